"""Teleoperation devices; each library runs in a process of its own."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from dzrobot.envs.driver_process import DisconnectedError, DriverProcess, Latest, plainly
from dzrobot.envs.teleop.settings import DeviceConfig
from dzrobot.errors import DzrobotError, RobotError
from dzrobot.importing import required

Gives = Literal["motion", "joints", "guidance"]
"""What a device shows: how the hand is to move, where the joints are to be, or whether a person
guides the arm itself."""


class DeviceLostError(RobotError):
    """A device that was there says nothing any more, or something that is none of its values."""


@dataclass(frozen=True, kw_only=True)
class TeleopReading:
    """What a device says at one moment."""

    active: bool
    """Whether the person steers: their hand is on the deadman button. Else nothing is to move."""

    motion: tuple[float, ...] | None = None
    """(6,) in [-1, 1]: translation forward, left and up, then rotation about these axes, which are
    those of the robot's base; 1 is the largest step that the robot takes.
    None: it does not show that."""

    joints: tuple[float, ...] | None = None
    """(7,) rad: where the arm's joints are to be. None: it does not show that."""

    closed: bool | None = None
    """Whether the gripper is to be closed. None: ``presses`` say it."""

    presses: int = 0
    """How often the button was pressed, since the device was opened, that closes an open gripper
    and opens a closed one."""

    ends: bool = False
    """Whether the button is pressed that ends the episode."""

    shown: Mapping[str, float] = field(default_factory=dict)
    """What the device says by its own names, for people who set it up."""


class TeleopDevice(Protocol):
    """One device. Nothing is opened before ``open``."""

    @property
    def gives(self) -> Gives:
        """What its readings hold."""
        ...

    @property
    def has_deadman(self) -> bool:
        """Whether it is active only while a person holds a button."""
        ...

    def check(self) -> None:
        """Check that the libraries it needs are installed; nothing is opened.

        Raises:
            MissingDependencyError: one is not.
        """
        ...

    def open(self) -> None:
        """Find the device and begin to listen to it; twice is harmless.

        Raises:
            RobotError: it is not there, or is not what its settings say.
        """
        ...

    def read(self) -> TeleopReading:
        """Return the newest reading, at once.

        Raises:
            DeviceLostError: it says nothing any more.
        """
        ...

    def close(self) -> None:
        """Let the device go; twice is harmless."""
        ...


def the_only(found: Mapping[str, str], kind: str, setting: str) -> str:
    """Return the key of the only device of ``found``, key -> name.

    Args:
        found: What is connected.
        kind: What it is, for messages.
        setting: That chooses one.

    Raises:
        RobotError: there is none, or there are several.
    """
    if not found:
        raise RobotError(f"no {kind} is connected: plug it in, or look at its receiver")
    if len(found) > 1:
        raise RobotError(
            f"several devices are a {kind}: {listed(found)}; choose one by --teleop-arg "
            f"{setting}={next(iter(found))}"
        )
    return next(iter(found))


def listed(found: Mapping[str, str]) -> str:
    """Return what is connected, for a message."""
    return ", ".join(f"{key} ({name})" for key, name in found.items()) or "none"


EXTRA = "teleop"
"""Extra of this package that installs every device's library."""

_PERIOD_S = 0.005
_OPEN_S = 10.0
_CLOSE_S = 2.0
_BYTES = 4096


class Source(Protocol):
    """A device as its library has it; lives in the driver's process."""

    def open(self) -> None:
        """Find the device.

        Raises:
            RobotError: it is not there; says what to do.
        """
        ...

    def poll(self) -> TeleopReading:
        """Take what has come since the last call and return what holds now; waits for nothing.

        Raises:
            RobotError, OSError, RuntimeError: the device is gone.
        """
        ...

    def close(self) -> None:
        """Let the device go; harmless where it is not open."""
        ...


