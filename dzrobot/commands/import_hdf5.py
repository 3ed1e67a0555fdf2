"""``dzrobot import-hdf5``: LIBERO's own demonstrations as a LeRobot dataset."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.envs.libero.hdf5 import find_demonstrations, import_demonstrations
from dzrobot.errors import counted
from dzrobot.progress import progress_bar

NEXT = "dzrobot inspect-data {output} --embodiment libero_sim"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot import-hdf5``."""
    parser.description = (
        "Write LIBERO's demonstrations (HDF5, robomimic's layout) as a LeRobot dataset of "
        "libero_sim. Images are turned as in the published datasets; nothing is simulated again. "
        "Interrupted, run the same command again."
    )
    parser.add_argument(
        "sources", type=flags.path, nargs="+", metavar="HDF5", help="files, or folders of them"
    )
    parser.add_argument(
        "--drop-idle", action="store_true",
        help="leave out rows that neither move the arm nor change the gripper, as the published "
        "conversion does",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", choices=["name", "bddl"], default="name",
        help="instruction from the file's name, as the benchmark has it, or from the task's "
        "definition",
    )  # fmt: skip
    parser.add_argument(
        "--skip-damaged", action="store_true",
        help="leave out files and demonstrations that cannot be read, and say which",
    )  # fmt: skip
    flags.add_dataset_format(parser)
    parser.add_argument("--output", type=flags.output, required=True, help="folder of the dataset")


def run(arguments: argparse.Namespace) -> int:
    """Import, or resume importing, and say what was left out."""
    skip = arguments.skip_damaged
    found = find_demonstrations(arguments.sources, arguments.prompt, skip_damaged=skip)
    with progress_bar("episodes") as show:
        done = import_demonstrations(
            found.demonstrations,
            arguments.output,
            skip_damaged=skip,
            drop_idle=arguments.drop_idle,
            version=arguments.version,
            video=arguments.video,
            show=show,
        )
    print(f"{counted(done.episodes, 'episode')}, {counted(done.rows, 'row')} in {arguments.output}")
    left_out = (*found.skipped, *done.damaged)
    for fault in left_out:
        print(f"left out: {fault}")
    if arguments.drop_idle:
        print(f"{done.idle} idle rows left out, {done.idle / (done.rows + done.idle):.1%}")
    return 0
