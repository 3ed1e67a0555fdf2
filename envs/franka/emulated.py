"""Emulated workcells: the only module of ``franka`` that imports ``emulators``.

The arm's time is paused while an environment thinks, so a driver that has to wait for the arm
must say so, and what is in transit from a peer can be awaited without the arm's time passing.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.emulators.scenes import (
    SECOND_EXTERIOR,
    SERIALS,
    SIZES,
    Cube,
    check_name,
    object_in,
    task_of,
)
from dzrobot.envs.emulators.timebase import FREE, ArmClock, Timebase
from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND, forward
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.workcells import (
    Arm,
    Camera,
    Frame,
    GripperDevice,
    Scene,
    SceneObject,
    Space,
    SystemClock,
    Timed,
)
from dzrobot.envs.mujoco.lift_scene import EMPTY_SCENE, LIFT_SCENE, READY
from dzrobot.envs.panda.poses import Array, euler_of
from dzrobot.envs.panda.state import ArmState, GripperState
from dzrobot.errors import ConfigError, RobotError

_numbers = itertools.count(1)
_LOCKSTEP_PATIENCE = 10.0

_IN_TRANSIT_S = 10.0
"""How long (wall) something that was sent is waited for, before it counts as lost."""

_AGAIN_S = 0.1
"""How long (wall) an image is waited for before it is asked for once more."""

_LOOK_S = 0.0005
_NEAR_MS = 2


class EmulatedWorkcell:
    """Emulated arm, gripper and cameras, started as child processes when first opened.

    An environment on it lives by the emulated arm's clock, which is paused while the environment
    thinks: what happens does not depend on how busy the machine is.

    Args:
        rate: Robot seconds per wall second, at most; infinity is as fast as the client answers.
        lockstep: False lets the arm run on by itself, as hardware does: the environment then lives
            by this machine's clock.
        scene: What surrounds the arm: ``empty``; ``lift``, robosuite's in MuJoCo; or an object of
            LIBERO, such as ``alphabet_soup``, in the place of Lift's cube.
        serials: Of its cameras, in the order of the environment's. None: exterior and wrist.
        arm: Kind of arm, ``fr3`` or ``fer``, or a YAML file that describes one.
    """

    def __init__(
        self,
        rate: float = 1.0,
        *,
        lockstep: bool = True,
        scene: str = EMPTY_SCENE,
        serials: Sequence[str] | None = None,
        arm: str = "fr3",
    ) -> None:
        self._rate = rate
        self._kind = arm
        self._serials = serials
        self._scene_name = scene
        self._lockstep = lockstep
        self._emulators: Any = None
        self._clock: ArmClock | None = None

    @property
    def clock(self) -> ArmClock:
        """The emulated arm's clock."""
        if self._clock is None:
            self._clock = ArmClock(Timebase.create())
        return self._clock

    @property
    def emulators(self) -> Any:
        """The running emulators, for those who inject faults.

        Raises:
            RobotError: they have not been started.
        """
        if self._emulators is None:
            raise RobotError("the emulators are started by the first reset()")
        return self._emulators

    def open(self) -> None:
        """Start the emulators."""
        if self._emulators is not None:
            return
        from dzrobot.envs.emulators.launcher import EmulatorLauncher, LauncherAddress

        address = LauncherAddress.for_process(next(_numbers))
        self._emulators = EmulatorLauncher(
            address,
            self._serials or SERIALS,
            self._rate,
            self.clock.page,
            self._scene_name,
            self._kind,
        ).start()

    @property
    def address(self) -> str:
        """The loopback address of the emulated arm."""
        host: str = self.emulators.address.host
        return host

    @property
    def patience(self) -> float:
        """Long in lockstep: the arm's time is paused meanwhile, and the machine may be busy."""
        return _LOCKSTEP_PATIENCE if self._lockstep else 1.0

    def camera_settings(self) -> dict[str, Any]:
        """Return the settings that find the emulated cameras."""
        settings: dict[str, Any] = self.emulators.camera_settings()
        return settings

    def keep_time(self, arm: Arm, cameras: Sequence[Camera]) -> Timed:
        """Return the drivers on the arm's clock, and that clock."""
        if not self._lockstep:
            return arm, cameras, SystemClock()
        if others := [camera.config.name for camera in cameras if camera.config.kind == "uvc"]:
            raise ConfigError(
                f"{', '.join(others)} cannot be used beside an emulated arm, whose time is "
                "paused while they run on: leave `cameras` out for emulated ones"
            )
        clock = self.clock
        clock.page.is_shared = True
        timed = [TimedCamera(camera, number, clock) for number, camera in enumerate(cameras)]
        return TimedArm(arm, clock), timed, clock

    @property
    def scene(self) -> Scene | None:
        """The objects around the arm; None where there are none."""
        return None if self._scene_name == EMPTY_SCENE else EmulatedScene(self)

    def close(self) -> None:
        """Stop the emulators."""
        if self._emulators is not None:
            self._emulators.close()
        self._emulators = None


