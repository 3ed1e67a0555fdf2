"""The small trained checkpoint that comes with the package, so that everything runs at once.

``MODEL_CARD.md`` beside this file says what it can do and how it was made.
"""

from pathlib import Path

EMBODIMENT = "libero_mini"
"""Robot of the bundled checkpoint."""


def default_checkpoint() -> Path:
    """Return the folder of the bundled checkpoint."""
    return Path(__file__).parent
