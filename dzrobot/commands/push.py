"""``dzrobot push``: an export or a dataset to the Hugging Face hub."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.hub import push_folder

NEXT = "dzrobot download {id}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot push``."""
    parser.description = (
        "Send a folder to a repository of the Hugging Face hub, which is made if it is not there. "
        "An export brings its own card; a dataset without README.md gets one. HF_TOKEN says who "
        "you are."
    )
    parser.add_argument("folder", type=flags.path, help="exported checkpoint, or LeRobot dataset")
    parser.add_argument("id", type=flags.text, help="owner/name")
    parser.add_argument("--public", action="store_true", help="everybody may see it; else only you")


def run(arguments: argparse.Namespace) -> int:
    """Push, and say where it is."""
    folder = arguments.folder
    is_dataset = (folder / "meta" / "info.json").is_file()
    if not is_dataset and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is neither an exported checkpoint (config.json) nor a LeRobot dataset "
            "(meta/info.json); `dzrobot export RUN` writes a checkpoint"
        )
    kind = "dataset" if is_dataset else "model"
    print(push_folder(folder, arguments.id, kind, private=not arguments.public))
    return 0
