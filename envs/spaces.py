"""Gymnasium spaces that follow from an embodiment."""

import string
from collections.abc import Mapping, Sequence

import numpy as np
from gymnasium import spaces

from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import find

Limits = tuple[float | Sequence[float], float | Sequence[float]]
"""Lowest and highest value of a state part: one number for all, or one for each."""

TEXT_LIMIT = 256
"""Longest instruction, in characters."""


def observation_space(
    embodiment: Embodiment,
    limits: Mapping[str, Limits],
    *,
    resolution: tuple[int, int] | None = None,
    cameras: bool = True,
) -> spaces.Dict:
    """Return the space of one observation: the embodiment's modality keys, each with its own space.

    Args:
        embodiment: Which cameras, state parts and instruction key there are.
        limits: ``(low, high)`` of every state part by key, in the part's own units; finite.
        resolution: ``(height, width)`` in pixels of every camera. None: what each view states.
        cameras: False leaves the cameras out.

    Raises:
        UnknownNameError: a state part has no limits.
    """
    parts: dict[str, spaces.Space[object]] = {}
    for view in embodiment.views if cameras else ():
        shape = (*(resolution or view.resolution), 3)
        parts[view.key] = spaces.Box(0, 255, shape, np.uint8)
    for part in embodiment.state:
        parts[part.key] = _box(part, find(limits, "state limits", part.key))
    # Gymnasium's own character set has no blank and no full stop, so no sentence fits it.
    parts[embodiment.language] = spaces.Text(
        max_length=TEXT_LIMIT, min_length=0, charset=string.printable
    )
    return spaces.Dict(parts)


def action_space(embodiment: Embodiment) -> spaces.Box:
    """Return the box [-1, 1] over all action numbers, in concatenation order."""
    return spaces.Box(-1.0, 1.0, (embodiment.action_dim,), np.float32)


def _box(part: Part, limits: Limits) -> spaces.Box:
    low, high = (np.broadcast_to(np.asarray(limit, np.float32), (part.dim,)) for limit in limits)
    return spaces.Box(low, high, (part.dim,), np.float32)
