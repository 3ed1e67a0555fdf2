"""From records to a summary: rates, their uncertainty, and what is still missing."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from dzrobot.files import write_json
from dzrobot.rollout.episode import Measures, percentiles
from dzrobot.rollout.evaluation.significance import Z_95
from dzrobot.rollout.policy_use import RunUse, shares
from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.rollout.records import Record, ordered, storing

SUMMARY_FILE = "summary.json"

STEPS_FILE = "steps.json"
"""In the folder of an evaluation over training steps: one entry for every step."""

SWEEP_FILE = "sweep.json"
"""In the folder of a sweep: see :class:`Sweep`."""


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a success rate; (0, 1) without episodes."""
    if episodes == 0:
        return 0.0, 1.0
    rate, square = successes / episodes, Z_95**2
    center = rate + square / (2 * episodes)
    spread = Z_95 * math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes**2))
    scale = 1 + square / episodes
    # Exact at the ends, where rounding would leave a trace.
    low = 0.0 if successes == 0 else (center - spread) / scale
    high = 1.0 if successes == episodes else (center + spread) / scale
    return low, high


@dataclass(frozen=True, kw_only=True)
class Row:
    """Successes of a task, a suite, or all."""

    suite: str
    task_id: int | None
    """None for a total."""

    task: str
    successes: int
    episodes: int
    """Episodes with a result."""

    errors: int
    missing: int
    """Episodes of the run that have neither result nor error yet."""

    low: float
    high: float
    """95 % Wilson interval of the success rate."""

    mean_steps: float | None
    """Mean number of steps of the successes."""

    failure_classes: Mapping[str, int]
    """How many episodes failed how; errors are counted too."""

    @property
    def rate(self) -> float | None:
        """Return successes per episode, None without episodes."""
        return self.successes / self.episodes if self.episodes else None


