"""``dzrobot libero``: install LIBERO and its assets, judge them, list the tasks."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dzrobot.commands.options import flags
from dzrobot.envs.libero.download import set_up
from dzrobot.envs.libero.listing import ListedTask, checks, list_tasks, runnable, suite_rows
from dzrobot.envs.libero.suites import BENCHMARKS, PACKAGES, SUITES, benchmark_of
from dzrobot.envs.libero.task_packages import PLUS, PRO
from dzrobot.errors import DzrobotError, find
from dzrobot.progress import progress_bar, waiting

WIDTH = 160
"""Columns of a table that goes into a file."""


def _next(arguments: argparse.Namespace) -> str:
    if arguments.action == "setup":
        return "dzrobot libero check"
    if arguments.action == "check":
        return "dzrobot libero list --benchmark LIBERO"
    suite = arguments.suite[0] if arguments.suite else "libero_object"
    return f"dzrobot eval --suite {suite} --tasks 0 --episodes 1"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot libero``."""
    parser.description = __doc__
    actions = parser.add_subparsers(dest="action", required=True)
    setup = actions.add_parser("setup", help="install hf-libero and get the assets")
    setup.add_argument(
        "--assets", type=flags.path, metavar="DIR", help="use the assets in this folder"
    )
    for package in (PRO, PLUS):
        setup.add_argument(
            package.flag, action="store_true",
            help=f"also get the tasks of {package.title} ({package.requirement})",
        )  # fmt: skip
    check = actions.add_parser("check", help="judge versions, OpenGL and assets")
    for action in (setup, check):
        action.add_argument(
            "--suite",
            action="append",
            default=[],
            metavar="NAME",
            help="only the files of this suite (may be repeated; default: all files)",
        )
    listing = actions.add_parser(
        "list", help="list suites by benchmark, those that can run first; or the tasks of some"
    )
    listing.add_argument(
        "--suite", action="append", default=[], metavar="NAME",
        help="list the tasks of this suite (may be repeated; default: all suites, without tasks)",
    )  # fmt: skip
    listing.add_argument(
        "--benchmark", choices=BENCHMARKS, help="only the suites of this one (default: all)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Set up, or check; a check that finds a fault returns 1."""
    if arguments.action == "check":
        return _check(arguments.suite)
    if arguments.action == "list":
        wanted = [arguments.benchmark] if arguments.benchmark else BENCHMARKS
        return _list(arguments.suite, wanted)
    packages = [package for package in (PRO, PLUS) if getattr(arguments, package.flag[2:])]
    set_up(arguments.assets, arguments.suite, packages, partial(print, flush=True))
    print("LIBERO is ready")
    return 0


def _console() -> Console:
    return Console(width=None if Console().is_terminal else WIDTH, highlight=False)


def _columns(*names: str) -> Iterator[Column]:
    """Yield columns that fold: a name or a path that is cut short cannot be typed."""
    for name in names:
        yield Column(name, overflow="fold")


def _check(suites: Sequence[str]) -> int:
    table = Table(*_columns("part", "verdict", "details"))
    faults = 0
    for name, check in checks(suites).items():
        try:
            with waiting(f"checking {name}"):
                found = check()
            table.add_row(name, "ok", found)
        except DzrobotError as error:
            faults += 1
            table.add_row(name, "FAULT", str(error))
    _console().print(table)
    return 1 if faults else 0


def _list(suites: Sequence[str], benchmarks: Sequence[str]) -> int:
    """Print every task of some suites; of none, the suites of benchmarks."""
    console = _console()
    for suite in suites:
        listed = _read([suite])[suite]
        console.print(_tasks_table(suite, listed))
        for line in runnable(listed):
            console.print(line, soft_wrap=True)
    for benchmark in () if suites else benchmarks:
        _print_benchmark(console, benchmark)
    return 0


def _print_benchmark(console: Console, benchmark: str) -> None:
    """Print its suites with what keeps their tasks from running: those that can run first."""
    own = [name for name in SUITES if benchmark_of(name) == benchmark]
    package = PACKAGES[own[0]]
    if package is not None and not package.wheel.is_file():
        console.print(f"{benchmark}: run `dzrobot libero setup {package.flag}`")
        return
    rows = [row for name, listed in _read(own).items() for row in suite_rows(name, listed)]
    names = ("suite", "axis", "tasks", "can run", "own instruction", "starts", "why not")
    table = Table(*_columns(*names), title=benchmark)
    for cells in sorted(rows, key=lambda cells: cells[names.index("can run")] == "0"):
        table.add_row(*map(Text, cells))
    console.print(table)


def _read(suites: Sequence[str]) -> dict[str, list[ListedTask]]:
    """Return the tasks of suites; LIBERO-Plus has ten thousand."""
    read: dict[str, list[ListedTask]] = {}
    total, done = sum(find(SUITES, "suite", name).tasks for name in suites), 0
    with progress_bar("reading tasks") as show:
        for name in suites:
            read[name] = []
            for task in list_tasks(name):
                read[name].append(task)
                done += 1
                show(done, total)
    return read


def _tasks_table(suite: str, tasks: Sequence[ListedTask]) -> Table:
    names = ("task", "axis", "instruction in the problem file", "starts", "why not")
    table = Table(*_columns(*names), title=suite)
    for task in tasks:
        cells = (str(task.task.task_id), task.task.axis or "", task.language, str(task.starts))
        table.add_row(*map(Text, (*cells, "; ".join(task.faults))))
    return table
