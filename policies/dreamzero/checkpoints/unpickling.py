"""Pickles from outside: what they may name, and what they may announce.

A pickle is a program. Tensors are read by torch's own restricted reader, descriptions of tensors by
one that knows the few classes that describe them. Both are only handed files whose lengths are what
they hold: a pickle of a hundred bytes can announce text of a terabyte or a memo of 2^32 places, and
an archive can unpack to a thousand times its size.
"""

import io
import pickle
import zipfile
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from dzrobot.errors import CheckpointError
from dzrobot.files import stand_in
from dzrobot.untrusted import check_announced, parsing, reason

MAX_DESCRIPTION = 1 << 30
"""Bytes of a pickle of descriptions; one of 1,828 tensors on 64 devices has less than 64 MiB."""

_LEGACY_PICKLES = 5
"""A file from before torch 1.6 begins with so many pickles; raw numbers follow."""


class _ListedClasses(pickle.Unpickler):
    """Unpickles objects of the listed classes and refuses every other."""

    def __init__(self, file: BinaryIO, allowed: Mapping[str, Collection[str]]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class."""
        if name not in self._allowed.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def load_listed(file: Path, allowed: Mapping[str, Collection[str]]) -> Any:
    """Return the object in a pickle that may hold the classes ``allowed``, by module, and no other.

    Raises:
        CheckpointError: It asks for another class, is too large, or is damaged.
        FileNotFoundError: There is no such file.
    """
    size = file.stat().st_size
    if size > MAX_DESCRIPTION:
        raise CheckpointError(
            f"{file} has {size} bytes, at most {MAX_DESCRIPTION} are read; it describes no "
            "checkpoint of this kind"
        )
    with parsing(file, CheckpointError, partial(_could_run, file)):
        content = io.BytesIO(file.read_bytes())
        check_announced(content)
        content.seek(0)
        return _ListedClasses(content, allowed).load()


def load_tensors(file: Path) -> Any:
    """Return the content of a torch file of tensors and plain containers; no code in it is run.

    Raises:
        CheckpointError: No such file, damaged, or it holds something else.
    """
    if not file.is_file():
        raise CheckpointError(f"no file {file}; give the path of the .pt or .pth file")
    with parsing(file, CheckpointError, partial(_could_run, file)):
        is_zip = can_be_mapped(file)
        with file.open("rb") as handle:
            if is_zip:
                check_archive(handle)
            else:
                check_announced(handle, _LEGACY_PICKLES)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)


def can_be_mapped(file: Path) -> bool:
    """Return whether a torch file is an archive; older files must be read whole."""
    with file.open("rb") as handle:
        return handle.read(2) == b"PK"


def load_piece(content: bytes, where: Path) -> Any:
    """Return the tensor in one stored piece of a distributed checkpoint.

    Args:
        content: The piece.
        where: Its file.

    Raises:
        CheckpointError: It is none, is damaged, or holds something else.
    """
    buffer = io.BytesIO(content)
    what = "is damaged or holds no tensor where one should be"
    with parsing(where, CheckpointError, what):
        check_archive(buffer)
        buffer.seek(0)
        return torch.load(buffer, map_location="cpu", weights_only=True)


def check_archive(handle: IO[bytes]) -> None:
    """Check that nothing in a torch archive is packed: what it holds is what it unpacks to.

    Raises:
        ValueError: Something is.
        zipfile.BadZipFile: It is not an archive.
    """
    with zipfile.ZipFile(handle) as archive:
        packed = [i.filename for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{packed[0]} in it is compressed, which torch never does")


def _could_run(file: Path, error: Exception) -> str | None:
    if not isinstance(error, pickle.UnpicklingError) or stand_in(file) is not None:
        return None
    return (
        "holds something other than tensors and was not opened: it could run code "
        f"({reason(error)}); get the weights as safetensors from a source you trust"
    )
