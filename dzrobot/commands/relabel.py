"""``dzrobot relabel``: labels of recorded episodes changed afterwards."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import recorded_robot
from dzrobot.documents import shorten
from dzrobot.errors import ConfigError, counted
from dzrobot.progress import progress_bar
from dzrobot.recording.relabel import Relabeling, described, drop, relabel


def _next(arguments: argparse.Namespace) -> str:
    if arguments.episode is None:
        return "dzrobot relabel {dataset} --episode 0 --failure REASON"
    return "dzrobot stats {robot} --dataset {dataset} --output metadata.json"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot relabel``."""
    parser.description = (
        "Change what a recording says of episodes, or take episodes out. All of it happens or "
        "nothing; statistics follow. Without --episode: list the episodes, and finish a change "
        "that was interrupted."
    )
    parser.add_argument("dataset", type=flags.path, help="folder of a recording")
    parser.add_argument(
        "--episode", type=flags.numbers, metavar="N", help="which, such as 3, 3,7 or 10-19"
    )
    verdict = parser.add_mutually_exclusive_group()
    verdict.add_argument("--success", action="store_true", help="they succeeded")
    verdict.add_argument(
        "--failure", type=flags.text, nargs="?", const="", metavar="REASON",
        help="they failed, and why",
    )  # fmt: skip
    verdict.add_argument(
        "--drop", action="store_true", help="take them out; later episodes move up"
    )
    parser.add_argument("--task", type=flags.text, help="the instruction")


def run(arguments: argparse.Namespace) -> int:
    """Change the recording, or list its episodes."""
    labels = _labels(arguments)
    wanted = labels != Relabeling() or arguments.drop
    if (arguments.episode is None) == wanted:
        raise ConfigError(
            "give --episode N with --success, --failure REASON, --task TEXT or --drop; without any "
            "of them the episodes are listed"
        )
    if arguments.drop and arguments.task is not None:
        raise ConfigError("--drop takes episodes out: they need no --task")
    if not wanted:
        for line in described(arguments.dataset):
            print(line)
        return 0
    with progress_bar("rewriting data files") as advance:
        if arguments.drop:
            drop(arguments.dataset, arguments.episode, advance)
        else:
            relabel(arguments.dataset, arguments.episode, labels, advance)
    count = len(arguments.episode)
    print(f"{arguments.dataset}: {counted(count, 'episode')} {_done(arguments, labels)}")
    print("The training statistics are of the recording as it was: measure them again.")
    arguments.robot = recorded_robot(arguments.dataset, None)
    return 0


def _labels(arguments: argparse.Namespace) -> Relabeling:
    if arguments.success:
        return Relabeling(success=True, task=arguments.task)
    if arguments.failure is not None:
        return Relabeling(success=False, reason=arguments.failure, task=arguments.task)
    return Relabeling(task=arguments.task)


def _done(arguments: argparse.Namespace, labels: Relabeling) -> str:
    if arguments.drop:
        return "dropped, later ones moved up"
    marked = {True: ["marked as successes"], False: ["marked as failures"], None: []}[
        labels.success
    ]
    instruction = [] if labels.task is None else [f"given the instruction {shorten(labels.task)}"]
    return ", ".join(marked + instruction)
