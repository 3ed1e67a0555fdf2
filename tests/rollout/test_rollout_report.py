"""Rates and their intervals, against published numbers."""

from dataclasses import fields, replace

import pytest

from dzrobot.rollout.evaluation.report import summarize, wilson
from dzrobot.rollout.evaluation.tables import clipped_line, failures_line
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes
from dzrobot.rollout.records import Record

CASES = plan_episodes(
    EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 1), episodes=4)
)


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        (495, 512, 94.75, 97.92), (394, 500, 75.0, 82.2), (484, 500, 94.9, 98.0),
        (1936, 2000, 95.9, 97.5), (48, 50, 86.5, 98.9), (9, 10, 59.6, 98.2),
        (0, 10, 0.0, 27.75), (10, 10, 72.25, 100.0), (0, 0, 0.0, 100.0),
    ],
)  # fmt: skip
def test_wilson(successes, episodes, low, high):
    found = [100 * bound for bound in wilson(successes, episodes)]
    digits = 0.006 if low in (94.75, 0.0, 72.25) else 0.06
    assert found == pytest.approx([low, high], abs=digits)


def record(case, *, success=None, error=None, steps=5):
    blank = dict.fromkeys(field.name for field in fields(Record))
    own = {name: getattr(case, name) for name in ("env", "suite", "task_id", "episode", "seed")}
    times = {"p50": 1.0, "p95": 2.0}
    result = {} if error else {
        "success": success, "steps": steps, "task": f"t{case.task_id}", "ended": "time limit",
        "action_sha256": "a", "policy_ms": times, "env_ms": times, "wall_s": 1.0,
    }  # fmt: skip
    return Record(**{**blank, **own, **result, "case": case.name, "error": error})


def test_errors_and_missing_episodes_are_no_failures():
    first, second = CASES[:4], CASES[4:]
    records = [record(case, success=True, steps=10 + case.episode) for case in first[:3]]
    records += [record(first[3], error="it broke"), record(second[0], success=False)]
    summary = summarize(reversed(records), CASES)
    rows = [(r.task_id, r.successes, r.episodes, r.errors, r.missing) for r in summary.rows]
    assert rows == [(0, 3, 3, 1, 0), (1, 0, 1, 0, 3)]
    total = summary.total
    assert (total.successes, total.episodes, total.errors, total.missing) == (3, 4, 1, 3)
    assert (total.low, total.high) == wilson(3, 4)
    assert summary.rows[0].mean_steps == 11
    assert summary.errors == ((first[3].name, "it broke"),)
    assert not summary.complete


def test_failures_are_counted_by_class():
    lost = replace(record(CASES[0], success=True), failure_class="goal held, then lost")
    dropped = [replace(record(case, success=False), failure_class="dropped") for case in CASES[1:3]]
    untold, broken = record(CASES[3], success=False), record(CASES[4], error="it broke")
    summary = summarize([lost, *dropped, untold, broken], CASES)
    assert summary.total.failure_classes == {"dropped": 2, "error": 1, "not stated": 1}
    assert summary.rows[1].failure_classes == {"error": 1}
    assert failures_line(summary) == "2 dropped; 1 error; 1 without a stated reason"
    assert summary.results()["total"][0]["failure_classes"] == summary.total.failure_classes


def test_clipped_states_are_averaged_and_told_below_the_table():
    def found(*shares):
        listed = zip(CASES, shares, strict=False)
        rows = [replace(record(case, success=False), clipped=share) for case, share in listed]
        return summarize(rows, CASES)

    assert clipped_line(found()) == ""
    assert clipped_line(found(None, None)) == ""
    few = found(0.0, 0.008, None)
    assert few.clipped.episodes == 2
    assert clipped_line(few) == "state numbers beyond the policy's statistics: 0.4 %"
    assert few.results()["clipped"]["mean"] == 0.004
    assert "doctor policy" in clipped_line(found(0.4, 0.25))


def test_repeats_are_counted_and_counted_apart():
    cases = plan_episodes(EvalSpec(protocol=PROTOCOLS["rlinf-may"], suites=("libero_spatial",)))
    records = [record(case, success=case.repeat_of is None) for case in cases]
    summary = summarize(records, cases)
    assert (summary.total.successes, summary.total.episodes) == (448, 512)
    assert summary.distinct is not None
    assert (summary.distinct.successes, summary.distinct.episodes) == (448, 448)
    assert summary.complete
