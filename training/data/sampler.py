"""Which window is at which position of the sample stream: a function of seed and position alone.

No state is kept between calls. Position ``p`` is sample ``p % global_batch`` of step
``p // global_batch``; resuming a run needs the step number and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import ConfigError
from dzrobot.rng import seed_sequence

BLOCK = 1024
"""Positions over which weights hold exactly, up to rounding."""

_SHARES = 1 << 20
_ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draws:
    """The windows at some positions, as int64 arrays of one length."""

    part: NDArray[np.int64]
    """Dataset."""

    window: NDArray[np.int64]
    """Window within the dataset."""

    epoch: NDArray[np.int64]
    """How often the dataset had been traversed before."""


class Stream(Protocol):
    """Which windows a run trains on, in which order.

    A run resumes from its step number alone, on any number of processes: what is at a position may
    depend on nothing but the position and what the stream was made of.
    """

    def at(self, positions: Sequence[int] | NDArray[np.int64]) -> Draws:
        """Return the windows at ``positions`` (n,); position ``step * global_batch + slot``."""


def check_stream(stream: Stream, sizes: Sequence[int], name: str) -> None:
    """Check on the first positions that a stream of a user's own is a function of the position.

    Args:
        stream: The stream.
        sizes: Windows of each dataset.
        name: What messages call it.

    Raises:
        ConfigError: It names windows that do not exist, or depends on how it is asked.
    """
    asked = np.arange(min(BLOCK, 2 * sum(sizes)))
    found = [_columns(stream.at(asked), len(asked), name)]
    backwards = _columns(stream.at(asked[::-1]), len(asked), name)[:, ::-1]
    alone = np.concatenate([_columns(stream.at([n]), 1, name) for n in asked[:8].tolist()], axis=1)
    part, window, epoch = found[0]
    if not (np.array_equal(found[0], backwards) and np.array_equal(found[0][:, :8], alone)):
        raise ConfigError(
            f"{name}: at(positions) gives other windows when the same positions are asked for once "
            "more, in another order: it must follow from each position alone (draw from "
            "numpy.random.default_rng([seed, position]), keep nothing between calls), or the run "
            "could neither be resumed nor shared out over processes"
        )
    if part.min() < 0 or part.max() >= len(sizes) or epoch.min() < 0:
        raise ConfigError(f"{name}: part and epoch from 0 on; part below {len(sizes)}")
    beyond = (window < 0) | (window >= np.asarray(sizes)[part])
    if beyond.any():
        at = int(np.flatnonzero(beyond)[0])
        raise ConfigError(
            f"{name}: window {window[at]} of dataset {part[at]}, which has {sizes[part[at]]}"
        )


def _columns(draws: object, count: int, name: str) -> NDArray[np.int64]:
    """Return part, window and epoch as rows (3, count)."""
    rows = [draws.part, draws.window, draws.epoch] if isinstance(draws, Draws) else []
    if not rows or any(
        np.shape(row) != (count,) or np.asarray(row).dtype.kind not in "iu" for row in rows
    ):
        raise ConfigError(
            f"{name}: at() returns Draws(part, window, epoch), three whole-number arrays as long "
            f"as the positions, here {count}"
        )
    return np.stack([np.asarray(row, dtype=np.int64) for row in rows])


class SampleStream:
    """Endless stream over datasets of given sizes.

    Each dataset is traversed in a new random order every time, each window exactly once; the
    datasets alternate by weight.

    Args:
        sizes: Windows of each dataset.
        weights: Share of each dataset in the stream; need not add up to one.
        seed: Decides every order.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"datasets with {list(sizes)} windows: each needs at least one")
        if len(weights) != len(sizes) or min(weights) <= 0:
            raise ConfigError(f"weights={list(weights)}: give one above 0 for each of {len(sizes)}")
        self.sizes = tuple(int(size) for size in sizes)
        self._seed = seed
        self._bounds = _bounds(weights)
        # Long enough that the rarest dataset appears in every block.
        rarest = int(np.diff(self._bounds).min())
        self._block = max(BLOCK, 2 * _SHARES // rarest)

    def at(self, positions: Sequence[int] | NDArray[np.int64]) -> Draws:
        """Return the windows at ``positions``."""
        where = np.asarray(positions, dtype=np.int64)
        part, turn = self._turns(where)
        sizes = np.asarray(self.sizes, dtype=np.int64)[part]
        epoch = turn // sizes
        window = np.empty_like(turn)
        for source, lap in {(int(p), int(e)) for p, e in zip(part, epoch, strict=True)}:
            chosen = (part == source) & (epoch == lap)
            key = _mix(_mix(_mix(self._seed) ^ source) ^ lap)
            window[chosen] = permute((turn % sizes)[chosen], self.sizes[source], key)
        return Draws(part, window, epoch)

    def _turns(self, where: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the dataset at each position, and how often it came before."""
        if len(self.sizes) == 1:
            return np.zeros_like(where), where
        part = np.empty_like(where)
        turn = np.empty_like(where)
        for block in np.unique(where // self._block):
            here = where // self._block == block
            before = self._before(int(block))
            counts = self._before(int(block) + 1) - before
            order = np.repeat(np.arange(len(self.sizes)), counts)
            generator = np.random.default_rng(seed_sequence("blocks", self._seed, int(block)))
            generator.shuffle(order)
            earlier = np.empty_like(order)
            for source in range(len(self.sizes)):
                mine = order == source
                earlier[mine] = before[source] + np.arange(mine.sum())
            offset = where[here] % self._block
            part[here], turn[here] = order[offset], earlier[offset]
        return part, turn

    def _before(self, block: int) -> NDArray[np.int64]:
        """Return the turns that each dataset has had before ``block``."""
        marks = [bound * block * self._block // _SHARES for bound in self._bounds]
        turns = [after - before for before, after in pairwise(marks)]
        return np.array(turns, dtype=np.int64)


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return where ``indices`` go in a keyed permutation of ``range(size)``.

    A Feistel network over the next power of four, walked until the result is in range: constant
    memory for any size, and each place is computed alone.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = [np.uint64(_mix(key ^ (round_ + 1))) for round_ in range(_ROUNDS)]
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & low
        for round_key in keys:
            left, right = right, left ^ (_mix_array(right ^ round_key) & low)
        values[outside] = (left << shift) | right
        outside[outside] = values[outside] >= size
    return values.astype(np.int64)


def _bounds(weights: Sequence[float]) -> list[int]:
    """Return the cumulative integer shares of ``weights``, from 0 to 2**20."""
    share = np.cumsum(np.asarray(weights, dtype=np.float64) / np.sum(weights))
    bounds = [0, *(round(value * _SHARES) for value in share.tolist())]
    if min(np.diff(bounds)) < 1:
        raise ConfigError(f"weights={list(weights)} differ by more than {_SHARES:,} times")
    return bounds


def _mix(value: int) -> int:
    """Return ``value`` scrambled (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return every value scrambled, as :func:`_mix`."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
