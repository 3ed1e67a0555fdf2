"""Import LIBERO so that it asks nothing, and writes nothing outside our cache."""

import hashlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dzrobot.envs.libero.assets import assets_folder
from dzrobot.envs.mujoco.simulator import import_robosuite
from dzrobot.errors import MissingDependencyError
from dzrobot.files import cache_folder

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
    _write_whole(folder / "config.yaml", text)
    before = os.environ.get("LIBERO_CONFIG_PATH")
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBERO_CONFIG_PATH"]
        else:
            os.environ["LIBERO_CONFIG_PATH"] = before


def _write_whole(path: Path, text: str) -> None:
    """Write at once, or not at all: several workers start together."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, delete=False
    ) as stream:
        stream.write(text)
    Path(stream.name).replace(path)
