"""The small trained checkpoints that come with the package, so that everything runs at once.

``MODEL_CARD.md`` beside the weights says what each can do and how it was made.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dzrobot.errors import ConfigError, find

EMBODIMENT = "libero_mini"
"""Robot of the bundled checkpoints."""

RESOLUTION = 128
"""Height and width in pixels of the simulated images that they were trained and scored on."""

SCORED: Mapping[str, Mapping[str, Any]] = {
    "lift": {},
    "libero_object": {"solver_steps": 4, "history": "off"},
}
"""By task, the ``PolicyOptions`` that it was scored with, where they are not the defaults."""

_FOLDERS: Mapping[str, str] = {"lift": ".", "libero_object": "libero_object"}


def default_checkpoint(task: str = "lift") -> Path:
    """Return the folder of the bundled checkpoint that was trained for ``task``.

    Args:
        task: ``lift``, the cube of ``dzrobot/lift-v0``, or ``libero_object``, the suite of LIBERO.

    Raises:
        UnknownNameError: there is none for it.
    """
    return Path(__file__).parent / find(_FOLDERS, "bundled task", task)


def bundled_task(name: str) -> str:
    """Return the task, as ``default_checkpoint`` takes it, of the policy trained for ``name``.

    Args:
        name: Gymnasium id, or suite of LIBERO or LIBERO-PRO. A suite of LIBERO-PRO belongs to the
            suite that it varies.

    Raises:
        ConfigError: none was trained for it.
    """
    suite = name.removeprefix("dzrobot/").removesuffix("-v0")
    for task in _FOLDERS:
        if suite == task or suite.startswith(f"{task}_"):
            return task
    raise ConfigError(
        f"no bundled policy was trained for {name}, only for dzrobot/lift-v0 and libero_object "
        "with its variants of LIBERO-PRO: give --checkpoint or --policy"
    )
