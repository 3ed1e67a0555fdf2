"""A RealSense camera through the library, in a process of its own."""

import contextlib
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Self

import numpy as np

from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.driver import plainly
from dzrobot.envs.franka.process import Latest
from dzrobot.envs.franka.realsense_settings import ColorSettings
from dzrobot.errors import DzrobotError, MissingDependencyError, RobotError

_FRAME_MS = 20
_SILENT_S = 1.0
_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0)
_OLDEST_FRAME_S = 1.0


@dataclass(frozen=True)
class Device:
    """One camera that was found."""

    serial: str
    name: str
    usb: str
    """Kind of the USB connection, such as 3.2; empty where it is not reported."""

    firmware: str

    offers: str = ""
    """What of exposure, gain and white balance may be fixed, and to what."""

    @property
    def is_slow(self) -> bool:
        """Return whether it hangs on USB 2, which carries a few frames a second."""
        return self.usb.startswith(("1", "2"))


@dataclass(frozen=True)
class FrameHead:
    """What stands before the pixels of a published frame."""

    number: int
    at_s: float
    """When it was exposed, or arrived where the camera's clock is not known (this machine's)."""

    stamp_s: float
    """When it was exposed, by the camera's own clock."""

    height: int
    width: int

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<QddII")

    def pack(self) -> bytes:
        """Return the head as bytes."""
        return self.FORMAT.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the head that :meth:`pack` wrote."""
        return cls(*cls.FORMAT.unpack_from(data))


class RealSenseDriver:
    """One color stream, opened again, less and less often, when it fails.

    Args:
        config: Serial number, stream, whether exposure is locked.
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
        self._config = config
        self._silent_s = _SILENT_S * patience
        self._latest = latest
        self._context = context(settings)
        self._pipeline: Any = None
        self._settings: ColorSettings
        self._count = 0
        self._heard_s = 0.0
        self._began_s = 0.0
        self._retry_s: float | None = None
        self._failures = 0
        self._locked = False
        self._fault = ""

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
            ColorSettings(found[wanted], self._name).check(self._camera)

    def stream(self) -> None:
        """Begin to stream, and keep doing so."""
        self._retry_s = time.monotonic()

    def fault(self) -> str:
        """Return what the stream failed of last."""
        return self._fault

    def tick(self) -> float:
        """Receive a frame, if there is one."""
        if self._pipeline is not None:
            self._receive()
            return 0.0
        if self._retry_s is not None and time.monotonic() >= self._retry_s:
            self._start()
        return 0.02

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        return plainly(error)

    def close(self) -> None:
        """Stop the stream."""
        self._stop()

    @property
    def _camera(self) -> CameraConfig:
        assert self._config is not None, "only devices() is asked of no camera in particular"
        return self._config

    @property
    def _name(self) -> str:
        return f"camera {self._camera.serial} ({self._camera.key})"

    def _connected(self) -> Iterator[tuple[str, Any]]:
        """Yield serial number and device of all cameras that tell their number."""
        import pyrealsense2 as rs

        for device in self._context.query_devices():
            try:
                serial = device.get_info(rs.camera_info.serial_number)
            except RuntimeError:
                continue
            yield serial, device

    def _start(self) -> None:
        import pyrealsense2 as rs

        camera, config = self._camera, rs.config()
        config.enable_device(camera.serial)
        config.enable_stream(
            rs.stream.color, camera.width, camera.height, rs.format.rgb8, camera.fps
        )
        pipeline = rs.pipeline(self._context)
        try:
            profile = pipeline.start(config)
        except RuntimeError as error:
            self._failed(str(error))
            return
        self._pipeline, self._locked = pipeline, False
        self._heard_s = self._began_s = time.monotonic()
        try:
            self._settings = ColorSettings(profile.get_device(), self._name)
            if camera.fixed:
                self._settings.fix(camera)
            else:
                self._settings.leave()
        except (RuntimeError, RobotError) as error:
            self._stop()
            self._failed(str(error))

    def _receive(self) -> None:
        try:
            came, frames = self._pipeline.try_wait_for_frames(_FRAME_MS)
            now = time.monotonic()
            if came:
                self._lock_exposure(now)
        except RuntimeError as error:
            self._stop()
            self._failed(str(error))
            return
        if came:
            self._heard_s, self._failures = now, 0
            self._publish(frames.get_color_frame(), now)
        elif now - self._heard_s > self._silent_s:
            self._stop()
            self._failed(f"no frame came for {self._silent_s} s")

    def _publish(self, color: Any, now_s: float) -> None:
        image = np.ascontiguousarray(color.get_data(), np.uint8)
        self._count += 1
        stamp_s = color.get_timestamp() / 1000.0
        head = FrameHead(self._count, _exposed_s(color, now_s), stamp_s, *image.shape[:2])
        assert self._latest is not None, "a stream has somewhere to go"
        self._latest.put(head.pack(), image.data)

    def _lock_exposure(self, now_s: float) -> None:
        camera = self._camera
        due = camera.lock_exposure and now_s - self._began_s >= camera.settle_s
        if due and not self._locked:
            self._locked = True
            self._settings.keep()

    def _failed(self, fault: str) -> None:
        self._fault = fault
        self._retry_s = time.monotonic() + _BACK_OFF_S[min(self._failures, len(_BACK_OFF_S) - 1)]
        self._failures += 1

    def _stop(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            try:
                pipeline.stop()
            except RuntimeError as error:
                self._fault = str(error)


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
    "RealSense cameras need `pip install -e '.[franka]'` and the system libraries libusb-1.0-0 "
    "and libudev1"
)


def _device(device: Any) -> Device:
    import pyrealsense2 as rs

    kinds = rs.camera_info
    asked = (kinds.serial_number, kinds.name, kinds.usb_type_descriptor, kinds.firmware_version)
    serial, name, usb, firmware = (
        device.get_info(kind) if device.supports(kind) else "" for kind in asked
    )
    try:
        offers = ColorSettings(device, serial).offered()
    except RobotError:
        offers = ""
    return Device(serial, name, usb, firmware, offers)


def _exposed_s(frame: Any, now_s: float) -> float:
    """Return when a frame was exposed, by this machine's clock, or ``now_s`` where it is unknown.

    Only a camera that keeps the time of this machine can tell.
    """
    import pyrealsense2 as rs

    domain = frame.get_frame_timestamp_domain()
    kinds = rs.timestamp_domain
    if domain not in (kinds.global_time, kinds.system_time):
        return now_s
    age = time.time() - frame.get_timestamp() / 1000.0
    return now_s - age if 0.0 <= age <= _OLDEST_FRAME_S else now_s
