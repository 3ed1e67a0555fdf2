"""What others wrote: how much it may hold, and the one error that a parser's many errors become.

Every parser of files and messages from outside runs inside :func:`parsing`. What such a parser may
raise is in no documentation: a list of its exceptions is always one class short.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from dzrobot.errors import ConfigError, DzrobotError, printable
from dzrobot.files import diagnosed

if TYPE_CHECKING:
    # Every command imports this module, and few of them read an array.
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

LARGEST_DOCUMENT = LARGEST_MESSAGE = 64 * 1024**2
"""Bytes of a document or a message, whatever carries it. The largest document we know, the index of
a checkpoint, has less than 1 MiB; vLLM-Omni has the same limit for messages."""

DEEPEST_DOCUMENT = 64
"""Levels of nesting. Python's parsers recurse, so that deep ones would end the process."""

MOST_ITEMS = 20_000
"""Items of one message, at all levels together. An item may take two hundred times its bytes in
memory; an array is four items whatever its size."""

DEEPEST_MESSAGE = 16
MOST_TEXT = 1024**2
"""Bytes of all texts of a message together: one rare letter makes four bytes of each other one."""

MOST_AXES = 8
"""Axes of one array of numbers."""

MOST_EXPANDED = 1100
"""Bytes that one stored byte may become: deflate, the tightest packing in use, reaches 1,032."""


@dataclass(frozen=True)
class Bound:
    """A bound that real data may pass, which an environment variable then raises.

    As a text it names both, for the end of an error's message.
    """

    variable: str
    usual: int

    @property
    def value(self) -> int:
        """Return the bound that holds now.

        Raises:
            ConfigError: The variable is not a whole number above 0.
        """
        text = os.environ.get(self.variable, str(self.usual))
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise ConfigError(
                f"{self.variable}={printable(text, 40)!r} in the environment; allowed are whole "
                f"numbers above 0; unset, it is {self.usual}"
            )
        return int(text)

    def __str__(self) -> str:
        """Return the bound, and what raises it."""
        return (
            f"{self.value} (if you trust its source, {self.variable} in the environment sets "
            "another bound)"
        )


MOST_ROWS = Bound("DZROBOT_MOST_ROWS", 1_000_000)
"""Rows of one episode, or episodes of one result; at 20 Hz, half a day."""

LARGEST_SIDE = Bound("DZROBOT_LARGEST_SIDE", 8192)
"""Pixels of an image."""

LARGEST_BLOCK = Bound("DZROBOT_LARGEST_BLOCK", 64 * 1024**2)
"""Bytes that must be unpacked at once to reach one row of a table."""

LARGEST_STARTS = 16 * 1024**2
"""Bytes of the starts of one task; LIBERO's 50 have less than 64 KiB."""

DAMAGED = "is damaged or cut short"


@contextmanager
def parsing(
    where: Path | str,
    error_class: type[DzrobotError],
    what: str | Callable[[Exception], str | None] = DAMAGED,
    remedy: str = "copy it again",
) -> Iterator[None]:
    """Turn whatever a foreign parser raises in the block into one message about its input.

    The block holds calls of the parser and nothing else: mistakes of ours would be called damage.

    Args:
        where: A file, which is looked at where it cannot be read; or a place, for the message.
        error_class: What to raise.
        what: What is wrong with it then; or what makes all of it, behind the place, of the error,
            or None for the usual text.
        remedy: What to do about it.

    Raises:
        DzrobotError: of class ``error_class``, from the parser's error. Errors of ours pass.
    """
    try:
        yield
    except DzrobotError:
        raise
    except Exception as error:
        # Nothing narrower, MemoryError and RecursionError included: see this module's docstring.
        if callable(what) and (whole := what(error)) is not None:
            raise error_class(f"{where} {whole}") from error
        said = f"{DAMAGED if callable(what) else what} ({reason(error)}); {remedy}"
        where_said = diagnosed(where, said) if isinstance(where, Path) else f"{where} {said}"
        raise error_class(where_said) from error


class _NothingReadError(DzrobotError):
    """What was tried cannot be read; somebody else says why, or does without."""


def attempted(read: Callable[[], T]) -> T | None:
    """Return what ``read``, calls of a foreign parser alone, returns; None where it raises.

    Args:
        read: What is called. Errors of ours that it raises pass.
    """
    try:
        with parsing("", _NothingReadError):
            return read()
    except _NothingReadError:
        return None


def reason(error: BaseException) -> str:
    """Return the beginning of an error's message as one line that a terminal can show."""
    lines = str(error).strip().splitlines()
    return printable(lines[0] if lines else type(error).__name__, 200)


