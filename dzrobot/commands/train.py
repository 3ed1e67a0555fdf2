"""``dzrobot train``: fine-tune a checkpoint, in one process, in several, or under torchrun."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dzrobot.commands import say_next
from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import add_damaged, damaged_words
from dzrobot.configuration import field_notes
from dzrobot.errors import ConfigError, StatisticsError
from dzrobot.files import explained, write_json
from dzrobot.progress import progress_bar
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions
from dzrobot.training.data.normalization import measure
from dzrobot.training.recipes.architecture import SourcePlan, source_plans
from dzrobot.training.recipes.check import start_faults
from dzrobot.training.recipes.read import RECIPES, read_recipe
from dzrobot.training.run.launch import end_process, launch, main
from dzrobot.training.sft_config import SFTConfig
from dzrobot.training.tiny.fit_plan import AutoencoderPlan

SMALL = ("tiny_cpu", "mini_lift_cpu")
"""Recipes of small networks, which may start from a new one."""

_METADATA, _WEIGHTS = "model.metadata_json_path", "model.model_path"
_STILL_STEPS, _CLIP_STEPS = 60, 12
"""Updates of a new autoencoder on the way: enough to try the whole way in minutes."""

INSTEAD = {
    "--config-name": "the recipe is the first word: dzrobot train NAME",
    "--config-path": "the recipe is the first word: dzrobot train FILE.yaml",
    "--train-backend": "write parallel.strategy=fsdp, hsdp or ddp",
    "--config": "the recipe is the first word: dzrobot train FILE.yaml",
}
"""Options of other trainers, and what to type here."""


def _next(arguments: argparse.Namespace) -> str:
    if arguments.fields or arguments.list_recipes:
        return "dzrobot plan tiny_cpu"
    if arguments.exported is None:
        return "dzrobot export {run}"
    return "dzrobot eval --checkpoint {exported} --env ENV"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot train``."""
    parser.description = (
        "Fine-tune on LeRobot datasets. On several devices of this machine: --processes N. On\n"
        "several machines: torchrun --nnodes 2 --nproc-per-node 8 training/sft.py RECIPE ..."
    )
    parser.add_argument(
        "recipe",
        type=flags.text,
        nargs="?",
        help="built-in recipe or YAML file; see --list-recipes",
    )
    overrides = parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value",
        help="any field of the recipe; see --fields",
    )  # fmt: skip
    # What a shell may complete a word with; see cli._complete.
    vars(overrides)["completer"] = lambda **_: [f"{note.name}=" for note in field_notes(SFTConfig)]
    parser.add_argument(
        "--processes", type=flags.whole(1, 1024), metavar="N",
        help="start N processes on this machine, one a GPU",
    )  # fmt: skip
    add_damaged(parser)
    parser.add_argument("--fields", action="store_true", help="list every field, and end")
    parser.add_argument("--list-recipes", action="store_true", help="list the recipes, and end")


def run(args: argparse.Namespace) -> int:
    """Train; under torchrun as one of its processes."""
    if args.fields:
        _print_fields()
        return 0
    if args.list_recipes:
        _print_recipes()
        return 0
    if args.recipe is None:
        raise ConfigError(
            "give a recipe: `dzrobot train --list-recipes` lists those that are built in, and a "
            "YAML file of your own is one too"
        )
    words = [args.recipe, *args.overrides, *damaged_words(args)]
    alone = "RANK" not in os.environ
    if args.processes is not None and not alone:
        raise ConfigError("torchrun has started the processes already: leave --processes out")
    if alone:
        words += _begun(args.recipe, words[1:], args.processes or 1)
    code = main(words) if args.processes is None else launch(words, args.processes)
    if code == 0:
        args.run, args.exported = _written(args.recipe, words[1:])
        say_next(NEXT, args)
    if args.processes is not None:
        return code
    if "torch" in sys.modules:
        # See launch.end_process: with process groups open, the interpreter must not be torn down
        # around them.
        end_process(code)
    return code


def _written(recipe: str, overrides: Sequence[str]) -> tuple[Path, Path | None]:
    """Return the folder of a run, and what it has exported last, if anything."""
    _, config = read_recipe(recipe, overrides)
    run = config.runner.output_dir
    return run, max((run / "export").glob("step_*[0-9]"), default=None)


def _begun(recipe: str, overrides: Sequence[str], processes: int) -> Iterator[str]:
    """Make what a run starts from and was not given, in its folder; yield the fields that say so.

    Statistics of one robot's recordings are measured. A small network to start from is made for
    the recipes of small networks alone. Where anything else is wrong, nothing is made.
    """
    _, config = read_recipe(recipe, overrides)
    faults = start_faults(config, processes)
    lacking = {fault.field for fault in faults}
    made = {_METADATA, _WEIGHTS, "model.preset"} if recipe in SMALL else {_METADATA}
    if not lacking or not lacking <= made or not all(fault.not_given for fault in faults):
        return
    (plan,) = source_plans(config)
    folder = config.runner.output_dir / "start"
    metadata = plan.metadata
    if _METADATA in lacking or metadata is None:
        metadata = folder / "metadata.json"
        yield f"{_METADATA}={metadata}"
        _measure(metadata, plan, config)
    if _WEIGHTS in lacking:
        yield f"{_WEIGHTS}={folder / 'weights'}"
        _initialize(folder / "weights", metadata, plan, config)


def _measure(metadata: Path, plan: SourcePlan, config: SFTConfig) -> None:
    if metadata.is_file():
        print(f"statistics: {metadata}, measured before")
        return
    # With its films, so that only what can be trained on is measured.
    options = ReaderOptions.of(config.data)
    readers = [DatasetReader(path, plan.embodiment, options) for path in plan.paths]
    with progress_bar("measuring statistics") as advance:
        entry = measure(
            readers, plan.embodiment, advance,
            per_step=bool(config.model.relative_action_per_horizon),
        )  # fmt: skip
    with explained(f"write the statistics to {metadata}", StatisticsError):
        metadata.parent.mkdir(parents=True, exist_ok=True)
        write_json(metadata, {plan.embodiment.tag: entry})
    print(f"statistics: {metadata}, measured on {', '.join(plan.paths)} (none were given)")


def _initialize(weights: Path, metadata: Path, plan: SourcePlan, config: SFTConfig) -> None:
    if weights.is_dir():
        print(f"start weights: {weights}, made before")
        return
    # Here, as help needs none of it.
    from dzrobot.training.tiny.init import FittedTo, write_fitted_checkpoint

    fit = AutoencoderPlan(
        still_steps=_STILL_STEPS, clip_steps=_CLIP_STEPS, held_out=config.data.holdout_episodes,
        seed=config.runner.seed, episodes=config.data.episodes, damaged=config.data.on_corrupt,
    )  # fmt: skip
    target = FittedTo(
        embodiment=plan.embodiment, datasets=[Path(path) for path in plan.paths], metadata=metadata
    )
    write_fitted_checkpoint(weights, target, fit)
    print(
        f"start weights: {weights}, a small new network (none were given), its autoencoder fitted "
        f"in {_STILL_STEPS} + {_CLIP_STEPS} steps; `dzrobot init` fits it for longer"
    )


def _print_fields() -> None:
    for note in field_notes(SFTConfig):
        print(f"{note.name}  ({note.type}; default: {note.default})")
        print(f"    {' '.join(note.meaning.split())}")


def _print_recipes() -> None:
    for path in sorted(RECIPES.glob("*.yaml")):
        head = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        print(f"{path.stem}\n    {head}")
