"""``dzrobot inspect-data``: what a dataset gives an embodiment, and what is wrong with it."""

import argparse

import numpy as np

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import add_recorded, add_sampling, sampled_robot
from dzrobot.errors import DatasetError
from dzrobot.progress import progress_bar
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions
from dzrobot.training.data.reading_pool import ReadingPool
from dzrobot.training.data.verify import first_frames, idle_episodes, unreadable, video_faults

SUMMARY = "show which columns feed an embodiment, count windows, find damaged files"

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot inspect-data``."""
    parser.add_argument(
        "path", type=flags.text, help="folder of a LeRobot dataset, or its hub name"
    )
    parser.add_argument(
        "--embodiment",
        type=flags.text,
        required=True,
        help="built-in tag, or module:NAME of your own",
    )
    parser.add_argument("--decoder", type=flags.text, default="pyav", help="pyav or torchcodec")
    sampling = parser.add_argument_group("how a run will cut samples")
    add_sampling(sampling)
    add_recorded(sampling)
    parser.add_argument("--quick", action="store_true", help="do not open every video")


def run(arguments: argparse.Namespace) -> int:
    """Report; the exit code is 1 if anything is wrong, as where training would refuse."""
    robot, _, data = sampled_robot(arguments, arguments.embodiment, [arguments.path])
    embodiment = robot.holding(arguments.recorded)
    options = ReaderOptions(
        decoder=arguments.decoder, damaged="count", empty="count", episodes=data.episodes
    )
    with progress_bar("reading columns") as advance:
        reader = DatasetReader(arguments.path, embodiment, options, progress=advance)
    print(reader.report())
    timing = embodiment.timing
    print(
        f"  a sample of {timing.blocks} blocks of {timing.action_horizon} actions needs "
        f"{timing.rows_needed} rows of an episode"
    )
    faults = [*_first_window(reader), *unreadable(reader)]
    with ReadingPool([reader]) as pool:
        faults += idle_episodes(pool)
        if not arguments.quick:
            with progress_bar("checking files") as advance:
                faults += video_faults(pool, advance)
    for fault in faults[:SHOWN]:
        print(f"  FAULT {fault}")
    if len(faults) > SHOWN:
        print(f"  ... and {len(faults) - SHOWN} more")
    print(f"  faults: {len(faults)}")
    return 1 if faults else 0


def _first_window(reader: DatasetReader) -> list[str]:
    """Print the first window; return what looks wrong."""
    try:
        reader.require_windows()
    except DatasetError as error:
        return [str(error)]
    window = reader.vectors(0)
    for key, value in window.items():
        shown = repr(value) if isinstance(value, str) else _range(value)
        print(f"  first window  {key}  {shown}")
    try:
        looks = first_frames(reader)
    except DatasetError as error:
        return [str(error)]
    for look in looks:
        print(f"  first frame   {look.key}  {look.shape}  mean {look.mean:.1f} of 255")
    return [f"{look.key}: the first frame is all one color" for look in looks if look.blank]


def _range(array: np.ndarray) -> str:
    return f"{array.shape}  {array.min():.4g} to {array.max():.4g}"
