"""Tests hold their level and intervals cover, by simulation; known values are met."""

import functools
import gc

import numpy as np
import pytest

from dzrobot.errors import ConfigError
from dzrobot.rollout.evaluation.report import wilson
from dzrobot.rollout.evaluation.significance import (
    PairCounts,
    adjusted_interval,
    compare_counts,
    count_pairs,
    e_value,
    first_decision,
    holm,
    mcnemar_p,
    paired_interval,
    rank_correlation,
)

pytest.importorskip("statsmodels")

DRAWS = 2000

WITHOUT = "another implementation of the statistics, robostats, did not install"

# Among 2,000 draws many have the same counts: what follows from counts is worked out once for each.
p_value = functools.cache(mcnemar_p)
compare = functools.cache(compare_counts)


@functools.cache
def bootstrap_interval(counts):
    return paired_interval([counts])


def outcomes(seed, shares, episodes):
    """Return (draws, 2, episodes) outcomes: ``shares`` of both, first only, second only."""
    generator = np.random.default_rng(seed)
    kinds = generator.choice(4, p=[*shares, 1 - sum(shares)], size=(DRAWS, episodes))
    return np.stack([(kinds == 0) | (kinds == 1), (kinds == 0) | (kinds == 2)], axis=1)


def test_known_values():
    # Smallest number of one-sided disagreements that is significant (spec of the statistics).
    for fewer, needed in {0: 6, 1: 8, 2: 10, 3: 12, 5: 15}.items():
        assert mcnemar_p(fewer, needed) < 0.05 <= mcnemar_p(fewer, needed - 1)
    for fewer, needed in {0: 8, 1: 11, 2: 14, 3: 16, 5: 20, 10: 29, 20: 46}.items():
        assert e_value(fewer, needed) >= 20 > e_value(fewer, needed - 1)
    assert mcnemar_p(20, 8) == pytest.approx(0.036, abs=5e-4)
    assert mcnemar_p(0, 0) == 1


def test_pairs_are_counted_by_episode():
    counts = count_pairs([True, True, False, False], [True, False, True, False])
    assert (counts.both, counts.first_only, counts.second_only, counts.neither) == (1, 1, 1, 1)
    with pytest.raises(ValueError, match="zip"):
        count_pairs([True], [])


@pytest.mark.parametrize("shares", [(0.5, 0.1, 0.1), (0.9, 0.03, 0.03), (0.2, 0.25, 0.25)])
def test_false_alarms_of_equal_runs(shares):
    runs = outcomes(1, shares, 100)
    alarms = [p_value((a & ~b).sum(), (b & ~a).sum()) < 0.05 for a, b in runs]
    assert np.mean(alarms) <= 0.05
    # Looked at after every single episode.
    early = [first_decision(a.tolist(), b.tolist()) is not None for a, b in runs]
    assert np.mean(early) <= 0.05


def test_a_difference_is_found():
    runs = outcomes(2, (0.6, 0.02, 0.2), 100)
    assert np.mean([p_value((a & ~b).sum(), (b & ~a).sum()) < 0.05 for a, b in runs]) > 0.9
    decided = [first_decision(a.tolist(), b.tolist()) for a, b in runs]
    found = [number for number in decided if number is not None]
    assert len(found) > 0.8 * DRAWS
    assert np.median(found) < 90


@pytest.mark.parametrize(
    ("interval", "shares"),
    [
        pytest.param("bootstrap", (0.5, 0.1, 0.2), marks=pytest.mark.long),
        ("bootstrap", (0.85, 0.05, 0.05)),
        ("adjusted", (0.5, 0.1, 0.2)),
        ("adjusted", (0.85, 0.05, 0.05)),
    ],
)
def test_intervals_of_the_difference_cover(shares, interval):
    truth = shares[2] - shares[1]
    covered = []
    for a, b in outcomes(3, shares, 100):
        counts = count_pairs(a.tolist(), b.tolist())
        low, high = (
            bootstrap_interval(counts) if interval == "bootstrap" else adjusted_interval(counts)
        )
        covered.append(low <= truth <= high)
    assert np.mean(covered) > (0.925 if interval == "bootstrap" else 0.945)


