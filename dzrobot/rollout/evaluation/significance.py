"""What two evaluations say about each other: tests and intervals that hold at the sizes we have.

Two runs are compared on the same episodes (task, initial state, seed), so what counts are the
episodes on which they disagree. scipy and statsmodels do the work; they are imported where used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import ConfigError
from dzrobot.importing import required

Z_95 = 1.959963984540054
"""Standard normal deviate of a two-sided 95 % interval."""

BOOTSTRAP_DRAWS = 10_000

CORRELATION_DRAWS = 2_000
FEWEST_OUTCOMES = 5
"""Successes, and failures, below which the interval of a correlation would be too narrow."""

_WHAT = "comparing runs"


@dataclass(frozen=True, kw_only=True)
class PairCounts:
    """Outcomes of two runs on the same episodes."""

    both: int
    """Both succeeded."""

    first_only: int
    second_only: int
    neither: int

    @property
    def episodes(self) -> int:
        """Pairs in all."""
        return self.both + self.first_only + self.second_only + self.neither

    @property
    def difference(self) -> float:
        """Success rate of the second run less that of the first; 0 without episodes."""
        return (self.second_only - self.first_only) / self.episodes if self.episodes else 0.0


def count_pairs(first: Sequence[bool], second: Sequence[bool]) -> PairCounts:
    """Return how often two runs succeeded, episode by episode.

    Raises:
        ValueError: the two are not equally long.
    """
    pairs = list(zip(first, second, strict=True))
    return PairCounts(
        both=pairs.count((True, True)),
        first_only=pairs.count((True, False)),
        second_only=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )


def mcnemar_p(first_only: int, second_only: int) -> float:
    """Return the two-sided p value of the exact McNemar test: were the disagreements fair coins?"""
    disagreements = first_only + second_only
    if not disagreements:
        return 1.0
    required(_WHAT, "report", "scipy")
    from scipy.stats import binomtest

    return float(binomtest(first_only, disagreements).pvalue)


def paired_interval(tasks: Sequence[PairCounts], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the difference in success rate.

    Pairs are drawn with replacement within each task, so that the tasks keep their shares; the
    percentiles are those of `BOOTSTRAP_DRAWS` draws. Where hardly any pair disagrees there is
    nothing to draw from, and :func:`adjusted_interval` is the one to read.

    Args:
        tasks: Counts of each task.
        seed: Of the draws.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    sums = np.zeros(BOOTSTRAP_DRAWS)
    episodes = sum(counts.episodes for counts in tasks)
    for counts in tasks:
        n = counts.episodes
        if not n:
            continue
        shares = [counts.first_only / n, counts.second_only / n]
        drawn = generator.multinomial(n, [*shares, max(0.0, 1 - sum(shares))], BOOTSTRAP_DRAWS)
        sums += drawn[:, 1] - drawn[:, 0]
    if not episodes:
        return -1.0, 1.0
    low, high = np.quantile(sums / episodes, [0.025, 0.975])
    return float(low), float(high)


def adjusted_interval(counts: PairCounts) -> tuple[float, float]:
    """Return the 95 % interval of the difference after Bonett and Price (2012).

    One disagreement is added each way, so it stays honest where few or none were seen.
    """
    n = counts.episodes + 2
    first, second = (counts.first_only + 1) / n, (counts.second_only + 1) / n
    middle = second - first
    spread = Z_95 * math.sqrt((first + second - middle**2) / n)
    return max(-1.0, middle - spread), min(1.0, middle + spread)


def e_value(first_only: int, second_only: int) -> float:
    """Return the evidence against equal runs, valid whenever one looks (an e-value).

    The likelihood of the disagreements with an unknown, evenly spread share, over that with fair
    coins: ``2^(b + c) B(1 + b, 1 + c)``. If the runs are equal, it ever reaches ``1 / alpha`` with
    probability at most ``alpha`` (Ville's inequality), however often and whenever one looks.
    """
    return math.exp(
        (first_only + second_only) * math.log(2)
        + math.lgamma(1 + first_only)
        + math.lgamma(1 + second_only)
        - math.lgamma(2 + first_only + second_only)
    )


class PairedEvidence:
    """The evidence of pairs, one after the other: when does the e-value reach ``1 / alpha``?

    Args:
        alpha: Largest probability of deciding although the runs are equal.
    """

    def __init__(self, alpha: float = 0.05) -> None:
        self._enough = 1 / alpha
        self._lost = self._won = self._pairs = 0
        self.decided_after: int | None = None
        """Pairs after which it first did; None: it has not."""

    def add(self, first: bool, second: bool) -> None:
        """Count a pair, in the order in which they are looked at."""
        self._pairs += 1
        self._lost += first and not second
        self._won += second and not first
        if self.decided_after is None and e_value(self._lost, self._won) >= self._enough:
            self.decided_after = self._pairs


def first_decision(first: Sequence[bool], second: Sequence[bool]) -> int | None:
    """Return after how many pairs :class:`PairedEvidence` was enough; None if it never was.

    Args:
        first: Outcomes of one run, in the order they were looked at.
        second: Outcomes of the other on the same episodes.
    """
    evidence = PairedEvidence()
    for one, other in zip(first, second, strict=True):
        evidence.add(one, other)
    return evidence.decided_after


@dataclass(frozen=True, kw_only=True)
class Unpaired:
    """A rate beside one that is known as a count only, such as a published one."""

    difference: float
    """Second less first."""

    low: float
    high: float
    """95 % interval of the difference, Newcombe's for independent rates."""

    p: float
    """Boschloo's exact test, two-sided."""


def compare_counts(first: tuple[int, int], second: tuple[int, int]) -> Unpaired:
    """Compare two independent rates, each given as successes and episodes.

    Raises:
        ConfigError: successes are not a count out of the episodes.
    """
    for successes, episodes in (first, second):
        if not 0 <= successes <= episodes or not episodes:
            raise ConfigError(f"{successes}/{episodes} is not a rate: give successes/episodes")
    required(_WHAT, "report", "scipy", "statsmodels")
    from scipy.stats import boschloo_exact
    from statsmodels.stats.proportion import confint_proportions_2indep

    table = [[first[0], second[0]], [first[1] - first[0], second[1] - second[0]]]
    low, high = confint_proportions_2indep(*second, *first, method="newcomb", compare="diff")
    return Unpaired(
        difference=second[0] / second[1] - first[0] / first[1],
        low=float(low),
        high=float(high),
        p=float(boschloo_exact(table).pvalue),
    )


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p values adjusted for being several (Holm), by name."""
    if not p_values:
        return {}
    required(_WHAT, "report", "statsmodels")
    from statsmodels.stats.multitest import multipletests

    adjusted = multipletests(list(p_values.values()), method="holm")[1]
    return {name: float(p) for name, p in zip(p_values, adjusted, strict=True)}


@dataclass(frozen=True, kw_only=True)
class RankCorrelation:
    """How far a number goes along with success."""

    rho: float
    """Spearman's coefficient, in [-1, 1]."""

    low: float
    """Lower end of the 95 % interval; see ``high``."""

    high: float
    """95 % bootstrap interval: starts are drawn with replacement, each with all its episodes."""

    auc: float
    """Probability that a failure has a lower number than a success; 0.5: the number says nothing.
    """

    auc_low: float
    """Lower end of the 95 % interval of ``auc``, from the same draws."""

    auc_high: float
    """Upper end of it."""


def rank_correlation(
    values: Sequence[Sequence[float]], outcomes: Sequence[Sequence[bool]], seed: int = 0
) -> RankCorrelation | None:
    """Return how far ``values`` go along with success; None with too few of either outcome.

    Below `FEWEST_OUTCOMES` successes or failures a draw too often has none of them. Where all
    values are equal there is nothing to order, and None as well.

    Args:
        values: (R, N): of the episodes of R runs from the same N starts.
        outcomes: (R, N): whether each succeeded.
        seed: Of the draws.

    Raises:
        ValueError: the two are not of one shape.
    """
    numbers, won = np.array(values, np.float64), np.array(outcomes, np.float64)
    if numbers.shape != won.shape:
        raise ValueError(f"values {numbers.shape} and outcomes {won.shape} are not of one shape")
    if min(won.sum(), (1 - won).sum()) < FEWEST_OUTCOMES or np.ptp(numbers) == 0:
        return None
    generator = np.random.Generator(np.random.PCG64(seed))
    starts = numbers.shape[1]
    drawn = generator.integers(starts, size=(CORRELATION_DRAWS, starts))
    resampled = _in_order(_flat(numbers[:, drawn]), _flat(won[:, drawn]))
    # A draw in which all ended the same, or all values are equal, says nothing.
    (low, auc_low), (high, auc_high) = np.nanquantile(resampled, [0.025, 0.975], axis=1).tolist()
    (rho,), (auc,) = _in_order(numbers.reshape(1, -1), won.reshape(1, -1)).tolist()
    return RankCorrelation(rho=rho, low=low, high=high, auc=auc, auc_low=auc_low, auc_high=auc_high)


def _flat(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (R, D, N) as (D, R * N)."""
    return np.moveaxis(drawn, 0, 1).reshape(drawn.shape[1], -1)


def _in_order(values: NDArray[np.float64], outcomes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Spearman's coefficient and the area under the curve (2, D) of each row of (D, N).

    Both are nan where a row does not vary. The ranks of two outcomes lie on a line with the
    outcomes themselves, and the area follows from the ranks of the successes (Mann and Whitney).
    """
    required(_WHAT, "report", "scipy")
    from scipy.stats import rankdata

    ranks = rankdata(values, axis=1)
    one, two = (rows - rows.mean(axis=1, keepdims=True) for rows in (ranks, outcomes))
    spread = np.sqrt((one**2).sum(axis=1) * (two**2).sum(axis=1))
    won = outcomes.sum(axis=1)
    pairs = won * (outcomes.shape[1] - won)
    above = (ranks * outcomes).sum(axis=1) - won * (won + 1) / 2
    found: NDArray[np.float64] = np.divide(
        [(one * two).sum(axis=1), above], [spread, pairs],
        out=np.full((2, len(spread)), np.nan), where=np.stack([spread > 0, spread > 0]),
    )  # fmt: skip
    return found
