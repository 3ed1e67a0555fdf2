"""RealSense cameras, through pyrealsense2."""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dzrobot.envs.driver_process import DriverProcess, Latest, require
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.camera import FRAME_S, DriverCamera, Shot, StreamDriver
from dzrobot.envs.franka.workcells import Clock
from dzrobot.errors import MissingDependencyError, RobotError
from dzrobot.importing import install

_DEPTH_UNITS_PER_MS = 1000.0
"""A color stream from the depth sensor, as the D405 has it, counts its exposure in us."""

_COLOR_UNITS_PER_MS = 10.0
"""A color sensor counts in 100 us, as all USB video cameras do."""

_ROUNDING = 1e-3
"""Rounding of a step: values are 32-bit floats."""


@dataclass(frozen=True)
class _Control:
    """One value of the sensor."""

    name: str
    """Field of :class:`~dzrobot.envs.franka.camera_config.CameraConfig`."""

    option: Any
    """The library's."""

    automatic: Any
    """The library's option by which the sensor chooses it by itself."""

    unit: str
    per_unit: float
    """Numbers of the sensor for 1 of the field."""


class ColorSettings:
    """Settings of the sensor behind a color stream.

    Args:
        device: The library's.
        name: Of the camera, for errors.

    Raises:
        RobotError: it has no color stream.
    """

    def __init__(self, device: Any, name: str) -> None:
        self._name = name
        self._sensor = _color_sensor(device, name)
        self._controls = tuple(_controls(self._sensor))

    def offered(self) -> str:
        """Return the ranges of what may be fixed, with their units; empty: nothing."""
        return ", ".join(
            f"{control.name} {self._range(control)}"
            for control in self._controls
            if self._sensor.supports(control.option)
        )

    def check(self, camera: CameraConfig) -> None:
        """Refuse fixed values that the camera does not offer.

        Raises:
            RobotError: names them, and what it offers.
        """
        faults = []
        for control, value in self._fixed(camera):
            if not self._sensor.supports(control.option):
                faults.append(f"{control.name} at all: leave it out")
                continue
            offered = self._sensor.get_option_range(control.option)
            number = value * control.per_unit
            steps = (number - offered.min) / (offered.step or 1.0)
            near = abs(steps - round(steps)) <= _ROUNDING
            if not (offered.min <= number <= offered.max and near):
                faults.append(
                    f"{control.name}={value:g}; it offers {self._range(control)}: change it in "
                    "`cameras` of the workcell"
                )
        if faults:
            raise RobotError(f"{self._name} does not offer {'; nor '.join(faults)}")

    def leave(self) -> None:
        """Let the camera choose everything by itself."""
        for option in self._automatic():
            self._sensor.set_option(option, 1.0)

    def keep(self) -> None:
        """Keep what the camera has chosen."""
        for option in self._automatic():
            self._sensor.set_option(option, 0.0)

    def fix(self, camera: CameraConfig) -> None:
        """Set the fixed values, and leave the others to the camera.

        Raises:
            RobotError: the camera reports another value than was set.
        """
        fixed = list(self._fixed(camera))
        ours = {control.automatic for control, _ in fixed}
        for option in self._automatic():
            self._set_option("automatic choice", option, 0.0 if option in ours else 1.0)
        for control, value in fixed:
            self._set_option(control.name, control.option, value * control.per_unit)

    def _set_option(self, what: str, option: Any, number: float) -> None:
        self._sensor.set_option(option, number)
        reported = self._sensor.get_option(option)
        if abs(reported - number) > 0.5 * (self._sensor.get_option_range(option).step or _ROUNDING):
            raise RobotError(
                f"{self._name} was told {number:g} for its {what}, in its own numbers, and says "
                f"{reported:g}: update its firmware, or leave the value out"
            )

    def _fixed(self, camera: CameraConfig) -> Iterator[tuple[_Control, float]]:
        for control in self._controls:
            if control.name in camera.fixed:
                yield control, camera.fixed[control.name]

    def _automatic(self) -> list[Any]:
        found = dict.fromkeys(control.automatic for control in self._controls)
        return [option for option in found if self._sensor.supports(option)]

    def _range(self, control: _Control) -> str:
        offered = self._sensor.get_option_range(control.option)
        low, high, step = (
            number / control.per_unit for number in (offered.min, offered.max, offered.step)
        )
        return f"{low:g} to {high:g}{control.unit} in steps of {step:g}"


