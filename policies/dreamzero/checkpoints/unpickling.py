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
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from dzrobot.errors import CheckpointError
from dzrobot.files import diagnosed, stand_in
from dzrobot.untrusted import check_announced

MAX_DESCRIPTION = 1 << 30
"""Bytes of a pickle of descriptions; one of 1,828 tensors on 64 devices has less than 64 MiB."""

MALFORMED = (
    RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError,
    MemoryError, NotImplementedError, AssertionError, ArithmeticError,
)  # fmt: skip
"""What the readers of torch and of the standard library raise on a pickle that makes no sense."""

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
    try:
        if (size := file.stat().st_size) > MAX_DESCRIPTION:
            raise CheckpointError(
                f"{file} has {size} bytes, at most {MAX_DESCRIPTION} are read; it describes no "
                "checkpoint of this kind"
            )
        content = io.BytesIO(file.read_bytes())
        check_announced(content)
        content.seek(0)
        return _ListedClasses(content, allowed).load()
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise _could_run(file, error) from error
    except MALFORMED as error:
        raise _damaged(file, error) from error


def load_tensors(file: Path) -> Any:
    """Return the content of a torch file of tensors and plain containers; no code in it is run.

    Raises:
        CheckpointError: No such file, damaged, or it holds something else.
    """
    if not file.is_file():
        raise CheckpointError(f"no file {file}; give the path of the .pt or .pth file")
    try:
        # Only the zip format can be mapped; older files must be read whole.
        with file.open("rb") as handle:
            is_zip = handle.read(2) == b"PK"
            handle.seek(0)
            if is_zip:
                check_archive(handle)
            else:
                check_announced(handle, _LEGACY_PICKLES)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _could_run(file, error) from error
    except (*MALFORMED, zipfile.BadZipFile) as error:
        raise _damaged(file, error) from error


def load_piece(content: bytes) -> Any:
    """Return the tensor in one stored piece of a distributed checkpoint.

    Raises:
        ValueError: It is none, is damaged, or holds something else.
    """
    buffer = io.BytesIO(content)
    try:
        check_archive(buffer)
        buffer.seek(0)
        return torch.load(buffer, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, *MALFORMED) as error:
        raise ValueError(first_line(error)) from error


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


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's message, fit for a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _could_run(file: Path, error: Exception) -> CheckpointError:
    if stand_in(file) is not None:
        return _damaged(file, error)
    return CheckpointError(
        f"{file} holds something other than tensors and was not opened: it could run code "
        f"({first_line(error)}); get the weights as safetensors from a source you trust"
    )


def _damaged(file: Path, error: BaseException) -> CheckpointError:
    reason = f"is damaged or cut short ({first_line(error)}); copy it again"
    return CheckpointError(diagnosed(file, reason))
