"""Work over the episodes of opened datasets, by processes of this machine or of a cluster.

And the checks that go through all of them; what lists and headers show is in ``claims.py``.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dzrobot.cluster import Cluster, Needs
from dzrobot.errors import DatasetError
from dzrobot.process import end_with_parent
from dzrobot.recording.catalog import listed_colors
from dzrobot.recording.checks import idle, is_blank
from dzrobot.training.data.claims import ALIKE
from dzrobot.training.data.column_mapping import ColumnSource
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


@dataclass(frozen=True)
class CameraPreview:
    """Size and brightness of a camera's first frame."""

    key: str
    shape: tuple[int, ...]
    mean: float
    blank: bool
    """Whether the image is all one color: a covered or dead camera."""


def first_frames(reader: DatasetReader) -> list[CameraPreview]:
    """Return the first frame that training would see, of every camera.

    Raises:
        DatasetError: It cannot be read.
    """
    ordinal, start = reader.windows.locate(0)
    previews = []
    for key, source in reader.resolution.views.items():
        frame = reader.frames(ordinal, source, [start])[0]
        previews.append(CameraPreview(key, frame.shape, float(frame.mean()), is_blank(frame)))
    return previews


def idle_episodes(pool: ReadingPool) -> Iterator[str]:
    """Yield a line for every used episode whose states or actions never change.

    None for recordings without actions: nothing was asked of a robot.
    """
    (reader,) = pool.readers
    used = np.unique(reader.windows.episode).tolist()
    for faults in pool.map(_idle, pieces_of(0, used)):
        yield from faults


def _idle(readers: Sequence[DatasetReader], piece: EpisodePiece) -> list[str]:
    (reader,) = readers
    robot, faults = reader.embodiment, []
    if not robot.action:
        return []
    for ordinal in piece.ordinals:
        rows = reader.states(ordinal)
        actions, states = (
            np.concatenate([rows[part.key] for part in parts], axis=1)
            for parts in (robot.action, robot.state)
        )
        number = int(reader.catalog.episodes.index[ordinal])
        faults += [f"episode {number}: {fault}" for fault in idle(actions, states)]
    return faults


@dataclass(frozen=True)
class DecodedEpisode:
    """What decoding every picture of an episode showed."""

    pictures: int
    faults: tuple[str, ...]


def decode_all(pool: ReadingPool, progress: Progress | None = None) -> Iterator[DecodedEpisode]:
    """Decode every picture of every used episode; yield what each shows.

    Pictures that do not decode are named, and episodes whose mean colors are not those that the
    lists give, as of a film under another episode's name.
    """
    (reader,) = pool.readers
    used = np.unique(reader.windows.episode).tolist()
    cameras = [source.column for source in reader.resolution.views.values()]
    colors = {camera: listed_colors(reader.catalog, camera) for camera in cameras}
    for found in pool.map(partial(_decode, colors), pieces_of(0, used), progress):
        yield from found


_Colors = dict[str, dict[int, NDArray[np.float64]]]

_AT_ONCE = 32
"""Pictures that are decoded at a time."""


def _decode(
    colors: _Colors, readers: Sequence[DatasetReader], piece: EpisodePiece
) -> list[DecodedEpisode]:
    (reader,) = readers
    found = []
    for ordinal in piece.ordinals:
        rows = int(reader.catalog.episodes.length[ordinal])
        number, faults = int(reader.catalog.episodes.index[ordinal]), list[str]()
        for source in reader.resolution.views.values():
            total, good, broken = np.zeros(3), 0, list[int]()
            for first in range(0, rows, _AT_ONCE):
                pictures = _pictures(
                    reader, ordinal, source, range(first, min(first + _AT_ONCE, rows)), broken
                )
                for picture in pictures:
                    total += picture[::4, ::4].mean((0, 1)) / 255
                    good += 1
            if broken:
                shown = f"frame {broken[0]}" + (f" and {len(broken) - 1} more" * (len(broken) > 1))
                faults.append(f"episode {number}: {source.key}: {shown} cannot be decoded")
            listed = colors[source.column].get(number)
            if good and listed is not None:
                away = float(np.abs(total / good - listed).max())
                if away > ALIKE:
                    faults.append(
                        f"episode {number}: {source.key}: its mean colors are {away:.2f} (of 1) "
                        "from those in its own statistics: are these another episode's pictures?"
                    )
        found.append(DecodedEpisode(rows * len(reader.resolution.views), tuple(faults)))
    return found


def _pictures(
    reader: DatasetReader, ordinal: int, source: ColumnSource, rows: range, broken: list[int]
) -> Iterator[NDArray[np.uint8]]:
    """Yield those pictures of ``rows`` that decode; the others are added to ``broken``."""
    try:
        yield from reader.frames(ordinal, source, rows)
    except DatasetError:
        for row in rows:
            try:
                yield reader.frames(ordinal, source, [row])[0]
            except DatasetError:
                broken.append(row)
