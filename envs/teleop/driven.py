"""A device whose library runs in a process of its own, and is asked without waiting for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from dzrobot.envs.processes.driver_main import plainly
from dzrobot.envs.processes.driver_process import DisconnectedError, DriverProcess, Latest
from dzrobot.envs.teleop.device import DeviceLostError, Gives, TeleopReading
from dzrobot.envs.teleop.settings import DeviceConfig
from dzrobot.errors import DzrobotError, RobotError
from dzrobot.importing import required

EXTRA = "teleop"
"""Of this package, that installs every device's library."""

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
            Exception: whatever the library raises for a device that is gone.
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
            except Exception as error:  # noqa: BLE001 (whatever a library raises is for the parent)
                sample = _Sample(time.monotonic(), None, f"{type(error).__name__}: {error}"[:500])
                # What was lost once is not to come back unseen.
                self._polls = False
            self._latest.put(_SAMPLES.dump_json(sample))
        return _PERIOD_S

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        return plainly(error)

    def close(self) -> None:
        """Let the device go."""
        self._source.close()


class DrivenDevice:
    """A device in a driver's process.

    A library that hangs, or crashes, freezes nobody here: the reading grows old, which is noticed,
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
        try:
            driver.ask("open", timeout_s=_OPEN_S + self._config.silent_s)
        except BaseException:
            driver.kill()
            raise
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
            raise self._lost(f"it says what is no reading: {error.errors()[0]['msg']}") from error
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
