"""What ways to act cost in success and save in time: one table and one plot.

Every set of options is evaluated while time stands still, and once more on the same episodes where
it says how plans are executed that take time. The first set is the base.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dzrobot.errors import ConfigError
from dzrobot.files import write_bytes, write_json
from dzrobot.plots import drawn, new_plot
from dzrobot.rollout.asynchronous.execution import ExecutionOptions
from dzrobot.rollout.evaluation.comparison import Results, compare, read_results
from dzrobot.rollout.evaluation.evaluate import EvaluationSession
from dzrobot.rollout.evaluation.planning import EvaluationRequest
from dzrobot.rollout.evaluation.report import wilson

CURVE_FILE = "curve.json"


@dataclass(frozen=True, kw_only=True)
class OptionSet:
    """One way to act."""

    name: str
    """The options, as they were written."""

    folder: str
    """Name of its results folders."""

    request: EvaluationRequest
    """Its ``execution`` says how plans are executed that take time; None: they take none."""

    ratio: float | None = None
    """Time of its chunks over that of the first set's, measured in one run; None: not measured."""

    chunk_ms: float | None = None
    """Milliseconds of its chunks on this machine; None: not measured."""


class PairedScore(BaseModel):
    """Success of one set, and the episodes on which it and the base disagree."""

    model_config = ConfigDict(frozen=True, strict=True)

    successes: int
    episodes: int
    lost: int
    """Episodes that only the base solved."""

    won: int
    """Episodes that only this set solved."""

    p: float
    """Exact McNemar test against the base."""

    @property
    def rate(self) -> float:
        """Return the share of successes."""
        return self.successes / self.episodes


class CurvePoint(BaseModel):
    """One set of options: what it costs and what it saves."""

    model_config = ConfigDict(frozen=True, strict=True)

    options: str
    ratio: float | None
    chunk_ms: float | None
    latency: str | None
    """Time of a plan in the evaluation where it takes some, as it was written."""

    still: PairedScore
    """While time stands still."""

    timed: PairedScore | None
    """With plans that take time; None: nothing says how long."""


def evaluate_curve(
    session: EvaluationSession, sets: Sequence[OptionSet]
) -> list[CurvePoint] | None:
    """Evaluate every set; return the points, None where an episode has no result yet.

    Args:
        session: Runs the evaluations.
        sets: What is evaluated; the first one is what the others are compared with.
    """
    output = session.parent("a curve")
    still: list[Results] = []
    timed: dict[str, Results] = {}
    for one in sets:
        session.console.print(one.name, markup=False, soft_wrap=True)
        found = _results(session, replace(one.request, execution=None), output / one.folder)
        if found is None:
            return None
        still.append(found)
        if one.request.execution is None:
            continue
        found = _results(session, one.request, output / f"{one.folder}-timed")
        if found is None:
            return None
        timed[one.name] = found
    scores = dict(zip(timed, _paired([*timed.values()]), strict=True))
    points = [
        CurvePoint(
            options=one.name, ratio=one.ratio, chunk_ms=one.chunk_ms, still=score,
            latency=_latency(one.request.execution),
            timed=scores.get(one.name),
        )
        for one, score in zip(sets, _paired(still), strict=True)
    ]  # fmt: skip
    write_json(output / CURVE_FILE, [point.model_dump() for point in points])
    return points


def _results(
    session: EvaluationSession, request: EvaluationRequest, folder: Path
) -> Results | None:
    done = session.run(request, folder, is_tracked=False)
    return read_results(done.folder) if done.summary.complete else None


def _latency(execution: ExecutionOptions | None) -> str | None:
    if execution is None:
        return None
    return "zero" if execution.latency is None else execution.latency.text


def _paired(runs: Sequence[Results]) -> list[PairedScore]:
    """Return the score of each run, beside the first."""
    if not runs:
        return []
    first = runs[0]
    won = sum(bool(record.success) for record in first.finished.values())
    scores = [PairedScore(successes=won, episodes=len(first.finished), lost=0, won=0, p=1.0)]
    for found in compare(runs, any_execution=True) if len(runs) > 1 else ():
        total = found.total
        scores.append(
            PairedScore(
                successes=total.both + total.second_only, episodes=total.episodes,
                lost=total.first_only, won=total.second_only, p=found.p,
            )
        )  # fmt: skip
    return scores


def curve_table(points: Sequence[CurvePoint], title: str) -> Table:
    """Return the points as a table, one line each."""
    # Eighty columns are enough.
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )  # fmt: skip
    table.add_column("options", overflow="fold", min_width=15)
    for name in ("ms", "ratio", "success", "-/+", "p", "latency", "timed", "-/+", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            point.options,
            "-" if point.chunk_ms is None else f"{point.chunk_ms:.0f}",
            "-" if point.ratio is None else f"{point.ratio:.2f}",
            *_cells(point.still),
            point.latency or "-",
            *_cells(point.timed),
        )
    table.caption = (
        "ms: time of a chunk on this machine; ratio: over the first line's, in one run. timed: "
        "success while plans take the latency. -/+: episodes that only the first line, only this "
        "line solved; p: McNemar."
    )
    return table


def _cells(score: PairedScore | None) -> tuple[str, str, str]:
    if score is None:
        return ("-",) * 3
    p = "<.001" if score.p < 0.001 else f"{score.p:.2g}"
    return f"{score.successes}/{score.episodes}", f"{score.lost}/{score.won}", p


def draw_curve(points: Sequence[CurvePoint], title: str, output: Path) -> list[Path]:
    """Draw the time of a chunk here and the success of every set; return a PNG and an SVG.

    A row each, the slowest at the top.

    Raises:
        ConfigError: chunks were not measured.
        MissingDependencyError: matplotlib is not installed.
    """
    known = sorted(
        ((point.chunk_ms, point) for point in points if point.chunk_ms is not None),
        key=lambda pair: pair[0],
    )
    if len(known) < len(points):
        raise ConfigError("chunks were not measured, so there is no time to draw against")
    shown = [point for _, point in known]
    figure, (times, successes) = new_plot(1, 2, height=1.6 + 0.32 * len(known))
    rows = range(len(known))
    bars = times.barh(rows, [ms for ms, _ in known], color="0.7")
    times.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    times.margins(x=0.15)
    times.set_yticks(rows, [point.options for point in shown])
    times.set_xlabel("time of a chunk on this machine, ms")
    for name, mark, shift, scores in (
        ("time stands still", "o", 0.13, [point.still for point in shown]),
        ("plans take time", "s", -0.13, [point.timed for point in shown]),
    ):
        _draw_scores(successes, name, mark, shift, scores)
    successes.set_xlabel("success, 95 % interval (Wilson)")
    successes.set_xlim(-0.03, 1.03)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    for axes in (times, successes):
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title)
    written = []
    for kind, image in drawn(figure).items():
        path = output / f"curve.{kind}"
        write_bytes(path, image)
        written.append(path)
    return written


def _draw_scores(
    axes: Any, name: str, mark: str, shift: float, scores: Sequence[PairedScore | None]
) -> None:
    pairs = [(row + shift, score) for row, score in enumerate(scores) if score is not None]
    ends = [wilson(score.successes, score.episodes) for _, score in pairs]
    rates = [score.rate for _, score in pairs]
    low = [max(0.0, rate - end[0]) for rate, end in zip(rates, ends, strict=True)]
    high = [max(0.0, end[1] - rate) for rate, end in zip(rates, ends, strict=True)]
    axes.errorbar(
        rates, [row for row, _ in pairs], xerr=(low, high), fmt=mark, capsize=3, label=name
    )
