"""``dzrobot libero setup`` installs LIBERO and its assets; ``dzrobot libero check`` judges them."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from dzrobot.commands.options import flags
from dzrobot.envs.libero.assets import (
    VARIABLE,
    Asset,
    assets_folder,
    needed,
    own_folder,
    use_folder,
    use_own_folder,
    verify,
)
from dzrobot.envs.libero.download import HubFetch, download
from dzrobot.envs.libero.install import HF_LIBERO, libero_folder
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot libero``."""
    parser.description = __doc__
    actions = parser.add_subparsers(dest="action", required=True)
    setup = actions.add_parser("setup", help="install hf-libero and get the assets")
    setup.add_argument(
        "--assets", type=flags.path, metavar="DIR", help="use the assets in this folder"
    )
    check = actions.add_parser("check", help="judge versions, OpenGL and assets")
    for action in (setup, check):
        action.add_argument(
            "--suite",
            action="append",
            default=[],
            metavar="NAME",
            help="only the files of this suite (may be repeated; default: all suites)",
        )


def run(arguments: argparse.Namespace) -> int:
    """Set up, or check; a check that finds a fault returns 1."""
    if arguments.action == "check":
        return _check(arguments.suite)
    files = needed(arguments.suite)
    check_versions()
    _install_libero()
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
    fetch = HubFetch(folder / ".unfinished")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    print(f"{len(files)} files, {sum(file.size for file in files) / 1e6:.0f} MB, into {folder}")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("LIBERO assets", total=sum(file.size for file in files))
        for file in download(folder, files, fetch):
            progress.advance(bar, file.size)
    fetch.clean()


def _check(suites: Sequence[str]) -> int:
    table = Table("part", "verdict", "details")
    checks: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "hf-libero": _libero,
        "OpenGL": _opengl,
        "assets": lambda: _assets(suites),
    }
    faults = 0
    for name, check in checks.items():
        try:
            table.add_row(name, "ok", check())
        except DzrobotError as error:
            faults += 1
            table.add_row(name, "FAULT", str(error))
    Console().print(table)
    return 1 if faults else 0


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
    if verdict.stand_ins:
        text += f"; the folder declares {len(verdict.stand_ins)} stand-ins"
    if verdict.altered or verdict.stand_ins:
        text += ". Scores obtained with it are not LIBERO scores."
    return text
