"""Where the windows of a dataset start: as runs, so that 100,000 episodes cost megabytes."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.timing import Timing, valid_anchors
from dzrobot.errors import DatasetError
from dzrobot.recording.catalog import FAILED

NO_INSTRUCTION = "no instruction"
"""Why an episode has no window: the instruction of every row is blank."""


Labels = Callable[[int], NDArray[np.int64]]
"""Instruction code of every row of an episode, by ordinal; negative where there is none."""


@dataclass(frozen=True)
class WindowTable:
    """Runs of window starts: window ``w`` is the ``w - before[run]``-th start of its run."""

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

    def within(self, rows: int) -> NDArray[np.int64]:
        """Return the windows that start in the first ``rows`` rows of an episode."""
        counts = np.clip(rows - self.start, 0, self.count)
        earlier = np.cumsum(counts) - counts
        return np.repeat(self.before[:-1] - earlier, counts) + np.arange(counts.sum())

    def save(self, path: Path) -> None:
        """Write the table to ``path``, an ``.npz`` file."""
        np.savez(
            path, episode=self.episode, start=self.start, count=self.count, before=self.before,
            rest=json.dumps([self.episodes, dict(self.dropped)]),
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> "WindowTable":
        """Read a table written by :meth:`save`."""
        with np.load(path) as known:
            episodes, dropped = json.loads(str(known["rest"]))
            arrays = {name: known[name] for name in ("episode", "start", "count", "before")}
            return cls(**arrays, episodes=episodes, dropped=dropped)

    def identity(self) -> str:
        """Return a text that changes with what a window number means."""
        return str([part.tolist() for part in (self.episode, self.start, self.count)])

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
    plain = _SingleInstruction(timing)
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
            blank = length > 0 and bool((marks < 0).all())
            short = not len(plain.starts(length))
            reason = "too short" if short else "no room within one instruction"
            dropped[NO_INSTRUCTION if blank else reason] += 1
    return _table(runs, len(lengths), dropped)


def require_windows(table: WindowTable, where: str, timing: Timing, longest: int) -> None:
    """Raise :class:`DatasetError` if there is nothing to train on.

    Args:
        table: Of the dataset.
        where: Its folder.
        timing: Grid of a sample.
        longest: Rows of the longest episode.
    """
    if not len(table) and FAILED in table.dropped:
        raise DatasetError(
            f"{where} holds no sample of a success ({table.report()}): record some, or ask for "
            "failures too (--episodes all, in a recipe data.episodes=all)"
        )
    if not len(table):
        raise DatasetError(
            f"{where} holds no complete sample of {timing.blocks} blocks of "
            f"{timing.action_horizon} actions, which needs {timing.rows_needed} rows of an episode "
            f"({table.report()}): record longer episodes, {_shorter(longest, timing)}, or repeat "
            "an episode's last row (--pad-tail, in a recipe data.pad_tail=true)"
        )


def _shorter(longest: int, timing: Timing) -> str:
    """Return what makes a sample short enough for an episode of ``longest`` rows."""
    blocks = (longest - 1) // timing.action_horizon
    if timing.sampling == "aligned" and blocks >= 1:
        return f"take --max-chunk-size {blocks} (in a recipe model.max_chunk_size={blocks})"
    return (
        "lower --max-chunk-size and --action-horizon (in a recipe model.max_chunk_size and "
        "model.action_horizon)"
    )


class _SingleInstruction:
    """Starts of windows in episodes with one instruction; computed once per length."""

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
