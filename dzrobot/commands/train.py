"""``dzrobot train``: fine-tune a checkpoint, in this process or under torchrun."""

import argparse
import sys

from dzrobot.commands import flags
from dzrobot.training.launch import leave, main

SUMMARY = "fine-tune a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot train``."""
    parser.description = (
        "Trains in one process. On several devices:\n"
        "  torchrun --nproc-per-node 8 training/sft.py RECIPE section.field=value ...\n"
        "  torchrun --nproc-per-node 8 -m dzrobot.cli train RECIPE section.field=value ..."
    )
    parser.add_argument("recipe", type=flags.text, help="built-in recipe or YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")


def run(args: argparse.Namespace) -> int:
    """Train; under torchrun as one of its processes."""
    code = main([args.recipe, *args.overrides])
    if "torch" in sys.modules:
        # See launch.leave: with process groups open, the interpreter must not be torn down around
        # them.
        leave(code)
    return code
