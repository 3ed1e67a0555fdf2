"""Arm and cameras read together for a while, as in an episode: rates, losses and clocks."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dzrobot.envs.franka.workcells import Arm, Camera, Clock, Frame, SystemClock
from dzrobot.envs.panda.state import ArmState
from dzrobot.errors import MissingDependencyError, RobotError

_READ_S = 0.01
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


@dataclass
class CameraStream:
    """What one camera sent."""

    camera: Camera
    fault: str = ""
    """Why it sent nothing; empty: it did."""

    first: Frame | None = None
    last: Frame | None = None

    @property
    def frames(self) -> int:
        """How many frames came after the first."""
        return (
            0 if self.first is None or self.last is None else self.last.number - self.first.number
        )

    @property
    def rate_hz(self) -> float:
        """Frames per second, by this machine's clock."""
        return 0.0 if not self.frames else self.frames / self._took_s

    @property
    def lost(self) -> int:
        """How many frames the camera's own clock says were sent and did not come."""
        if self.first is None or self.last is None:
            return 0
        sent = round((self.last.stamp_s - self.first.stamp_s) * self.camera.config.fps)
        return max(0, sent - self.frames)

    @property
    def ahead_s(self) -> float:
        """How much the camera's clock gained on this machine's meanwhile."""
        if self.first is None or self.last is None:
            return 0.0
        return self.last.stamp_s - self.first.stamp_s - self._took_s

    @property
    def _took_s(self) -> float:
        assert self.first is not None
        assert self.last is not None
        return self.last.came_s - self.first.came_s


@dataclass
class ArmStream:
    """What the arm sent."""

    first: ArmState
    last: ArmState
    took_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    """How long each state took."""

    @property
    def ahead_s(self) -> float:
        """How much the arm's clock gained on this machine's meanwhile."""
        return self.last.robot_time_s - self.first.robot_time_s - self.took_s


@dataclass
class Together:
    """What arm and cameras sent together."""

    seconds: float
    cameras: list[CameraStream]
    arm: ArmStream | None


def stream_together(
    cameras: Sequence[Camera], arm: Arm | None, seconds: float, clock: Clock | None = None
) -> Together:
    """Let all cameras stream and read the arm meanwhile, as an episode does; nothing moves.

    Args:
        cameras: Are opened, all at once, and left open where they send.
        arm: Connected. None: there is none.
        seconds: How long.
        clock: What is waited by. None: this machine's.

    Raises:
        DisconnectedError: the arm does not answer.
    """
    clock = clock or SystemClock()
    streams = [CameraStream(camera) for camera in cameras]
    if streams:
        with ThreadPoolExecutor(len(streams)) as pool:
            list(pool.map(_open, streams))
    heard = None if arm is None else ArmStream(arm.state(), arm.state())
    began = clock.now()
    while clock.now() < began + seconds:
        if heard is not None and arm is not None:
            asked = time.monotonic()
            heard.last = arm.state()
            heard.waits_s.append(time.monotonic() - asked)
            heard.took_s = clock.now() - began
        for stream in streams:
            _look(stream)
        clock.sleep_until(clock.now() + _READ_S)
    return Together(seconds, streams, heard)


def _open(stream: CameraStream) -> None:
    try:
        stream.camera.open()
    except (RobotError, MissingDependencyError) as error:
        stream.fault = str(error)


def _look(stream: CameraStream) -> None:
    if stream.fault:
        return
    try:
        frame = stream.camera.latest()
    except RobotError as error:
        stream.fault = str(error)
        return
    stream.first = frame if stream.first is None else stream.first
    stream.last = frame


def shared_controllers(ports: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each USB controller that several devices hang on, and their names.

    Args:
        ports: Device -> its path in ``/sys/devices``, or of a video device.
    """
    found: dict[str, list[str]] = {}
    for name, port in ports.items():
        if controller := _controller_of(port):
            found.setdefault(controller, []).append(name)
    for controller, names in sorted(found.items()):
        if len(names) > 1:
            yield controller, tuple(sorted(names))


def _controller_of(port: str) -> str:
    """Return the PCI address of the USB controller on a path; empty: it is not known."""
    if port.startswith("/dev/"):
        port = str((Path("/sys/class/video4linux") / Path(port).resolve().name).resolve())
    before, found, _ = port.partition("/usb")
    addresses = _PCI.findall(before)
    return addresses[-1] if found and addresses else ""


def waits_ms(stream: ArmStream) -> tuple[float, float]:
    """Return the usual and the longest time that a state took (ms)."""
    return 1000 * float(np.median(stream.waits_s)), 1000 * max(stream.waits_s)
