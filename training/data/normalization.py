"""Statistics for normalization, measured on recordings: what ``dzrobot stats`` writes.

States and absolute actions are measured on every row of every usable episode. Relative actions are
measured as they are trained: action minus the state at the start of its block, over all rows of the
block, for every row that starts a block of a valid window, each such row counted once. Asked for
step by step, each step of a block has measures of its own; a file then has a list for each step.
"""

import base64
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from operator import add
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field, model_validator

from dzrobot.cluster import Cluster
from dzrobot.documents import validated
from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import StatisticsError, counted
from dzrobot.training.data.columns import Progress
from dzrobot.training.data.dataset import DatasetReader
from dzrobot.training.data.provenance import PROVENANCE, Provenance, provenance
from dzrobot.training.data.reading_pool import EpisodePiece, ReadingPool, pieces_of
from dzrobot.untrusted import parsing

BINS = 4096
"""At most this many bins between the smallest and the largest value; at least half as many."""

_SMALLEST_EXPONENT = -60


_PACKED = 8 * (BINS + 2)
"""Bytes of the counts of a histogram, unpacked, at most."""


def _packed(value: str) -> str:
    try:
        with parsing("the packed counts", StatisticsError, remedy="measure them again"):
            _unpack(value)
    except StatisticsError as error:
        raise ValueError(str(error)) from error
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


class PackedHistogram(BaseModel):
    """A histogram as :meth:`QuantileHistogram.to_json` writes it."""

    exponent: Annotated[int, Field(strict=True, ge=-1000, le=1000)]
    first: Annotated[int, Field(strict=True, ge=-(2**62), le=2**62)]
    counts: Annotated[str, AfterValidator(_packed)]


