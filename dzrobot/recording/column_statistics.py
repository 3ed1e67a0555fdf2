"""Per-episode statistics as LeRobot stores them, of every column that holds numbers or images."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dzrobot.errors import DatasetError, printable

ColumnStatistics = dict[str, list[Any]]
"""``min``, ``max``, ``mean``, ``std`` (population), ``count`` and the quantiles ``q01`` to ``q99``
of one column, as nested lists.
"""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
"""Measure -> share of the data below it, as LeRobot 0.4 and later keep them."""

_PIXEL_STRIDE = 4
"""Every fourth row and column of an image is enough for a mean and a deviation."""


def of_rows(rows: np.ndarray) -> ColumnStatistics:
    """Return the statistics of ``rows`` (N, D) or (N,), per dimension."""
    table = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    return {
        "min": table.min(0).tolist(),
        "max": table.max(0).tolist(),
        "mean": table.mean(0).tolist(),
        "std": table.std(0).tolist(),
        "count": [len(table)],
        **{name: np.quantile(table, share, axis=0).tolist() for name, share in QUANTILES.items()},
    }


class ImageStatistics:
    """Running statistics of images, per channel in [0, 1], shape (3, 1, 1)."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, 256), dtype=np.int64)
        self._frames = 0

    def see(self, image: np.ndarray) -> None:
        """Add one image (H, W, 3) uint8."""
        pixels = image[::_PIXEL_STRIDE, ::_PIXEL_STRIDE].reshape(-1, 3)
        for channel in range(3):
            self._counts[channel] += np.bincount(pixels[:, channel], minlength=256)
        self._frames += 1

    def result(self) -> ColumnStatistics:
        """Return the statistics so far."""
        levels = np.arange(256)
        share = self._counts / self._counts.sum(1, keepdims=True)
        mean = share @ levels
        below = self._counts.cumsum(1)
        values = {
            "min": (below > 0).argmax(1),
            "max": 255 - (self._counts[:, ::-1] > 0).argmax(1),
            "mean": mean,
            "std": np.sqrt((share * (levels - mean[:, None]) ** 2).sum(1)),
        }
        for name, quantile in QUANTILES.items():
            values[name] = (below > quantile * (below[:, -1:] - 1)).argmax(1)
        table: ColumnStatistics = {
            name: (value / 255).reshape(3, 1, 1).tolist() for name, value in values.items()
        }
        return table | {"count": [self._frames]}


def add(
    known: Mapping[str, ColumnStatistics], episode: Mapping[str, ColumnStatistics]
) -> dict[str, ColumnStatistics]:
    """Return ``known``, empty before the first episode, with one more episode."""
    return merge([known, episode]) if known else dict(episode)


def merge(episodes: Iterable[Mapping[str, ColumnStatistics]]) -> dict[str, ColumnStatistics]:
    """Return the statistics of all episodes together, weighted by count.

    Quantiles are the weighted means of the episodes' quantiles, as LeRobot merges them.

    Raises:
        DatasetError: those of a column are of unlike shapes, or incomplete.
    """
    columns: dict[str, list[ColumnStatistics]] = {}
    for episode in episodes:
        for name, moments in episode.items():
            columns.setdefault(name, []).append(moments)
    merged = {}
    for name, parts in columns.items():
        try:
            merged[name] = _merge_column(parts)
        except (LookupError, TypeError, ValueError) as error:
            raise DatasetError(
                f"the statistics of {name!r} are not alike in all episodes "
                f"({printable(str(error), 100)}): the recording was changed by another program; "
                "record to a new folder"
            ) from error
    return merged


def _merge_column(parts: list[ColumnStatistics]) -> ColumnStatistics:
    stack = {
        name: np.array([part[name] for part in parts]) for name in ("min", "max", "mean", "std")
    }
    counts = np.array([part["count"][0] for part in parts], dtype=np.float64)
    if not counts.sum() > 0:
        raise ValueError("they count no row")
    weight = (counts / counts.sum()).reshape(-1, *[1] * (stack["mean"].ndim - 1))
    mean = (weight * stack["mean"]).sum(0)
    # Deviation inside the episodes plus deviation between their means.
    variance = (weight * (stack["std"] ** 2 + (stack["mean"] - mean) ** 2)).sum(0)
    merged: ColumnStatistics = {
        "min": stack["min"].min(0).tolist(),
        "max": stack["max"].max(0).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(variance).tolist(),
        "count": [int(counts.sum())],
    }
    for name in QUANTILES:
        # Recordings begun before 2026-11 have none.
        if all(name in part for part in parts):
            values = np.array([part[name] for part in parts])
            merged[name] = (weight * values).sum(0).tolist()
    return merged
