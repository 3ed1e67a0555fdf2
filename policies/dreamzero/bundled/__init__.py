"""The small trained checkpoints that come with the package, so that everything runs at once.

``MODEL_CARD.md`` beside the weights says what each can do and how it was made.
"""

from pathlib import Path

from dzrobot.errors import find

EMBODIMENT = "libero_mini"
"""Robot of the bundled checkpoints."""

_FOLDERS = {"lift": ".", "libero_object": "libero_object"}


def default_checkpoint(task: str = "lift") -> Path:
    """Return the folder of the bundled checkpoint that was trained for ``task``.

    Args:
        task: ``lift``, the cube of ``dzrobot/lift-v0``, or ``libero_object``, the suite of LIBERO.

    Raises:
        UnknownNameError: there is none for it.
    """
    return Path(__file__).parent / find(_FOLDERS, "bundled task", task)
