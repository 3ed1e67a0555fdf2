"""``dzrobot doctor franka``: is this workcell ready? Nothing moves."""

import argparse

from rich.console import Console

from dzrobot.commands import flags
from dzrobot.envs.franka.diagnostics import diagnose
from dzrobot.envs.franka.make import load_workcell, located
from dzrobot.errors import ConfigError

SUMMARY = "check a workcell"

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot doctor``."""
    parser.description = (
        "Look at libraries, kernel, cameras, arm and limits; nothing moves. The exit code is 1 "
        "when something failed."
    )
    parser.add_argument("robot", choices=["franka"], help="what to look at")
    parser.add_argument(
        "--config", "--workcell", dest="workcell", type=flags.text, metavar="CELL",
        help="YAML file that describes the workcell, or `emulated`",
    )  # fmt: skip
    parser.add_argument(
        "--images",
        type=flags.path,
        metavar="DIR",
        help="keep what each camera shows in this folder",
    )
    parser.add_argument("--address", type=flags.text, help="of the arm; replaces the workcell's")


def run(arguments: argparse.Namespace) -> int:
    """Print one line per thing; return 1 when one failed."""
    if arguments.workcell == "fake":
        raise ConfigError("the fake workcell has nothing to look at; try --config emulated")
    given = {} if arguments.address is None else {"address": arguments.address}
    cell, config = located(arguments.workcell, load_workcell(arguments.workcell, given))
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    try:
        for line in diagnose(cell, config, arguments.images):
            failed += line.verdict == "fail"
            color = _COLORS[line.verdict]
            console.print(f"[{color}]{line.verdict:<5}[/] {line.what:<20} ", end="")
            console.print(line.found, markup=False)
    finally:
        cell.close()
    return 1 if failed else 0
