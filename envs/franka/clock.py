"""Time, so that an episode on fakes needs none."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return the time in seconds."""
        ...

    def sleep_until(self, deadline_s: float) -> None:
        """Return at ``deadline_s``, or at once when it has passed."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    def sleep_until(self, deadline_s: float) -> None:
        """Sleep until ``deadline_s``."""
        time.sleep(max(0.0, deadline_s - time.monotonic()))


class RateLimiter:
    """A fixed control rate, and how often it was missed.

    Args:
        clock: What the rate is measured by.
        period_s: Seconds per step.
    """

    TOLERANCE = 0.1
    """Share of a period that a step may overrun before it counts as late."""

    def __init__(self, clock: Clock, period_s: float) -> None:
        self._clock = clock
        self._period_s = period_s
        self._deadline_s = clock.now() + period_s
        self.late_steps = 0
        self.overrun_s = 0.0
        """By how much the last step overran its slot."""

    def restart(self) -> None:
        """Begin an episode: the first slot starts now."""
        self.begin_slot()
        self.late_steps = 0
        self.overrun_s = 0.0

    def begin_slot(self) -> None:
        """Let the slot of this step start now: what came before it was no delay."""
        self._deadline_s = self._clock.now() + self._period_s

    def wait(self) -> None:
        """Sleep until the slot of this step ends; a missed slot is counted, never caught up."""
        self.overrun_s = max(0.0, self._clock.now() - self._deadline_s)
        if self.overrun_s > self.TOLERANCE * self._period_s:
            self.late_steps += 1
            self._deadline_s = self._clock.now()
        else:
            self._clock.sleep_until(self._deadline_s)
        self._deadline_s += self._period_s
