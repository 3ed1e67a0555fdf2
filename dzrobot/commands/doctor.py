"""``dzrobot doctor``: looks at a workcell, a dataset, a policy, or a device that people use."""

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import add_teleop_settings, add_workcell, workcell_arguments
from dzrobot.commands.options.policy import declare_policy, read_policy
from dzrobot.envs.franka.diagnostics import LISTEN_S, Diagnosis, diagnose
from dzrobot.envs.franka.make import load_workcell, located
from dzrobot.envs.teleop.devices import DEVICES
from dzrobot.errors import ConfigError
from dzrobot.progress import Show, progress_bar, waiting
from dzrobot.rollout.policy_spec import REMOTE

if TYPE_CHECKING:
    from dzrobot.diagnostics.examination import CheckupLine, Verdict

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


def _next(arguments: argparse.Namespace) -> str:
    if arguments.kind == "franka":
        workcell = "{workcell}" if arguments.workcell else "CELL.yaml"
        return f"dzrobot eval --env Franka-PnP-v0 --env-arg workcell={workcell} --policy hold"
    if arguments.kind == "device":
        return "dzrobot record --workcell CELL.yaml --teleop {device} --output recordings"
    if arguments.kind == "data":
        return "dzrobot inspect-data {dataset} --embodiment TAG"
    policy = "--checkpoint {checkpoint}" if arguments.checkpoint else "--policy {policy}"
    return f"dzrobot eval {'--server {server}' if arguments.server else policy} --env ENV"


NEXT = _next


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
    _add_policy(
        kinds.add_parser("policy", help="why a policy fails: its files, data, inputs and actions")
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find out why a policy succeeds about never. It is asked about rows that it was trained "
        "on, what it sees is compared with what was recorded, and recorded actions are repeated; "
        "at last it acts. The first certain cause ends it. Exit codes: 0 no cause, 1 a cause, 2 "
        "wrong arguments, 3 it could not be measured."
    )
    parser.add_argument("--checkpoint", type=flags.text, help="folder or Hugging Face id")
    parser.add_argument(
        "--policy",
        type=flags.text,
        help="instead: module:factory, a policy of your own, or lerobot:ID_OR_FOLDER",
    )
    parser.add_argument(
        "--dataset", type=flags.path, help="folder of what it was trained on, a LeRobot dataset"
    )
    parser.add_argument("--env", type=flags.text, help="Gymnasium id of where it acts")
    flags.add_keywords(parser, "--env-arg", "keyword argument of the environment")
    parser.add_argument(
        "--recording", type=flags.path, metavar="DIR",
        help="what was recorded where it acts, an arm for example, in place of a live environment: "
        "nothing moves; with the --env of that arm, its commands are compared too",
    )  # fmt: skip
    parser.add_argument(
        "--max-steps", type=flags.whole(1, 1_000_000),
        help="steps per episode where it failed (default: what the environment says)",
    )  # fmt: skip
    parser.add_argument(
        "--episodes", type=flags.whole(1, 1000), default=4, help="of the dataset, to be looked at"
    )
    parser.add_argument("--json", action="store_true", help="print all of it as one JSON object")
    parser.add_argument(
        "--page", type=flags.output, metavar="FILE",
        help="write a page (HTML) with what was compared, side by side",
    )  # fmt: skip
    declare_policy(parser.add_argument_group("how the policy acts"))


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
    if arguments.kind == "policy":
        return _policy(arguments)
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


def _policy(arguments: argparse.Namespace) -> int:
    from dzrobot.diagnostics.policy_opening import Around, opened_checkup
    from dzrobot.diagnostics.policy_page import check_can_write, write_policy_page

    served = REMOTE if arguments.server else None
    given_as = [one for one in (arguments.checkpoint, arguments.policy, served) if one]
    # As in `dzrobot eval`, --policy remote may stand beside its server.
    if len(set(given_as)) != 1:
        raise ConfigError(
            "give the policy once: --checkpoint PATH, --policy module:factory, --policy "
            "lerobot:ID, or --server URL"
        )
    named = given_as[0]
    if arguments.dataset is None and arguments.env is None:
        raise ConfigError("there is nothing to compare it with: give --dataset, --env, or both")
    if arguments.recording is not None and arguments.dataset is None:
        raise ConfigError("--recording is compared with what was trained on: give --dataset")
    spec = read_policy(arguments, named)
    around = Around(
        dataset=arguments.dataset, env=arguments.env, arguments=flags.keywords(arguments.env_arg),
        recording=arguments.recording, episodes=arguments.episodes, max_steps=arguments.max_steps,
    )  # fmt: skip
    if arguments.page is not None:
        check_can_write()
    with progress_bar("plans") as show, opened_checkup(spec, around, show) as checkup:
        lines = list(checkup.run())
        if arguments.page is not None:
            write_policy_page(arguments.page, checkup, lines)
    assert checkup.verdict is not None, "a checkup that is over has one"
    return _concluded(checkup.verdict, lines, as_json=arguments.json)


def _concluded(verdict: "Verdict", lines: "list[CheckupLine]", *, as_json: bool) -> int:
    """Print what came of a policy's examination, and return the exit code."""
    from dzrobot.diagnostics.policy_page import COLUMNS, cells

    code = 1 if verdict.causes else 0 if verdict.judged else 3
    if as_json:
        found = {"exit": code, **asdict(verdict), "measurements": [asdict(one) for one in lines]}
        print(json.dumps(found, ensure_ascii=False))
        return code
    console = Console(highlight=False)
    console.print(verdict.sentence, markup=False, soft_wrap=True)
    table = Table(*COLUMNS)
    for one in lines:
        table.add_row(*map(Text, cells(one)))
    console.print(table)
    plans, seconds = sum(one.plans for one in lines), sum(one.seconds for one in lines)
    console.print(f"{plans} plans, {seconds:.0f} s in all")
    return code


def _workcell(arguments: argparse.Namespace, held: ExitStack) -> Iterable[_Line]:
    if arguments.workcell == "fake":
        raise ConfigError("the fake workcell has nothing to look at; try --config emulated")
    given = {} if arguments.address is None else {"address": arguments.address}
    workcell, config = located(arguments.workcell, load_workcell(arguments.workcell, given))
    held.callback(workcell.close)
    checks = diagnose(workcell, config, arguments.images, arguments.seconds)
    return _shown(map(_Check, checks))


class _Check:
    """One check of a workcell: what fails stops a person, and every line names its page."""

    def __init__(self, line: Diagnosis) -> None:
        self.verdict: str = "stop" if line.verdict == "fail" else line.verdict
        self.what = line.what
        self.found = f"{line.found} [{line.page}]"


def _shown(lines: Iterable[_Line]) -> Iterator[_Line]:
    """Yield the lines, and say while the next one is waited for that devices are looked at."""
    rest = iter(lines)
    while True:
        with waiting("looking at the machine and its devices"):
            line = next(rest, None)
        if line is None:
            return
        yield line


def _printed(lines: Iterable[_Line]) -> int:
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    for line in lines:
        failed += line.verdict in ("fail", "stop")
        color = _COLORS[line.verdict]
        console.print(f"[{color}]{line.verdict:<5}[/] {line.what:<20} ", end="")
        console.print(line.found, markup=False)
    return 1 if failed else 0
