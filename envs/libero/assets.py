"""LIBERO's assets: where they lie, which there must be, and LIBERO imported so that it uses them.

It then asks nothing, and writes nothing outside our cache.
"""

import hashlib
import importlib.util
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from dzrobot.envs.mujoco.simulator import import_robosuite
from dzrobot.errors import MissingDependencyError, SetupError, SimulatorError, find, preview
from dzrobot.files import cache_folder, cached_in, replacing, spare_cache, write_text
from dzrobot.registration import PLUS_SUITES, PRO_SUITES

VARIABLE = "DZROBOT_LIBERO_ASSETS"
"""Environment variable that names a folder of assets."""

REMEDIES = (
    "run `dzrobot libero setup` to download them, or `dzrobot libero setup --assets DIR` (or set "
    f"{VARIABLE}=DIR) to use a folder that you have"
)

_POINTER = "elsewhere"


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One official file."""

    path: str
    size: int
    sha256: str
    suites: tuple[str, ...]
    """Suites whose tasks refer to it; most files have none."""


def assets_folder() -> Path:
    """Return the folder of LIBERO's assets.

    Raises:
        SetupError: there is none, or the named one does not hold assets.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named).expanduser() if named else _pointed_to(own_folder())
    if not (folder / "scenes").is_dir():
        given = f"{VARIABLE}={named}" if named else f"{folder}"
        raise SetupError(f"no LIBERO assets in {given}: {REMEDIES}.")
    return folder.resolve()


def own_folder() -> Path:
    """Return where a download puts the assets."""
    return cache_folder() / "libero-assets"


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
    with cached_in(own_folder(), SetupError) as own:
        (own / _POINTER).write_text(f"{folder}\n", encoding="utf-8")


def use_own_folder() -> None:
    """Forget what :func:`use_folder` was told."""
    note = own_folder() / _POINTER
    # A folder that cannot be written and holds none is left alone.
    if note.is_file():
        note.unlink()


def write_license(folder: Path) -> None:
    """Put the license of the assets, and whose they are, beside them."""
    write_text(folder / "LICENSE", _packaged("assets_license.md"))


def manifest() -> tuple[Asset, ...]:
    """Return the official files, ordered by path."""
    table = json.loads(_packaged("assets_manifest.json"))
    suites = table["suites"]
    return tuple(
        Asset(path=path, size=size, sha256=sha256, suites=tuple(suites[int(i)] for i in used))
        for path, (size, sha256, used) in table["files"].items()
    )


def pro_manifest() -> tuple[Asset, ...]:
    """Return the files of the objects that LIBERO-PRO adds, ordered by path."""
    table = json.loads(_packaged("assets_manifest_pro.json"))
    names = tuple(suite.name for suite in PRO_SUITES)
    return tuple(
        Asset(path=path, size=size, sha256=sha256, suites=names)
        for path, (size, sha256) in table.items()
    )


def needed(suites: Iterable[str] = ()) -> tuple[Asset, ...]:
    """Return LIBERO's official files; with ``suites`` those that their tasks may refer to.

    A suite of LIBERO-PRO takes objects from any of LIBERO's and has its own; one of LIBERO-Plus has
    the objects of the suite that it is made from.

    Raises:
        UnknownNameError: no such suite.
    """
    everything = manifest()
    known = {suite: {suite} for asset in everything for suite in asset.suites}
    known |= {suite.name: {*known, suite.name} for suite in PRO_SUITES}
    known |= {suite.name: {suite.name.replace("plus_", "")} for suite in PLUS_SUITES}
    wanted = {part for suite in suites for part in find(known, "suite", suite)}
    if not wanted:
        return everything
    return tuple(asset for asset in (*everything, *pro_manifest()) if wanted & set(asset.suites))


