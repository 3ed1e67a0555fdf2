"""``dzrobot plan``: what a training run will need, before any weight is read."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from dzrobot.commands import flags
from dzrobot.config import read_config
from dzrobot.errors import ConfigError
from dzrobot.training.recipe import find_recipe, read_recipe
from dzrobot.training.validate.recipe import find_faults
from dzrobot.training.validate.weights import known_network

SUMMARY = "check a training run and tell what it will need"

_PLACEHOLDER = "not-given"
_NOT_NEEDED = (
    "data.train_data_paths", "model.metadata_json_path", "model.model_path",
    "model.tokenizer_path", "runner.resume_dir",
)  # fmt: skip


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


def run(args: argparse.Namespace) -> int:
    """Print the plan; refuse what does not fit."""
    recipe = find_recipe(args.recipe)
    written = read_config(recipe).values
    _, config = read_recipe(args.recipe, [*_placeholders(written), *args.overrides])
    faults = [
        f"  {fault.field}: {fault.message}"
        for fault in find_faults(config, args.gpus)
        if not fault.field.startswith(_NOT_NEEDED) and "_pretrained_path" not in fault.field
    ]
    if faults:
        raise ConfigError("\n".join([f"{recipe} cannot be run:", *faults]))
    base = known_network(config.model)
    if base is None:
        raise ConfigError(
            "no architecture to plan with: give model.preset, or a model.model_path on this machine"
        )
    # Torch only now: faults of the recipe are reported at once.
    from dzrobot.training.planning.plan import check_fits, describe_plan, plan_run

    plan = plan_run(config, base, args.gpus, args.peak_tflops)
    print(describe_plan(plan))
    check_fits(plan, args.memory)
    print(f"fits {args.gpus} x {args.memory:g} GiB")
    return 0


def _placeholders(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values for what a plan does not look at, where the recipe leaves it open."""
    data = values.get("data")
    sources = data.get("train_data_paths") if isinstance(data, dict) else None
    if sources is None:
        yield f"data.train_data_paths={_PLACEHOLDER}"
    for i, entry in enumerate(sources if isinstance(sources, list) else []):
        for name in ("dataset_path", "metadata_json_path"):
            if isinstance(entry, dict) and name not in entry:
                yield f"data.train_data_paths.{i}.{name}={_PLACEHOLDER}"
