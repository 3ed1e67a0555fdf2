"""What is printed of an evaluation: before it what it is, after it the table and what is left."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dzrobot.rollout.evaluation.report import Summary, failures_line, measures_line, table
from dzrobot.rollout.footage import predictions_size


def folder_name(suites: Sequence[str] | None, env: str) -> str:
    """Return what a folder of results is called after: suites, or the last part of an id."""
    return "-".join(suites or ()) or re.split("[/:]", env)[-1]


def conclude(
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
        console.print(times_line(summary.timing), soft_wrap=True, markup=False)
    if busy := busy_line(summary.timing):
        console.print(busy, soft_wrap=True, markup=False)
    if measured := measures_line(summary):
        console.print(f"means over episodes: {measured}", soft_wrap=True, markup=False)
    for case, message in summary.errors[:5]:
        console.print(f"error in {case}: {message}", markup=False, soft_wrap=True)
    if size := predictions_size(output):
        console.print(f"predictions for `dzrobot report`: {size / 1e6:.1f} MB")
    console.print(f"results in {output}", markup=False, soft_wrap=True)
    if summary.complete or (enough and not summary.causes):
        return 0
    causes = [f"{count} {cause}" for cause, count in sorted(summary.causes.items())]
    missing = [f"{summary.total.missing} not run"] if summary.total.missing else []
    console.print(
        f"without a result: {', '.join([*causes, *missing])} (tracebacks of exceptions in "
        f"{output}/errors); the same command runs them.",
        markup=False,
        soft_wrap=True,
    )
    return 1


def times_line(times: Mapping[str, float]) -> str:
    """Return how long plans, actions and steps took; medians over episodes of their medians."""
    shown = [("plan", "per plan"), ("policy", "per action")]
    parts = [
        f"{said} {times[f'{name}_ms_p50']:.1f} ms (95th percentile {times[f'{name}_ms_p95']:.1f})"
        for name, said in shown
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
    return f"protocol {card['protocol']}{changes}"


def say_what_it_is(console: Console, card: Mapping[str, Any], output: Path) -> None:
    """Print how many episodes, under which title, and which assets are not the official ones."""
    console.print(
        f"{card['episodes']} episodes, {title(card)}; results: {output}",
        markup=False,
        soft_wrap=True,
    )
    for suite, assets in card["assets"].items():
        if assets["missing"] or assets["altered"]:
            console.print(
                f"WARNING: {len(assets['missing'])} asset files of {suite} are missing and "
                f"{len(assets['altered'])} are not the official ones: this is no LIBERO score.",
                markup=False,
                soft_wrap=True,
            )