def _color_sensor(device: Any, name: str) -> Any:
    import pyrealsense2 as rs

    for sensor in device.query_sensors():
        profiles = sensor.get_stream_profiles()
        if any(profile.stream_type() == rs.stream.color for profile in profiles):
            return sensor
    raise RobotError(f"{name} has no color stream: use another camera")


def _controls(sensor: Any) -> Iterator[_Control]:
    import pyrealsense2 as rs

    of, per_ms = rs.option, _COLOR_UNITS_PER_MS
    if sensor.is_depth_sensor():
        per_ms = _DEPTH_UNITS_PER_MS
    yield _Control("exposure_ms", of.exposure, of.enable_auto_exposure, " ms", per_ms)
    yield _Control("gain", of.gain, of.enable_auto_exposure, "", 1.0)
    yield _Control("white_balance_k", of.white_balance, of.enable_auto_white_balance, " K", 1.0)


_LIST_S = 30.0
"""Nothing moves and nothing waits while cameras are listed: a busy machine may take its time."""

_OLDEST_FRAME_S = 1.0
_LEAVES_S = 2.0


@dataclass(frozen=True)
class Device:
    """One camera that was found."""

    serial: str
    name: str
    usb: str
    """Kind of the USB connection, such as 3.2; empty where it is not reported."""

    firmware: str

    port: str = ""
    """Where it is plugged in, a path in ``/sys/devices``; empty where it is not reported."""

    offers: str = ""
    """What of exposure, gain and white balance may be fixed, and to what."""

    @property
    def is_slow(self) -> bool:
        """Return whether it hangs on USB 2, which carries a few frames a second."""
        return self.usb.startswith(("1", "2"))