@dataclass(frozen=True)
class _Sample:
    at_s: float
    """Monotonic clock, which all processes of a machine share."""

    reading: TeleopReading | None
    fault: str = ""


_SAMPLES = TypeAdapter(_Sample)

_ERRORS = (OSError, RuntimeError)
"""What the libraries of the devices raise, those of pygame and pyserial included."""


class PolledDriver:
    """Polls a source, in the driver's process, and publishes what it says.

    Args:
        make: Makes the source from its settings; a function or class of a module.
        config: The settings.
        latest: Where readings go.
    """

    def __init__(self, make: Callable[[Any], Source], config: DeviceConfig, latest: Latest) -> None:
        self._source = make(config)
        self._latest = latest
        self._polls = False

    def open(self) -> None:
        """Open the device; from now on it is polled."""
        self._source.open()
        self._polls = True
        self.tick()

    def tick(self) -> float:
        """Poll, and return the seconds until the next time."""
        if self._polls:
            try:
                sample = _Sample(time.monotonic(), self._source.poll())
            except (*_ERRORS, RobotError) as error:
                sample = _Sample(time.monotonic(), None, f"{type(error).__name__}: {error}"[:500])
                # What was lost once is not to come back unseen.
                self._polls = False
            self._latest.put(_SAMPLES.dump_json(sample))
        return _PERIOD_S

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the library raises."""
        return _ERRORS

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        return plainly(error)

    def close(self) -> None:
        """Let the device go."""
        self._source.close()


class DrivenDevice:
    """A device in a driver's process.

    A library that hangs, or crashes, freezes nothing here: the reading grows old, which is noticed,
    and the process is killed.

    Args:
        name: For messages, such as ``SpaceMouse``.
        make: Makes its :class:`Source`, in the other process.
        config: Its settings.
        gives: What its readings hold.
        has_deadman: Whether its settings name a deadman button.
        packages: That it needs, by the names they are imported by.
    """

    def __init__(  # noqa: PLR0913 (what a device is, said once per device)
        self,
        name: str,
        make: Callable[[Any], Source],
        config: DeviceConfig,
        *,
        gives: Gives,
        has_deadman: bool,
        packages: Sequence[str],
    ) -> None:
        self.gives: Gives = gives
        self.has_deadman = has_deadman
        self._name = name
        self._make = make
        self._config = config
        self._packages = packages
        self._driver: DriverProcess | None = None

    def check(self) -> None:
        """Check that the libraries are installed."""
        required(f"the {self._name}", EXTRA, *self._packages)

    def open(self) -> None:
        """Start the driver and find the device."""
        if self._driver is not None:
            return
        self.check()
        driver = DriverProcess(self._name, PolledDriver, self._make, self._config, memory=_BYTES)
        with driver.killed_on_error():
            driver.call("open", timeout_s=_OPEN_S + self._config.silent_s)
        self._driver = driver

    def read(self) -> TeleopReading:
        """Return the newest reading."""
        if self._driver is None:
            raise RobotError(f"the {self._name} is not open")
        running = self._driver.is_running()
        try:
            data = self._driver.latest.get()
        except DisconnectedError as error:
            raise self._lost("its driver has ended") from error
        if data is None or not running:
            raise self._lost("its driver has ended")
        try:
            sample = _SAMPLES.validate_json(data)
        except ValidationError as error:
            # A number that is not finite is written as none.
            raise self._lost(
                f"it gives what is not a reading: {error.errors()[0]['msg']}"
            ) from error
        if sample.reading is None:
            raise self._lost(sample.fault)
        age_s = time.monotonic() - sample.at_s
        if age_s > self._config.silent_s:
            raise self._lost(f"it has said nothing for {age_s:.2f} s")
        return sample.reading

    def close(self) -> None:
        """Let the device go."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.end(_CLOSE_S)

    def _lost(self, why: str) -> DeviceLostError:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.kill()
        return DeviceLostError(
            f"the {self._name} is lost ({why}); look at its cable and start again"
        )
