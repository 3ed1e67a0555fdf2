"""``dzrobot eval --wandb PROJECT``: what was found, on a page of Weights & Biases."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.rollout.evaluation.report import Row, StepScore, Summary
from dzrobot.training.run.loggers import WandbLogger, check_wandb

Tell = Callable[[int, Mapping[str, float | int | None]], None]
"""Takes a step and its numbers."""


def add_tracking(group: Any) -> None:
    """Declare ``--wandb``."""
    group.add_argument(
        "--wandb", type=flags.text, metavar="PROJECT",
        help="also show what was found, and the card, in this Weights & Biases project",
    )  # fmt: skip


def check_tracking(arguments: argparse.Namespace) -> None:
    """Refuse ``--wandb`` without the package, before anything is loaded.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if arguments.wandb is not None:
        check_wandb("--wandb")


@contextmanager
def tracked(project: str | None, folder: Path, settings: Mapping[str, Any]) -> Iterator[Tell]:
    """Yield what takes the numbers for the page of ``folder``; without a project, nothing happens.

    Args:
        project: Of Weights & Biases. None: nothing is shown.
        folder: Of the results.
        settings: Shown beside the numbers.
    """
    if project is None:
        yield lambda _, __: None
        return
    sink = WandbLogger(project, folder, settings)
    try:
        yield sink.write
    finally:
        sink.close()


def numbers_of(summary: Summary) -> dict[str, float | int | None]:
    """Return what the page of one evaluation shows."""
    found: dict[str, float | int | None] = {**_rate("eval", summary.total)}
    found |= {"eval/episodes": summary.total.episodes, "eval/errors": summary.total.errors}
    for row in summary.rows:
        found |= _rate("/".join(map(str, ("eval", row.suite, *_task(row)))), row)
    return found | {f"time/{name}": value for name, value in summary.timing.items()}


def numbers_of_step(score: StepScore) -> dict[str, float | int | None]:
    """Return what the page of an evaluation over training steps shows of one of them."""
    low, high = score.interval
    rate = score.successes / score.episodes if score.episodes else None
    return {"eval/success": rate, "eval/low": low, "eval/high": high}


def _task(row: Row) -> tuple[int, ...]:
    return () if row.task_id is None else (row.task_id,)


def _rate(name: str, row: Row) -> dict[str, float | None]:
    return {f"{name}/success": row.rate, f"{name}/low": row.low, f"{name}/high": row.high}