def test_where_nothing_disagrees_the_adjusted_interval_stays_open():
    counts = count_pairs([True] * 20, [True] * 20)
    assert paired_interval([counts]) == (0, 0)
    low, high = adjusted_interval(counts)
    assert low < -0.1 < 0.1 < high


def test_tasks_keep_their_shares():
    """A task on which all pairs disagree adds no spread: only the other task's pairs vary."""
    sure = count_pairs([False] * 50, [True] * 50)
    open_ = count_pairs([True, False] * 25, [False, True] * 25)
    low, high = paired_interval([sure, open_])
    whole_low, whole_high = paired_interval(
        [count_pairs([False] * 50 + [True, False] * 25, [True] * 50 + [False, True] * 25)]
    )
    assert high - low < whole_high - whole_low


def test_wilson_covers():
    for rate in (0.5, 0.9, 0.97):
        drawn = np.random.default_rng(4).binomial(200, rate, DRAWS)
        covered = [low <= rate <= high for low, high in (wilson(int(k), 200) for k in drawn)]
        assert np.mean(covered) > 0.93


def test_a_published_count():
    found = compare_counts((198, 205), (158, 200))
    assert found.p < 1e-7
    assert found.low < found.difference < found.high < 0
    assert compare_counts((9, 10), (9, 10)).p == pytest.approx(1, abs=0.1)
    with pytest.raises(ConfigError, match="3/2"):
        compare_counts((3, 2), (1, 2))


@pytest.mark.parametrize("rates", [(0.8, 0.8), (0.5, 0.8)])
def test_against_a_count_alarms_hold_their_level_and_intervals_cover(rates):
    drawn = np.random.default_rng(5).binomial(20, rates, size=(DRAWS, 2))
    found = [compare((int(a), 20), (int(b), 20)) for a, b in drawn]
    truth = rates[1] - rates[0]
    # So many draws leave half a percent of doubt (one standard deviation).
    assert np.mean([one.low <= truth <= one.high for one in found]) > 0.95 - 3.1 * 0.0049
    alarms = np.mean([one.p < 0.05 for one in found])
    assert alarms < 0.05 + 3.1 * 0.0049 if truth == 0 else alarms > 0.4


def test_several_comparisons_of_equal_runs_rarely_raise_any_alarm(monkeypatch):
    # statsmodels collects garbage in every call.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    families = [outcomes(7 + number, (0.5, 0.1, 0.1), 50) for number in range(4)]
    raised = unadjusted = 0
    for runs in zip(*families, strict=True):
        values = {str(i): p_value((a & ~b).sum(), (b & ~a).sum()) for i, (a, b) in enumerate(runs)}
        raised += min(holm(values).values()) < 0.05
        unadjusted += min(values.values()) < 0.05
    assert raised / DRAWS <= 0.05
    assert unadjusted > 2 * raised


def test_several_comparisons():
    assert holm({"a": 0.01, "b": 0.04}) == pytest.approx({"a": 0.02, "b": 0.04})
    assert holm({}) == {}
    generator = np.random.default_rng(6)
    family = generator.random((6, 5))
    for row in family:
        # By definition: the smallest p value counts five times, the next four times, ...
        smallest = min(holm(dict(enumerate(row))).values())
        assert smallest == pytest.approx(min(1, 5 * row.min()))


def along(draws, starts, slope, seed):
    """Return (draws, 2, starts) numbers and outcomes of two runs; a start shifts both of them."""
    generator = np.random.default_rng(seed)
    start = generator.normal(size=(draws, 1, starts))
    values = start + generator.normal(size=(draws, 2, starts))
    return values, generator.random(values.shape) < 1 / (1 + np.exp(-slope * values))


