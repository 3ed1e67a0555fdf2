"""An arm that is read but never moved, for a first look at what a policy would do."""

from dataclasses import replace
from pathlib import Path

from dzrobot.envs.franka.arm_model import forward
from dzrobot.envs.franka.workcells import Arm, GripperDevice, Space
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.state import ArmState, GripperState


class DryRunGripper:
    """A hand that is read and never asked to move.

    Args:
        gripper: The hand.
    """

    def __init__(self, gripper: GripperDevice) -> None:
        self._gripper = gripper
        self._opened = True

    def connect(self) -> None:
        """Connect."""
        self._gripper.connect()
        self._opened = self._gripper.state().is_open

    def home(self) -> None:
        """Do nothing."""

    def state(self) -> GripperState:
        """Return the state, as if the last request had been carried out."""
        return replace(self._gripper.state(), is_open=self._opened, is_homed=True)

    def request(self, *, opened: bool) -> None:
        """Remember what would be asked."""
        self._opened = opened

    def close(self) -> None:
        """Let go of the hand."""
        self._gripper.close()


class DryRunArm:
    """An arm that is read and never moved: every pose counts as reached.

    Args:
        arm: The arm.
    """

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._gripper = DryRunGripper(arm.gripper)
        self._target: Array | None = None
        self._joints: Array | None = None
        self._hand: Array | None = None
        """Pose of the flange, where the targets are joint angles."""

    @property
    def gripper(self) -> DryRunGripper:
        """The hand."""
        return self._gripper

    def watch_stop(self, path: Path) -> None:
        """Watch it as the arm does."""
        self._arm.watch_stop(path)

    def keep_alive(self) -> None:
        """Say that the program runs."""
        self._arm.keep_alive()

    def connect(self) -> None:
        """Connect."""
        self._arm.connect()

    def state(self) -> ArmState:
        """Return the measured state at the pose that would have been commanded."""
        state = self._arm.state()
        if self._target is None:
            return state
        joints = state.joints if self._joints is None else self._joints
        pose = self._target
        if self._hand is not None:
            pose = forward(joints, self._hand)
        return replace(state, pose=pose.copy(), joints=joints, controlled=True)

    def recover(self) -> None:
        """Leave errors as they are."""

    def start(self, space: Space = Space.CARTESIAN) -> None:
        """Begin to pretend, where the arm is."""
        state = self._arm.state()
        self._target, self._hand = state.pose, None
        if space is not Space.CARTESIAN:
            self._joints = state.joints
            self._hand = state.flange_to_ee

    def home(self, joints: Array, dynamics: float) -> None:
        """Leave the joints where they are."""
        self._joints = joints

    def command(self, target: Array, over_s: float = 0.0, speeds: Array | None = None) -> None:
        """Pretend to have arrived."""
        if self._hand is None:
            self._target = target.copy()
        else:
            self._joints = target.copy()

    def make_compliant(self, joints: Array) -> None:
        """Pretend to be there."""
        self.command(joints)

    def stop(self) -> None:
        """Stop pretending."""
        self._target = self._joints = self._hand = None

    def close(self) -> None:
        """Disconnect."""
        self.stop()
        self._arm.close()
