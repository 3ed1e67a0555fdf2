"""Work over the episodes of opened datasets, by processes of this machine or of a cluster."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self, TypeVar

from dzrobot.cluster import Cluster, Needs
from dzrobot.process import end_with_parent
from dzrobot.training.data.columns import Progress
from dzrobot.training.data.dataset import DatasetReader

Result = TypeVar("Result")

EPISODES_AT_ONCE = 256
"""Episodes that a process takes at a time."""

EPISODES_WORTH_A_PROCESS = 2000
"""A process needs seconds to start; with fewer episodes for each it saves nothing."""

READER = Needs(cpus=1)
"""What a process on a cluster occupies."""


@dataclass(frozen=True)
class EpisodePiece:
    """Some episodes of one of the datasets."""

    reader: int
    ordinals: tuple[int, ...]


class ReadingPool:
    """Maps functions of the readers and a piece over pieces, in order.

    Args:
        readers: Opened datasets.
        processes: How many share the work, or the cluster that does, whose machines all see the
            datasets at the same paths. None: one for every core, as far as it is worth it.
    """

    def __init__(
        self, readers: Sequence[DatasetReader], processes: int | Cluster | None = None
    ) -> None:
        self.readers = readers
        """Opened datasets."""

        self._pool: ProcessPoolExecutor | None = None
        self._cluster: Cluster | None = None
        if isinstance(processes, Cluster):
            self._cluster, self._held = processes, processes.ray.put(tuple(readers))
            return
        episodes = sum(len(reader.catalog.episodes) for reader in readers)
        worth = max(1, episodes // EPISODES_WORTH_A_PROCESS)
        processes = processes or min(len(os.sched_getaffinity(0)), worth)
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context, _adopt, (tuple(readers),))

    def map(
        self,
        function: Callable[[Sequence[DatasetReader], EpisodePiece], Result],
        pieces: Sequence[EpisodePiece],
        progress: Progress | None = None,
    ) -> Iterator[Result]:
        """Yield ``function(readers, piece)`` for every piece, in their order.

        Args:
            function: Picklable.
            pieces: What it is called with.
            progress: Called with pieces done and pieces in all.
        """
        results: Iterator[Result]
        if self._cluster is not None:
            results = self._on_cluster(self._cluster, function, pieces)
        elif self._pool is None:
            results = map(partial(function, self.readers), pieces)
        else:
            results = self._pool.map(partial(_call, function), pieces)
        for done, result in enumerate(results, start=1):
            yield result
            if progress:
                progress(done, len(pieces))

    def _on_cluster(
        self, cluster: Cluster, function: Callable[..., Result], pieces: Sequence[EpisodePiece]
    ) -> Iterator[Result]:
        # Tasks of a machine that is lost run again elsewhere; readers are one object for all.
        task = cluster.remote(_apply, READER, max_retries=-1)
        left, running = iter(pieces), deque[Any]()
        for piece in islice(left, 2 * cluster.room(READER)):
            running.append(task.remote(self._held, function, piece))
        while running:
            yield cluster.result(running.popleft())
            running.extend(task.remote(self._held, function, piece) for piece in islice(left, 1))

    def close(self) -> None:
        """End the processes; what has not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pieces_of(reader: int, ordinals: Sequence[int]) -> list[EpisodePiece]:
    """Return episodes of the ``reader``-th dataset, some at a time."""
    return [
        EpisodePiece(reader, tuple(ordinals[first : first + EPISODES_AT_ONCE]))
        for first in range(0, len(ordinals), EPISODES_AT_ONCE)
    ]


_opened: list[DatasetReader] = []


def _adopt(readers: Sequence[DatasetReader]) -> None:
    end_with_parent()
    _opened.extend(readers)


def _apply(
    readers: Sequence[DatasetReader],
    function: Callable[[Sequence[DatasetReader], EpisodePiece], Result],
    piece: EpisodePiece,
) -> Result:
    return function(readers, piece)


def _call(
    function: Callable[[Sequence[DatasetReader], EpisodePiece], Result], piece: EpisodePiece
) -> Result:
    return function(_opened, piece)
