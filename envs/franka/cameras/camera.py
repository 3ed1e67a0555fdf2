"""Cameras whose driver runs in a process of its own: the streaming side and the reading side."""

import logging
import struct
import time
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.driver_process import DisconnectedError, DriverProcess, Latest, plainly
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.workcells import Clock, Frame, SystemClock
from dzrobot.errors import DzrobotError, RobotError

FRAME_S = 0.02
"""How long a driver waits for a frame before it looks for questions."""

_SILENT_S = 1.0
_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class FrameHead:
    """Header of a published frame, before its pixels."""

    number: int
    at_s: float
    """When it was exposed, or arrived where the camera's clock is not known (this machine's)."""

    came_s: float
    """When it arrived (this machine's clock)."""

    stamp_s: float
    """When it was exposed, by the camera's own clock."""

    height: int
    width: int

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<QdddII")

    def pack(self) -> bytes:
        """Return the head as bytes."""
        return self.FORMAT.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the head that :meth:`pack` wrote."""
        return cls(*cls.FORMAT.unpack_from(data))


class Shot(NamedTuple):
    """One frame as a library delivers it."""

    image: NDArray[np.uint8]
    """(H, W, 3) RGB."""

    at_s: float
    stamp_s: float
    """Both as in :class:`FrameHead`."""


class StreamDriver(ABC):
    """One stream, opened again, less and less often, when it fails.

    Args:
        patience: How many times longer than usual a frame is waited for.
        latest: Where frames are published.
    """

    def __init__(self, patience: float, latest: Latest | None) -> None:
        self._silent_s = _SILENT_S * patience
        self._latest = latest
        self._is_open = False
        self._count = 0
        self._heard_s = 0.0
        self._retry_s: float | None = None
        self._failures = 0
        self._fault = ""

    @abstractmethod
    def find(self, timeout_s: float) -> None:
        """Wait for the configured camera, and look whether it offers what is asked of it.

        Raises:
            RobotError: it is not there, or does not offer that.
        """

    @abstractmethod
    def begin(self) -> None:
        """Open the stream.

        Raises:
            RuntimeError, RobotError: it cannot be opened.
        """

    @abstractmethod
    def next(self) -> Shot | None:
        """Return the next frame; None where none came within :data:`FRAME_S`.

        Raises:
            RuntimeError: the stream has failed.
        """

    @abstractmethod
    def end(self) -> None:
        """Close the stream; twice, or before it is open, is harmless.

        Raises:
            RuntimeError: the library complains.
        """

    def restart_device(self, timeout_s: float) -> bool:
        """Restart a camera that sends nothing and begin to stream; False where that cannot be done.

        Raises:
            RobotError: it did not come back.
        """
        return False

    def stream(self) -> None:
        """Begin to stream, and keep doing so."""
        self._retry_s = time.monotonic()

    def fault(self) -> str:
        """Return what the stream failed of last."""
        return self._fault

    def tick(self) -> float:
        """Receive a frame, if there is one."""
        if self._is_open:
            self._receive()
            return 0.0
        if self._retry_s is not None and time.monotonic() >= self._retry_s:
            self._open()
        return 0.02

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the library raises."""
        return (RuntimeError,)

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        return plainly(error)

    def close(self) -> None:
        """Stop the stream."""
        self._is_open = False
        try:
            self.end()
        except RuntimeError as error:
            self._fault = str(error)

    def _open(self) -> None:
        try:
            self.begin()
        except (RuntimeError, RobotError) as error:
            self._failed(str(error))
            return
        self._is_open, self._heard_s = True, time.monotonic()

    def _receive(self) -> None:
        try:
            shot = self.next()
        except RuntimeError as error:
            self._failed(str(error))
            return
        if shot is not None:
            self._heard_s, self._failures = time.monotonic(), 0
            self._publish(shot)
        elif time.monotonic() - self._heard_s > self._silent_s:
            self._failed(f"no frame came for {self._silent_s} s")

    def _publish(self, shot: Shot) -> None:
        image = np.ascontiguousarray(shot.image, np.uint8)
        self._count += 1
        head = FrameHead(self._count, shot.at_s, self._heard_s, shot.stamp_s, *image.shape[:2])
        assert self._latest is not None, "a stream has somewhere to go"
        self._latest.put(head.pack(), image.data)

    def _failed(self, fault: str) -> None:
        self.close()
        self._fault = fault
        self._retry_s = time.monotonic() + _BACK_OFF_S[min(self._failures, len(_BACK_OFF_S) - 1)]
        self._failures += 1


_log = logging.getLogger(__name__)

_FIRST_FRAME_S = 10.0
_RESTART_S = 5.0
_AGAIN_S = 1.0
"""How long a frame of a stream that was open already is waited for."""

_CALL_S = 5.0
_CLOSE_S = 2.0


class DriverCamera(ABC):
    """A camera whose driver runs in a process of its own, frames in shared memory.

    A camera that stops sending is opened again by the driver, less and less often; meanwhile
    ``latest`` returns the last frame, whose age shows it. ``open`` replaces a driver that hangs.

    Args:
        config: Device, stream and crop.
        clock: What the age of a frame is measured by. None: this machine's.
        patience: See :class:`~dzrobot.envs.driver_process.DriverProcess`.
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
            if self._driver.is_running() and _streams(self._driver, _AGAIN_S * self._patience):
                return
            self._driver.kill()
        self._driver, self._seen = None, 0
        config = self._config
        driver, search_s = self._start(FrameHead.FORMAT.size + config.width * config.height * 3)
        with driver.killed_on_error():
            driver.call("find", search_s * self._patience, timeout_s=search_s + _CALL_S)
            driver.call("stream", timeout_s=_CALL_S)
            if not _streams(driver, _FIRST_FRAME_S * self._patience):
                self._restart(driver, search_s)
        self._driver = driver

    def _restart(self, driver: DriverProcess, search_s: float) -> None:
        """Restart a camera that is there and sends nothing, as a killed program leaves it.

        Raises:
            RobotError: it sends nothing all the same.
        """
        name, fault = self._config.name, driver.call("fault", timeout_s=_CALL_S)
        wait_s = (search_s + _RESTART_S) * self._patience
        done = driver.call("restart_device", wait_s, timeout_s=wait_s + _CALL_S)
        if done and _streams(driver, _FIRST_FRAME_S * self._patience):
            _log.warning("%s sent no frame (%s) and was restarted", name, fault or "no error")
            return
        tried = ", also after it was restarted once" if done else ""
        raise RobotError(
            f"{name} is there but sends no frame{tried} ({fault or 'no error'}): unplug it and "
            "plug it in again, use a USB 3 port and cable, and close other programs that hold it"
        )

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
        ours_s = self._clock.now() - time.monotonic()
        number = 1 if self._frame is None else self._frame.number + head.number - self._seen
        self._frame = Frame(image, number, ours_s + head.at_s, ours_s + head.came_s, head.stamp_s)
        self._seen = head.number


def _streams(driver: DriverProcess, limit_s: float) -> bool:
    """Return whether a new frame comes within ``limit_s``."""
    before = driver.latest.count()
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if driver.latest.count() > before:
            return True
        time.sleep(0.01)
    return False
