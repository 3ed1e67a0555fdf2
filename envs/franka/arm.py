"""What an arm is to the environment."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from dzrobot.envs.franka.poses import Array
from dzrobot.errors import RobotError

if TYPE_CHECKING:
    # The real hand is a driver's process, whose errors stand here.
    from dzrobot.envs.franka.gripper import Gripper


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
    def gripper(self) -> "Gripper":
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

    def home(self, joints: Array, dynamics: float) -> None:
        """Begin to move the joints (7,) to ``joints``, by a planned motion; ends other control.

        Args:
            joints: Where to, rad.
            dynamics: Share of the arm's largest velocity, acceleration and jerk.

        Raises:
            RobotError: the arm refused.
        """
        ...

    def command(self, target: Array, over_s: float = 0.0) -> None:
        """Move towards ``target`` (4, 4).

        Args:
            target: Where to.
            over_s: The reference goes there evenly within this time; 0: at once.

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
