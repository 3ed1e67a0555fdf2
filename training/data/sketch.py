"""Histograms that can be added to each other, for quantiles of data that is no longer at hand.

Bins are as wide as a power of two and begin at its multiples, so bins of two sketches nest and a
merge loses nothing but the finer of the two resolutions.
"""

import base64
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field

BINS = 4096
"""At most this many bins between the smallest and the largest value; at least half as many."""

_SMALLEST_EXPONENT = -60


_PACKED = 8 * (BINS + 2)
"""Bytes of the counts of a sketch, unpacked, at most."""


def _packed(value: str) -> str:
    try:
        _unpack(value)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"no packed counts: {error}") from error
    return value


def _unpack(value: str) -> NDArray[np.int64]:
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(base64.b64decode(value, validate=True), _PACKED)
    if not unpacker.eof or not raw or len(raw) % 8:
        raise ValueError(f"allowed are 1 to {_PACKED // 8} numbers of 8 bytes")
    counts = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    if counts.min() < 0:
        raise ValueError("a count is negative")
    return counts


class Binned(BaseModel):
    """A sketch as :meth:`Sketch.to_json` writes it."""

    exponent: Annotated[int, Field(strict=True, ge=-1000, le=1000)]
    first: Annotated[int, Field(strict=True, ge=-(2**62), le=2**62)]
    counts: Annotated[str, AfterValidator(_packed)]


@dataclass(frozen=True)
class Sketch:
    """Counts of one number; bin ``i`` covers ``[(first + i) * width, (first + i + 1) * width)``."""

    exponent: int
    """The width is ``2 ** exponent``."""

    first: int
    counts: NDArray[np.int64]

    @classmethod
    def between(cls, low: float, high: float) -> "Sketch":
        """Return an empty sketch with room for values from ``low`` to ``high``."""
        spread = max(high - low, 2.0**_SMALLEST_EXPONENT * BINS, abs(high) * 2.0**-40)
        exponent = int(np.ceil(np.log2(spread / BINS)))
        first = int(np.floor(low / 2.0**exponent))
        last = int(np.floor(high / 2.0**exponent))
        return cls(exponent, first, np.zeros(last - first + 1, dtype=np.int64))

    @property
    def width(self) -> float:
        """Width of a bin, in the unit of the values."""
        return 2.0**self.exponent

    def add(self, values: NDArray[np.floating[Any]]) -> None:
        """Count ``values``, which must lie between the bounds given at the start."""
        bins = np.floor(values / self.width).astype(np.int64) - self.first
        self.counts[:] += np.bincount(bins, minlength=len(self.counts))

    def quantile(self, share: float) -> float:
        """Return the value below which ``share`` of the data lies, to within one bin.

        Between two data, as NumPy does, on the line from one to the next.
        """
        rank = share * (int(self.counts.sum()) - 1)
        below = int(rank)
        low, high = self._value(below), self._value(math.ceil(rank))
        return low + (rank - below) * (high - low)

    def _value(self, rank: int) -> float:
        """Return the middle of the bin that holds the ``rank``-th smallest value."""
        bin_ = int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))
        return (self.first + bin_ + 0.5) * self.width

    def to_json(self) -> dict[str, Any]:
        """Return the sketch as plain values; counts are compressed."""
        packed = base64.b64encode(zlib.compress(self.counts.astype("<i8").tobytes())).decode()
        return {"exponent": self.exponent, "first": self.first, "counts": packed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Sketch":
        """Return what :meth:`to_json` wrote."""
        return cls(int(value["exponent"]), int(value["first"]), _unpack(value["counts"]))


def merge(sketches: Sequence[Sketch]) -> Sketch:
    """Return the sketch of all data together."""
    exponent = max(sketch.exponent for sketch in sketches)
    while True:
        coarse = [_coarsen(sketch, exponent) for sketch in sketches]
        first = min(sketch.first for sketch in coarse)
        stop = max(sketch.first + len(sketch.counts) for sketch in coarse)
        if stop - first <= BINS + 1:
            break
        exponent += 1
    return Sketch(exponent, first, _sum(coarse, first, stop))


def _sum(sketches: Iterable[Sketch], first: int, stop: int) -> NDArray[np.int64]:
    counts = np.zeros(stop - first, dtype=np.int64)
    for sketch in sketches:
        at = sketch.first - first
        counts[at : at + len(sketch.counts)] += sketch.counts
    return counts


def _coarsen(sketch: Sketch, exponent: int) -> Sketch:
    bins = (sketch.first + np.arange(len(sketch.counts))) >> (exponent - sketch.exponent)
    counts = np.bincount(bins - bins[0], weights=sketch.counts).astype(np.int64)
    return Sketch(exponent, int(bins[0]), counts)
