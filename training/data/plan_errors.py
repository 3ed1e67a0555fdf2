"""Plans beside recorded rows: how large their errors are, and how they would have to be read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DOES_ITS_DATA = 0.6
"""Error over that of the mean action, as :attr:`OwnRows.share`, above which a policy does not do
its data. On Lift: 0.3 of the bundled policy, 1.0 with statistics of another task, 3.6 with random
weights."""

LAG_ROWS = 4
"""Rows by which plans are tried to be early or late."""

_FEW = 1e-3
_VARIES = 0.05
_MIRRORED = 0.5
_ALIKE = 0.7
_CLEARLY = 0.8
_SCALE = 0.4


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnRows:
    """Plans beside what was recorded, at N rows."""

    planned: Floats
    """(N, H, A)."""

    recorded: Floats
    """(N, H, A)."""

    every: Floats
    """(M, A): all recorded actions."""

    @cached_property
    def deviation(self) -> Floats:
        """Return the deviation (A,) of recorded actions."""
        deviation: Floats = np.maximum(self.every.std(0), _FEW)
        return deviation

    @property
    def by_number(self) -> Floats:
        """Return the mean error (A,) of the first planned action, in deviations."""
        return self._away(self.planned[:, 0])

    @property
    def of_mean(self) -> Floats:
        """Return the same of the mean action."""
        return self._away(self.every.mean(0))

    def _away(self, actions: Floats) -> Floats:
        away: Floats = np.abs(actions - self.recorded[:, 0]).mean(0) / self.deviation
        return away

    @property
    def error(self) -> float:
        """Return the mean error, in deviations."""
        return float(self.by_number.mean())

    @property
    def share(self) -> float:
        """Return the error over that of the mean action: the median over numbers that vary.

        Some numbers of a demonstration are as good as noise, so a mean would be theirs.
        """
        shares = self.shares[~np.isnan(self.shares)]
        if not len(shares):
            return 0.0 if self.error < _VARIES else float("inf")
        return float(np.median(shares))

    @property
    def shares(self) -> Floats:
        """Return the error (A,) over that of the mean action; NaN of numbers that hardly vary."""
        varies = self.of_mean > _VARIES
        return np.where(varies, self.by_number / np.where(varies, self.of_mean, 1.0), np.nan)

    @property
    def does_its_data(self) -> bool:
        """Return whether the policy does what was recorded, and no number the other way around."""
        mirrored = np.diag(self.correlations) < -_MIRRORED
        return self.share <= DOES_ITS_DATA and not mirrored.any()

    @property
    def words(self) -> str:
        """Return what was found, for a person."""
        pairs = zip(self.by_number, self.of_mean, np.diag(self.correlations), strict=True)
        each = ", ".join(f"{a:.2f}/{b:.2f} ({c:+.2f})" for a, b, c in pairs)
        return f"{self.share:.2f} of the mean action's error; by number {each}"

    @property
    def correlations(self) -> Floats:
        """Return the correlation (A, A) of planned with recorded numbers; 0: one is constant."""
        ours, theirs = (_standard(one[:, 0]) for one in (self.planned, self.recorded))
        return ours.T @ theirs / len(ours)

    @cached_property
    def otherwise(self) -> str:
        """Return how plans have to be read to be the data's; empty: no reading that is tried helps.

        Numbers exchanged, mirrored or scaled, or rows that are off.
        """
        readings = [*self._exchanged(), *self._scaled(), *self._shifted()]
        words, best = min(readings, key=lambda one: one[1].error, default=("", self))
        return words if best.does_its_data and best.error < _CLEARLY * self.error else ""

    def _exchanged(self) -> Iterator[tuple[str, "OwnRows"]]:
        """Yield the plan with two numbers exchanged, three turned in a circle, or one negated."""
        count = self.planned.shape[-1]
        for number in range(count):
            signs = np.where(np.arange(count) == number, -1, 1)
            words = f"action[{number}] of the data is minus action[{number}] of the policy"
            yield words, replace(self, planned=self.planned * signs)
        circles: list[tuple[int, ...]] = [*combinations(range(count), 2)]
        circles += [order for one in range(count - 2) for order in _circles(one)]
        for circle in circles:
            order = np.arange(count)
            order[list(circle)] = [*circle[1:], circle[0]]
            words = "; ".join(
                f"action[{one}] of the data is action[{order[one]}] of the policy" for one in circle
            )
            yield words, replace(self, planned=self.planned[..., order])

    def _scaled(self) -> Iterator[tuple[str, "OwnRows"]]:
        """Yield the plan with numbers multiplied by what makes them as large as recorded ones."""
        ours, theirs, said = self.planned[:, 0], self.recorded[:, 0], []
        factors = (ours * theirs).sum(0) / np.maximum((ours**2).sum(0), _FEW**2)
        sure = (np.diag(self.correlations) > _ALIKE) & (
            np.abs(np.log(np.maximum(np.abs(factors), _FEW))) > _SCALE
        )
        for number in np.flatnonzero(sure):
            said.append(f"action[{number}] of the data is {factors[number]:.3g} times the policy's")
        if said:
            yield "; ".join(said), replace(self, planned=self.planned * np.where(sure, factors, 1))

    def _shifted(self) -> Iterator[tuple[str, "OwnRows"]]:
        """Yield plan and recording beside each other some rows off."""
        most = min(LAG_ROWS, self.planned.shape[1] - 1, self.recorded.shape[1] - 1)
        for rows in range(1, most + 1):
            early = replace(self, planned=self.planned[:, rows:])
            yield f"recorded actions are {rows} rows ahead of the policy's", early
            late = replace(self, recorded=self.recorded[:, rows:])
            yield f"recorded actions are {rows} rows behind the policy's", late


def _circles(first: int) -> list[tuple[int, ...]]:
    """Return both ways around three numbers that stand beside each other."""
    return [(first, first + 1, first + 2), (first, first + 2, first + 1)]


def _standard(values: NDArray[np.floating[Any]]) -> Floats:
    away = values - values.mean(0)
    spread = values.std(0)
    return np.where(spread < 1e-9, 0.0, away / np.maximum(spread, 1e-9))
