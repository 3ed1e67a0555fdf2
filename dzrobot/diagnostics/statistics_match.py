"""Do a checkpoint's statistics belong to a dataset? Its bounds beside what is measured there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.modality.input_variants import Floats
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint
from dzrobot.training.data.dataset import DatasetReader
from dzrobot.training.data.normalization import measure

OUTSIDE = 0.25
"""Distance of a checkpoint's bound from the data's, in widths, above which they are of others."""

_NEAR = 0.3
_FAR = 2.0
_FEW = 1e-6


@dataclass(frozen=True, kw_only=True)
class StatisticsMatch:
    """How a checkpoint's bounds compare with the data's."""

    entry: Mapping[str, Any]
    """What is measured on the data, as ``metadata.json`` has it."""

    apart: float
    """Median distance of the bounds, in widths of the data's."""

    width: float
    """Median of the checkpoint's width over the data's."""

    mode: str
    """Which other measures of the data the bounds are; empty: none."""

    @property
    def differs(self) -> bool:
        """Return whether they are those of other data."""
        return bool(self.mode) or self.apart > OUTSIDE

    @property
    def words(self) -> str:
        """Return what was found, for a person."""
        text = f"bounds {self.apart:.2f} widths from the data's, {self.width:.2g} times as wide"
        return f"{text}; they are the data's {self.mode}" if self.mode else text

    @property
    def cause(self) -> str:
        """Return the cause, where these statistics are one."""
        if self.mode:
            return f"statistics of another mode: {self.mode} in the place of the quantiles"
        return "statistics of other data, another mode or another robot"


def match_statistics(checkpoint: Checkpoint, reader: DatasetReader) -> StatisticsMatch:
    """Return how a checkpoint's statistics fit a dataset.

    Args:
        checkpoint: Whose bounds are compared.
        reader: The dataset, opened for the checkpoint's robot.

    Raises:
        StatisticsError: one of both has none.
    """
    robot = reader.embodiment
    entry = measure([reader], robot)
    held = Statistics.from_metadata(checkpoint.metadata_file, robot)
    own = Statistics.from_metadata({robot.tag: entry}, robot)
    apart: list[float] = []
    widths: list[float] = []
    for part in _parts(robot):
        (low, high), (a, b) = (_bounds(one, part) for one in (held, own))
        width = b - a
        varies = width > _FEW
        apart += [*_relative(low - a, width), *_relative(high - b, width)]
        widths += [*((high - low)[varies] / width[varies])]
    return StatisticsMatch(
        entry=entry, apart=_median(apart), width=_median(widths, 1.0),
        mode=_mode(robot, held, entry),
    )  # fmt: skip


def _mode(robot: Embodiment, held: Statistics, entry: Mapping[str, Any]) -> str:
    """Return which measures of the data the bounds are, where it is not those they are to be."""
    own = {"q99": "q01, q99", "min_max": "min, max"}[_parts(robot)[0].normalization]
    away = {
        name: float(np.minimum(list(_away(robot, held, entry, name)) or [0.0], _FAR).mean())
        for name in ("q01, q99", "min, max", "mean, std", "mean less and plus std")
    }
    best = min(away, key=lambda name: away[name])
    return best if best != own and away[best] < _NEAR * away[own] else ""


def _away(
    robot: Embodiment, held: Statistics, entry: Mapping[str, Any], name: str
) -> Iterator[float]:
    for part in _parts(robot):
        kind, _, last = part.key.partition(".")
        table = {key: np.asarray(value) for key, value in entry["statistics"][kind][last].items()}
        low, high = _bounds(held, part)
        if name == "mean less and plus std":
            a, b = table["mean"] - table["std"], table["mean"] + table["std"]
        else:
            # A lower bound above an upper one is refused: they can only be there in order.
            a, b = np.sort([table[one] for one in name.split(", ")], axis=0)
        width = table["q99"] - table["q01"]
        yield from _relative(low - a, width)
        yield from _relative(high - b, width)


def _median(values: Sequence[float], otherwise: float = 0.0) -> float:
    return float(np.median(values)) if values else otherwise


def _relative(away: Floats, width: Floats) -> list[float]:
    """Return distances (D,) in widths, of the numbers that vary."""
    varies = width > _FEW
    found: list[float] = (np.abs(away[varies]) / width[varies]).tolist()
    return found


def _parts(robot: Embodiment) -> list[Part]:
    return [*robot.state, *robot.action]


def _bounds(statistics: Statistics, part: Part) -> tuple[Floats, Floats]:
    """Return the bounds (D,) of a part; of several steps, their mean."""
    bounds = statistics.bounds[part.key]
    low, high = (
        np.atleast_2d(np.asarray(one, np.float64)).mean(0) for one in (bounds.low, bounds.high)
    )
    return low, high
