"""Requests that wait a moment for others, so that the policy plans for all of them in one call."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Gathering(Generic[T]):
    """Holds requests until everybody asks, or the oldest has waited long enough.

    Args:
        window_s: Longest time that a request waits for others; 0: none does.
        clock: Seconds that only grow.
    """

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._held: list[T] = []
        self._due = 0.0

    @property
    def held(self) -> tuple[T, ...]:
        """Return the requests that wait, oldest first."""
        return tuple(self._held)

    def add(self, request: T) -> None:
        """Hold ``request``."""
        if not self._held:
            self._due = self._clock() + self._window_s
        self._held.append(request)

    def timeout(self, otherwise: float | None) -> float | None:
        """Return how long to wait for news, in seconds: ``otherwise``, or until some are due."""
        if not self._held:
            return otherwise
        left = max(0.0, self._due - self._clock())
        return left if otherwise is None else min(left, otherwise)

    def take(self, askers: int) -> list[T]:
        """Return the requests whose wait is over, and forget them; empty: they go on waiting.

        Args:
            askers: How many could ask at the same time.
        """
        if len(self._held) < askers and self._clock() < self._due:
            return []
        taken, self._held = self._held, []
        return taken
