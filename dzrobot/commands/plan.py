"""``dzrobot plan``: what a training run will need, before any weight is read."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import add_damaged, damaged_words
from dzrobot.training.recipes.read import PlannedRun, plan_recipe

SUMMARY = "check a training run and tell what it will need"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot plan``."""
    parser.add_argument("recipe", type=flags.text, help="built-in recipe or YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument(
        "--gpus", type=flags.whole(1, 100_000), default=1, help="devices (default: 1)"
    )
    parser.add_argument(
        "--memory",
        type=flags.number(0.001, 100_000),
        default=80,
        help="GiB of one device (default: 80)",
    )
    parser.add_argument(
        "--peak-tflops",
        type=flags.number(0.001, 1e9),
        default=989.0,
        help="dense bf16 peak of one device (H100: 989)",
    )
    add_damaged(parser)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show where the operations of a sample are",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; refuse what does not fit, and whatever ``dzrobot train`` refuses."""
    planned = plan_recipe(args.recipe, [*args.overrides, *damaged_words(args)], args.gpus)
    config, base = planned.config, planned.network
    # Torch only now: faults of the recipe are reported at once.
    from dzrobot.training.cost.memory import GIB
    from dzrobot.training.cost.plan import check_fits, describe_plan, plan_run, run_speed, settle
    from dzrobot.training.cost.speed import describe_cost, describe_speed
    from dzrobot.training.run.opening import check_run
    from dzrobot.training.run.plugin import Plugins

    check_run(config, Plugins.of(config.runner.plugins), planned.lacking)
    config = settle(config, base, args.gpus, args.memory * GIB)
    plan = plan_run(config, base, args.gpus)
    print(describe_plan(plan))
    speed = run_speed(config, base, args.gpus, args.peak_tflops)
    lines = [*describe_speed(speed), *(describe_cost(speed.cost) if args.profile else ())]
    print("\n".join(lines))
    check_fits(plan, args.memory)
    print(f"fits {args.gpus} x {args.memory:g} GiB")
    _print_limits(planned, f"{args.gpus} x {args.memory:g} GiB")
    return 0


def _print_limits(planned: PlannedRun, devices: str) -> None:
    """Say what `dzrobot train` will look at and the plan has not."""
    opened = [what for what in ("weights", "data") if what not in planned.lacking]
    print("checked as `dzrobot train` does: " + ", ".join(["the recipe", *opened]))
    print(f"not known without the machine: that it has {devices}, its network, its free disk")
    for fault in planned.unread:
        print(f"not checked: {fault.field}: {fault.message}")