def test_a_correlation_is_spearmans():
    from scipy.stats import spearmanr

    values, won = along(1, 40, 1.0, seed=7)
    found = rank_correlation(values[0].tolist(), won[0].tolist())
    expected = spearmanr(values[0].ravel(), won[0].ravel()).statistic
    assert found.rho == pytest.approx(expected)
    assert found.low < found.rho < found.high
    pairs = [
        (bad < good) + (bad == good) / 2
        for good in values[0][won[0]] for bad in values[0][~won[0]]
    ]  # fmt: skip
    assert found.auc == pytest.approx(np.mean(pairs))
    assert 0.5 < found.auc_low < found.auc < found.auc_high < 1
    tied = rank_correlation(np.round(values[0]), won[0])
    assert tied.auc == pytest.approx(
        np.mean([
            (bad < good) + (bad == good) / 2
            for good in np.round(values[0])[won[0]] for bad in np.round(values[0])[~won[0]]
        ])
    )  # fmt: skip
    few = [[False] * 36 + [True] * 4]
    assert rank_correlation(values[0][:1], few) is None
    assert rank_correlation([[1.0] * 40], won[0][:1]) is None
    with pytest.raises(ValueError, match="one shape"):
        rank_correlation(values[0], won[0][:1])


@pytest.mark.parametrize(
    ("slope", "draws"),
    [(1.0, 100), *(pytest.param(slope, DRAWS, marks=pytest.mark.long) for slope in (0.0, 1.0))],
)
def test_the_interval_of_a_correlation_covers(slope, draws, monkeypatch):
    monkeypatch.setattr("dzrobot.rollout.evaluation.significance.CORRELATION_DRAWS", 300)
    truth = spearman_of(*along(1, 200_000, slope, seed=8))
    found = [rank_correlation(*pair) for pair in zip(*along(draws, 40, slope, 9), strict=True)]
    covered = np.mean([one.low <= truth <= one.high for one in found])
    # The share that an interval of 92.5 % falls short of once in a thousand such simulations.
    assert covered > 0.925 - 3.1 * np.sqrt(0.925 * 0.075 / draws)


def spearman_of(values, won):
    from scipy.stats import spearmanr

    return spearmanr(values.ravel(), won.ravel()).statistic


@pytest.mark.parametrize("cells", [(40, 3, 12, 45), (90, 1, 6, 3), (10, 0, 0, 5), (0, 8, 21, 171)])
def test_another_implementation_agrees(cells):
    robostats = pytest.importorskip("robostats", reason=WITHOUT)
    both, first_only, second_only, neither = cells
    counts = PairCounts(both=both, first_only=first_only, second_only=second_only, neither=neither)
    # Theirs subtracts the second run, ours the first.
    theirs = robostats.PairedResult(
        policy_id_a="second", policy_id_b="first", n_both_success=both, n_both_failure=neither,
        n_a_success_b_failure=second_only, n_b_success_a_failure=first_only,
        scenario_ids=tuple(map(str, range(counts.episodes))), dropped_from_a=0, dropped_from_b=0,
        protocol_fingerprints_a=(), protocol_fingerprints_b=(), replicates=None,
    )  # fmt: skip
    test = robostats.mcnemar(theirs)
    assert mcnemar_p(first_only, second_only) == pytest.approx(test.p_value, rel=1e-12)
    assert counts.difference == pytest.approx(test.delta, abs=1e-15)
    # Tango's score interval, ours Bonett and Price's: both are about the same difference.
    interval = robostats.paired_difference(theirs)
    assert adjusted_interval(counts) == pytest.approx((interval.lower, interval.upper), abs=0.045)


@pytest.mark.long
def test_another_implementation_agrees_on_rates_and_several_comparisons():
    robostats = pytest.importorskip("robostats", reason=WITHOUT)
    for successes, episodes in ((0, 20), (7, 20), (495, 512), (100, 100)):
        theirs = robostats.wilson(successes, episodes)
        assert wilson(successes, episodes) == pytest.approx((theirs.lower, theirs.upper), abs=1e-12)
    values = {"a": 0.03, "b": 0.001, "c": 0.2, "d": 0.03, "e": 0.9}
    adjusted = robostats.kmodel.adjust(list(values.values()), "holm")
    assert list(holm(values).values()) == pytest.approx(adjusted, rel=1e-12)
    # Miettinen and Nurminen's interval, ours Newcombe's.
    for first, second in (((40, 50), (30, 50)), ((495, 512), (470, 500))):
        ours, theirs = compare_counts(first, second), robostats.unpaired_difference(*second, *first)
        assert ours.difference == pytest.approx(theirs.point, abs=1e-12)
        assert (ours.low, ours.high) == pytest.approx((theirs.lower, theirs.upper), abs=0.01)
