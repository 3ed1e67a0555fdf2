"""Several policies on the same episodes: what `eval --steps` and `sweep` have in common."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dzrobot.commands.variants import Variant
from dzrobot.rollout.evaluation.report import Score, Summary

SELECTED = "selected on these episodes"
"""What the score of a policy that was picked by its score has to be called."""

One = Callable[[Variant], tuple[Summary, Path, str]]
"""Runs one evaluation; returns what it found, its folder and the title of its table."""


def evaluate_candidates(
    console: Console, candidates: Mapping[str, Variant], one: One
) -> Iterator[tuple[str, Summary]]:
    """Evaluate one after the other; yield the name and what was found of each.

    Args:
        console: Where to it is said which one is evaluated.
        candidates: What each has of its own, by its name.
        one: Runs one evaluation.
    """
    for name, variant in candidates.items():
        console.print(name, highlight=False, markup=False, soft_wrap=True)
        yield name, one(variant)[0]


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
            f"{rate:.1f}",
            f"{100 * low:.1f} to {100 * high:.1f}",
        )
    return table
