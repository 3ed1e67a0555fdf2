"""What evaluations found, as tables and lines of a terminal or a log."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dzrobot.errors import counted, in_units, printable
from dzrobot.rollout.evaluation.card import codes_of, listed
from dzrobot.rollout.evaluation.comparison import Comparison, Results
from dzrobot.rollout.evaluation.report import Row, Score, StepScore, Summary, summarize, wilson
from dzrobot.rollout.evaluation.significance import compare_counts
from dzrobot.rollout.records import NOT_STATED, predictions_size

if TYPE_CHECKING:
    # An evaluation reads no results of other programs.
    from dzrobot.rollout.evaluation.foreign import ForeignResult

MOST_ROWS = 200
"""Rows of the final table; further tasks are in :data:`SUMMARY_FILE` and in the report only."""


def table(summary: Summary, title: str) -> Table:
    """Return the final table; it holds no times, so equal runs print equal tables."""
    # As text: names of tasks and settings may hold what rich takes for markup.
    shown = Table(title=Text(title), title_justify="left")
    for name in ("suite", "task"):
        shown.add_column(name, overflow="fold")
    for name in ("success", "rate", "95 % interval", "steps", "errors"):
        shown.add_column(name, justify="right", no_wrap=True)
    few = len(summary.rows) <= MOST_ROWS
    for row in summary.rows:
        if few or row.task_id is None:
            shown.add_row(*map(Text, _cells(row)), end_section=row.task_id is None)
    shown.add_section()
    for row in summary.axes:
        shown.add_row(*map(Text, _cells(row)))
    shown.add_section()
    for whole in (summary.total, summary.distinct):
        if whole is not None:
            shown.add_row(*map(Text, _cells(whole)), style="bold")
    return shown


def failures_line(summary: Summary) -> str:
    """Return how the episodes failed, most frequent first, in one line; empty without failures."""
    counted = sorted(summary.total.failure_classes.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(
        f"{count} {'without a stated reason' if name == NOT_STATED else printable(name)}"
        for name, count in counted
    )


def measures_line(summary: Summary) -> str:
    """Return the averages of what was measured, in one line; empty without any."""
    return ", ".join(
        f"{name} {one.mean:.3g}" + ("" if one.half_width is None else f" ± {one.half_width:.2g}")
        for name, one in summary.measures.items()
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        printable(row.suite),
        "" if row.task_id is None else printable(f"{row.task_id} {row.task}"),
        f"{row.successes}/{row.episodes}",
        "-" if row.rate is None else f"{100 * row.rate:.1f} %",
        f"{100 * row.low:.1f} to {100 * row.high:.1f} %",
        "-" if row.mean_steps is None else f"{row.mean_steps:.0f}",
        f"{row.errors}" + (f" (+{row.missing} to run)" if row.missing else ""),
    )


def scores_table(title: str, column: str, scores: Mapping[str, Score]) -> Table:
    """Return scores as a table, one line each.

    Args:
        title: Of the table.
        column: Heading of the names.
        scores: By name.
    """
    table = Table(title=title, title_justify="left")
    table.add_column(column, overflow="fold")
    for name in ("success", "rate", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in scores.items():
        rate = 100 * score.successes / score.episodes if score.episodes else float("nan")
        low, high = score.interval
        table.add_row(
            name,
            f"{score.successes}/{score.episodes}",
            f"{rate:.1f} %",
            f"{100 * low:.1f} to {100 * high:.1f} %",
        )
    return table


def print_conclusion(
    console: Console, summary: Summary, output: Path, title: str, *, enough: bool = False
) -> int:
    """Print the table and what is left to do; return the exit code.

    Args:
        console: Where to.
        summary: Of the evaluation.
        output: Its folder.
        title: Of the table.
        enough: Whether episodes that were not run are not wanted.
    """
    console.print(table(summary, title))
    if failed := failures_line(summary):
        console.print(f"failed: {failed}", soft_wrap=True, markup=False)
    if summary.total.episodes:
        console.print(_times_line(summary.timing), soft_wrap=True, markup=False)
    if busy := busy_line(summary.timing):
        console.print(busy, soft_wrap=True, markup=False)
    if measured := measures_line(summary):
        console.print(f"means over episodes: {measured}", soft_wrap=True, markup=False)
    if clipped := clipped_line(summary):
        console.print(clipped, soft_wrap=True, markup=False)
    for case, message in summary.errors[:5]:
        console.print(f"error in {case}: {printable(message)}", markup=False, soft_wrap=True)
    for line in policy_lines(summary):
        console.print(line, markup=False, soft_wrap=True)
    if size := predictions_size(output):
        console.print(f"predictions for `dzrobot report`: {in_units(size)}")
    console.print(f"results in {output}", markup=False, soft_wrap=True)
    if summary.complete or (enough and not summary.causes):
        return 0 if summary.acted else 1
    causes = [f"{count} {cause}" for cause, count in sorted(summary.causes.items())]
    missing = [f"{summary.total.missing} not run"] if summary.total.missing else []
    console.print(
        f"without a result: {', '.join([*causes, *missing])} (tracebacks of exceptions in "
        f"{output}/errors); the same command tries them again.",
        markup=False,
        soft_wrap=True,
    )
    return 1


FOREIGN = 0.1
"""Share of clipped state numbers from which the states are other ones than those of training. On
Lift: 0.004 of the bundled policy, 0.25 and 0.4 with two wrong states."""


def clipped_line(summary: Summary) -> str:
    """Return how many state numbers a policy's statistics cut off; empty where it does not say."""
    if summary.clipped is None:
        return ""
    line = f"state numbers beyond the policy's statistics: {100 * summary.clipped.mean:.1f} %"
    if summary.clipped.mean < FOREIGN:
        return line
    return (
        f"{line}: the network saw bounds in their place. Compare unit, order and sign of the state "
        "with the training data: `dzrobot doctor policy`"
    )


