"""What an arm is to the environment."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from dzrobot.envs.franka.poses import Array
from dzrobot.errors import RobotError

if TYPE_CHECKING:
    # The real hand is a driver's process, whose errors stand here.
    from dzrobot.envs.franka.gripper import GripperDevice


class Space(StrEnum):
    """What the targets of a controller are."""

    HAND = "hand"
    """Poses of the hand's grasp point, (4, 4)."""

    JOINTS = "joints"
    """Joint angles, (7,), rad."""

    GUIDED = "guided"
    """The same, of an arm that may yield to a person's hand; its friction is compensated."""


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


class ControllerEndedError(RobotError):
    """A target was not taken: the controller had ended."""


class DisconnectedError(RobotError):
    """The connection is gone; only connecting again helps."""


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
        """Whether the arm waits for a motion, and no error stands."""
        return self.mode is Mode.IDLE and not self.errors

    @property
    def said(self) -> str:
        """What the arm shows, and what a person does about it."""
        if self.mode is Mode.IDLE and self.errors:
            remedy = "an error stands; the next reset clears it, after a person has looked"
        else:
            remedy = REMEDIES[self.mode]
        return f"{self.mode}, {', '.join(self.errors) or 'no error'}: {remedy}"


class Arm(Protocol):
    """One robot arm with its gripper, real or not. Nothing is opened before ``connect``."""

    @property
    def gripper(self) -> "GripperDevice":
        """The hand."""
        ...

    def connect(self) -> None:
        """Open the arm, or open it again after the connection was lost; twice is harmless.

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

    def start(self, space: Space = Space.HAND) -> None:
        """Take control for targets of a space, and hold where the arm is."""
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

    def command(self, target: Array, over_s: float = 0.0, speeds: Array | None = None) -> None:
        """Move towards ``target``, in the space that control was taken for.

        Args:
            target: Where to.
            over_s: The reference goes there evenly within this time; 0: at once.
            speeds: Of the joints (7,) at the target, rad/s, where targets are joint angles. They
                brake from there unless another target follows. None: they rest.

        Raises:
            ControllerEndedError: the controller had ended, so nothing moves.
            DisconnectedError: the arm does not answer.
        """
        ...

    def give_way(self, joints: Array) -> None:
        """Have no stiffness from here on, at joint angles (7,), until the next command.

        Only where control was taken for ``Space.GUIDED``.

        Raises:
            ControllerEndedError: the controller had ended.
            DisconnectedError: the arm does not answer.
        """
        ...

    def stop(self) -> None:
        """Give control up and come to rest; harmless when not in control."""
        ...

    def close(self) -> None:
        """Stop and disconnect; twice is harmless."""
        ...