class Score(BaseModel):
    """Successes of one of several evaluations."""

    model_config = ConfigDict(frozen=True, strict=True)

    successes: int
    episodes: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % Wilson interval of the rate."""
        return wilson(self.successes, self.episodes)

    @classmethod
    def of(cls, summary: "Summary", **own: Any) -> Self:
        """Return the score of an evaluation; ``own`` says which it is."""
        return cls(successes=summary.total.successes, episodes=summary.total.episodes, **own)


class StepScore(Score):
    """Success at one training step."""

    step: int


class SweepScore(Score):
    """Success of one of several policies."""

    policy: str
    """Checkpoint, or name of a policy."""

    selected: bool = False
    """Whether it was the best: its score is then too high for it."""


class Sweep(BaseModel):
    """Several policies on the same episodes, and the best of them on others."""

    model_config = ConfigDict(frozen=True, strict=True)

    scores: tuple[SweepScore, ...]
    confirmation: SweepScore | None = None
    """Score of the selected one, on episodes that had no part in its selection."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Mean of one measure over the episodes that have it."""

    mean: float
    half_width: float | None
    """Half the width of the 95 % interval of the mean; None of a single episode."""

    episodes: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What an evaluation found."""

    rows: tuple[Row, ...]
    """Tasks, then suites if there are several."""

    axes: tuple[Row, ...]
    """A total of every axis along which tasks are harder than others; ``suite`` names it."""

    total: Row
    distinct: Row | None
    """The total without repeated episodes; None where nothing is repeated."""

    timing: Mapping[str, float]
    """Milliseconds, and shares of the time; differs from run to run, unlike everything above."""

    errors: tuple[tuple[str, str], ...]
    """EpisodeSpec and message of every episode without a result."""

    causes: Mapping[str, int]
    """How many of these by cause: as the environment states it (a hardware fault, discarded by the
    operator), or ``exception``."""

    measures: Mapping[str, Average] = field(default_factory=dict)
    """Where time passed while the policy thought."""

    policy_errors: tuple[tuple[str, str], ...] = ()
    """Name and reason of every episode that a fault of the policy ended: what it returned was
    refused, or it raised after its first action."""

    clipped: Average | None = None
    """Share of an episode's state numbers that lie clearly beyond the policy's statistics. None: no
    episode says it."""

    @property
    def acted(self) -> bool:
        """Return whether some episode ended otherwise than by a fault of the policy."""
        return not self.policy_errors or len(self.policy_errors) < self.total.episodes

    @property
    def complete(self) -> bool:
        """Return whether every episode has a result."""
        return not self.total.errors and not self.total.missing

    def results(self) -> dict[str, Any]:
        """Return what is the same whenever the same run is repeated, as plain values."""
        rows = {"tasks": self.rows, "total": [self.total]}
        rows["distinct"] = [self.distinct] if self.distinct else []
        rows |= {"axes": self.axes} if self.axes else {}
        found: dict[str, Any] = {
            kind: [{**asdict(row), "rate": row.rate} for row in some] for kind, some in rows.items()
        }
        if self.clipped is not None:
            found["clipped"] = asdict(self.clipped)
        if self.measures:
            found["measures"] = {name: asdict(one) for name, one in self.measures.items()}
        return found


def summarize(
    records: Iterable[Record],
    cases: Sequence[EpisodeSpec],
    uses: Sequence[RunUse] = (),
    axes: Mapping[str, Container[tuple[str, int]]] = MappingProxyType({}),
) -> Summary:
    """Return the summary of ``cases``, of which ``records`` tells as far as they were run.

    Args:
        records: In any order.
        cases: All of the evaluation, or of the part that is summarized.
        uses: How busy its runs kept the policy.
        axes: Tasks, as (suite, number), of every axis along which some are harder.
    """
    listed = ordered(records, cases)
    known = {record.case: record for record in listed}
    suites: dict[str, dict[int, list[EpisodeSpec]]] = {}
    for case in cases:
        suites.setdefault(case.suite, {}).setdefault(case.task_id, []).append(case)
    rows = []
    for suite, tasks in suites.items():
        rows += [_row(suite, task, known, tasks[task]) for task in sorted(tasks)]
        if len(suites) > 1:
            rows.append(_row(suite, None, known, [case for case in cases if case.suite == suite]))
    along = {
        axis: [case for case in cases if (case.suite, case.task_id) in harder]
        for axis, harder in axes.items()
    }
    once = [case for case in cases if case.repeat_of is None]
    done = [record for record in listed if record.error is None]
    return Summary(
        rows=tuple(rows),
        axes=tuple(_row(f"axis {axis}", None, known, own) for axis, own in along.items() if own),
        total=_row("all", None, known, cases),
        distinct=None if len(once) == len(cases) else _row("distinct", None, known, once),
        timing={**_timing(done), **shares(uses)},
        errors=tuple((r.case, r.error) for r in listed if r.error is not None),
        causes=Counter(r.ended or "exception" for r in listed if r.error is not None),
        measures=averages([(r.steps or 0, r.measures) for r in done if r.measures]),
        policy_errors=tuple((r.case, r.policy_error) for r in done if r.policy_error is not None),
        clipped=_average([r.clipped for r in done if r.clipped is not None]),
    )


def write_summary(folder: Path, summary: Summary, card: Mapping[str, Any]) -> None:
    """Write summary.json: results, then times, then the card."""
    content = {
        "complete": summary.complete,
        "results": summary.results(),
        "errors": dict(summary.errors),
        "causes": dict(sorted(summary.causes.items())),
        "timing": dict(summary.timing),
        "card": dict(card),
    }
    with storing(folder):
        write_json(folder / SUMMARY_FILE, content)


def _row(
    suite: str, task: int | None, records: Mapping[str, Record], cases: Sequence[EpisodeSpec]
) -> Row:
    own = [records[case.name] for case in cases if case.name in records]
    done = [record for record in own if record.error is None]
    won = [record for record in done if record.success]
    steps = [record.steps for record in won if record.steps is not None]
    low, high = wilson(len(won), len(done))
    return Row(
        suite=suite,
        task_id=task,
        task="" if task is None else next((r.task for r in done if r.task is not None), ""),
        successes=len(won),
        episodes=len(done),
        errors=len(own) - len(done),
        missing=len(cases) - len(own),
        low=low,
        high=high,
        mean_steps=sum(steps) / len(steps) if steps else None,
        failure_classes=dict(sorted(Counter(filter(None, (r.failed_by for r in own))).items())),
    )


def _timing(records: Sequence[Record]) -> dict[str, float]:
    """Return medians over episodes of each episode's own median and 95th percentile."""
    found: dict[str, float] = {"episodes_wall_s": sum(r.wall_s or 0.0 for r in records)}
    for name, times in (
        ("policy_ms", [r.policy_ms for r in records if r.policy_ms]),
        ("plan_ms", [r.plan_ms for r in records if r.plan_ms]),
        ("env_ms", [r.env_ms for r in records if r.env_ms]),
    ):
        if name == "plan_ms" and not times:
            continue
        for kind in ("p50", "p95"):
            found[f"{name}_{kind}"] = percentiles([t[kind] for t in times])["p50"]
    return found


AVERAGED = (
    "seconds",
    "idle_ratio",
    "stale_ratio",
    "late",
    "reaction_mean_s",
    "reaction_p95_s",
    "seam_jump",
    "jerk",
    "smoothness",
    "path_ratio",
)
"""Measures of a summary. ``seconds``: simulated time of the episode; ``idle_ratio`` and
``stale_ratio``: held and stale steps per step; the rest as in :class:`Measures`."""


def averages(measured: Sequence[tuple[int, Measures]]) -> dict[str, Average]:
    """Return the mean of every measure.

    Args:
        measured: Steps and measures of every episode.
    """
    found: dict[str, Average] = {}
    rows = [_measured(steps, one) for steps, one in measured if steps]
    for name in AVERAGED:
        values = [value for row in rows if (value := row[name]) is not None]
        if (average := _average(values)) is not None:
            found[name] = average
    return found


def _average(values: Sequence[float]) -> Average | None:
    if not values:
        return None
    spread = None
    if len(values) > 1:
        spread = Z_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Average(mean=float(np.mean(values)), half_width=spread, episodes=len(values))


def _measured(steps: int, one: Measures) -> dict[str, float | None]:
    derived = {
        "seconds": steps / one.hz,
        "idle_ratio": one.held_steps / steps,
        "stale_ratio": one.stale_steps / steps,
    }
    return {name: value for name, value in {**vars(one), **derived}.items() if name in AVERAGED}
