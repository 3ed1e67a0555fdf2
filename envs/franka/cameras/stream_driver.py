"""A camera's stream in a process of its own: opened, published, and opened again when it fails."""

import struct
import time
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.processes.driver_main import plainly
from dzrobot.envs.processes.driver_process import Latest
from dzrobot.errors import DzrobotError, RobotError

FRAME_S = 0.02
"""How long a driver waits for a frame before it looks for questions."""

_SILENT_S = 1.0
_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0)


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
        head = FrameHead(self._count, shot.at_s, shot.stamp_s, *image.shape[:2])
        assert self._latest is not None, "a stream has somewhere to go"
        self._latest.put(head.pack(), image.data)

    def _failed(self, fault: str) -> None:
        self.close()
        self._fault = fault
        self._retry_s = time.monotonic() + _BACK_OFF_S[min(self._failures, len(_BACK_OFF_S) - 1)]
        self._failures += 1