class RealSenseDriver(StreamDriver):
    """The color stream of one camera.

    Args:
        config: Serial number, stream, exposure. None: of no camera in particular.
        settings: Of the library's context; empty for cameras on USB.
        patience: How many times longer than on USB a frame is waited for.
        latest: Where frames are published.
    """

    def __init__(
        self,
        config: CameraConfig | None,
        settings: dict[str, Any],
        patience: float,
        latest: Latest | None = None,
    ) -> None:
        super().__init__(patience, latest)
        self._config = config
        self._context = context(settings)
        self._pipeline: Any = None
        self._settings: ColorSettings
        self._began_s = 0.0
        self._locked = False

    def devices(self) -> list[Device]:
        """Return all cameras found; one in a bad state is left out."""
        found = []
        for _, device in self._connected():
            with contextlib.suppress(RuntimeError):
                found.append(_device(device))
        return sorted(found, key=lambda device: device.serial)

    def find(self, timeout_s: float) -> None:
        """Wait for the configured camera, and look whether it offers what is to be fixed."""
        wanted = self._camera.serial
        deadline = time.monotonic() + timeout_s
        while wanted not in (found := dict(self._connected())):
            if time.monotonic() > deadline:
                raise RobotError(
                    f"no camera {wanted}; found: {', '.join(sorted(found)) or 'none'}. Check the "
                    "cable and the serial numbers (`dzrobot doctor franka` lists them)."
                )
            time.sleep(0.1)
        if self._camera.fixed:
            ColorSettings(found[wanted], self._camera.name).check(self._camera)

    def begin(self) -> None:
        """Start the stream, and set what is fixed."""
        import pyrealsense2 as rs

        camera, config = self._camera, rs.config()
        config.enable_device(camera.serial)
        config.enable_stream(
            rs.stream.color, camera.width, camera.height, rs.format.rgb8, camera.fps
        )
        pipeline = rs.pipeline(self._context)
        profile = pipeline.start(config)
        self._pipeline, self._locked, self._began_s = pipeline, False, time.monotonic()
        self._settings = ColorSettings(profile.get_device(), self._camera.name)
        if camera.fixed:
            self._settings.fix(camera)
        else:
            self._settings.leave()

    def next(self) -> Shot | None:
        """Return the next frame."""
        came, frames = self._pipeline.try_wait_for_frames(round(1000 * FRAME_S))
        if not came:
            return None
        now_s = time.monotonic()
        self._lock_exposure(now_s)
        color = frames.get_color_frame()
        stamp_s = color.get_timestamp() / 1000.0
        return Shot(np.asanyarray(color.get_data()), _exposed_s(color, now_s), stamp_s)

    def restart_device(self, timeout_s: float) -> bool:
        """Restart the camera by its serial number, once, and wait until it is there again."""
        self.close()
        device = dict(self._connected()).get(self._camera.serial)
        if device is None:
            return False
        device.hardware_reset()
        # It leaves the bus for a moment, and is found as it was before.
        time.sleep(_LEAVES_S)
        self.find(timeout_s)
        self.stream()
        return True

    def end(self) -> None:
        """Stop the stream."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.stop()

    @property
    def _camera(self) -> CameraConfig:
        assert self._config is not None, "only devices() is asked of no camera in particular"
        return self._config

    def _connected(self) -> Iterator[tuple[str, Any]]:
        """Yield serial number and device of all cameras that report one."""
        import pyrealsense2 as rs

        for device in self._context.query_devices():
            try:
                serial = device.get_info(rs.camera_info.serial_number)
            except RuntimeError:
                continue
            yield serial, device

    def _lock_exposure(self, now_s: float) -> None:
        camera = self._camera
        due = camera.lock_exposure and now_s - self._began_s >= camera.settle_s
        if due and not self._locked:
            self._locked = True
            self._settings.keep()


def context(settings: dict[str, Any]) -> Any:
    """Return the library's context; finding cameras takes seconds.

    Raises:
        MissingDependencyError: the library is not installed.
    """
    try:
        import pyrealsense2 as rs
    except ImportError as error:
        raise MissingDependencyError(f"{MISSING} ({error})") from error
    return rs.context(json.dumps(settings)) if settings else rs.context()


MISSING = (
    f"RealSense cameras need `{install('franka')}` and the system libraries libusb-1.0-0 "
    "and libudev1"
)


def _device(device: Any) -> Device:
    import pyrealsense2 as rs

    kinds = rs.camera_info
    asked = (
        kinds.serial_number, kinds.name, kinds.usb_type_descriptor, kinds.firmware_version,
        kinds.physical_port,
    )  # fmt: skip
    serial, name, usb, firmware, port = (
        device.get_info(kind) if device.supports(kind) else "" for kind in asked
    )
    try:
        offers = ColorSettings(device, serial).offered()
    except RobotError:
        offers = ""
    return Device(serial, name, usb, firmware, port, offers)


def _exposed_s(frame: Any, now_s: float) -> float:
    """Return when a frame was exposed, by this machine's clock, or ``now_s`` where it is unknown.

    Known only if the camera is synchronized with this machine.
    """
    import pyrealsense2 as rs

    domain = frame.get_frame_timestamp_domain()
    kinds = rs.timestamp_domain
    if domain not in (kinds.global_time, kinds.system_time):
        return now_s
    age = time.time() - frame.get_timestamp() / 1000.0
    return now_s - age if 0.0 <= age <= _OLDEST_FRAME_S else now_s


class RealSenseCamera(DriverCamera):
    """A RealSense color stream.

    Args:
        config: Serial number, stream and crop.
        settings: Returns settings for the library's context; empty for cameras on USB.
        clock: What the age of a frame is measured by. None: this machine's.
        patience: See :class:`~dzrobot.envs.driver_process.DriverProcess`.
    """

    def __init__(
        self,
        config: CameraConfig,
        settings: Callable[[], dict[str, Any]] = dict,
        clock: Clock | None = None,
        *,
        patience: float = 1.0,
    ) -> None:
        super().__init__(config, clock, patience=patience)
        self._settings = settings

    def _start(self, memory: int) -> tuple[DriverProcess, float]:
        require("pyrealsense2", MISSING)
        settings = self._settings()
        driver = DriverProcess(
            self._config.name, RealSenseDriver, self._config, settings, self._patience,
            memory=memory, patience=self._patience,
        )  # fmt: skip
        return driver, discovery_s(settings)


def discovery_s(settings: dict[str, Any]) -> float:
    """Return how long to wait for a camera (s): on a network they announce themselves, slowly."""
    return 15.0 if settings else 3.0


def list_cameras(settings: dict[str, Any], wanted: Collection[str] = ()) -> list[Device]:
    """Return the cameras that the library finds, in a process that ends with the answer.

    Args:
        settings: Of the library's context; empty for cameras on USB.
        wanted: Serial numbers that are waited for, for a while.

    Raises:
        MissingDependencyError: the library is not installed.
        RobotError: it gives no answer.
    """
    require("pyrealsense2", MISSING)
    driver = DriverProcess("cameras", RealSenseDriver, None, settings, 1.0)
    try:
        deadline = time.monotonic() + discovery_s(settings)
        while True:
            found: list[Device] = driver.call("devices", timeout_s=_LIST_S)
            known = {device.serial for device in found}
            if (set(wanted) <= known and known) or time.monotonic() > deadline:
                return found
            time.sleep(0.1)
    finally:
        driver.kill()
