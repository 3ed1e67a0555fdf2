"""``dzrobot inspect-data``: what a dataset gives an embodiment, and what is wrong with it."""

import argparse
import time

import numpy as np

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import add_recorded, add_sampling, sampled_robot
from dzrobot.errors import DatasetError
from dzrobot.progress import progress_bar
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions, alike
from dzrobot.training.data.reading_pool import (
    ReadingPool,
    decode_all,
    first_frames,
    idle_episodes,
)

SUMMARY = "show which columns feed an embodiment, count windows, find damaged files"

SHOWN = 20

NEXT = "dzrobot stats {embodiment} --dataset {path} --output metadata.json"


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
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="do not look at videos")
    depth.add_argument("--thorough", action="store_true", help="decode every picture")


def run(arguments: argparse.Namespace) -> int:
    """Report; the exit code is 1 if anything is wrong, as where training would refuse."""
    robot, _, data = sampled_robot(arguments, arguments.embodiment, [arguments.path])
    embodiment = robot.holding(arguments.recorded)
    options = ReaderOptions(
        decoder=arguments.decoder, damaged="count", empty="count", episodes=data.episodes,
        images=not arguments.quick,
    )  # fmt: skip
    with progress_bar("reading columns and headers") as advance:
        reader = DatasetReader(arguments.path, embodiment, options, progress=advance)
    print(reader.report())
    timing = embodiment.timing
    print(
        f"  a sample of {timing.blocks} blocks of {timing.action_horizon} actions needs "
        f"{timing.rows_needed} rows of an episode"
    )
    faults = [*_first_window(reader), *reader.faults()]
    with ReadingPool([reader]) as pool:
        faults += idle_episodes(pool)
        if arguments.thorough:
            faults += _decoded(pool)
    print(f"  looked at     {_LOOKED_AT[options.images + arguments.thorough]}")
    kinds = alike(faults)
    for fault in kinds[:SHOWN]:
        print(f"  FAULT {fault}")
    if len(kinds) > SHOWN:
        print(f"  ... and {len(kinds) - SHOWN} other kinds")
    print(f"  faults: {len(faults)}")
    return 1 if faults else 0


_LOOKED_AT = (
    "lists and numbers alone (--quick): whether videos fit is not known",
    "lists, numbers, headers of videos, and some pictures; --thorough decodes all",
    "lists, numbers, headers of videos, and every picture",
)


def _decoded(pool: ReadingPool) -> list[str]:
    """Decode all that is used, and print how fast that was; return what is wrong."""
    began = time.monotonic()
    with progress_bar("decoding") as advance:
        found = list(decode_all(pool, advance))
    seconds, pictures = time.monotonic() - began, sum(one.pictures for one in found)
    print(f"  decoded       {pictures:,} pictures, {pictures / max(seconds, 1e-9):,.0f} a second")
    return [fault for one in found for fault in one.faults]


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
    if not reader.options.images:
        return []
    try:
        looks = first_frames(reader)
    except DatasetError as error:
        return [str(error)]
    for look in looks:
        print(f"  first frame   {look.key}  {look.shape}  mean {look.mean:.1f} of 255")
    return [f"{look.key}: the first frame is all one color" for look in looks if look.blank]


def _range(array: np.ndarray) -> str:
    return f"{array.shape}  {array.min():.4g} to {array.max():.4g}"
