"""Which numbers of state and action move a hand, and what they mean."""

from dataclasses import dataclass
from typing import Literal

from dzrobot.embodiments.spec import ActionFrame

RotationForm = Literal["rotation vector", "euler"]
"""Axis times angle, or roll, pitch and yaw about fixed axes."""


@dataclass(frozen=True, kw_only=True)
class HandMotion:
    """What an environment says of its hand, in numbers of the concatenated state and action."""

    position: slice
    """Of the state, (3,) in meters."""

    rotation: slice
    """Of the state, (3,) in radians."""

    rotation_form: RotationForm
    """How the state writes it. An action's is always the small turn about each axis."""

    fingers: slice
    """Of the state: how far the gripper is open, in the environment's own units."""

    translation: slice
    """Of the action, (3,): a difference of position."""

    turn: slice
    """Of the action, (3,): a difference of rotation."""

    gripper: int
    """Of the action."""

    closes: Literal[-1, 1]
    """Sign of the gripper's number that closes."""

    translation_m: float
    """What a translation of 1 commands."""

    rotation_rad: float
    """What a turn of 1 commands."""

    frame: ActionFrame = "base"
    """Axes of translation and turn."""
