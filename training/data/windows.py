"""Every sample a dataset holds, as runs of consecutive starts: a few numbers per episode."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.timing import Timing, valid_anchors
from dzrobot.errors import DatasetError

_ARRAYS = ("episode", "start", "count", "before")

Labels = Callable[[int], NDArray[np.int64]]
"""Instruction code of every row of an episode, by ordinal; below 0 where there is none."""


@dataclass(frozen=True)
class WindowTable:
    """Runs of starts: window ``w`` is the ``w - before[run]``-th start of its run."""

    episode: NDArray[np.int32]
    """(runs,): ordinal of the episode."""

    start: NDArray[np.int32]
    """(runs,): first start."""

    count: NDArray[np.int32]
    """(runs,): consecutive starts."""

    before: NDArray[np.int64]
    """(runs + 1,): windows in earlier runs."""

    episodes: int
    """Episodes listed."""

    dropped: Mapping[str, int] = field(default_factory=dict)
    """Episodes without a window, by reason."""

    def __len__(self) -> int:
        return int(self.before[-1])

    def locate(self, window: int) -> tuple[int, int]:
        """Return the episode's ordinal and the start row of ``window``."""
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        run = int(np.searchsorted(self.before, window, side="right")) - 1
        return int(self.episode[run]), int(self.start[run] + window - self.before[run])

    def starts(self, ordinal: int) -> NDArray[np.int64]:
        """Return every start in an episode."""
        first, stop = np.searchsorted(self.episode, [ordinal, ordinal + 1])
        runs = range(first, stop)
        parts = [np.arange(self.start[run], self.start[run] + self.count[run]) for run in runs]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def save(self, path: Path) -> None:
        """Write the table to ``path``, an ``.npz`` file."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(path, **arrays, rest=json.dumps([self.episodes, dict(self.dropped)]))

    @classmethod
    def load(cls, path: Path) -> "WindowTable":
        """Read a table written by :meth:`save`."""
        with np.load(path) as known:
            episodes, dropped = json.loads(str(known["rest"]))
            arrays = {name: known[name] for name in _ARRAYS}
            return cls(**arrays, episodes=episodes, dropped=dropped)

    @property
    def usable(self) -> int:
        """Episodes with at least one window."""
        return len(np.unique(self.episode))

    def report(self) -> str:
        """Return ``episodes ..., usable ..., windows ..., dropped: ...`` on one line."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.dropped.items())
        return (
            f"episodes {self.episodes:,}, usable {self.usable:,}, windows {len(self):,}, "
            f"dropped: {reasons or 'none'}"
        )


def build_windows(
    lengths: NDArray[np.int64],
    timing: Timing,
    labels: Labels,
    excluded: Mapping[int, str] | None = None,
) -> WindowTable:
    """Return the table of a dataset.

    Args:
        lengths: Frames of each episode.
        timing: Grid of the sample.
        labels: Instructions; a sample keeps to one, and needs one.
        excluded: Reason by ordinal for episodes to leave out.
    """
    runs: list[tuple[int, int, int]] = []
    dropped: Counter[str] = Counter()
    plain = _Plain(timing)
    for ordinal, length in enumerate(lengths.tolist()):
        if excluded and ordinal in excluded:
            dropped[excluded[ordinal]] += 1
            continue
        marks = labels(ordinal)
        uniform = length > 0 and bool((marks == marks[0]).all())
        if uniform and marks[0] >= 0:
            starts = plain.starts(length)
        else:
            starts = valid_anchors(length, timing, marks.tolist())
            starts = starts[marks[starts] >= 0]
        if len(starts):
            runs += [(ordinal, first, count) for first, count in _runs(starts)]
        else:
            short = not len(plain.starts(length))
            dropped["too short" if short else "no room within one instruction"] += 1
    return _table(runs, len(lengths), dropped)


def require_windows(table: WindowTable, where: str, timing: Timing) -> None:
    """Raise :class:`DatasetError` if there is nothing to train on."""
    if not len(table):
        raise DatasetError(
            f"{where} holds no complete sample of {timing.blocks} blocks of "
            f"{timing.action_horizon} actions ({table.report()}): record longer episodes, lower "
            "blocks or the horizon, or set data.pad_tail to repeat an episode's last row"
        )


class _Plain:
    """Starts of episodes with one instruction; equal lengths share the answer."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._known: dict[int, NDArray[np.int64]] = {}

    def starts(self, length: int) -> NDArray[np.int64]:
        if length not in self._known:
            self._known[length] = valid_anchors(length, self._timing)
        return self._known[length]


def _runs(starts: NDArray[np.int64]) -> list[tuple[int, int]]:
    breaks = np.flatnonzero(np.diff(starts) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(starts, breaks)]


def _table(runs: list[tuple[int, int, int]], episodes: int, dropped: Counter[str]) -> WindowTable:
    columns = np.array(runs, dtype=np.int32).reshape(-1, 3).T
    before = np.concatenate([[0], np.cumsum(columns[2], dtype=np.int64)])
    return WindowTable(columns[0], columns[1], columns[2], before, episodes, dict(dropped))
