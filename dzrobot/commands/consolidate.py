"""``dzrobot consolidate``: many episodes per file in a v3.0 recording."""

import argparse
from pathlib import Path

from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError, counted
from dzrobot.progress import progress_bar
from dzrobot.recording import consolidate
from dzrobot.recording.small_films import small_copy

DATA_MB, VIDEO_MB = 100.0, 200.0

NEXT = "dzrobot push {path} OWNER/NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot consolidate``."""
    parser.description = (
        "Join the data files and the videos of a v3.0 recording. Nothing is compressed again "
        "unless --films exact asks for it. Interrupted anywhere, the recording is whole; run the "
        "command again. More episodes can be recorded afterwards."
    )
    parser.add_argument("path", type=flags.path, help="folder of the dataset")
    parser.add_argument(
        "--data-mb", type=flags.number(0, 10**6), default=DATA_MB, help="largest data file, MiB"
    )
    parser.add_argument(
        "--video-mb", type=flags.number(0, 10**6), default=VIDEO_MB, help="largest video, MiB"
    )
    parser.add_argument(
        "--films", choices=("kept", "exact", "small"), default="kept",
        help="exact: write every picture anew as a key frame, the same to the bit, so that "
        "training decodes only those it needs; several times larger. small: write a copy of the "
        "dataset with smaller pictures, each a key frame; training then sees other pictures than "
        "those of the source (default: kept)",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=flags.size, metavar="HEIGHTxWIDTH", help="of small films, in pixels"
    )
    parser.add_argument("--output", type=flags.output, help="new folder, for small films")


def run(arguments: argparse.Namespace) -> int:
    """Pack and say how many files are left."""
    root: Path = arguments.path
    if arguments.films == "small":
        if (arguments.data_mb, arguments.video_mb) != (DATA_MB, VIDEO_MB):
            raise ConfigError(
                "--data-mb and --video-mb join files, which --films small copies one by one: leave "
                "them out, and join those of the copy afterwards"
            )
        code = _small(root, arguments.size, arguments.output)
        # What the next command is about.
        arguments.path = arguments.output
        return code
    if arguments.size or arguments.output:
        raise ConfigError("--size and --output belong to --films small: leave them out, or add it")
    with progress_bar("writing films") as show:
        consolidate(
            root, data_mb=arguments.data_mb, video_mb=arguments.video_mb, films=arguments.films,
            show=show,
        )  # fmt: skip
    data = counted(len(list(root.glob("data/*/*.parquet"))), "data file")
    videos = counted(len(list(root.glob("videos/*/*/*.mp4"))), "video")
    print(f"{root}: {data}, {videos}")
    return 0


def _small(root: Path, size: tuple[int, int] | None, output: Path | None) -> int:
    """Write a copy with small films and say how to train on it."""
    if size is None or output is None:
        raise ConfigError(
            "--films small writes a copy with other pictures: give its --size HEIGHTxWIDTH and its "
            "--output folder"
        )
    with progress_bar("writing films") as show:
        small_copy(root, output, size, show)
    name = f"{size[0]}x{size[1]}"
    print(f"{output}: films of {name}; to train on it, put @{name} behind the robot's name")
    return 0