class _Announced:
    """A file that never reads more than it has: asking for more is an error, not an allocation."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        here = handle.tell()
        self._end = handle.seek(0, io.SEEK_END)
        handle.seek(here)

    @property
    def left(self) -> int:
        """Return the bytes from here to the end."""
        return self._end - self._handle.tell()

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes."""
        if size > self.left:
            raise ValueError(f"it announces {size} bytes where {self.left} are left")
        return self._handle.read(size)

    def readline(self) -> bytes:
        """Return the rest of a line."""
        return self._handle.readline()

    def tell(self) -> int:
        """Return the position."""
        return self._handle.tell()


def check_announced(handle: BinaryIO, count: int = 1) -> None:
    """Check that ``count`` pickles, read from here on, announce no more than the file holds.

    A pickle of a hundred bytes can announce text of a terabyte or a memo of 2^32 places.

    Raises:
        ValueError: one does, or is not a pickle.
    """
    import pickletools

    reader = _Announced(handle)
    for _ in range(count):
        opcodes = pickletools.genops(cast("IO[bytes]", reader))
        for number, (opcode, argument, _) in enumerate(opcodes):
            if not isinstance(argument, int):
                continue
            if opcode.name == "FRAME" and argument > reader.left:
                raise ValueError(f"it announces a frame of {argument} bytes")
            # Writers count places up from zero; a reader makes room for all below the highest.
            if opcode.name.endswith("PUT") and argument > number:
                raise ValueError(f"it asks for {argument} places in memory")


class ListedNames(pickle.Unpickler):
    """Unpickles what is listed, by module and name, and refuses every other name."""

    def __init__(self, file: BinaryIO, listed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._listed = listed

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what stands for a listed name."""
        if (module, name) not in self._listed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._listed[module, name]


class _PickledArray:
    """Stands for an array of NumPy's, whose own reader makes room for what is announced."""

    values: "NDArray[Any]"

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        self.values = _shaped(content, dtype.found(), shape, is_fortran=bool(is_fortran))


class _PickledType:
    """Stands for NumPy's description of a number."""

    def __init__(self, name: str, *_: Any) -> None:
        self._name = name
        self._order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self._order = str(state[1])

    def found(self) -> "np.dtype[Any]":
        import numpy as np

        return np.dtype(self._name).newbyteorder(self._order)


def _latin(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"it holds bytes as {encoding}")
    return text.encode("latin1")


_ARRAYS: Mapping[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _latin,
}
"""What a pickled array asks for; nothing of NumPy itself is called with what a file says."""


def read_pickled_array(content: bytes) -> "NDArray[Any]":
    """Return the array of numbers in a pickle; no code in it is run.

    Raises:
        Exception: any, if it holds something else; call it inside :func:`parsing`.
    """
    file = io.BytesIO(content)
    check_announced(file)
    file.seek(0)
    found = ListedNames(file, _ARRAYS).load()
    if not isinstance(found, _PickledArray):
        raise TypeError(f"it holds {type(found).__name__}, not an array")
    return found.values


def read_npy(content: bytes) -> "NDArray[Any]":
    """Return the array of numbers in a file of NumPy's, which has as many as its head announces.

    Raises:
        Exception: any, if it is not one; call it inside :func:`parsing`.
    """
    import numpy as np

    file = io.BytesIO(content)
    readers: Mapping[tuple[int, int], Callable[[IO[bytes]], Any]] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, is_fortran, dtype = readers[np.lib.format.read_magic(file)](file)
    return _shaped(content[file.tell() :], dtype, shape, is_fortran=is_fortran)


def read_member(file: IO[bytes], ending: str, largest: int) -> bytes:
    """Return the content of the first member of a zip whose name ends in ``ending``.

    Raises:
        Exception: any, if there is none, or it unpacks to more than ``largest`` bytes; call it
            inside :func:`parsing`.
    """
    import zipfile

    with zipfile.ZipFile(file) as archive:
        found = [item for item in archive.infolist() if item.filename.endswith(ending)]
        if not found:
            raise ValueError(f"there is no {ending} in it")
        if found[0].file_size > largest:
            raise ValueError(
                f"it unpacks to {found[0].file_size} bytes; at most {largest} are read"
            )
        with archive.open(found[0]) as stream:
            return stream.read(largest)


def _shaped(
    content: Any, dtype: "np.dtype[Any]", shape: Any, *, is_fortran: bool
) -> "NDArray[Any]":  # fmt: skip
    import numpy as np

    if dtype.kind not in "biuf" or len(shape) > MOST_AXES:
        raise ValueError(f"it holds {dtype} of {len(shape)} axes, not numbers")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")
