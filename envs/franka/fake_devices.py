"""A fake arm, gripper, cameras and clock, which need no hardware, library or waiting.

To the environment they behave like the real ones, and they show faults on demand.
"""

from pathlib import Path

import numpy as np

from dzrobot.envs.driver_process import DisconnectedError
from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND, forward
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.franka_config import ResetConfig
from dzrobot.envs.franka.workcells import ControllerEndedError, Frame, Space
from dzrobot.envs.panda.poses import Array, towards
from dzrobot.envs.panda.state import ArmState, GripperState, Mode
from dzrobot.errors import RobotError

HOME = ResetConfig().pose
READY = ResetConfig().joints

_SPEED_M_S = 1.0
_TURN_RAD_S = 3.0


class FakeClock:
    """Time that passes only where someone sleeps."""

    def __init__(self) -> None:
        self._now_s = 100.0

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now_s

    def sleep_until(self, deadline_s: float) -> None:
        """Let time pass."""
        self._now_s = max(self._now_s, deadline_s)


class FakeGripper:
    """Fingers that arrive at once."""

    def __init__(self) -> None:
        self.requests: list[bool] = []
        """Every request, true for an open hand."""

        self.fault = ""
        """What :meth:`state` reports; the next ``connect`` clears it."""

        self.busy = False
        """The fingers are on their way, for as long as a test says."""

        self.homed = True
        """It knows how far it opens."""

    def connect(self) -> None:
        """Clear a fault."""
        self.fault = ""

    def home(self) -> None:
        """Know how far it opens."""
        self.homed = True

    def state(self) -> GripperState:
        """Return the state."""
        opened = self.requests[-1] if self.requests else True
        width = 0.08 if opened else 0.0
        return GripperState(width, opened, self.busy, 0.0, self.fault, is_homed=self.homed)

    def request(self, *, opened: bool) -> None:
        """Open or close."""
        self.requests.append(opened)

    def close(self) -> None:
        """Do nothing."""


