"""``dzrobot consolidate``: many episodes per file in a v3.0 recording."""

import argparse
from pathlib import Path

from dzrobot.commands.options import flags
from dzrobot.errors import counted
from dzrobot.progress import progress_bar
from dzrobot.recording import consolidate

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
        "--films", choices=("kept", "exact"), default="kept",
        help="exact: write every picture anew as a key frame, the same to the bit, so that "
        "training decodes only those it needs; several times larger (default: kept)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Pack and say how many files are left."""
    root: Path = arguments.path
    with progress_bar("writing films") as show:
        consolidate(
            root, data_mb=arguments.data_mb, video_mb=arguments.video_mb, films=arguments.films,
            show=show,
        )  # fmt: skip
    data = counted(len(list(root.glob("data/*/*.parquet"))), "data file")
    videos = counted(len(list(root.glob("videos/*/*/*.mp4"))), "video")
    print(f"{root}: {data}, {videos}")
    return 0
