"""``dzrobot plot``: losses and success of runs against the training step."""

import argparse
from pathlib import Path

from dzrobot.commands.options import flags
from dzrobot.progress import waiting
from dzrobot.training.run.training_curves import draw


def _next(arguments: argparse.Namespace) -> str:
    run: Path = arguments.runs[0]
    if (run / "checkpoints").is_dir():
        return "dzrobot eval --checkpoint {run} --steps all --env ENV"
    return "dzrobot report {run}/step_N"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot plot``."""
    parser.description = (
        "Draw losses and success against the training step, several runs in one plot: a PNG for "
        "each, and a page (index.html) with all of them and the table of success."
    )
    parser.add_argument(
        "runs", nargs="+", type=flags.path, metavar="RUN",
        help="folders of training runs, or of `dzrobot eval --steps`",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=flags.output, metavar="DIR", help="default: RUN/plots of the first run"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw, and say where."""
    arguments.run = arguments.runs[0]
    output: Path = arguments.output or arguments.runs[0] / "plots"
    with waiting("drawing"):
        drawn = draw(arguments.runs, output)
    for path in drawn:
        print(path)
    return 0