class EmulatedScene:
    """The objects of an emulated workcell.

    Args:
        workcell: Of an emulated arm with a scene.
    """

    def __init__(self, workcell: EmulatedWorkcell) -> None:
        self._workcell = workcell

    def prepare(self, start: int) -> None:
        """Put the objects where an initial state has them."""
        self._workcell.emulators.call("prepare", start)

    def object(self) -> SceneObject:
        """Return where the object is, at the arm's time."""
        page = self._workcell.clock.page
        return SceneObject(*object_in(page.scene_at(page.clock_ms)))

    def goal_holds(self) -> bool:
        """Return whether the task is done, at the arm's time."""
        return self._workcell.clock.page.goal_holds


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

    def watch_stop(self, path: Path) -> None:
        """Watch it as the arm does."""
        self._arm.watch_stop(path)

    def keep_alive(self) -> None:
        """Say that the program runs."""
        self._arm.keep_alive()

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

    def start(self, space: Space = Space.CARTESIAN) -> None:
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

    def make_compliant(self, joints: Array) -> None:
        """Yield to a person's hand."""
        self._arm.make_compliant(joints)

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
        self._came = (-1, 0.0)
        """Number of the newest image, and when it was there (the arm's clock)."""

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
        # Images that are not read are not rendered.
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
            # Lost in transit; the images until the next one that comes are not waited for.
            self._missing_ms = 1000 * frame.stamp_s
        if frame.number != self._came[0]:
            self._came = frame.number, self._clock.now()
        return replace(frame, at_s=frame.stamp_s, came_s=self._came[1])

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


def emulated_serials(config: FrankaConfig) -> tuple[str, ...]:
    """Return which cameras are emulated: those the workcell names, then the usual ones."""
    # Image and clock of a camera meet by its place in this order.
    named = [camera.serial for camera in config.cameras]
    known = [serial for serial in named if serial in (*SERIALS, SECOND_EXTERIOR)]
    return (*known, *(serial for serial in SERIALS if serial not in known))


def emulated_values(robot: Embodiment) -> dict[str, Any]:
    """Return cameras and task of the emulated workcell for an embodiment.

    Raises:
        ConfigError: it has neither two nor three views.
    """
    views = robot.video_keys
    exterior, wrist = SERIALS
    # As policies of DROID have them: exterior views first, the wrist's last.
    serials = {2: SERIALS, 3: (exterior, SECOND_EXTERIOR, wrist)}.get(len(views))
    if serials is None:
        raise ConfigError(
            f"the emulated workcell has two or three cameras, and {robot.tag!r} has {len(views)} "
            "views"
        )
    tall, wide = robot.views[0].resolution
    # Of the views' shape, so that nothing is cut off; small leaves more of the machine to the arm.
    width, height = min(SIZES, key=lambda size: (abs(size[0] / size[1] - wide / tall), size))
    return {
        "cameras": [
            {"key": key, "serial": serial, "width": width, "height": height}
            for key, serial in zip(views, serials, strict=True)
        ],
        "task": "pick up the red block",
    }


def scene_values(scene: str) -> dict[str, Any]:
    """Return where robosuite's Lift begins, and what may be reached there."""
    check_name(scene)
    return {
        "task": Cube.task if scene == LIFT_SCENE else task_of(scene),
        "reset": {
            "position": (0.457, 0.0, 0.10),
            "joints": READY.tolist(),
        },
        "limits": {
            "workspace_low": (0.35, -0.25, -0.11),
            "workspace_high": (0.70, 0.25, 0.25),
            "tilt": (0.1, 0.1, 0.9),
        },
        "reward": {"rule": "scene"},
    }


def hand_at(joints: ArrayLike) -> dict[str, Any]:
    """Return position (m) and roll, pitch, yaw (rad) of the Franka Hand at joint angles (7,)."""
    pose = forward(np.array(joints, np.float64), FLANGE_TO_HAND)
    return {"position": pose[:3, 3].tolist(), "euler": euler_of(pose[:3, :3]).tolist()}
