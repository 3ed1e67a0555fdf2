"""The devices of a workcell, as protocols: arm, gripper, cameras, scene and clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.state import ArmState, GripperState
from dzrobot.errors import RobotError


class Space(StrEnum):
    """What the targets of a controller are."""

    CARTESIAN = "cartesian"
    """Poses of the hand's grasp point, (4, 4)."""

    JOINTS = "joints"
    """Joint angles, (7,), rad."""

    GUIDED = "guided"
    """Joint angles of an arm that a person may guide by hand; its friction is compensated."""


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
        """Home the gripper: its fingers move all the way, once. One that was homed stays as it is.

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

    def watch_stop(self, path: Path) -> None:
        """Hold by itself, and take no target, while there is a file at ``path``.

        Say so before ``connect``.
        """
        ...

    def keep_alive(self) -> None:
        """Say that the program runs; without a word for ``limits.deadman_s`` the arm holds."""
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

    def start(self, space: Space = Space.CARTESIAN) -> None:
        """Take control for targets of a space, and hold where the arm is.

        A controller of poses that runs already goes on, and holds its reference: an arm that is
        given up sinks under a load that it does not know.
        """
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
            StoppedError: a stop stands; the arm holds by itself. So too of what else moves it.
        """
        ...

    def make_compliant(self, joints: Array) -> None:
        """Make the arm compliant at joint angles (7,): no stiffness until the next command.

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


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return the time in seconds."""
        ...

    def sleep_until(self, deadline_s: float) -> None:
        """Return at ``deadline_s``, or at once when it has passed."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    def sleep_until(self, deadline_s: float) -> None:
        """Sleep until ``deadline_s``."""
        time.sleep(max(0.0, deadline_s - time.monotonic()))


class RateLimiter:
    """A fixed control rate, and how often it was missed.

    Args:
        clock: What the rate is measured by.
        period_s: Seconds per step.
    """

    TOLERANCE = 0.1
    """Share of a period that a step may overrun before it counts as late."""

    def __init__(self, clock: Clock, period_s: float) -> None:
        self._clock = clock
        self._period_s = period_s
        self._deadline_s = clock.now() + period_s
        self.late_steps = 0
        self.overrun_s = 0.0
        """By how much the last step overran its slot."""

    def restart(self) -> None:
        """Begin an episode: the first slot starts now."""
        self.begin_slot()
        self.late_steps = 0
        self.overrun_s = 0.0

    def begin_slot(self) -> None:
        """Let the slot of this step start now: what came before it was not a delay."""
        self._deadline_s = self._clock.now() + self._period_s

    def wait(self) -> None:
        """Sleep until the slot of this step ends; a missed slot is counted, never caught up."""
        self.overrun_s = max(0.0, self._clock.now() - self._deadline_s)
        if self.overrun_s > self.TOLERANCE * self._period_s:
            self.late_steps += 1
            self._deadline_s = self._clock.now()
        else:
            self._clock.sleep_until(self._deadline_s)
        self._deadline_s += self._period_s


Image = NDArray[np.uint8]


@dataclass(frozen=True)
class Frame:
    """One image."""

    image: Image
    """(H, W, 3) uint8 RGB, as the camera delivers it; not to be written to."""

    number: int
    """Counts the frames that arrived, from 1."""

    at_s: float
    """When it was exposed, or arrived if the camera does not report it (environment clock)."""

    came_s: float
    """When it arrived (environment clock)."""

    stamp_s: float
    """When it was exposed, by the camera's own clock."""


class Camera(Protocol):
    """One camera, real or not. Nothing is opened before ``open``."""

    @property
    def config(self) -> CameraConfig:
        """Which view it delivers, and how it is cropped."""
        ...

    def open(self) -> None:
        """Start the stream and wait for its first frame; twice is harmless.

        Raises:
            RobotError: there is no such camera, or it sends nothing.
        """
        ...

    def latest(self) -> Frame:
        """Return the newest frame, at once.

        Raises:
            RobotError: the camera is not open.
        """
        ...

    def close(self) -> None:
        """Stop the stream; twice is harmless."""
        ...


@dataclass(frozen=True)
class SceneObject:
    """Something that can be grasped: a box."""

    pose: Array
    """Pose of its center, in the arm's base frame, (4, 4)."""

    half: Array
    """Half of its edges (3,), m."""


class Scene(Protocol):
    """The scene around an arm, if a program can set it up and read it."""

    def object(self) -> SceneObject:
        """Return where what the task is about is now."""
        ...

    def prepare(self, start: int) -> None:
        """Put the objects where an initial state has them."""
        ...

    def goal_holds(self) -> bool:
        """Return whether the task is done now."""
        ...


class Workcell(Protocol):
    """Where arm, gripper and cameras are reached."""

    def open(self) -> None:
        """Make the devices reachable; twice is harmless.

        Raises:
            RobotError: it is not known where they are.
        """
        ...

    @property
    def address(self) -> str:
        """Host name or IP address of the arm's controller."""
        ...

    @property
    def patience(self) -> float:
        """How many times longer than beside hardware a driver's answer is waited for."""
        ...

    def camera_settings(self) -> dict[str, Any]:
        """Return settings of the camera library's context; empty for cameras on USB."""
        ...

    def keep_time(self, arm: Arm, cameras: Sequence[Camera]) -> "Timed":
        """Return the drivers as they are to be used, and the clock that they keep."""
        ...

    @property
    def scene(self) -> Scene | None:
        """The scene around the arm, if a program knows it."""
        ...

    def close(self) -> None:
        """Let the devices go; twice is harmless."""
        ...


Timed = tuple[Arm, Sequence[Camera], Clock]
"""Arm, cameras, and the clock that an environment on them measures its periods by."""


class RealWorkcell:
    """A workcell of hardware.

    Args:
        address: Host name or IP address of the arm's controller; None is an error at ``open``.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address

    def open(self) -> None:
        """Refuse a workcell without an address."""
        _ = self.address

    @property
    def address(self) -> str:
        """The configured address.

        Raises:
            RobotError: there is none.
        """
        if self._address is None:
            raise RobotError(
                "no robot address is known. Give one of: address='172.16.0.2' and cameras=[...]; "
                "workcell='cell.yaml' with both; workcell='emulated' for an emulated robot and "
                "cameras; workcell='fake' for neither library."
            )
        return self._address

    @property
    def patience(self) -> float:
        """No longer than is safe."""
        return 1.0

    def camera_settings(self) -> dict[str, Any]:
        """Return no settings: the cameras are on USB."""
        return {}

    def keep_time(self, arm: Arm, cameras: Sequence[Camera]) -> Timed:
        """Return the drivers, and this machine's clock."""
        return arm, cameras, SystemClock()

    @property
    def scene(self) -> Scene | None:
        """None: no program knows the scene around hardware."""
        return None

    def close(self) -> None:
        """Do nothing: hardware stays."""
