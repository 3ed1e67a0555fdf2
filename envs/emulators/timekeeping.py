"""Drivers on the arm's clock: what an environment sees of an emulated workcell, free of races.

The arm's time stands still while an environment thinks, so a driver that has to wait for the arm
must say so, and what is on its way from a peer can be waited for without the arm's time passing.
"""

import time
from dataclasses import replace

from dzrobot.envs.emulators.timebase import FREE, ArmClock
from dzrobot.envs.franka.arm import Arm, ArmState, Space
from dzrobot.envs.franka.camera import Camera, Frame
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.gripper import GripperDevice, GripperState
from dzrobot.envs.franka.poses import Array

_IN_TRANSIT_S = 10.0
"""How long (wall) something that was sent is waited for, before it counts as lost."""

_AGAIN_S = 0.1
"""How long (wall) an image is waited for before it is asked for once more."""

_LOOK_S = 0.0005
_NEAR_MS = 2


class TimedArm:
    """An arm whose calls let the arm's time continue while they wait.

    Args:
        arm: The driver.
        clock: The arm's clock.
    """

    def __init__(self, arm: Arm, clock: ArmClock) -> None:
        self._arm = arm
        self._clock = clock
        self._gripper = TimedGripper(arm.gripper, clock)

    @property
    def gripper(self) -> "TimedGripper":
        """The hand."""
        return self._gripper

    def connect(self) -> None:
        """Connect."""
        with self._clock.running():
            self._arm.connect()

    def state(self) -> ArmState:
        """Return the newest state that was sent."""
        deadline = time.monotonic() + _IN_TRANSIT_S
        state = self._arm.state()
        page = self._clock.page
        while (
            state.controlled
            and 1000 * state.robot_time_s < page.sent_ms - _NEAR_MS
            and time.monotonic() < deadline
        ):
            time.sleep(_LOOK_S)
            state = self._arm.state()
        return replace(state, fresh_at_s=state.robot_time_s)

    def recover(self) -> None:
        """Clear errors."""
        with self._clock.running():
            self._arm.recover()

    def start(self, space: Space = Space.HAND) -> None:
        """Take control."""
        with self._clock.running():
            self._arm.start(space)

    def home(self, joints: Array, dynamics: float) -> None:
        """Begin to move the joints home."""
        with self._clock.running():
            self._arm.home(joints, dynamics)

    def command(self, target: Array, over_s: float = 0.0, speeds: Array | None = None) -> None:
        """Move towards ``target``."""
        self._arm.command(target, over_s, speeds)

    def give_way(self, joints: Array) -> None:
        """Yield to a person's hand."""
        self._arm.give_way(joints)

    def stop(self) -> None:
        """Come to rest."""
        with self._clock.running():
            self._arm.stop()

    def close(self) -> None:
        """Stop and disconnect."""
        with self._clock.running():
            self._arm.close()


class TimedGripper:
    """A hand whose silence is measured by the arm's clock.

    Args:
        gripper: The driver.
        clock: The arm's clock.
    """

    def __init__(self, gripper: GripperDevice, clock: ArmClock) -> None:
        self._gripper = gripper
        self._clock = clock
        self._since_s: float | None = None

    def connect(self) -> None:
        """Connect."""
        with self._clock.running():
            self._gripper.connect()

    def home(self) -> None:
        """Move the fingers all the way, once."""
        with self._clock.running():
            self._gripper.home()

    def state(self) -> GripperState:
        """Return the last known state."""
        state = self._gripper.state()
        if state.waiting_s <= 0:
            self._since_s = None
            return state
        if self._since_s is None:
            self._since_s = self._clock.now()
        return replace(state, waiting_s=self._clock.now() - self._since_s)

    def request(self, *, opened: bool) -> None:
        """Ask for an open or closed hand."""
        self._gripper.request(opened=opened)

    def close(self) -> None:
        """Let go of the hand."""
        with self._clock.running():
            self._gripper.close()


class TimedCamera:
    """A camera whose newest image is the newest that has left it, by the arm's clock.

    Args:
        camera: The driver.
        number: Of this camera on the page.
        clock: The arm's clock.
    """

    def __init__(self, camera: Camera, number: int, clock: ArmClock) -> None:
        self._camera = camera
        self._number = number
        self._clock = clock
        self._missing_ms = -1.0

    @property
    def config(self) -> CameraConfig:
        """Which view it delivers."""
        return self._camera.config

    def open(self) -> None:
        """Start the stream."""
        # Whether a stream has begun is seen by its images.
        self._clock.page.watch(self._number, FREE)
        with self._clock.running():
            self._camera.open()

    def latest(self) -> Frame:
        """Return the newest image, stamped with the arm's time at its exposure."""
        # Images that nobody looks at are not made.
        self._clock.page.watch(self._number, self._clock.page.clock_ms)
        frame = self._camera.latest()
        now = time.monotonic()
        deadline, ask_at = now + _IN_TRANSIT_S, now + _AGAIN_S
        while self._is_late(frame) and (now := time.monotonic()) < deadline:
            if now > ask_at:
                # The bus drops an image whose reader was not given the processor in time.
                self._clock.page.ask_again()
                ask_at = now + _AGAIN_S
            time.sleep(_LOOK_S)
            frame = self._camera.latest()
        if self._is_late(frame):
            # Lost on its way; the images until the next one that comes are not waited for.
            self._missing_ms = 1000 * frame.stamp_s
        return replace(frame, at_s=frame.stamp_s)

    def close(self) -> None:
        """Stop the stream."""
        with self._clock.running():
            self._camera.close()

    def _is_late(self, frame: Frame) -> bool:
        """Return whether an image that is due by now has not come yet."""
        page, came_ms = self._clock.page, 1000 * frame.stamp_s
        if not page.camera_is_alive or came_ms <= self._missing_ms:
            return False
        due_ms = page.clock_ms - 1000 / self._camera.config.fps
        return came_ms < max(page.published_ms(self._number), due_ms) - 0.5