class FakeArm:
    """A hand that flies straight to its target at up to 1 m/s and 3 rad/s.

    Args:
        at: Pose (4, 4) it begins at.
        clock: What it moves by.
    """

    def __init__(self, at: Array = HOME, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.moves: list[Array] = []
        """Every target it was sent, (4, 4) or (7,)."""

        self.space = Space.CARTESIAN
        """What its targets are."""

        self.force_n = np.zeros(3)
        self.torque_nm = np.zeros(3)
        self.joints = np.array(READY)
        """Joint angles (7,), which do not move with the hand; the hand moves with them."""

        self.guidance = np.zeros(7)
        """How fast a person turns the joints (7,) of an arm that yields, rad/s."""

        self.compliant = False
        """Whether it gives way to a person's hand."""

        self.frozen = False
        """The state no longer advances."""

        self.stuck = False
        """The hand does not move."""

        self.gripper = FakeGripper()
        """The hand."""

        self.pose = np.array(at, np.float64)
        """Where the hand is, (4, 4)."""

        self.mode = Mode.IDLE
        """What the arm says that it does."""

        self.is_connected = False
        self._target = self.pose
        self._twist = np.zeros(6)
        self._joint_speeds = np.zeros(7)
        self._goal = self.joints
        self._hand = FLANGE_TO_HAND
        self._errors: tuple[str, ...] = ()
        self._controlled = False
        self._user_stop = False
        self._moved_s = self.clock.now()
        self._shown: ArmState | None = None

    def trip(self, *errors: str) -> None:
        """Stop with a reflex that shows ``errors``."""
        self._advance()
        self._errors, self.mode, self._controlled = errors, Mode.REFLEX, False

    def press_user_stop(self) -> None:
        """Press the user stop."""
        self._advance()
        self._user_stop, self.mode, self._controlled = True, Mode.USER_STOPPED, False

    def release_user_stop(self) -> None:
        """Release the user stop."""
        self._user_stop, self.mode = False, Mode.IDLE

    def disconnect(self) -> None:
        """Lose the connection."""
        self.is_connected = self._controlled = False

    def put(self, pose: Array) -> None:
        """Place the hand at ``pose`` (4, 4)."""
        self.pose = self._target = np.array(pose, np.float64)

    def watch_stop(self, path: Path) -> None:
        """Do nothing: what moves this arm runs in the program."""

    def keep_alive(self) -> None:
        """Do nothing."""

    def connect(self) -> None:
        """Connect."""
        self.is_connected, self.frozen = True, False

    def state(self) -> ArmState:
        """Return the state."""
        if not self.is_connected:
            raise DisconnectedError("the fake arm was disconnected")
        if self.frozen and self._shown is not None:
            return self._shown
        self._advance()
        self._shown = ArmState(
            pose=self.pose.copy(),
            twist=self._twist.copy(),
            force_n=self.force_n.copy(),
            torque_nm=self.torque_nm.copy(),
            joints=self.joints.copy(),
            flange_to_ee=FLANGE_TO_HAND.copy(),
            joint_speeds=self._joint_speeds.copy(),
            mode=self.mode,
            errors=self._errors,
            controlled=self._controlled,
            robot_time_s=self.clock.now(),
            success_rate=1.0,
            fresh_at_s=self.clock.now(),
        )
        return self._shown

    def recover(self) -> None:
        """Clear errors, unless the user stop is pressed."""
        if self._user_stop:
            raise RobotError("the user stop is pressed")
        self._errors, self.mode = (), Mode.IDLE

    def start(self, space: Space = Space.CARTESIAN) -> None:
        """Take control."""
        self._advance()
        if self._errors or self._user_stop:
            raise ControllerEndedError("the arm refused the controller")
        if self._controlled and space is self.space is Space.CARTESIAN:
            return
        self.space, self.compliant = space, False
        self._goal = self.joints.copy()
        self._hand = np.linalg.inv(forward(self.joints, np.eye(4))) @ self.pose
        self._target, self._controlled, self.mode = self.pose, True, Mode.MOVE

    def home(self, joints: Array, dynamics: float) -> None:
        """Have the joints where they belong, at once."""
        self.stop()
        self.start()
        self.joints = np.array(joints, np.float64)

    def command(self, target: Array, over_s: float = 0.0, speeds: Array | None = None) -> None:
        """Move towards ``target``."""
        if not self.is_connected:
            raise DisconnectedError("the fake arm was disconnected")
        self._advance()
        if not self._controlled:
            raise ControllerEndedError("the controller had ended")
        self.moves.append(np.array(target, np.float64))
        self.compliant = False
        if self.space is Space.CARTESIAN:
            self._target = self.moves[-1]
        else:
            self._goal = self.moves[-1]

    def make_compliant(self, joints: Array) -> None:
        """Move as a person turns the joints."""
        self.command(joints)
        self.compliant = True

    def stop(self) -> None:
        """Give control up."""
        self._advance()
        if self._controlled:
            self._controlled, self.mode = False, Mode.IDLE

    def close(self) -> None:
        """Disconnect."""
        self.stop()
        self.is_connected = False

    def _advance(self) -> None:
        elapsed = self.clock.now() - self._moved_s
        self._moved_s = self.clock.now()
        if elapsed <= 0 or not self._controlled or self.stuck:
            return
        if self.space is not Space.CARTESIAN:
            reach = _TURN_RAD_S * elapsed
            before = self.joints
            self.joints = np.clip(self._goal, before - reach, before + reach)
            if self.compliant:
                self.joints = before + elapsed * self.guidance
            self._joint_speeds = (self.joints - before) / elapsed
            self.pose = forward(self.joints, self._hand)
            return
        before = self.pose
        self.pose = towards(
            before, self._target, meters=_SPEED_M_S * elapsed, radians=_TURN_RAD_S * elapsed
        )
        self._twist[:3] = (self.pose[:3, 3] - before[:3, 3]) / elapsed


class FakeCamera:
    """A camera that draws where the arm's hand is.

    Args:
        key: View it delivers.
        arm: Whose hand it shows.
    """

    def __init__(self, key: str, arm: FakeArm) -> None:
        self._config = CameraConfig.model_validate(
            {"key": key, "serial": f"fake {key}", "width": 160, "height": 120}
        )
        self._arm = arm
        self._number = 0
        self._frame: Frame | None = None
        self.frozen = False
        """No new frame comes; the next ``open`` ends that."""

        self.stuck = False
        """New frames come, all of one image."""

    @property
    def config(self) -> CameraConfig:
        """Which view it delivers."""
        return self._config

    def open(self) -> None:
        """Start."""
        self.frozen = False
        self._number += 1
        self._frame = self._image()

    def latest(self) -> Frame:
        """Return a frame of this moment."""
        if self._frame is None:
            raise RobotError("the fake camera is not open")
        if not self.frozen and self._frame.at_s < self._arm.clock.now():
            self._number += 1
            self._frame = self._image()
        return self._frame

    def close(self) -> None:
        """Stop."""
        self._frame = None

    def _image(self) -> Frame:
        height, width = self._config.height, self._config.width
        image = np.full((height, width, 3), (60, 90, 120), np.uint8)
        x, y, z = self._arm.state().pose[:3, 3]
        column = int(np.clip(width / 2 + 100 * y, 8, width - 8))
        row = int(np.clip(height * (1 - (z if "wrist" in self._config.key else x)), 8, 112))
        image[row - 6 : row + 6, column - 6 : column + 6] = (210, 40, 40)
        now = self._arm.clock.now()
        # The noise of a real sensor: no two images are the same.
        image[0, 0] = self._number % 256
        if self.stuck and self._frame is not None:
            image = self._frame.image
        return Frame(image, self._number, now, now, now)