@dataclass(frozen=True)
class QuantileHistogram:
    """Counts of one number; bin ``i`` covers ``[(first + i) * width, (first + i + 1) * width)``."""

    exponent: int
    """The width is ``2 ** exponent``."""

    first: int
    counts: NDArray[np.int64]

    @classmethod
    def between(cls, low: float, high: float) -> "QuantileHistogram":
        """Return an empty histogram with room for values from ``low`` to ``high``."""
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
        """Return the histogram as plain values; counts are compressed."""
        packed = base64.b64encode(zlib.compress(self.counts.astype("<i8").tobytes())).decode()
        return {"exponent": self.exponent, "first": self.first, "counts": packed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "QuantileHistogram":
        """Return what :meth:`to_json` wrote."""
        return cls(int(value["exponent"]), int(value["first"]), _unpack(value["counts"]))


def merge_histograms(histograms: Sequence[QuantileHistogram]) -> QuantileHistogram:
    """Return the histogram of all data together."""
    exponent = max(histogram.exponent for histogram in histograms)
    while True:
        coarse = [_coarsen(histogram, exponent) for histogram in histograms]
        first = min(histogram.first for histogram in coarse)
        stop = max(histogram.first + len(histogram.counts) for histogram in coarse)
        if stop - first <= BINS + 1:
            break
        exponent += 1
    return QuantileHistogram(exponent, first, _sum(coarse, first, stop))


def _sum(histograms: Iterable[QuantileHistogram], first: int, stop: int) -> NDArray[np.int64]:
    counts = np.zeros(stop - first, dtype=np.int64)
    for histogram in histograms:
        at = histogram.first - first
        counts[at : at + len(histogram.counts)] += histogram.counts
    return counts


def _coarsen(histogram: QuantileHistogram, exponent: int) -> QuantileHistogram:
    bins = (histogram.first + np.arange(len(histogram.counts))) >> (exponent - histogram.exponent)
    counts = np.bincount(bins - bins[0], weights=histogram.counts).astype(np.int64)
    return QuantileHistogram(exponent, int(bins[0]), counts)


EXACT_ROWS = 20_000_000
"""Up to this many rows quantiles are exact; beyond, they are read from histograms."""

QUANTILES = {"q01": 0.01, "q99": 0.99}

SKETCH = "sketch"
"""Field beside ``statistics``: counts and histograms, by which statistics can be merged."""

Floats = NDArray[np.float64]


Numbers = list[Annotated[float, Field(strict=True, allow_inf_nan=False)]]


class Table(BaseModel):
    """Measures of one part, a number for each of its dimensions, or such a list for each step."""

    min: Numbers | list[Numbers]
    max: Numbers | list[Numbers]
    mean: Numbers | list[Numbers]
    std: Numbers | list[Numbers]


class PartHistograms(BaseModel):
    """Counts of one part."""

    count: Annotated[int, Field(strict=True, ge=1, le=2**53)]
    bins: list[PackedHistogram]


class StatisticsEntry(BaseModel):
    """What ``dzrobot stats`` wrote for one embodiment, in the part that merging needs."""

    relative_action_keys: list[str]
    action_horizon: int
    provenance: Provenance
    statistics: dict[str, dict[str, Table]]
    sketch: dict[str, PartHistograms]

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for key, histograms in self.sketch.items():
            kind, _, name = key.partition(".")
            table = self.statistics.get(kind, {}).get(name)
            if table is None:
                raise ValueError(f"sketch has {key!r}, statistics have not")
            sizes = {np.size(values) for values in table.model_dump().values()}
            if sizes != {len(histograms.bins)}:
                raise ValueError(f"the measures of {key!r} have different lengths")
        return self


@dataclass(frozen=True)
class RunningStatistics:
    """Count, mean and squared deviations, per number; exact under addition."""

    count: int
    mean: Floats
    squares: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, rows: NDArray[Any]) -> "RunningStatistics":
        """Return the moments of ``rows``, (N, D) with N > 0."""
        table = rows.astype(np.float64)
        mean = table.mean(0)
        return cls(len(table), mean, ((table - mean) ** 2).sum(0), table.min(0), table.max(0))

    def __add__(self, other: "RunningStatistics") -> "RunningStatistics":
        count = self.count + other.count
        difference = other.mean - self.mean
        return RunningStatistics(
            count,
            self.mean + difference * (other.count / count),
            self.squares + other.squares + difference**2 * (self.count * other.count / count),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    def table(self) -> dict[str, list[float]]:
        """Return min, max, mean and std (of the population)."""
        return {
            "min": self.low.tolist(),
            "max": self.high.tolist(),
            "mean": self.mean.tolist(),
            "std": np.sqrt(self.squares / self.count).tolist(),
        }


def measure(
    readers: Sequence[DatasetReader],
    embodiment: Embodiment,
    progress: Progress | None = None,
    *,
    per_step: bool = False,
    processes: int | Cluster | None = 1,
) -> dict[str, Any]:
    """Return the entry of ``metadata.json`` for ``embodiment``, over all ``readers`` together.

    Args:
        readers: Opened datasets; images are not touched.
        embodiment: Says which parts there are and which of them are relative.
        progress: Called with parts done and parts in all.
        per_step: Whether each step of a block of relative actions has measures of its own.
        processes: How many share the work, or the cluster that does. None: one for every core, as
            far as it is worth it.

    Raises:
        StatisticsError: nothing to measure, or ``per_step`` where no action is relative.
    """
    if per_step and not embodiment.relative_keys:
        raise StatisticsError(
            f"{embodiment.tag!r} has no action that is measured from the state (Part.reference): "
            "all steps of a block are alike, so measures step by step are not for it"
        )
    parts = [*embodiment.state, *embodiment.action]
    if not parts:
        raise StatisticsError(
            "recordings of images alone have no numbers to measure, and a run on them needs no "
            "statistics: leave metadata_json_path out of their entry"
        )
    statistics: dict[str, dict[str, Any]] = {"state": {}, "action": {}}
    histograms: dict[str, Any] = {}
    pieces = [
        piece
        for number, reader in enumerate(readers)
        for piece in pieces_of(number, np.unique(reader.windows.episode).tolist())
    ]
    with ReadingPool(readers, processes) as pool:
        for done, part in enumerate(parts):
            steps = embodiment.timing.action_horizon if per_step and part.reference else 1
            table, known = _measure_part(pool, pieces, _Measured(part, embodiment, steps))
            statistics[part.key.partition(".")[0]][part.name] = table
            histograms[part.key] = known
            if progress:
                progress(done + 1, len(parts))
    identities = [reader.catalog.identity for reader in readers]
    return {
        "statistics": statistics,
        "modalities": _modalities(readers[0], embodiment),
        "embodiment_tag": embodiment.tag,
        **provenance(embodiment, identities),
        SKETCH: histograms,
    }


FAR = 100
"""Widths of the usual range from which a row lies so far away that it is likely a fault."""


def narrow_columns(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every number that hardly moves, but for a few rows far away."""
    for kind, parts in entry["statistics"].items():
        for name, table in parts.items():
            low, q01, q99, high = (
                np.atleast_2d(table[measure]) for measure in ("min", "q01", "q99", "max")
            )
            width = (q99 - q01).max(0)
            far = np.maximum(high - q99, q01 - low).max(0)
            for number in np.flatnonzero((far > FAR * width) & (far > 0)):
                yield (
                    f"{kind}.{name}[{number}] keeps within {width[number]:.3g} in 98 % of the "
                    f"rows, and the farthest row lies {far[number]:.3g} beyond: it is clipped to "
                    "the range, and what trains is the noise within; look for a wrong row, or "
                    "leave the number out"
                )


def merge(known: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry over the data of both; moments are exact, quantiles to within one bin.

    Raises:
        StatisticsError: Not mergeable: other parts or another grid, or the same data twice.
    """
    _check_mergeable(known, added)
    statistics: dict[str, dict[str, Any]] = {"state": {}, "action": {}}
    histograms = {}
    for key in added[SKETCH]:
        kind, _, name = key.partition(".")
        tables = [entry["statistics"][kind][name] for entry in (known, added)]
        steps = len(tables[0]["min"]) if np.ndim(tables[0]["min"]) == 2 else 1
        counts = [entry[SKETCH][key]["count"] for entry in (known, added)]
        total = _moments(tables[0], counts[0]) + _moments(tables[1], counts[1])
        joined = [
            merge_histograms([QuantileHistogram.from_json(one), QuantileHistogram.from_json(two)])
            for one, two in zip(known[SKETCH][key]["bins"], added[SKETCH][key]["bins"], strict=True)
        ]
        statistics[kind][name] = _by_step(total.table() | _quantiles(joined, total), steps)
        histograms[key] = _histogram_entry(total.count, joined)
    note = dict(added[PROVENANCE])
    note["datasets"] = sorted({*known[PROVENANCE]["datasets"], *note["datasets"]})
    return {**added, "statistics": statistics, PROVENANCE: note, SKETCH: histograms}


@dataclass(frozen=True)
class _Measured:
    """A part and how its rows are cut; picklable."""

    part: Part
    embodiment: Embodiment
    steps: int

    def batches(self, readers: Sequence[DatasetReader], piece: EpisodePiece) -> Iterator[Floats]:
        """Yield the rows of each episode of a piece, ``steps`` at a time."""
        reader = readers[piece.reader]
        for rows in _rows(reader, piece.ordinals, self.part, self.embodiment):
            yield rows.reshape(-1, self.steps * self.part.dim)

    def moments(
        self, readers: Sequence[DatasetReader], piece: EpisodePiece
    ) -> list[RunningStatistics]:
        """Return those of each episode."""
        return [RunningStatistics.of(rows) for rows in self.batches(readers, piece)]

    def counted(
        self, bounds: RunningStatistics, readers: Sequence[DatasetReader], piece: EpisodePiece
    ) -> list[QuantileHistogram]:
        """Return a histogram of each number."""
        histograms = _empty_histograms(bounds)
        for rows in self.batches(readers, piece):
            for number, one in enumerate(histograms):
                one.add(rows[:, number])
        return histograms


def _empty_histograms(bounds: RunningStatistics) -> list[QuantileHistogram]:
    return [
        QuantileHistogram.between(low, high)
        for low, high in zip(bounds.low, bounds.high, strict=True)
    ]


def _measure_part(
    pool: ReadingPool, pieces: Sequence[EpisodePiece], measured: _Measured
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return the measures and counts of a part; the same however many processes there are."""
    # Added episode by episode, in order: sums of floating-point numbers depend on it.
    episodes = chain.from_iterable(pool.map(measured.moments, pieces))
    first = next(episodes, None)
    if first is None:
        raise StatisticsError(f"{measured.part.key}: there is no row to measure")
    total = reduce(add, episodes, first)
    histograms = _empty_histograms(total)
    for found in pool.map(partial(measured.counted, total), pieces):
        for one, counts in zip(histograms, found, strict=True):
            one.counts[:] += counts.counts

    def batches() -> Iterator[Floats]:
        for piece in pieces:
            yield from measured.batches(pool.readers, piece)

    exact = total.count <= EXACT_ROWS
    quantiles = _exact(batches, total) if exact else _quantiles(histograms, total)
    table = _by_step(total.table() | quantiles, measured.steps)
    return table, _histogram_entry(total.count, histograms)


def _by_step(table: Mapping[str, list[float]], steps: int) -> dict[str, list[Any]]:
    """Return measures of ``steps`` steps one after the other as a list for each step."""
    if steps == 1:
        return dict(table)
    return {name: np.reshape(values, (steps, -1)).tolist() for name, values in table.items()}


def _rows(
    reader: DatasetReader, ordinals: Sequence[int], part: Part, embodiment: Embodiment
) -> Iterator[Floats]:
    """Yield the values of a part, episode by episode, (N, dim) float64."""
    horizon = embodiment.timing.action_horizon
    offset = reader.catalog.episodes.offset
    source = reader.resolution.vectors[part.key]
    column = reader.columns.vector(source.column)
    for ordinal in ordinals:
        rows = slice(int(offset[ordinal]), int(offset[ordinal + 1]))
        values = column[rows, source.start : source.stop].astype(np.float64)
        if part.reference is not None:
            anchors = _anchors(reader, ordinal, embodiment)
            base = reader.resolution.vectors[part.reference]
            states = reader.columns.vector(base.column)[rows, base.start : base.stop]
            blocks = values[anchors[:, None] + np.arange(horizon)]
            values = (blocks - states[anchors].astype(np.float64)[:, None]).reshape(-1, part.dim)
        if len(values):
            yield values


def _anchors(reader: DatasetReader, ordinal: int, embodiment: Embodiment) -> NDArray[np.int64]:
    """Return the rows of an episode that start a block of a valid window."""
    timing = embodiment.timing
    length = int(reader.catalog.episodes.length[ordinal])
    if timing.sampling == "multi_anchor":
        # The walk reaches every row that a whole block can follow.
        return np.arange(max(0, length - timing.action_horizon), dtype=np.int64)
    starts = reader.windows.starts(ordinal)
    blocks = np.arange(timing.blocks, dtype=np.int64) * timing.anchor_stride
    return np.unique(starts[:, None] + blocks)


def _exact(
    batches: Callable[[], Iterator[Floats]], total: RunningStatistics
) -> dict[str, list[float]]:
    """Return exact quantiles, as many numbers of the part at a time as memory is spent on."""
    values: dict[str, list[float]] = {name: [] for name in QUANTILES}
    together = max(1, EXACT_ROWS // total.count)
    for first in range(0, len(total.mean), together):
        columns = np.concatenate([rows[:, first : first + together] for rows in batches()])
        found = np.quantile(columns, [*QUANTILES.values()], axis=0)
        for name, row in zip(QUANTILES, found, strict=True):
            values[name] += row.tolist()
    return values


def _quantiles(
    histograms: Sequence[QuantileHistogram], total: RunningStatistics
) -> dict[str, list[float]]:
    bounds = list(zip(histograms, total.low.tolist(), total.high.tolist(), strict=True))
    return {
        name: [min(max(one.quantile(share), low), high) for one, low, high in bounds]
        for name, share in QUANTILES.items()
    }


def _histogram_entry(count: int, histograms: Sequence[QuantileHistogram]) -> dict[str, Any]:
    return {"count": count, "bins": [one.to_json() for one in histograms]}


def _moments(table: Mapping[str, list[Any]], count: int) -> RunningStatistics:
    arrays = {name: np.ravel(table[name]) for name in ("mean", "std", "min", "max")}
    squares = arrays["std"] ** 2 * count
    return RunningStatistics(count, arrays["mean"], squares, arrays["min"], arrays["max"])


def _check_mergeable(known: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    tag = added["embodiment_tag"]
    if SKETCH not in known or PROVENANCE not in known:
        raise StatisticsError(
            f"the statistics of {tag!r} in the file came with a checkpoint or another tool and "
            "hold no counts, so nothing can be added to them: write to a new file"
        )
    validated(known, StatisticsEntry, f"the statistics of {tag!r} in the file", StatisticsError)
    shapes = [
        {key: len(entry[SKETCH][key]["bins"]) for key in entry[SKETCH]} for entry in (known, added)
    ]
    grids = [
        {**{k: v for k, v in entry[PROVENANCE].items() if k != "datasets"}}
        | {name: entry[name] for name in ("relative_action_keys", "action_horizon")}
        for entry in (known, added)
    ]
    if shapes[0] != shapes[1] or grids[0] != grids[1]:
        raise StatisticsError(
            f"the statistics of {tag!r} in the file were measured with {shapes[0]} and {grids[0]}, "
            f"the new ones with {shapes[1]} and {grids[1]}: write to a new file"
        )
    twice = set(known[PROVENANCE]["datasets"]) & set(added[PROVENANCE]["datasets"])
    if twice:
        raise StatisticsError(
            f"already counted in the statistics of {tag!r}: {counted(len(twice), 'dataset')}; give "
            "only new ones, or write to a new file"
        )


def _modalities(reader: DatasetReader, embodiment: Embodiment) -> dict[str, Any]:
    views = {}
    for view in embodiment.views:
        height, width = reader.catalog.frame_size(reader.resolution.views[view.key].column)
        views[view.name] = {
            "resolution": [width, height],
            "channels": 3,
            "fps": reader.catalog.fps,
        }
    return {
        "video": views,
        "state": {part.name: _modality(part) for part in embodiment.state},
        "action": {part.name: _modality(part) for part in embodiment.action},
    }


def _modality(part: Part) -> dict[str, Any]:
    return {
        "absolute": part.reference is None,
        "rotation_type": None,
        "shape": [part.dim],
        "continuous": True,
    }