_MOST_REASONS = 3
_NUMBERS = re.compile(r"array\(\[.*?(\)|\.{3,})|[-+]?\d[\d.e+-]*")


def policy_lines(summary: Summary) -> list[str]:
    """Return why the policy itself ended episodes, most frequent first; empty where it did not."""
    first: dict[str, str] = {}
    counts = Counter[str]()
    for case, reason in summary.policy_errors:
        # Equal but for their numbers: one reason, shown as the first episode has it.
        kind = _NUMBERS.sub("#", reason)
        counts[kind] += 1
        first.setdefault(kind, f"{case}: {printable(reason, 400)}")
    lines = [
        f"the policy failed in {counted(count, 'episode')}, first in {first[kind]}"
        for kind, count in counts.most_common(_MOST_REASONS)
    ]
    if more := len(counts) - len(lines):
        lines.append(f"and for {counted(more, 'other reason')}: policy_error of records.jsonl")
    if not summary.acted:
        lines.append(
            "Every episode was ended by a fault of the policy, so this is not a score: mend the "
            "policy, and evaluate into another --output."
        )
    return lines


def _times_line(times: Mapping[str, float]) -> str:
    """Return how long plans, actions and steps took; medians over episodes of their medians."""
    shown = [("plan", "per plan"), ("policy", "per action")]
    parts = [
        f"{label} {times[f'{name}_ms_p50']:.1f} ms (95th percentile {times[f'{name}_ms_p95']:.1f})"
        for name, label in shown
        if f"{name}_ms_p50" in times
    ]
    return f"policy {', '.join(parts)}; environment {times['env_ms_p50']:.1f} ms per step"


def busy_line(times: Mapping[str, float]) -> str:
    """Return how busy the evaluation kept its policy; empty where that is not known."""
    if "planning_share" not in times:
        return ""
    busy = times.get("device_busy_share")
    device = "" if busy is None else f"; device busy {100 * busy:.0f} %"
    return (
        f"the policy planned {100 * times['planning_share']:.0f} % of the time, "
        f"{times['plans_per_call']:.2f} plans a call{device}"
    )


def title(card: Mapping[str, Any]) -> str:
    """Return the protocol, and how it was departed from: such a score does not bear its name."""
    changes = f", with {'; '.join(card['changes'])}" if card["changes"] else ""
    codes = max((len(codes) for codes in codes_of(card).values()), default=1)
    mixed = f", by {codes} different codes" if codes > 1 else ""
    return f"protocol {card['protocol']}{changes}{mixed}"


def print_card(console: Console, card: Mapping[str, Any], output: Path) -> None:
    """Print how many episodes, under which title, and which assets are not the official ones."""
    console.print(
        f"{counted(card['episodes'], 'episode')}, {title(card)}; results: {output}",
        markup=False,
        soft_wrap=True,
    )
    for suite, assets in card["assets"].items():
        if assets["missing"] or assets["altered"]:
            console.print(
                f"WARNING: {len(assets['missing'])} asset files of {suite} are missing and "
                f"{len(assets['altered'])} are not the official ones: this is not a LIBERO score.",
                markup=False,
                soft_wrap=True,
            )


def logged_numbers(summary: Summary) -> dict[str, float | int | None]:
    """Return what an experiment logger shows of one evaluation, by metric name."""
    found: dict[str, float | int | None] = {**_rate("eval", summary.total)}
    found |= {"eval/episodes": summary.total.episodes, "eval/errors": summary.total.errors}
    for row in summary.rows:
        found |= _rate("/".join(map(str, ("eval", row.suite, *_task_number(row)))), row)
    return found | {f"time/{name}": value for name, value in summary.timing.items()}


def logged_step(score: StepScore) -> dict[str, float | int | None]:
    """Return what an experiment logger shows of one training step, by metric name."""
    low, high = score.interval
    rate = score.successes / score.episodes if score.episodes else None
    return {"eval/success": rate, "eval/low": low, "eval/high": high}


def _task_number(row: Row) -> tuple[int, ...]:
    return () if row.task_id is None else (row.task_id,)


def _rate(name: str, row: Row) -> dict[str, float | None]:
    return {f"{name}/success": row.rate, f"{name}/low": row.low, f"{name}/high": row.high}


