"""``dzrobot doctor``: looks at a workcell, a dataset, or a device that people steer with."""

import argparse
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

from rich.console import Console

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import add_teleop_settings, add_workcell, workcell_arguments
from dzrobot.envs.franka.diagnostics import LISTEN_S, Diagnosis, diagnose
from dzrobot.envs.franka.make import load_workcell, located
from dzrobot.envs.teleop.devices import DEVICES
from dzrobot.errors import ConfigError
from dzrobot.progress import Show, progress_bar

_JOINTS = 7

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red", "stop": "red"}


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
    franka.add_argument(
        "--seconds", type=flags.number(0.5, 600), default=LISTEN_S,
        help="how long arm and cameras are read together",
    )  # fmt: skip
    franka.add_argument("--address", type=flags.text, help="of the arm; replaces the workcell's")
    _add_device(kinds.add_parser("device", help="show what a device reports; nothing moves"))
    _add_data(
        kinds.add_parser(
            "data",
            help="repeat recorded actions in a simulator; of an arm's recording, compare states "
            "with actions, and nothing moves",
        )
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Open a device, as `dzrobot record --teleop` does, and show what it reports whenever that "
        "changes. Nothing moves."
    )
    parser.add_argument(
        "device", type=flags.text, help=f"{', '.join(DEVICES)}, or module:factory of an own device"
    )
    add_teleop_settings(parser)
    parser.add_argument(
        "--seconds", type=flags.number(0, 3600), default=20.0, help="how long to listen"
    )
    parser.add_argument(
        "--stands-at", type=flags.angles(_JOINTS), metavar="J1,...,J7",
        help="leader: the joint angles (rad) that it stands in; prints its offsets_rad",
    )  # fmt: skip


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Repeat recorded actions in the environment, from the recorded initial states, and say "
        "which convention differs: images turned or exchanged, gripper, scale, rotation, rate, "
        "rows, poses instead of differences. An arm's recording is only read."
    )
    parser.add_argument("dataset", type=flags.path, help="folder of a LeRobot dataset")
    add_workcell(parser)
    parser.add_argument(
        "--episodes", type=flags.whole(1, 10_000), default=5, help="to repeat as a whole"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one line per thing; return 1 when one failed."""
    with ExitStack() as held:
        if arguments.kind == "data":
            show = held.enter_context(progress_bar("replays"))
            lines: Iterable[_Line] = _dataset(arguments, show)
        elif arguments.kind == "device":
            lines = _device(arguments)
        else:
            lines = _workcell(arguments, held)
        return _printed(lines)


def _device(arguments: argparse.Namespace) -> Iterable[_Line]:
    from dzrobot.diagnostics.teleop_device import readings

    return readings(arguments.device, arguments.teleop_arg, arguments.seconds, arguments.stands_at)


def _dataset(arguments: argparse.Namespace, show: Show) -> Iterable[_Line]:
    from dzrobot.diagnostics.recorded import examine_dataset

    given = workcell_arguments(arguments)
    return examine_dataset(arguments.dataset, arguments.env, given, arguments.episodes, show)


def _workcell(arguments: argparse.Namespace, held: ExitStack) -> Iterable[_Line]:
    if arguments.workcell == "fake":
        raise ConfigError("the fake workcell has nothing to look at; try --config emulated")
    given = {} if arguments.address is None else {"address": arguments.address}
    workcell, config = located(arguments.workcell, load_workcell(arguments.workcell, given))
    held.callback(workcell.close)
    return map(_Check, diagnose(workcell, config, arguments.images, arguments.seconds))


class _Check:
    """One check of a workcell: what fails stops a person, and every line names its page."""

    def __init__(self, line: Diagnosis) -> None:
        self.verdict: str = "stop" if line.verdict == "fail" else line.verdict
        self.what = line.what
        self.found = f"{line.found} [{line.page}]"


def _printed(lines: Iterable[_Line]) -> int:
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    for line in lines:
        failed += line.verdict in ("fail", "stop")
        color = _COLORS[line.verdict]
        console.print(f"[{color}]{line.verdict:<5}[/] {line.what:<20} ", end="")
        console.print(line.found, markup=False)
    return 1 if failed else 0
