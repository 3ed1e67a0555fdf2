"""Cameras: the newest frame, its number and when it came."""

import functools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.config import CameraConfig
from dzrobot.errors import MissingDependencyError, RobotError

_log = logging.getLogger(__name__)

Image = NDArray[np.uint8]

_FIRST_FRAME_S = 10.0
_FRAME_TIMEOUT_MS = 1000
_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Frame:
    """One picture."""

    image: Image
    """(H, W, 3) uint8 RGB, as the camera delivers it; not to be written to."""

    number: int
    """Counts the frames that arrived, from 1."""

    at_s: float
    """When it arrived (environment clock)."""


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


def fit(image: Image, config: CameraConfig, size: tuple[int, int]) -> Image:
    """Return the cropped picture at ``size`` (height, width), a fresh (H, W, 3) uint8 array."""
    top, left, bottom, right = config.box
    cropped = image[top:bottom, left:right]
    # Bilinear, as the published recordings of this embodiment were made.
    resized = cv2.resize(cropped, size[::-1], interpolation=cv2.INTER_LINEAR)
    return np.array(resized, np.uint8)


class RealSenseCamera:
    """A RealSense colour stream, kept by a thread that holds the newest frame.

    A camera that stops sending is opened anew by the thread, less and less often; meanwhile
    ``latest`` returns the last frame, whose age tells.

    Args:
        config: Serial number, stream and crop.
        settings: Returns settings for the library's context; empty for cameras on USB.
    """

    def __init__(self, config: CameraConfig, settings: Callable[[], dict[str, Any]] = dict) -> None:
        self._config = config
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._arrived = threading.Event()
        self._frame: Frame | None = None
        self._fault = ""

    @property
    def config(self) -> CameraConfig:
        """Which view it delivers, and how it is cropped."""
        return self._config

    def open(self) -> None:
        """Find the camera, start it and wait for a frame."""
        if self._thread is not None and self._thread.is_alive():
            if self._is_streaming():
                return
            self.close()
        settings = self._settings()
        context = context_for(json.dumps(settings, sort_keys=True))
        await_serials(context, [self._config.serial], discovery_s(settings))
        self._stopping.clear()
        self._arrived.clear()
        name = f"camera-{self._config.serial}"
        self._thread = threading.Thread(target=self._run, args=(context,), name=name, daemon=True)
        self._thread.start()
        if not self._arrived.wait(_FIRST_FRAME_S):
            self.close()
            raise RobotError(
                f"camera {self._config.serial} ({self._config.key}) is there but sends no frame "
                f"({self._fault or 'no error'}): use a USB 3 port and cable, and close other "
                "programs that hold it"
            )

    def latest(self) -> Frame:
        """Return the newest frame."""
        frame = self._frame
        if frame is None or self._thread is None:
            raise RobotError(
                f"camera {self._config.serial} is not open; the environment's reset() opens it"
            )
        return frame

    def close(self) -> None:
        """Stop the thread and the stream."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(3.0)
        self._thread = None

    def _is_streaming(self) -> bool:
        number = 0 if self._frame is None else self._frame.number
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            if self._frame is not None and self._frame.number > number:
                return True
            time.sleep(0.01)
        return False

    def _run(self, context: Any) -> None:
        failures = 0
        while not self._stopping.is_set():
            received = self._stream(context)
            failures = 0 if received else failures + 1
            pause = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]
            self._stopping.wait(pause)

    def _stream(self, context: Any) -> int:
        """Receive frames until the camera fails; return how many came."""
        import pyrealsense2 as rs

        config = rs.config()
        config.enable_device(self._config.serial)
        config.enable_stream(
            rs.stream.color,
            self._config.width,
            self._config.height,
            rs.format.rgb8,
            self._config.fps,
        )
        received = 0
        pipeline = rs.pipeline(context)
        try:
            pipeline.start(config)
        except RuntimeError as error:
            self._fault = str(error)
            return 0
        try:
            while not self._stopping.is_set():
                self._keep(pipeline.wait_for_frames(_FRAME_TIMEOUT_MS).get_color_frame())
                received += 1
        except RuntimeError as error:
            self._fault = str(error)
            # Text only: a log that kept the error would keep its frames, and in them the pipeline,
            # whose end can take a minute.
            _log.warning("camera %s: %s", self._config.serial, str(error))
        finally:
            _stop(pipeline)
        return received

    def _keep(self, color: Any) -> None:
        # The library reuses its buffer, so the frame is copied before the next one arrives.
        image = np.asanyarray(color.get_data()).copy()
        number = 1 if self._frame is None else self._frame.number + 1
        self._frame = Frame(image, number, time.monotonic())
        self._arrived.set()


def _stop(pipeline: Any) -> None:
    try:
        pipeline.stop()
    except RuntimeError as error:
        _log.debug("stopping a camera that had failed: %s", str(error))


@functools.lru_cache
def context_for(settings: str) -> Any:
    """Return this process's camera context for ``settings`` (JSON); finding cameras takes seconds.

    Raises:
        MissingDependencyError: the camera library is not installed.
    """
    try:
        import pyrealsense2 as rs
    except ImportError as error:
        raise MissingDependencyError(
            f"RealSense cameras need `pip install 'dzrobot[franka]'` and the system libraries "
            f"libusb-1.0-0 and libudev1 ({error})"
        ) from error
    return rs.context(settings) if settings != "{}" else rs.context()


def discovery_s(settings: dict[str, Any]) -> float:
    """Return how long to wait for a camera (s): on a network they announce themselves, slowly."""
    return 15.0 if settings else 3.0


def serials_of(context: Any) -> list[str]:
    """Return the serial numbers of all cameras found."""
    import pyrealsense2 as rs

    info = rs.camera_info.serial_number
    return sorted(device.get_info(info) for device in context.query_devices())


def await_serials(context: Any, wanted: list[str], timeout_s: float) -> None:
    """Return when all ``wanted`` cameras are found.

    Raises:
        RobotError: one is missing after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while missing := sorted(set(wanted) - set(found := serials_of(context))):
        if time.monotonic() > deadline:
            raise RobotError(
                f"no camera {', '.join(missing)}; found: {', '.join(found) or 'none'}. Check the "
                "cable and the serial numbers (`dzrobot doctor franka` lists them)."
            )
        time.sleep(0.1)
