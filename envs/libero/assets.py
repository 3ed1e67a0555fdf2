"""LIBERO's assets: where they lie, which there must be, and how to get them."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

from dzrobot.errors import SimulatorError, find, preview

VARIABLE = "DZROBOT_LIBERO_ASSETS"
"""Environment variable that names a folder of assets."""

HUB_DATASET = "lerobot/libero-assets"
"""Dataset on the Hugging Face hub that holds them."""

REMEDIES = (
    "run `dzrobot libero setup` to download them, or `dzrobot libero setup --assets DIR` (or set "
    f"{VARIABLE}=DIR) to use a folder that you have"
)

Fetch = Callable[[str, Path], None]
"""``fetch(path, destination)``: bring one file of the dataset to ``destination``."""


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One official file."""

    path: str
    size: int
    sha256: str
    suites: tuple[str, ...]
    """Suites whose tasks refer to it; most files have none."""


def cache_folder() -> Path:
    """Return the one folder this package writes to on its own."""
    named = os.environ.get("DZROBOT_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "dzrobot"


def assets_folder() -> Path:
    """Return the folder of LIBERO's assets.

    Raises:
        SimulatorError: there is none, or the named one does not hold assets.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named).expanduser() if named else cache_folder() / "libero-assets"
    if link := _pointer(folder):
        folder = link
    if not (folder / "scenes").is_dir():
        given = f"{VARIABLE}={named}" if named else f"{folder}"
        raise SimulatorError(f"no LIBERO assets in {given}: {REMEDIES}.")
    return folder.resolve()


def use_folder(folder: Path) -> None:
    """Remember ``folder`` as the place of the assets; nothing is copied.

    Raises:
        SimulatorError: it does not hold LIBERO assets.
    """
    folder = folder.expanduser().resolve()
    if not (folder / "scenes").is_dir():
        raise SimulatorError(
            f"{folder} holds no LIBERO assets: name the folder that has scenes/, textures/, "
            "stable_scanned_objects/ and the others in it."
        )
    place = cache_folder() / "libero-assets"
    place.mkdir(parents=True, exist_ok=True)
    (place / "elsewhere").write_text(f"{folder}\n", encoding="utf-8")


def manifest() -> tuple[Asset, ...]:
    """Return the official files, ordered by path."""
    text = resources.files("dzrobot.envs.libero").joinpath("assets_manifest.json").read_text()
    table = json.loads(text)
    suites = table["suites"]
    return tuple(
        Asset(path=path, size=size, sha256=sha256, suites=tuple(suites[int(i)] for i in used))
        for path, (size, sha256, used) in table["files"].items()
    )


def needed(suites: Iterable[str] = ()) -> tuple[Asset, ...]:
    """Return the files that the tasks of ``suites`` (none: of all suites) refer to.

    Raises:
        UnknownNameError: no such suite.
    """
    known = {suite: suite for asset in manifest() for suite in asset.suites}
    wanted = {find(known, "suite", suite) for suite in suites} or set(known)
    return tuple(asset for asset in manifest() if wanted & set(asset.suites))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a folder compares with the official files."""

    official: tuple[str, ...]
    missing: tuple[str, ...]
    altered: tuple[str, ...]
    """Files of another size or content; scores obtained with them are no LIBERO scores."""

    stand_ins: Mapping[str, str]
    """Files that the folder itself declares not to be official (``STANDINS.json``)."""


def verify(folder: Path, assets: Iterable[Asset]) -> Verdict:
    """Compare ``folder`` with ``assets`` by size and SHA-256."""
    official, missing, altered = [], [], []
    for asset in assets:
        place = folder / asset.path
        if not place.is_file():
            missing.append(asset.path)
        elif _matches(place, asset):
            official.append(asset.path)
        else:
            altered.append(asset.path)
    declared = folder / "STANDINS.json"
    return Verdict(
        official=tuple(official),
        missing=tuple(missing),
        altered=tuple(altered),
        stand_ins=json.loads(declared.read_text()) if declared.is_file() else {},
    )


def download(folder: Path, assets: Iterable[Asset], fetch: Fetch) -> Iterator[Asset]:
    """Bring every file of ``assets`` into ``folder``; yield each one when it is there and right.

    A file that is there already and right is not fetched again, so a second run goes on where the
    first stopped. Each file is fetched beside its place, verified, and only then moved.

    Raises:
        SimulatorError: a file cannot be fetched, or is not the official one.
    """
    for asset in assets:
        place = folder / PurePosixPath(asset.path)
        if not (place.is_file() and _matches(place, asset)):
            _fetch_one(place, asset, fetch)
        yield asset


def hub_fetch(path: str, destination: Path) -> None:
    """Fetch ``path`` of the dataset on the hub.

    Raises:
        SimulatorError: the hub cannot be reached, or lacks the file.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    stage = destination.parent / f".{destination.name}.hub"
    try:
        held = hf_hub_download(HUB_DATASET, path, repo_type="dataset", local_dir=stage)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise SimulatorError(
            f"cannot download {path} from {HUB_DATASET} ({type(error).__name__}). Check the "
            "network and run `dzrobot libero setup` again, which goes on where it stopped; or "
            "copy the assets from another machine and run `dzrobot libero setup --assets DIR`."
        ) from error
    Path(held).replace(destination)
    _remove_tree(stage)


def _fetch_one(place: Path, asset: Asset, fetch: Fetch) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.part")
    fetch(asset.path, part)
    if not _matches(part, asset):
        size = part.stat().st_size if part.is_file() else 0
        part.unlink(missing_ok=True)
        raise SimulatorError(
            f"{asset.path} arrived damaged: {size} bytes instead of {asset.size}, or another "
            "SHA-256. Run `dzrobot libero setup` again."
        )
    part.replace(place)


def _matches(place: Path, asset: Asset) -> bool:
    if not place.is_file() or place.stat().st_size != asset.size:
        return False
    with place.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == asset.sha256


def _pointer(folder: Path) -> Path | None:
    note = folder / "elsewhere"
    if not note.is_file():
        return None
    target = Path(note.read_text(encoding="utf-8").strip())
    if not target.is_dir():
        raise SimulatorError(f"the LIBERO assets were in {target}, which is gone: {REMEDIES}.")
    return target


def _remove_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def summary(verdict: Verdict) -> str:
    """Return one line about ``verdict``."""
    total = len(verdict.official) + len(verdict.missing) + len(verdict.altered)
    line = f"{len(verdict.official)} of {total} files are official"
    if verdict.missing:
        line += f"; {len(verdict.missing)} missing ({preview(verdict.missing, 2)})"
    if verdict.altered:
        line += f"; {len(verdict.altered)} not official ({preview(verdict.altered, 2)})"
    return line
