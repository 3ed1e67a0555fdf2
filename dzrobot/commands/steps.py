"""Success against training step: `dzrobot eval --checkpoint RUN --steps all`."""

import argparse
from pathlib import Path

from rich.console import Console

from dzrobot.commands.candidates import SELECTED, One, evaluate_candidates, scores_table
from dzrobot.commands.options.tracking import numbers_of_step, tracked
from dzrobot.commands.results import folder_name
from dzrobot.commands.variants import Variant
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.files import write_json
from dzrobot.rollout.evaluation.report import STEPS_FILE, StepScore


def listed_steps(run: Path, wanted: str) -> list[tuple[int, Path]]:
    """Return the training checkpoints of a run that ``wanted`` names, oldest first.

    Args:
        run: ``runner.output_dir`` of a training run.
        wanted: ``all``, or steps as ``1000,2000``.

    Raises:
        CheckpointError: There is none, or not the one that is named.
        ConfigError: ``wanted`` is neither.
    """
    from dzrobot.training.run.checkpoint import complete_checkpoints

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
    one: One,
) -> int:
    """Evaluate each step on the same episodes; print and keep the table; return the exit code.

    Args:
        console: Where to.
        arguments: Those of `dzrobot eval`; ``checkpoint`` is the run.
        one: Runs one evaluation; returns what it found, its folder and the title of its table.
    """
    if arguments.checkpoint is None:
        raise ConfigError("--steps needs --checkpoint RUN, the folder of a training run")
    run = Path(arguments.checkpoint)
    whole = arguments.output or run / "evaluations" / folder_name(
        arguments.suite, arguments.env or "lift"
    )
    found = {f"step {step}": (step, path) for step, path in listed_steps(run, arguments.steps)}
    candidates = {
        name: Variant(checkpoint=str(path), output=whole / f"step_{step:08d}", is_tracked=False)
        for name, (step, path) in found.items()
    }
    scores: list[StepScore] = []
    complete = True
    with tracked(arguments.wandb, whole, {"checkpoint": arguments.checkpoint}) as tell:
        for name, summary in evaluate_candidates(console, candidates, one):
            score = StepScore.of(summary, step=found[name][0])
            scores.append(score)
            complete = complete and summary.complete
            write_json(whole / STEPS_FILE, [score.model_dump() for score in scores])
            tell(score.step, numbers_of_step(score))
    title = f"success by training step, {SELECTED}"
    console.print(scores_table(title, "step", {str(score.step): score for score in scores}))
    console.print(
        f"A checkpoint picked by this table has a score {SELECTED}: too high for it. Measure it "
        f"once more on others, as `dzrobot sweep` does. `dzrobot plot {run}` draws the table; "
        f"results in {whole}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0 if complete else 1
