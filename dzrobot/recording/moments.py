"""Per-episode statistics as LeRobot stores them: min, max, mean, std and count of every column."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Moments = dict[str, list[Any]]
"""``min``, ``max``, ``mean``, ``std`` (population) and ``count`` of one column, as nested lists."""

_PIXEL_STRIDE = 4
"""Every fourth row and column of a picture is enough for a mean and a deviation."""


def of_rows(rows: np.ndarray) -> Moments:
    """Return the statistics of ``rows`` (N, D) or (N,), per dimension."""
    table = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    return {
        "min": table.min(0).tolist(),
        "max": table.max(0).tolist(),
        "mean": table.mean(0).tolist(),
        "std": table.std(0).tolist(),
        "count": [len(table)],
    }


class PictureMoments:
    """Running statistics of pictures, per channel in [0, 1], shape (3, 1, 1)."""

    def __init__(self) -> None:
        self._low = np.full(3, 255, dtype=np.uint8)
        self._high = np.zeros(3, dtype=np.uint8)
        self._sum = np.zeros(3)
        self._squares = np.zeros(3)
        self._pixels = 0
        self._frames = 0

    def see(self, picture: np.ndarray) -> None:
        """Add one picture (H, W, 3) uint8."""
        pixels = picture[::_PIXEL_STRIDE, ::_PIXEL_STRIDE].reshape(-1, 3)
        self._low = np.minimum(self._low, pixels.min(0))
        self._high = np.maximum(self._high, pixels.max(0))
        self._sum += pixels.sum(0, dtype=np.float64)
        self._squares += np.square(pixels, dtype=np.float64).sum(0)
        self._pixels += len(pixels)
        self._frames += 1

    def result(self) -> Moments:
        """Return the statistics so far."""
        mean = self._sum / self._pixels
        std = np.sqrt(np.maximum(self._squares / self._pixels - mean**2, 0))
        values: dict[str, np.ndarray] = {
            "min": self._low,
            "max": self._high,
            "mean": mean,
            "std": std,
        }
        table: Moments = {
            name: (value / 255).reshape(3, 1, 1).tolist() for name, value in values.items()
        }
        return table | {"count": [self._frames]}


def merge(episodes: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """Return the statistics of all episodes together, weighted by count."""
    columns: dict[str, list[Moments]] = {}
    for episode in episodes:
        for name, moments in episode.items():
            columns.setdefault(name, []).append(moments)
    return {name: _merge_column(parts) for name, parts in columns.items()}


def _merge_column(parts: list[Moments]) -> Moments:
    stack = {
        name: np.array([part[name] for part in parts]) for name in ("min", "max", "mean", "std")
    }
    counts = np.array([part["count"][0] for part in parts], dtype=np.float64)
    weight = (counts / counts.sum()).reshape(-1, *[1] * (stack["mean"].ndim - 1))
    mean = (weight * stack["mean"]).sum(0)
    # Deviation inside the episodes plus deviation between their means.
    variance = (weight * (stack["std"] ** 2 + (stack["mean"] - mean) ** 2)).sum(0)
    return {
        "min": stack["min"].min(0).tolist(),
        "max": stack["max"].max(0).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(variance).tolist(),
        "count": [int(counts.sum())],
    }
