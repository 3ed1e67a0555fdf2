"""``dzrobot train``: fine-tune a checkpoint, in one process, in several, or under torchrun."""

import argparse
import os
import sys

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import add_damaged, damaged_words
from dzrobot.configuration import field_notes
from dzrobot.errors import ConfigError
from dzrobot.training.recipes.read import RECIPES
from dzrobot.training.run.launch import end_process, launch, main
from dzrobot.training.sft_config import SFTConfig

INSTEAD = {
    "--config-name": "the recipe is the first word: dzrobot train NAME",
    "--config-path": "the recipe is the first word: dzrobot train FILE.yaml",
    "--train-backend": "write parallel.strategy=fsdp, hsdp or ddp",
    "--config": "the recipe is the first word: dzrobot train FILE.yaml",
}
"""Options of other trainers, and what to type here."""


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
    if args.processes is not None:
        if "RANK" in os.environ:
            raise ConfigError("torchrun has started the processes already: leave --processes out")
        return launch(words, args.processes)
    code = main(words)
    if "torch" in sys.modules:
        # See launch.end_process: with process groups open, the interpreter must not be torn down
        # around them.
        end_process(code)
    return code


def _print_fields() -> None:
    for note in field_notes(SFTConfig):
        print(f"{note.name}  ({note.type}; default: {note.default})")
        print(f"    {' '.join(note.meaning.split())}")


def _print_recipes() -> None:
    for path in sorted(RECIPES.glob("*.yaml")):
        head = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        print(f"{path.stem}\n    {head}")
