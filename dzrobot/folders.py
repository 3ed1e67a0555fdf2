"""Where this package writes on its own."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``DZROBOT_CACHE``, else ~/.cache/dzrobot: the one folder written to unasked."""
    named = os.environ.get("DZROBOT_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "dzrobot"
