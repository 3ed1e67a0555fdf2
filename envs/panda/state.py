"""What arm and gripper report, and the axes of Cartesian actions."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
from pydantic import Field

from dzrobot.configuration import FrozenConfig
from dzrobot.embodiments.spec import ActionAnchor, ActionFrame
from dzrobot.envs.panda.poses import Array, rotation_of, skew


class Mode(StrEnum):
    """What the arm says it is doing."""

    IDLE = "idle"
    MOVE = "move"
    GUIDING = "guiding"
    REFLEX = "reflex"
    USER_STOPPED = "user_stopped"
    RECOVERY = "recovery"
    OTHER = "other"


REMEDIES = {
    Mode.IDLE: "it is ready (blue lamp)",
    Mode.MOVE: "another program moves it (green lamp): end that program",
    Mode.GUIDING: "it is guided by hand (white lamp): let go of the buttons, and leave "
    "Programming for Execution in Desk's side bar",
    Mode.REFLEX: "it has stopped by itself (red lamp): look at what it touched; the next reset "
    "clears it, after a person has looked",
    Mode.USER_STOPPED: "the user stop is pressed (white or yellow lamp): release it",
    Mode.RECOVERY: "it recovers from an error (red lamp): wait, or recover by hand in Desk",
    Mode.OTHER: "its brakes are locked or it is not in Execution (yellow or white lamp): in Desk "
    "unlock the joints, choose Execution, then Activate FCI in the menu at the top",
}
"""What each mode looks like on the arm, and what a person does about it."""


@dataclass(frozen=True)
class ArmState:
    """One state of the arm."""

    pose: Array
    """Pose of the hand's grasp point in the base frame, (4, 4)."""

    twist: Array
    """Measured velocity of the grasp point, base axes, (6,): m/s, then rad/s."""

    force_n: Array
    """External force at the hand, hand axes, (3,)."""

    torque_nm: Array
    """External torque at the hand, hand axes, (3,)."""

    joints: Array
    """Joint angles (7,), rad."""

    flange_to_ee: Array
    """Pose (4, 4) of the hand's grasp point in the flange frame, as the arm reports it."""

    joint_speeds: Array
    """Measured joint speeds (7,), rad/s."""

    mode: Mode
    errors: tuple[str, ...]
    """Errors that are set now."""

    controlled: bool
    """Whether our controller is running."""

    robot_time_s: float
    """The arm's own clock."""

    success_rate: float
    """Share of control commands that arrived lately, in [0, 1]."""

    fresh_at_s: float
    """When the arm's clock was last seen to advance (environment clock)."""

    @property
    def is_ready(self) -> bool:
        """Whether the arm is ready for a motion, without errors."""
        return self.mode is Mode.IDLE and not self.errors

    @property
    def description(self) -> str:
        """What the arm shows, and what a person does about it."""
        if self.errors and self.mode in (Mode.IDLE, Mode.MOVE):
            # The error is the cause, whatever the arm did when its state was sent.
            remedy = "an error is set; the next reset clears it, after a person has looked"
            return f"{', '.join(self.errors)}, {self.mode}: {remedy}"
        return f"{self.mode}, {', '.join(self.errors) or 'no error'}: {REMEDIES[self.mode]}"


OPEN_M = 0.08
"""Distance between the open fingers of the Franka Hand."""

FINGER_SPEED_M_S = 0.3
"""How fast that distance changes, unless a workcell says otherwise."""


@dataclass(frozen=True)
class GripperState:
    """What is known about the hand without asking it."""

    width_m: float
    """Distance between the fingers."""

    is_open: bool
    """What was last asked for."""

    is_busy: bool
    """Whether what was last asked for has not been carried out yet."""

    waiting_s: float
    """For how long a command has not been answered."""

    fault: str
    """Why the last command failed; empty when it did not."""

    is_grasped: bool = False
    """Whether something is held: closed fingers with nothing between them hold nothing."""

    is_homed: bool = True
    """Whether the hand knows how far it opens; before, it opens and grasps nothing."""

    widest_m: float = OPEN_M
    """Width of an open hand of its kind."""


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ActionConfig(FrozenConfig):
    """What an action number means."""

    translation_m: _Positive = 0.03
    """Translation of an action number of 1."""

    rotation_rad: _Positive = 0.1
    """Rotation of an action number of 1."""

    anchor: ActionAnchor = "target"
    """What a translation and rotation start from: the target before, or the pose the arm is at.
    Where it is left out, a policy that was trained with the other brings its own; a policy of
    another anchor than the one written here is refused."""

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
