"""One writer at a time."""

import fcntl
from pathlib import Path
from typing import TextIO

from dzrobot.errors import DatasetError
from dzrobot.files import explained
from dzrobot.recording.layout import ASIDE


def lock(root: Path) -> TextIO:
    """Return a handle that keeps other writers out of ``root`` until it is closed.

    Raises:
        DatasetError: Another writer is at work, or the folder cannot be written to.
    """
    aside = root / ASIDE
    with explained(f"record to {root}", DatasetError):
        aside.mkdir(parents=True, exist_ok=True)
        handle = (aside / "lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise DatasetError(
            f"another writer is recording to {root}: wait for it or use another folder"
        ) from error
    return handle
