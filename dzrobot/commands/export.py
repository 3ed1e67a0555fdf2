"""``dzrobot export``: a training checkpoint of a run as a checkpoint that a policy opens."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.progress import waiting

NEXT = "dzrobot eval --checkpoint {output} --env ENV"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Write the network of one training checkpoint, adapters merged, as the run itself does at "
        "its end. What the run did not train comes from the checkpoint it started from."
    )
    parser.add_argument("run", type=flags.path, help="runner.output_dir of a training run")
    parser.add_argument(
        "--step",
        type=flags.whole(0, 10**15),
        metavar="N",
        help="which (default: the newest whole one)",
    )
    parser.add_argument(
        "--output", type=flags.output, metavar="DIR", help="default: RUN/export/step_N"
    )
    parser.add_argument(
        "--base", type=flags.text, nargs="+", default=[], metavar="PATH",
        help="checkpoint the run started from, where that has been moved",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Export, and say what was written."""
    with waiting("loading libraries"):
        from dzrobot.training.run.checkpoint import find_checkpoint, step_folder
        from dzrobot.training.run.export import export_saved

    run, step = arguments.run, arguments.step
    with waiting("exporting"):
        saved = find_checkpoint(run if step is None else step_folder(run, step))
        done = export_saved(saved, arguments.output, tuple(arguments.base))
    arguments.output = done.path
    print(f"wrote {done.tensors} tensors of step {saved.step} to {done.path}")
    return 0
