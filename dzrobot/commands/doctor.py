"""``dzrobot doctor``: looks at a workcell, a dataset, or a device that people steer with."""

import argparse
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

from rich.console import Console

from dzrobot.commands.doctor_data import add_data_arguments, findings
from dzrobot.commands.doctor_device import add_device_arguments, readings
from dzrobot.commands.options import flags
from dzrobot.envs.franka.diagnostics import diagnose
from dzrobot.envs.franka.make import load_workcell, located
from dzrobot.errors import ConfigError
from dzrobot.progress import progress_bar

SUMMARY = "check a workcell, a dataset, or a device that people steer with"

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


class _Line(Protocol):
    """One thing that was looked at."""

    @property
    def verdict(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def found(self) -> str: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot doctor``."""
    parser.description = "The exit code is 1 when something failed."
    kinds = parser.add_subparsers(dest="kind", required=True)
    franka = kinds.add_parser(
        "franka",
        help="look at libraries, kernel, cameras, arm and limits; nothing moves",
    )
    franka.add_argument(
        "--config", "--workcell", dest="workcell", type=flags.text, metavar="CELL",
        help="YAML file that describes the workcell, or `emulated`",
    )  # fmt: skip
    franka.add_argument(
        "--images",
        type=flags.path,
        metavar="DIR",
        help="keep what each camera shows in this folder",
    )
    franka.add_argument("--address", type=flags.text, help="of the arm; replaces the workcell's")
    add_device_arguments(kinds.add_parser("device", help="show what a device says; nothing moves"))
    add_data_arguments(
        kinds.add_parser(
            "data",
            help="repeat recorded actions in a simulator; of an arm's recording, compare states "
            "with actions, and nothing moves",
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one line per thing; return 1 when one failed."""
    with ExitStack() as held:
        if arguments.kind == "data":
            show = held.enter_context(progress_bar("replays"))
            lines: Iterable[_Line] = findings(arguments, show)
        elif arguments.kind == "device":
            lines = readings(arguments)
        else:
            lines = _workcell(arguments, held)
        return _printed(lines)


def _workcell(arguments: argparse.Namespace, held: ExitStack) -> Iterable[_Line]:
    if arguments.workcell == "fake":
        raise ConfigError("the fake workcell has nothing to look at; try --config emulated")
    given = {} if arguments.address is None else {"address": arguments.address}
    workcell, config = located(arguments.workcell, load_workcell(arguments.workcell, given))
    held.callback(workcell.close)
    return diagnose(workcell, config, arguments.images)


def _printed(lines: Iterable[_Line]) -> int:
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    for line in lines:
        failed += line.verdict == "fail"
        color = _COLORS[line.verdict]
        console.print(f"[{color}]{line.verdict:<5}[/] {line.what:<20} ", end="")
        console.print(line.found, markup=False)
    return 1 if failed else 0
