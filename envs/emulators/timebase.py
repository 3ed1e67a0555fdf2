"""A clock in shared memory for the emulated arm, its cameras and the environment.

The arm's process advances the clock, a millisecond at a time, and no further than the environment
allows; the cameras expose by it; the environment's periods are measured by it. What every
process writes is its own and one machine word wide, so no lock is needed.
"""

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Self

import numpy as np
from numpy.typing import NDArray

FREE = 2**63 - 1
"""A limit that is none: the arm's clock follows the wall clock."""

SCENES = 64
"""How many of the last scenes are kept for the cameras."""

SCENE_PERIOD_MS = 5
LARGEST_SCENE = 24
"""Numbers of one scene, at most."""

_WORDS = 32
_CLOCK, _LIMIT, _SENT, _ARM_ALIVE, _CAMERA_ALIVE, _AGAIN, _GOAL, _SHARED = range(8)
_CAMERAS = 12
LARGEST_CAMERAS = 10
_WATCHED = _CAMERAS + LARGEST_CAMERAS
_BYTES = 8 * (_WORDS + SCENES * LARGEST_SCENE)

_POLL_S = 0.0003
_STALLED_S = 20.0
"""An arm whose clock stands still this long (wall), though it may continue, has ended."""


class Timebase:
    """The shared page, as one process sees it.

    Args:
        descriptor: Of the memory that :meth:`create` made; children inherit it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _BYTES)
        self._words = memoryview(self._map)[: 8 * _WORDS].cast("q")
        self._scenes = np.frombuffer(self._map, np.float64, offset=8 * _WORDS)
        self._scenes = self._scenes.reshape(SCENES, LARGEST_SCENE)

    @classmethod
    def create(cls) -> Self:
        """Return a new page at time 0, without a limit."""
        descriptor = os.memfd_create("dzrobot-timebase")
        os.ftruncate(descriptor, _BYTES)
        page = cls(descriptor)
        weakref.finalize(page, os.close, descriptor)
        page.limit_ms = FREE
        for camera in range(LARGEST_CAMERAS):
            page.watch(camera, FREE)
        return page

    @property
    def clock_ms(self) -> int:
        """The arm's clock."""
        return self._words[_CLOCK]

    @clock_ms.setter
    def clock_ms(self, value: int) -> None:
        self._words[_CLOCK] = value

    @property
    def limit_ms(self) -> int:
        """How far the clock may go while the arm moves."""
        return self._words[_LIMIT]

    @limit_ms.setter
    def limit_ms(self, value: int) -> None:
        self._words[_LIMIT] = value

    @property
    def is_shared(self) -> bool:
        """Whether an environment lives by this clock, also while it sets no limit."""
        return bool(self._words[_SHARED])

    @is_shared.setter
    def is_shared(self, value: bool) -> None:
        self._words[_SHARED] = int(value)

    @property
    def sent_ms(self) -> int:
        """The last state that the arm's client has answered."""
        return self._words[_SENT]

    @sent_ms.setter
    def sent_ms(self, value: int) -> None:
        self._words[_SENT] = value

    @property
    def arm_is_alive(self) -> bool:
        """Whether an arm advances the clock."""
        return bool(self._words[_ARM_ALIVE])

    @arm_is_alive.setter
    def arm_is_alive(self, value: bool) -> None:
        self._words[_ARM_ALIVE] = int(value)

    @property
    def camera_is_alive(self) -> bool:
        """Whether cameras follow the clock."""
        return bool(self._words[_CAMERA_ALIVE])

    @camera_is_alive.setter
    def camera_is_alive(self, value: bool) -> None:
        self._words[_CAMERA_ALIVE] = int(value)

    def published_ms(self, camera: int) -> int:
        """Return when the newest image of camera number ``camera`` was exposed."""
        return self._words[_CAMERAS + camera]

    def publish(self, camera: int, exposed_ms: int) -> None:
        """Say that an image has left camera number ``camera``."""
        self._words[_CAMERAS + camera] = exposed_ms

    def watched_ms(self, camera: int) -> int:
        """Return up to when images of camera number ``camera`` are read."""
        return self._words[_WATCHED + camera]

    def watch(self, camera: int, until_ms: int) -> None:
        """Say that images exposed after ``until_ms`` are not read, or not yet."""
        self._words[_WATCHED + camera] = until_ms

    @property
    def again(self) -> int:
        """How often the newest images were asked for once more: the bus loses some."""
        return self._words[_AGAIN]

    def ask_again(self) -> None:
        """Ask every camera for its newest image once more; one process does."""
        self._words[_AGAIN] += 1

    @property
    def goal_holds(self) -> bool:
        """Whether the task of the arm's scene is done."""
        return bool(self._words[_GOAL])

    @goal_holds.setter
    def goal_holds(self, value: bool) -> None:
        self._words[_GOAL] = int(value)

    def keep_scene(self, at_ms: int, values: NDArray[np.float64]) -> None:
        """Keep what cameras see, (N,), of which only those who draw it know the order."""
        self._scenes[at_ms // SCENE_PERIOD_MS % SCENES, : len(values)] = values

    def scene_at(self, at_ms: int) -> NDArray[np.float64]:
        """Return what cameras see at a time, (`LARGEST_SCENE`,)."""
        kept: NDArray[np.float64] = self._scenes[at_ms // SCENE_PERIOD_MS % SCENES].copy()
        return kept


class ArmClock:
    """The environment's clock, which is the arm's.

    While an environment thinks, a moving arm's time is paused; it continues while the
    environment sleeps, exactly until it wakes, and while it waits for a driver (:meth:`running`).
    The time of an arm at rest follows the wall clock, and so does everything once no arm advances
    the page.

    Args:
        page: What the arm's process shares.
    """

    def __init__(self, page: Timebase) -> None:
        self.page = page
        self._guard = threading.Lock()
        self._waits = 0

    def now(self) -> float:
        """Return the arm's time (s)."""
        return self.page.clock_ms / 1000.0

    def sleep_until(self, deadline_s: float) -> None:
        """Let the arm's time continue until ``deadline_s``."""
        goal = round(deadline_s * 1000)
        with self._guard:
            if self._waits == 0:
                limit = self.page.limit_ms
                self.page.limit_ms = goal if limit == FREE else max(limit, goal)
        seen, since = self.page.clock_ms, time.monotonic()
        while (now := self.page.clock_ms) < goal:
            if now != seen:
                seen, since = now, time.monotonic()
            elif not self.page.arm_is_alive or time.monotonic() - since > _STALLED_S:
                self._advance_alone(goal)
                return
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the arm's time continue by itself meanwhile: a driver is being waited for."""
        with self._guard:
            self._waits += 1
            self.page.limit_ms = FREE
        try:
            yield
        finally:
            with self._guard:
                self._waits -= 1
                if self._waits == 0:
                    self.page.limit_ms = self.page.clock_ms

    def _advance_alone(self, goal_ms: int) -> None:
        """Count milliseconds of the wall clock: nothing else does."""
        start, began = self.page.clock_ms, time.monotonic()
        while (now := start + int(1000 * (time.monotonic() - began))) < goal_ms:
            self.page.clock_ms = max(self.page.clock_ms, now)
            time.sleep(_POLL_S)
        self.page.clock_ms = max(self.page.clock_ms, goal_ms)
