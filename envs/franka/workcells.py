"""Where a workcell's devices are: on the robot's network, or emulated in child processes."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dzrobot.envs.franka.arm import Arm
from dzrobot.envs.franka.camera import Camera
from dzrobot.envs.franka.clock import Clock, SystemClock
from dzrobot.envs.franka.outcomes import Scene, SceneObject
from dzrobot.errors import ConfigError, RobotError

if TYPE_CHECKING:
    from dzrobot.envs.emulators.timebase import ArmClock

EMPTY_SCENE = "empty"
"""Of an arm alone."""

LIFT_SCENE = "lift"
"""robosuite's Lift in MuJoCo: a table with a red cube; cameras are rendered."""

_numbers = itertools.count(1)
_LOCKSTEP_PATIENCE = 10.0


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
        """What stands around the arm, where a program knows it."""
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
        if self._address is None:
            raise RobotError(
                "no robot address is known. Give one of: address='172.16.0.2' and cameras=[...]; "
                "workcell='cell.yaml' with both; workcell='emulated' for an emulated robot and "
                "cameras; workcell='fake' for neither library."
            )

    @property
    def address(self) -> str:
        """The configured address."""
        assert self._address is not None, "checked by open()"
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
        """None: what stands around hardware, people know."""
        return None

    def close(self) -> None:
        """Do nothing: hardware stays."""


class EmulatedWorkcell:
    """Emulated arm, gripper and cameras, started as child processes when first opened.

    An environment on it lives by the emulated arm's clock, which stands still while the environment
    thinks: what happens does not depend on how busy the machine is.

    Args:
        rate: Robot seconds per wall second, at most; infinity is as fast as the client answers.
        lockstep: False lets the arm run on by itself, as hardware does: the environment then lives
            by this machine's clock.
        scene: What surrounds the arm: ``empty``; ``lift``, robosuite's in MuJoCo; or an object of
            LIBERO, such as ``alphabet_soup``, in the place of Lift's cube.
        serials: Of its cameras, in the order of the environment's. None: exterior and wrist.
    """

    def __init__(
        self,
        rate: float = 1.0,
        *,
        lockstep: bool = True,
        scene: str = EMPTY_SCENE,
        serials: Sequence[str] | None = None,
    ) -> None:
        self._rate = rate
        self._serials = serials
        self._scene_name = scene
        self._lockstep = lockstep
        self._emulators: Any = None
        self._clock: ArmClock | None = None

    @property
    def clock(self) -> "ArmClock":
        """The emulated arm's clock."""
        if self._clock is None:
            from dzrobot.envs.emulators.timebase import ArmClock, Timebase

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
        from dzrobot.envs.emulators.launcher import SERIALS, EmulatorLauncher, LauncherAddress

        address = LauncherAddress.for_process(next(_numbers))
        self._emulators = EmulatorLauncher(
            address, self._serials or SERIALS, self._rate, self.clock.page, self._scene_name
        ).start()

    @property
    def address(self) -> str:
        """The loopback address of the emulated arm."""
        host: str = self.emulators.address.host
        return host

    @property
    def patience(self) -> float:
        """Long in lockstep: the arm's time stands still meanwhile, and the machine may be busy."""
        return _LOCKSTEP_PATIENCE if self._lockstep else 1.0

    def camera_settings(self) -> dict[str, Any]:
        """Return the settings that find the emulated cameras."""
        settings: dict[str, Any] = self.emulators.camera_settings()
        return settings

    def keep_time(self, arm: Arm, cameras: Sequence[Camera]) -> Timed:
        """Return the drivers on the arm's clock, and that clock."""
        if not self._lockstep:
            return arm, cameras, SystemClock()
        from dzrobot.envs.emulators.timekeeping import TimedArm, TimedCamera

        if others := [camera.config.name for camera in cameras if camera.config.kind == "uvc"]:
            raise ConfigError(
                f"{', '.join(others)} cannot be used beside an emulated arm, whose time stands "
                "still while they go on: leave `cameras` out for emulated ones"
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
        from dzrobot.envs.emulators.table_objects import object_in

        page = self._workcell.clock.page
        return object_in(page.scene_at(page.clock_ms))

    def goal_holds(self) -> bool:
        """Return whether the task is done, at the arm's time."""
        return self._workcell.clock.page.goal_holds
