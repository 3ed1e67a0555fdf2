"""Cameras: the newest frame, its number and when it came."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.cameras.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.realsense import MISSING, Device, RealSenseDriver
from dzrobot.envs.franka.cameras.stream_driver import FrameHead
from dzrobot.envs.franka.cameras.uvc import UvcDriver
from dzrobot.envs.franka.clock import Clock, SystemClock
from dzrobot.envs.processes.driver_process import DisconnectedError, DriverProcess, require
from dzrobot.errors import RobotError

Image = NDArray[np.uint8]

_FIRST_FRAME_S = 10.0
_AGAIN_S = 1.0
"""How long a frame of a stream that was open already is waited for."""

_CALL_S = 5.0
_LIST_S = 30.0
"""Nothing moves and nobody waits while cameras are listed: a busy machine may take its time."""

_CLOSE_S = 2.0


@dataclass(frozen=True)
class Frame:
    """One image."""

    image: Image
    """(H, W, 3) uint8 RGB, as the camera delivers it; not to be written to."""

    number: int
    """Counts the frames that arrived, from 1."""

    at_s: float
    """When it was exposed, or arrived where the camera does not tell (environment clock)."""

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


def fit(image: Image, config: CameraConfig, size: tuple[int, int]) -> Image:
    """Return the cropped image at ``size`` (height, width), a fresh (H, W, 3) uint8 array."""
    top, left, bottom, right = config.box(size)
    cropped = image[top:bottom, left:right]
    # Bilinear, as the published recordings of this embodiment were made.
    resized = cv2.resize(cropped, size[::-1], interpolation=cv2.INTER_LINEAR)
    return np.array(resized, np.uint8)


class DriverCamera(ABC):
    """A camera whose driver runs in a process of its own, frames in shared memory.

    A camera that stops sending is opened again by the driver, less and less often; meanwhile
    ``latest`` returns the last frame, whose age tells. A driver that hangs is replaced by ``open``.

    Args:
        config: Device, stream and crop.
        clock: What the age of a frame is measured by. None: this machine's.
        patience: See :class:`~dzrobot.envs.processes.driver_process.DriverProcess`.
    """

    def __init__(
        self, config: CameraConfig, clock: Clock | None = None, *, patience: float = 1.0
    ) -> None:
        self._patience = patience
        self._config = config
        self._clock: Clock = clock or SystemClock()
        self._driver: DriverProcess | None = None
        self._seen = 0
        self._frame: Frame | None = None

    @abstractmethod
    def _start(self, memory: int) -> tuple[DriverProcess, float]:
        """Return a new driver with ``memory`` bytes for frames, and how long it may search (s)."""

    @property
    def config(self) -> CameraConfig:
        """Which view it delivers, and how it is cropped."""
        return self._config

    @property
    def driver(self) -> DriverProcess:
        """The camera's process.

        Raises:
            RobotError: there is none.
        """
        if self._driver is None:
            raise RobotError(f"{self._config.name} is not open; the environment's reset() opens it")
        return self._driver

    def open(self) -> None:
        """Find the camera, start it and wait for a frame."""
        if self._driver is not None:
            if self._driver.is_running() and self._streams(_AGAIN_S * self._patience):
                return
            self._driver.kill()
        self._driver, self._seen = None, 0
        config = self._config
        driver, search_s = self._start(FrameHead.FORMAT.size + config.width * config.height * 3)
        try:
            driver.ask("find", search_s * self._patience, timeout_s=search_s + _CALL_S)
            driver.ask("stream", timeout_s=_CALL_S)
            self._driver = driver
            if not self._streams(_FIRST_FRAME_S * self._patience):
                fault = driver.ask("fault", timeout_s=_CALL_S)
                raise RobotError(
                    f"{config.name} is there but sends no frame ({fault or 'no error'}): use a USB "
                    "3 port and cable, and close other programs that hold it"
                )
        except BaseException:
            self._driver = None
            driver.kill()
            raise

    def latest(self) -> Frame:
        """Return the newest frame."""
        try:
            memory = self.driver.latest
        except DisconnectedError:
            memory = None
        if memory is not None and memory.count() > self._seen:
            self._take(memory.get())
        if self._frame is None:
            raise RobotError(f"{self._config.name} has sent no frame")
        return self._frame

    def close(self) -> None:
        """Stop the stream."""
        if self._driver is not None:
            self._driver.end(_CLOSE_S)
        self._driver, self._frame = None, None

    def _take(self, data: bytes | None) -> None:
        assert data is not None, "something was published"
        head = FrameHead.unpack(data)
        pixels = np.frombuffer(data, np.uint8, offset=FrameHead.FORMAT.size)
        image = pixels.reshape(head.height, head.width, 3)
        at_s = self._clock.now() - (time.monotonic() - head.at_s)
        number = 1 if self._frame is None else self._frame.number + head.number - self._seen
        self._frame = Frame(image, number, at_s, head.stamp_s)
        self._seen = head.number

    def _streams(self, limit_s: float) -> bool:
        """Return whether a new frame comes within ``limit_s``."""
        before = self.driver.latest.count()
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.driver.latest.count() > before:
                return True
            time.sleep(0.01)
        return False


class RealSenseCamera(DriverCamera):
    """A RealSense color stream.

    Args:
        config: Serial number, stream and crop.
        settings: Returns settings for the library's context; empty for cameras on USB.
        clock: What the age of a frame is measured by. None: this machine's.
        patience: See :class:`~dzrobot.envs.processes.driver_process.DriverProcess`.
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


class UvcCamera(DriverCamera):
    """A webcam, a ZED or another USB video camera, through OpenCV."""

    def _start(self, memory: int) -> tuple[DriverProcess, float]:
        driver = DriverProcess(
            self._config.name, UvcDriver, self._config, self._patience,
            memory=memory, patience=self._patience,
        )  # fmt: skip
        return driver, discovery_s({})


def camera_of(
    config: CameraConfig, settings: Callable[[], dict[str, Any]], *, patience: float
) -> DriverCamera:
    """Return the camera that a workcell describes; nothing is opened yet.

    Args:
        config: What it is.
        settings: Of RealSense's context; see :class:`RealSenseCamera`.
        patience: See :class:`~dzrobot.envs.processes.driver_process.DriverProcess`.
    """
    if config.kind == "uvc":
        return UvcCamera(config, patience=patience)
    return RealSenseCamera(config, settings, patience=patience)


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
            found: list[Device] = driver.ask("devices", timeout_s=_LIST_S)
            known = {device.serial for device in found}
            if (set(wanted) <= known and known) or time.monotonic() > deadline:
                return found
            time.sleep(0.1)
    finally:
        driver.kill()
