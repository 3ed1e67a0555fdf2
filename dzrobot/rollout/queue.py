"""Which case is run next: the one place where cases are handed out."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.rollout.records import Record

EnvironmentKey = tuple[object, ...]
"""What two cases must have in common to run in one environment."""


def environment_key(case: EpisodeSpec) -> EnvironmentKey:
    """Return what two cases must have in common to run in one environment."""
    return case.env, tuple(sorted(case.arguments.items())), case.max_steps


class CaseQueue(Protocol):
    """Cases that wait, seen from one process that runs some of them."""

    poll_s: float | None
    """Seconds after which to look again, as other processes take cases too. None: there are none.
    """

    def is_open(self) -> bool:
        """Return whether a case waits or runs, in whichever process."""
        ...

    def take(self, last: EnvironmentKey | None) -> EpisodeSpec | None:
        """Return a case for this process to run, of the environment ``last`` if there is one.

        None: none waits now; while the queue is open, one may come back.
        """
        ...

    def arrived(self) -> Iterator[Record]:
        """Yield what other processes have finished; going on says that the record is kept."""
        ...

    def conclude(self, record: Record) -> None:
        """Note that a case that was taken here is over."""
        ...


class LocalQueue:
    """The cases of a process that runs all of them."""

    poll_s: float | None = None

    def __init__(self, cases: Iterable[EpisodeSpec]) -> None:
        self._waiting = deque(cases)
        self._running = 0

    def is_open(self) -> bool:
        """Return whether a case waits or runs."""
        return bool(self._waiting or self._running)

    def take(self, last: EnvironmentKey | None) -> EpisodeSpec | None:
        """Return the next case, of the environment ``last`` if there is one."""
        if not self._waiting:
            return None
        self._running += 1
        return pick(self._waiting, last)

    def arrived(self) -> Iterator[Record]:
        """Yield nothing."""
        yield from ()

    def conclude(self, record: Record) -> None:
        """Note that a case is over."""
        self._running -= 1


def pick(waiting: deque[EpisodeSpec], last: EnvironmentKey | None) -> EpisodeSpec:
    """Remove and return the first case of the environment ``last``, else the first of all."""
    found = next((case for case in waiting if environment_key(case) == last), waiting[0])
    waiting.remove(found)
    return found
