"""``dzrobot plan``: what a training run will need, before any weight is read."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import add_damaged, damaged_words
from dzrobot.progress import waiting
from dzrobot.training.recipes.read import PlannedRun, plan_recipe
from dzrobot.training.sft_config import RunnerConfig

SUMMARY = "check a training run and tell what it will need"

_TRIALS = 3
"""Measurements of a few steps each."""

NEXT = "dzrobot train {recipe} {overrides}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot plan``."""
    parser.add_argument("recipe", type=flags.text, help="built-in recipe or YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument(
        "--gpus", type=flags.whole(1, 100_000),
        help="plan for so many GPUs, here or elsewhere (default: one of this machine, if any)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=flags.number(0.001, 100_000),
        help="GiB of one GPU (default: of this machine's; 80 where there is none)",
    )  # fmt: skip
    parser.add_argument(
        "--peak-tflops", type=flags.number(0.001, 1e9),
        help="dense bf16 peak of one GPU (default: of this machine's; 989, an H100's, where there "
        "is none)",
    )  # fmt: skip
    parser.add_argument(
        "--measure", action="store_true",
        help="train a few steps on this machine, in one process, and say how fast they were",
    )  # fmt: skip
    add_damaged(parser)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show where the operations of a sample are",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; refuse what does not fit, and whatever ``dzrobot train`` refuses."""
    words = [*args.overrides, *damaged_words(args)]
    planned = plan_recipe(args.recipe, words, args.gpus or 1)
    config, base = planned.config, planned.network
    # Torch only now: faults of the recipe are reported at once.
    with waiting("loading libraries"):
        from dzrobot.training.cost.memory import GIB
        from dzrobot.training.cost.plan import (
            check_fits,
            describe_plan,
            plan_run,
            run_speed,
            settle,
        )
        from dzrobot.training.cost.speed import PlannedDevices, describe_cost, describe_speed
        from dzrobot.training.run.opening import check_run
        from dzrobot.training.run.plugin import Plugins

    with waiting("opening what the run starts from"):
        opened = check_run(config, Plugins.of(config.runner.plugins), planned.lacking)
    devices = PlannedDevices.of(args.gpus, args.memory, args.peak_tflops)
    config = settle(config, base, devices.count, devices.memory_gib * GIB)
    plan = plan_run(config, base, devices.count)
    print(f"planned for {devices.text}")
    print(describe_plan(plan))
    speed = run_speed(config, base, devices.count, devices.peak_tflops)
    lines = [*describe_speed(speed), *(describe_cost(speed.cost) if args.profile else ())]
    print("\n".join(lines))
    if devices.memory_gib:
        check_fits(plan, devices.memory_gib)
        print(f"fits {devices.count} x {devices.memory_gib:.3g} GiB")
    if args.measure:
        _print_measured(args.recipe, words, config.runner)
    _print_limits(planned, opened)
    return 0


def _print_measured(recipe: str, words: Sequence[str], runner: RunnerConfig) -> None:
    """Train a few steps here, and say how fast they were."""
    from dzrobot.policies.dreamzero.options import chosen_device
    from dzrobot.training.bench.document import BenchSettings
    from dzrobot.training.bench.learning import measure_train
    from dzrobot.training.cost.speed import describe_measured

    settings = BenchSettings(
        recipe=recipe, overrides=tuple(words), device=chosen_device("auto"), repeats=_TRIALS
    )
    with TemporaryDirectory() as folder, waiting("training a few steps"):
        (rates, *_), notes = measure_train(settings, Path(folder))
    print(describe_measured(rates.values, runner.max_steps * runner.global_batch_size))
    print("\n".join(f"  {note}" for note in notes))


def _print_limits(planned: PlannedRun, opened: Sequence[str]) -> None:
    """Say what `dzrobot train` will look at and the plan has not."""
    print("checked as `dzrobot train` does: " + ", ".join(["the recipe", *opened]))
    print("not looked at: other machines and their devices, the network between them, free disk")
    for fault in planned.unread:
        print(f"not checked: {fault.field}: {fault.message}")
