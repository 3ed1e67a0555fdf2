"""``dzrobot merge``: one table from the shards of one evaluation."""

import argparse

from rich.console import Console

from dzrobot.commands.options import flags
from dzrobot.rollout.evaluation.card import read_card
from dzrobot.rollout.evaluation.evaluate import merge
from dzrobot.rollout.evaluation.planning import RunOptions
from dzrobot.rollout.evaluation.tables import print_conclusion, title

SUMMARY = "put shards of one evaluation together"

NEXT = "dzrobot report {output}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot merge``."""
    parser.add_argument("output", type=flags.output, help="folder for the whole")
    parser.add_argument(
        "parts", type=flags.path, nargs="+", help="folders of `dzrobot eval --shard I/N`"
    )
    flags.declare(parser, RunOptions, only=("allow_other_code",))


def run(arguments: argparse.Namespace) -> int:
    """Merge, print the table, and return 0 if every episode of the evaluation has a result."""
    mixed = bool(arguments.allow_other_code)
    summary = merge(arguments.output, arguments.parts, allow_other_code=mixed)
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    return print_conclusion(console, summary, arguments.output, title(read_card(arguments.output)))
