"""Axes of a Cartesian action and of the velocity in the state: the hand's, or the robot base's."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from dzrobot.config import FrozenConfig
from dzrobot.embodiments.spec import ActionFrame
from dzrobot.envs.panda.poses import Array, rotation_of, skew
from dzrobot.envs.panda.state import ArmState

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ActionConfig(FrozenConfig):
    """What an action number means."""

    translation_m: _Positive = 0.03
    """Translation of an action number of 1."""

    rotation_rad: _Positive = 0.1
    """Rotation of an action number of 1."""

    anchor: Literal["target", "measured"] = "target"
    """What a translation and rotation start from. ``target``: the target before, so that a zero
    action holds the pose and a steady error (a load, friction) never becomes motion.
    ``measured``: the pose the arm is at, as the published recordings were made."""

    frame: ActionFrame = "ee_adjoint"
    """Axes of translation and rotation: the hand's, or the robot base's. ``ee_adjoint`` is ``ee``
    plus the lever term of the pose's adjoint (rotation += position x translation), in the action
    and, inverted, in the velocity of the state: the published recordings have it. A policy of
    another frame is refused."""


def desired_pose(anchor: Array, action: Array, config: ActionConfig) -> Array:
    """Return the pose (4, 4) that ``action`` (6,), in [-1, 1], asks for.

    Translation and rotation are measured from ``anchor``, the target before or the measured pose;
    the rotation's roll, pitch and yaw are taken about the base axes through the hand.
    """
    move, turn = in_base_axes(anchor, action, config)
    pose = anchor.copy()
    pose[:3, 3] = anchor[:3, 3] + config.translation_m * move
    pose[:3, :3] = rotation_of(config.rotation_rad * turn) @ anchor[:3, :3]
    return pose


def in_base_axes(measured: Array, twist: Array, config: ActionConfig) -> tuple[Array, Array]:
    """Return translation and rotation (3,) of an action, turned into the base axes."""
    if config.frame == "base":
        return twist[:3], twist[3:]
    rotation = measured[:3, :3]
    move, turn = rotation @ twist[:3], rotation @ twist[3:]
    if config.frame == "ee_adjoint":
        turn = turn + skew(measured[:3, 3]) @ move
        move, turn = np.clip(move, -1.0, 1.0), np.clip(turn, -1.0, 1.0)
    return move, turn


def in_action_axes(measured: Array, twist: Array, config: ActionConfig) -> Array:
    """Return translation and rotation (6,) along the base axes as an action has them."""
    return twist if config.frame == "base" else _in_hand_axes(measured, twist, config)


def in_hand_axes(state: ArmState, config: ActionConfig) -> Array:
    """Return the measured velocity (6,) in the hand's axes, for the observation."""
    return _in_hand_axes(state.pose, state.twist, config)


def _in_hand_axes(measured: Array, twist: Array, config: ActionConfig) -> Array:
    rotation = measured[:3, :3]
    linear, angular = twist[:3], twist[3:]
    if config.frame == "ee_adjoint":
        angular = angular - skew(measured[:3, 3]) @ linear
    return np.concatenate([rotation.T @ linear, rotation.T @ angular])
