"""What an arm is to the environment."""

from enum import StrEnum
from typing import Protocol

from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.state import ArmState, GripperState
from dzrobot.errors import RobotError


class Space(StrEnum):
    """What the targets of a controller are."""

    HAND = "hand"
    """Poses of the hand's grasp point, (4, 4)."""

    JOINTS = "joints"
    """Joint angles, (7,), rad."""

    GUIDED = "guided"
    """The same, of an arm that may yield to a person's hand; its friction is compensated."""


class ControllerEndedError(RobotError):
    """A target was not taken: the controller had ended."""


class GripperDevice(Protocol):
    """One gripper, real or not; no call but ``connect`` may take longer than a moment."""

    def connect(self) -> None:
        """Connect to the hand, or connect again after a fault; nothing moves.

        Raises:
            RobotError: it cannot be reached.
        """
        ...

    def home(self) -> None:
        """Move the fingers all the way, once; a hand that was homed stays as it is.

        Raises:
            RobotError: they do not get there.
        """
        ...

    def state(self) -> GripperState:
        """Return the last known state."""
        ...

    def request(self, *, opened: bool) -> None:
        """Ask for an open or closed hand; of several requests only the newest is carried out."""
        ...

    def close(self) -> None:
        """Let go of the hand."""
        ...


class Arm(Protocol):
    """One robot arm with its gripper, real or not. Nothing is opened before ``connect``."""

    @property
    def gripper(self) -> GripperDevice:
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


class NoGripper:
    """No hand at all: it is open, and nothing that is asked of it happens."""

    def connect(self) -> None:
        """Do nothing."""

    def home(self) -> None:
        """Do nothing."""

    def state(self) -> GripperState:
        """Return an open hand of no width."""
        return GripperState(
            width_m=0.0, is_open=True, is_busy=False, waiting_s=0.0, fault="", is_grasped=False
        )

    def request(self, *, opened: bool) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
