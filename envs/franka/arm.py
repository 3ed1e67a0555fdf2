"""What an arm is to the environment."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dzrobot.envs.franka.gripper import Gripper
from dzrobot.envs.franka.poses import Array
from dzrobot.errors import RobotError


class Mode(StrEnum):
    """What the arm says it is doing."""

    IDLE = "idle"
    MOVE = "move"
    GUIDING = "guiding"
    REFLEX = "reflex"
    USER_STOPPED = "user_stopped"
    RECOVERY = "recovery"
    OTHER = "other"


class ControllerEndedError(RobotError):
    """A target was not taken: the controller had ended."""


class DisconnectedError(RobotError):
    """The connection is gone; only connecting anew helps."""


@dataclass(frozen=True)
class ArmState:
    """One state of the arm."""

    pose: Array
    """Of the hand's grasp point in the base frame, (4, 4)."""

    twist: Array
    """Measured velocity of the grasp point, base axes, (6,): m/s, then rad/s."""

    force_n: Array
    """External force at the hand, hand axes, (3,)."""

    torque_nm: Array
    """External torque at the hand, hand axes, (3,)."""

    joints: Array
    """Joint angles (7,), rad."""

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


class Arm(Protocol):
    """One robot arm with its gripper, real or not. Nothing is opened before ``connect``."""

    @property
    def gripper(self) -> Gripper:
        """The hand."""
        ...

    def connect(self) -> None:
        """Open the arm, or open it anew after the connection was lost; twice is harmless.

        Raises:
            RobotError: it cannot be reached; says what to do.
        """
        ...

    def state(self) -> ArmState:
        """Return the newest state.

        Raises:
            DisconnectedError: the arm does not answer.
        """
        ...

    def recover(self) -> None:
        """Clear errors.

        Raises:
            RobotError: they cannot be cleared from here.
        """
        ...

    def start(self) -> None:
        """Take control and hold the measured pose."""
        ...

    def command(self, target: Array) -> None:
        """Move towards ``target`` (4, 4).

        Raises:
            ControllerEndedError: the controller had ended, so nothing moves.
            DisconnectedError: the arm does not answer.
        """
        ...

    def stop(self) -> None:
        """Give control up and come to rest; harmless when not in control."""
        ...

    def close(self) -> None:
        """Stop and disconnect; twice is harmless."""
        ...
