"""Import robosuite and LIBERO so that they ask nothing, and write nothing outside our cache."""

import hashlib
import importlib.util
import logging
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from dzrobot.envs.libero.assets import assets_folder
from dzrobot.envs.libero.rendering import choose_backend
from dzrobot.errors import MissingDependencyError, SimulatorError
from dzrobot.files import cache_folder

MUJOCO = "3.3.2"
"""The version results are reported with."""

ROBOSUITE = "1.4.0"
HF_LIBERO = "0.1.4"

_MUJOCO_TOO_OLD = (3, 1, 6)
_MUJOCO_TOO_NEW = (3, 3, 3)
_EXTRA = "pip install -e '.[libero]'"
_log = logging.getLogger(__name__)


def check_versions() -> None:
    """Raise unless the simulator is one that gives LIBERO's physics and colors; imports nothing.

    Raises:
        MissingDependencyError: mujoco or robosuite is not installed.
        SimulatorError: MuJoCo before 3.1.6 or from 3.3.3 on, or a robosuite other than 1.4.0.
    """
    mujoco, robosuite = installed("mujoco"), installed("robosuite")
    if mujoco is None or robosuite is None:
        missing = "mujoco" if mujoco is None else "robosuite"
        raise MissingDependencyError(f"the simulator needs {missing}: run `{_EXTRA}`.")
    if not _MUJOCO_TOO_OLD <= numbers(mujoco) < _MUJOCO_TOO_NEW:
        raise SimulatorError(
            f"mujoco {mujoco} is installed; 3.3.3 darkens LIBERO's floors and 3.4 changes its "
            f"physics, so scores would not compare. Allowed: 3.1.6 up to 3.3.2. Run "
            f"`pip install mujoco=={MUJOCO}`."
        )
    if robosuite != ROBOSUITE:
        raise SimulatorError(
            f"robosuite {robosuite} is installed; LIBERO is written for {ROBOSUITE}. Run "
            f"`pip install robosuite=={ROBOSUITE}`."
        )


def installed(distribution: str) -> str | None:
    """Return the installed version of ``distribution``, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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


def import_robosuite() -> Any:
    """Import and return robosuite.

    Raises:
        SimulatorError: a wrong version, or OpenGL libraries are missing.
    """
    check_versions()
    choose_backend()
    if "robosuite" not in sys.modules:
        _quieten_robosuite()
        point_caches_home()
    try:
        robosuite = import_module("robosuite")
    except (ImportError, AttributeError, OSError) as error:
        # PyOpenGL without its libraries fails with an AttributeError on None.
        raise SimulatorError(
            f"robosuite does not import ({type(error).__name__}: {error}). If OpenGL is missing: "
            "`apt-get install libegl1 libgl1 libglib2.0-0 libosmesa6`; a Python package: "
            f"`{_EXTRA}`."
        ) from error
    mujoco = import_module("mujoco")
    if mujoco.get_mju_user_warning() is None:
        # By itself it prints, and appends to MUJOCO_LOG.TXT in the working directory.
        mujoco.set_mju_user_warning(_log.warning)
    return robosuite


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


def _quieten_robosuite() -> None:
    """Give robosuite the private settings it looks for, unless the user has written some.

    Without them it warns on the console and opens ``/tmp/robosuite.log``, which fails when that
    file belongs to somebody else.
    """
    spec = importlib.util.find_spec("robosuite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "macros_private.py").is_file():
            return
    settings = types.ModuleType("robosuite.macros_private")
    vars(settings).update(FILE_LOGGING_LEVEL=None, CONSOLE_LOGGING_LEVEL="ERROR")
    sys.modules["robosuite.macros_private"] = settings
    logging.getLogger("robosuite_logs").propagate = False


def point_caches_home() -> None:
    """Keep the compiled functions and font lists of libraries below our own cache."""
    for variable, name in (("NUMBA_CACHE_DIR", "numba"), ("MPLCONFIGDIR", "matplotlib")):
        if variable not in os.environ:
            folder = cache_folder() / name
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(folder)


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


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of ``version``, to compare it by."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
