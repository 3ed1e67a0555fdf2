"""A RealSense camera through the library, in a process of its own."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dzrobot.envs.franka.cameras.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.realsense_settings import ColorSettings
from dzrobot.envs.franka.cameras.stream_driver import FRAME_S, Shot, StreamDriver
from dzrobot.envs.processes.driver_process import Latest
from dzrobot.errors import MissingDependencyError, RobotError

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
        """Start the stream, and tell the camera what is fixed."""
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
        """Yield serial number and device of all cameras that tell their number."""
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