@dataclass(frozen=True, kw_only=True)
class AssetCheck:
    """How a folder compares with the official files."""

    official: tuple[str, ...]
    missing: tuple[str, ...]
    altered: tuple[str, ...]
    """Files of another size or content; scores obtained with them are not LIBERO scores."""

    @property
    def summary(self) -> str:
        """One line for people."""
        total = len(self.official) + len(self.missing) + len(self.altered)
        line = f"{len(self.official)} of {total} files are official"
        if self.missing:
            line += f"; {len(self.missing)} missing ({preview(self.missing, 2)})"
        if self.altered:
            line += f"; {len(self.altered)} not official ({preview(self.altered, 2)})"
        return line


def verify(folder: Path, assets: Iterable[Asset]) -> AssetCheck:
    """Compare ``folder`` with ``assets`` by size and SHA-256."""
    official, missing, altered = [], [], []
    for asset in assets:
        place = folder / asset.path
        if not place.is_file():
            missing.append(asset.path)
        elif matches(place, asset):
            official.append(asset.path)
        else:
            altered.append(asset.path)
    return AssetCheck(official=tuple(official), missing=tuple(missing), altered=tuple(altered))


def report(suite: str) -> dict[str, Any]:
    """Return how many files of ``suite`` are the official ones, and which are not."""
    verdict = verify(assets_folder(), needed([suite]))
    return {
        "official": len(verdict.official),
        "missing": sorted(verdict.missing),
        "altered": sorted(verdict.altered),
    }


def matches(place: Path, asset: Asset) -> bool:
    """Return whether ``place`` holds ``asset``, by size and SHA-256."""
    if not place.is_file() or place.stat().st_size != asset.size:
        return False
    with place.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == asset.sha256


def _packaged(name: str) -> str:
    return resources.files("dzrobot.envs.libero").joinpath(name).read_text(encoding="utf-8")


def _pointed_to(folder: Path) -> Path:
    note = folder / _POINTER
    if not note.is_file():
        return folder
    target = Path(note.read_text(encoding="utf-8").strip())
    if not target.is_dir():
        raise SetupError(f"the LIBERO assets were in {target}, which is gone: {REMEDIES}.")
    return target


HF_LIBERO = "0.1.4"


def libero_folder() -> Path:
    """Return the folder of LIBERO's inner package, without importing it.

    Raises:
        MissingDependencyError: hf-libero is not installed.
    """
    spec = importlib.util.find_spec("libero")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (Path(place) / "libero" / "benchmark").is_dir():
            return Path(place) / "libero"
    raise MissingDependencyError("LIBERO is not installed: run `dzrobot libero setup`.")


def import_libero() -> Any:
    """Import LIBERO's environments and return the module with ``TASK_MAPPING``.

    Raises:
        MissingDependencyError: hf-libero is not installed.
        SimulatorError: a wrong version, no assets, or OpenGL libraries are missing.
    """
    libero_folder()
    assets = assets_folder()
    import_robosuite()
    with _no_questions(), warnings.catch_warnings():
        # LIBERO changes the process's warning filters when it is imported.
        warnings.simplefilter("ignore")
        inner: Any = import_module("libero.libero")
        # Its own search takes a half-finished download for a complete one.
        inner._assets_path_cache = str(assets)
        return import_module("libero.libero.envs")


@contextmanager
def _no_questions() -> Iterator[None]:
    """Show LIBERO a finished config file while it is imported: without one it reads from stdin."""
    root = libero_folder()
    # One per installation: the file holds absolute paths, and another venv must not inherit them.
    key = hashlib.sha256(str(root).encode()).hexdigest()[:12]
    folder = cache_folder() / f"libero-config-{key}"
    paths = {
        "assets": assets_folder(),
        "bddl_files": root / "bddl_files",
        "benchmark_root": root,
        "datasets": cache_folder() / "libero-datasets",
        "init_states": root / "init_files",
    }
    text = "".join(f"{name}: {path}\n" for name, path in paths.items())
    path = folder / "config.yaml"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        folder = spare_cache(folder, SetupError)
        # Several workers start together.
        with replacing(folder / "config.yaml", derived=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
    before = os.environ.get("LIBERO_CONFIG_PATH")
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBERO_CONFIG_PATH"]
        else:
            os.environ["LIBERO_CONFIG_PATH"] = before