WIDTH = 140
"""Columns of a terminal that the table of a comparison takes; a narrower one folds its lines."""


def print_comparison(console: Console, found: Sequence[Comparison]) -> None:
    """Print every comparison as one line; all have the same first run."""
    wide = Console(file=console.file, width=max(console.width, WIDTH), highlight=False)
    wide.print(comparison_table(found))
    if any(comparison.code != "same" for comparison in found):
        for run in (found[0].first, *(comparison.second for comparison in found)):
            for who, codes in run.codes.items():
                made = f"{run.name}, {who}: dzrobot {listed(codes)}"
                wide.print(made, markup=False, soft_wrap=True)
        wide.print("Where the code differs, the difference is of that as well.")
    for one, two in ((comparison.first, comparison.second) for comparison in found):
        if one.video != two.video:
            wide.print(
                f"{one.name} was planned with --video {one.video}, {two.name} with --video "
                f"{two.video}: the difference is of that as well.", markup=False,
            )  # fmt: skip


def comparison_table(found: Sequence[Comparison]) -> Table:
    """Return every comparison as one line; all have the same first run."""
    first = found[0].first
    table = Table(title=f"against {first.name}, on the same episodes", title_justify="left")
    table.add_column("run", overflow="fold", min_width=12)
    marks_code = any(comparison.code != "same" for comparison in found)
    if marks_code:
        table.add_column("code", no_wrap=True)
    for name in ("pairs", "rate, %", "base, %", "difference", "95 % (bootstrap)", "95 % (adjusted)",
                 "lost", "won", "p (McNemar)", "p (Holm)", "e"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for comparison in found:
        total = comparison.total
        base = (total.both + total.first_only) / total.episodes
        table.add_row(
            comparison.second.name,
            *([comparison.code] if marks_code else []),
            str(total.episodes),
            f"{100 * (base + total.difference):.1f}",
            f"{100 * base:.1f}",
            f"{100 * total.difference:+.1f}",
            # Where all pairs have ended alike, every draw is the same.
            percent_span(comparison.low, comparison.high)
            if comparison.low < comparison.high
            else "-",
            percent_span(*comparison.adjusted),
            str(total.first_only),
            str(total.second_only),
            f"{comparison.p:.3g}",
            f"{comparison.p_holm:.3g}",
            f"{comparison.e:.3g}",
        )
    table.caption = (
        "difference and intervals: percentage points (-: all pairs ended alike). "
        "lost, won: episodes that only the base, only this run solved. e: evidence that may be "
        "looked at after every episode; 20 decides at the 5 % level."
    )
    return table


def unpaired_table(runs: Sequence[Results], what: str, count: tuple[int, int]) -> Table:
    """Return each run's rate beside a count (successes, episodes) of other episodes.

    Args:
        runs: What evaluations found.
        what: Name of the count, for the title.
        count: Successes and episodes.
    """
    table = Table(title=f"against {what}", title_justify="left")
    table.add_column("run", overflow="fold")
    for name in (
        "success",
        "rate, %",
        "95 % (Wilson)",
        "difference",
        "95 % (Newcombe)",
        "p (Boschloo)",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for results in runs:
        won = sum(bool(record.success) for record in results.finished.values())
        own = (won, len(results.finished))
        unpaired = compare_counts(count, own)
        table.add_row(
            results.name, f"{own[0]}/{own[1]}", f"{100 * own[0] / own[1]:.1f}",
            percent_span(*wilson(*own)),
            f"{100 * unpaired.difference:+.1f}", percent_span(unpaired.low, unpaired.high),
            f"{unpaired.p:.3g}",
        )  # fmt: skip
    table.caption = (
        "That count is of other episodes, and perhaps of another protocol. Intervals: percent, and "
        "percentage points of the difference."
    )
    return table


def task_counts(runs: Sequence[Results], result: "ForeignResult") -> Table:
    """Return the tasks that the first run and another program's result have in common."""
    table = Table(title=f"by task, {result.program}: {result.path}", title_justify="left")
    for name in ("suite", "task"):
        table.add_column(name, overflow="fold")
    for name in (*(run.name for run in runs), result.program):
        table.add_column(name, justify="right", overflow="fold")
    summaries = [summarize(run.records.values(), run.cases) for run in runs]
    rates = [
        {(row.suite, row.task_id): f"{row.successes}/{row.episodes}" for row in one.rows}
        for one in summaries
    ]
    shared = 0
    for row in summaries[0].rows:
        count = result.of(row.suite, row.task_id, row.task)
        if count is not None:
            key = (row.suite, row.task_id)
            own = [one.get(key, "-") for one in rates]
            table.add_row(row.suite, f"{row.task_id} {row.task}", *own, f"{count[0]}/{count[1]}")
            shared += 1
    table.caption = (
        f"{len(result.tasks) - shared} of its {len(result.tasks)} tasks are not in "
        f"{runs[0].name}; {result.errors} of its episodes ended with an error and count nowhere."
    )
    return table


def percent_span(low: float, high: float) -> str:
    """Return an interval of rates in percent."""
    return f"{100 * low:.1f} to {100 * high:.1f}"
