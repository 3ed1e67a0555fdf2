"""How an action is read: what moves the hand, where descriptions may differ, what holds a robot."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import HOLD_ZERO, ActionFrame, Embodiment, Part
from dzrobot.errors import ConfigError


def check_conventions(environment: Embodiment, policy: Embodiment) -> None:
    """Check that an environment reads actions as a policy was made to write them.

    Args:
        environment: The robot as the environment has it.
        policy: The robot as the policy was trained for it. What it leaves open is not compared.

    Raises:
        ConfigError: axes, anchor or rate differ.
    """
    frame, wanted_frame = environment.action_frame, policy.action_frame
    if None not in (frame, wanted_frame) and frame != wanted_frame:
        raise ConfigError(
            f"the environment reads actions in the frame {frame!r}, the policy was made for "
            f"{wanted_frame!r}: set action.frame of the workcell to {wanted_frame!r}, "
            f"or describe the policy's robot with action_frame={frame!r}"
        )
    anchor, wanted_anchor = environment.action_anchor, policy.action_anchor
    if None not in (anchor, wanted_anchor) and anchor != wanted_anchor:
        raise ConfigError(
            f"the environment measures actions from the anchor {anchor!r}, the policy was made for "
            f"{wanted_anchor!r}, and its steps would have another size: set action.anchor of the "
            f"workcell to {wanted_anchor!r}, leave it out there, or write "
            f"gym.make(..., action_anchor={wanted_anchor!r})"
        )
    rate, wanted_rate = environment.timing.control_hz, policy.timing.control_hz
    if rate != wanted_rate:
        raise ConfigError(
            f"the environment takes {rate:g} actions per second, the policy was made for "
            f"{wanted_rate:g}: set control_hz of the workcell to {wanted_rate:g}, or describe the "
            "policy's robot with that rate"
        )


def check_holds(robot: Embodiment, when: str, instead: str = "") -> None:
    """Raise ConfigError where nothing says how ``robot`` is left as it is."""
    if unknown := [part.key for part in robot.action if part.hold is None]:
        raise ConfigError(
            f"{', '.join(unknown)} of {robot.tag!r}: nothing says how it holds still {when}; give "
            f"the part hold={HOLD_ZERO!r} (differences from step to step) or a state key (absolute "
            f"numbers){instead}"
        )


def hold_command(
    robot: Embodiment, seen: Mapping[str, Any], last: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Return the action (A,) that leaves ``robot`` as it is.

    Args:
        robot: Every part of its action says how; see ``Part.hold``.
        seen: The newest observation.
        last: The last command; None: there was none.

    Raises:
        ConfigError: a part does not.
    """
    check_holds(robot, "here")
    values, start = [], 0
    for part in robot.action:
        before = None if last is None else last[start : start + part.dim]
        values.append(_held(part, seen, before))
        start += part.dim
    return np.concatenate(values)


def _held(
    part: Part, seen: Mapping[str, Any], last: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    if part.hold not in (None, HOLD_ZERO):
        return np.asarray(seen[part.hold] if last is None else last, np.float32)
    held = np.zeros(part.dim, np.float32)
    if part.gripper is not None and last is not None:
        held[part.gripper.index] = last[part.gripper.index]
    return held


RotationForm = Literal["rotation vector", "euler"]
"""Axis times angle, or roll, pitch and yaw about fixed axes."""


@dataclass(frozen=True, kw_only=True)
class HandMotion:
    """What an environment says of its hand, in numbers of the concatenated state and action."""

    position: slice
    """The hand's place in the state, (3,) in meters."""

    rotation: slice
    """The hand's rotation in the state, (3,) in radians."""

    rotation_form: RotationForm
    """How the state writes it. An action's is always the small turn about each axis."""

    fingers: slice
    """How far the gripper is open, in the state and in the environment's own units."""

    translation: slice
    """A difference of position in the action, (3,)."""

    turn: slice
    """A difference of rotation in the action, (3,)."""

    gripper: int
    """The gripper's number in the action."""

    closes: Literal[-1, 1]
    """Sign of the gripper's number that closes."""

    translation_m: float
    """What a translation of 1 commands."""

    rotation_rad: float
    """What a turn of 1 commands."""

    frame: ActionFrame = "base"
    """Axes of translation and turn."""
