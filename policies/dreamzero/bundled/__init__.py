"""The small trained checkpoints that come with the package, so that everything runs at once.

``MODEL_CARD.md`` beside the weights says what each can do and how it was made.
"""

import re
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

_FOLDERS = {"lift": ".", "libero_object": "libero_object"}
_TRAINED = {"lift": r"dzrobot/lift-v0", "libero_object": r"dzrobot/libero_object(_\w+)?-v0"}
"""By task, a pattern of the environments that it is found in."""


def scored_with(checkpoint: str) -> Mapping[str, Any]:
    """Return the options that a bundled checkpoint was scored with; none of another one.

    Args:
        checkpoint: Folder, as :func:`default_checkpoint` returns it.
    """
    own = {str(default_checkpoint(task)): options for task, options in SCORED.items()}
    return own.get(checkpoint, {})


def default_checkpoint(task: str = "lift") -> Path:
    """Return the folder of the bundled checkpoint that was trained for ``task``.

    Args:
        task: ``lift``, the cube of ``dzrobot/lift-v0``, or ``libero_object``, the suite of LIBERO.

    Raises:
        UnknownNameError: there is none for it.
    """
    return Path(__file__).parent / find(_FOLDERS, "bundled task", task)


def bundled_task(*environments: str) -> str:
    """Return the task, as ``default_checkpoint`` takes it, of the policy trained for all of them.

    Args:
        environments: Gymnasium ids. LIBERO-PRO's variants of ``libero_object`` count as that suite.

    Raises:
        ConfigError: no policy was trained for all of them.
    """
    for task, trained in _TRAINED.items():
        if all(re.fullmatch(trained, environment) for environment in environments):
            return task
    raise ConfigError(
        f"no bundled policy was trained for {', '.join(environments)}, only one for "
        "dzrobot/lift-v0, and one for libero_object with its variants of LIBERO-PRO: give "
        "--checkpoint or --policy"
    )
