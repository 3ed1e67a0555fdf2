"""Which episode runs next, and which requests for actions wait to share a call of the policy."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Generic, Protocol, TypeVar

from dzrobot.rollout.protocol import EnvironmentKey, EpisodeSpec, environment_key
from dzrobot.rollout.records import Record


class WaitingCases:
    """Cases in order; taking one costs the same however many wait."""

    def __init__(self, cases: Iterable[EpisodeSpec]) -> None:
        self._cases: OrderedDict[str, EpisodeSpec] = OrderedDict()
        self._names: dict[EnvironmentKey, deque[str]] = {}
        for case in cases:
            self._cases[case.name] = case
            self._names.setdefault(environment_key(case), deque()).append(case.name)

    def __bool__(self) -> bool:
        return bool(self._cases)

    def put_back(self, case: EpisodeSpec) -> None:
        """Make a case that was taken the first of all."""
        self._cases[case.name] = case
        self._cases.move_to_end(case.name, last=False)
        self._names[environment_key(case)].appendleft(case.name)

    def take(self, last: EnvironmentKey | None) -> EpisodeSpec:
        """Remove and return the first case of the environment ``last``, else the first of all.

        Raises:
            KeyError: none waits.
        """
        if last is not None and self._names.get(last):
            return self._cases.pop(self._names[last].popleft())
        _, first = self._cases.popitem(last=False)
        # The first of all is the first of its environment too.
        self._names[environment_key(first)].popleft()
        return first


class CaseQueue(Protocol):
    """Cases that wait, seen from one process that runs some of them."""

    news: tuple[Connection, ...]
    """Readable when a case may have come; empty: all have been there from the beginning."""

    def is_open(self) -> bool:
        """Return whether a case waits or runs, or may come."""
        ...

    def take(self, last: EnvironmentKey | None) -> EpisodeSpec | None:
        """Return a case for this process to run, of the environment ``last`` if there is one.

        None: none waits now.
        """
        ...

    def conclude(self, record: Record) -> None:
        """Note that a case that was taken here is over."""
        ...


class LocalQueue:
    """The cases of a run, all of which are there from the beginning."""

    news: tuple[Connection, ...] = ()

    def __init__(self, cases: Iterable[EpisodeSpec]) -> None:
        self._waiting = WaitingCases(cases)
        self._running = 0

    def is_open(self) -> bool:
        """Return whether a case waits or runs."""
        return bool(self._waiting or self._running)

    def take(self, last: EnvironmentKey | None) -> EpisodeSpec | None:
        """Return the next case, of the environment ``last`` if there is one."""
        if not self._waiting:
            return None
        self._running += 1
        return self._waiting.take(last)

    def put_back(self, case: EpisodeSpec) -> None:
        """Let a case that was taken, and got no result, be the next one."""
        self._running -= 1
        self._waiting.put_back(case)

    def conclude(self, record: Record) -> None:
        """Note that a case is over."""
        self._running -= 1


class EpisodeEngine(Protocol):
    """Runs cases: by workers of this process, or on a cluster."""

    def run(self, queue: LocalQueue) -> Iterator[Record]:
        """Yield the record of every case as it finishes; exceptions become records too.

        A record's files lie in the results folder when it is yielded.
        """
        ...


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
        """Return the requests whose wait is over, and forget them; empty: they keep waiting.

        Args:
            askers: How many could ask at the same time.
        """
        if len(self._held) < askers and self._clock() < self._due:
            return []
        taken, self._held = self._held, []
        return taken
