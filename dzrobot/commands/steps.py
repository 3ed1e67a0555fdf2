"""Success against training step: `dzrobot eval --checkpoint RUN --steps all`."""

import argparse
from collections.abc import Callable
from copy import copy
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dzrobot.commands.results import folder_name
from dzrobot.commands.tracking import numbers_of_step, tracked
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.files import write_json
from dzrobot.rollout.evaluation.report import STEPS_FILE, StepScore, Summary

SELECTED = "selected on these episodes"
"""What the score of a step that was picked by its score has to be called."""


def listed_steps(run: Path, wanted: str) -> list[tuple[int, Path]]:
    """Return the training checkpoints of a run that ``wanted`` names, oldest first.

    Args:
        run: ``runner.output_dir`` of a training run.
        wanted: ``all``, or steps as ``1000,2000``.

    Raises:
        CheckpointError: There is none, or not the one that is named.
        ConfigError: ``wanted`` is neither.
    """
    from dzrobot.training.checkpoint import complete_checkpoints

    found = {saved.step: saved.path for saved in complete_checkpoints(run / "checkpoints")}
    if not found:
        raise CheckpointError(
            f"{run} holds no training checkpoint: --checkpoint names a run (runner.output_dir), "
            "whose checkpoints/step_N are kept by checkpoint.keep_last_k"
        )
    if wanted == "all":
        return sorted(found.items())
    if not all(part.isascii() and part.isdecimal() for part in wanted.split(",")):
        raise ConfigError(f"--steps {wanted}: write all, or numbers such as 1000,2000")
    steps = sorted({int(part) for part in wanted.split(",")})
    if lost := [step for step in steps if step not in found]:
        raise CheckpointError(f"{run} has no checkpoint of step {lost[0]}; it has {preview(found)}")
    return [(step, found[step]) for step in steps]


def evaluate_steps(
    console: Console,
    arguments: argparse.Namespace,
    one: Callable[[argparse.Namespace], Summary],
) -> int:
    """Evaluate each step on the same episodes; print and keep the table; return the exit code.

    Args:
        console: Where to.
        arguments: Those of `dzrobot eval`; ``checkpoint`` is the run.
        one: Evaluates one checkpoint into ``output``.
    """
    if arguments.checkpoint is None:
        raise ConfigError("--steps needs --checkpoint RUN, the folder of a training run")
    run = Path(arguments.checkpoint)
    whole = arguments.output or run / "evaluations" / folder_name(
        arguments.suite, arguments.env or "lift"
    )
    steps, scores, complete = listed_steps(run, arguments.steps), [], True
    with tracked(arguments.wandb, whole, {"checkpoint": arguments.checkpoint}) as tell:
        for step, folder in steps:
            console.print(f"step {step}", highlight=False)
            own = copy(arguments)
            own.checkpoint, own.output = str(folder), whole / f"step_{step:08d}"
            own.steps = own.wandb = None
            summary = one(own)
            total, complete = summary.total, complete and summary.complete
            score = StepScore(step=step, successes=total.successes, episodes=total.episodes)
            scores.append(score)
            write_json(whole / STEPS_FILE, [score.model_dump() for score in scores])
            tell(step, numbers_of_step(score))
    console.print(_table(scores))
    console.print(
        f"A checkpoint picked by this table has a score {SELECTED}: too high for it. Measure it "
        f"once more on others (--seed). `dzrobot plot {run}` draws the table; results in {whole}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0 if complete else 1


def _table(scores: list[StepScore]) -> Table:
    table = Table(title=f"success by training step, {SELECTED}", title_justify="left")
    for name in ("step", "success", "rate", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for score in scores:
        rate = 100 * score.successes / score.episodes if score.episodes else float("nan")
        low, high = score.interval
        table.add_row(
            str(score.step),
            f"{score.successes}/{score.episodes}",
            f"{rate:.1f}",
            f"{100 * low:.1f} to {100 * high:.1f}",
        )
    return table
