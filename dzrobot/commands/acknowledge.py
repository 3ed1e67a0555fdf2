"""``dzrobot acknowledge``: a person has looked at a stopped arm; it may be moved again."""

import argparse
import sys

from dzrobot.commands.options import flags
from dzrobot.envs.franka.safeguards.lock_and_stop import StopLatch
from dzrobot.errors import ConfigError

NEXT = "dzrobot doctor franka --config CELL.yaml --address {address}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot acknowledge``."""
    parser.description = (
        "Show why an arm was stopped and, once a person has pressed Enter, let the next reset move "
        "it again. Nothing moves now."
    )
    parser.add_argument("address", type=flags.text, help="of the arm, as in its workcell file")
    parser.add_argument(
        "--lock-folder", type=flags.text, help="the workcell's lock_folder, if it has one"
    )
    parser.add_argument(
        "--yes", action="store_true", help="a person has looked; for services without a terminal"
    )


def run(arguments: argparse.Namespace) -> int:
    """Acknowledge; an arm that is not stopped is left as it is."""
    stops = StopLatch(arguments.address, arguments.lock_folder)
    stop = stops.active()
    if stop is None:
        print(f"no stop is in force for {arguments.address}")
        return 0
    print(f"{arguments.address} was stopped: {stop}")
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                "no person can be asked: standard input is not a terminal. Run this in one, or say "
                "--yes once a person has looked at the arm"
            )
        input("Look at the arm, then press Enter (Ctrl-C leaves it stopped): ")
    stops.acknowledge()
    print("the next reset may move it")
    return 0
