"""One HDF5 file from outside: what lies in it, within bounds, and nothing that lies elsewhere.

A dataset can name any file of its reader as the place of its numbers, and a few bytes can announce
terabytes of them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.documents import shorten
from dzrobot.errors import DatasetError, printable
from dzrobot.untrusted import (
    LARGEST_BLOCK,
    LARGEST_DOCUMENT,
    LARGEST_SIDE,
    MOST_EXPANDED,
    MOST_ROWS,
    parsing,
)  # fmt: skip

_MOST_LINKS = 16
"""Soft links on the way to one object; more are a circle."""

_SMALL = 4096
"""Bytes of a table that is taken whatever it holds: what was never written reads as zeros."""


@contextmanager
def open_hdf5(path: Path) -> Iterator["Hdf5Group"]:
    """Yield the root of the file at ``path``.

    Raises:
        DatasetError: it is not an HDF5 file, or is damaged.
    """
    import h5py

    if path.exists() and not path.is_file():
        raise DatasetError(f"{path} is not a regular file; an HDF5 file is expected there")
    with _whole(path):
        file = h5py.File(path, "r")
    try:
        yield Hdf5Group(path, file["/"])
    finally:
        file.close()


def _whole(path: Path) -> AbstractContextManager[None]:
    what = "is not a whole HDF5 file of LIBERO: it is damaged or cut short"
    return parsing(path, DatasetError, what, "copy or download it again")


class Hdf5Group:
    """A group of a file. Links are followed where they lead inside the same file, and no further.

    Every method raises DatasetError for damage, and for what lies outside of the file.
    """

    def __init__(self, path: Path, group: Any) -> None:
        self._path, self._group = path, group

    @property
    def name(self) -> str:
        """Return its place in the file."""
        return printable(str(self._group.name))

    @property
    def where(self) -> str:
        """Return its file and place, for messages."""
        return f"{self._path}: {self.name}"

    def names(self) -> list[str]:
        """Return what is in it; nothing is opened."""
        with _whole(self._path):
            return list(self._group)

    def group(self, name: str) -> "Hdf5Group | None":
        """Return the group at ``name``; None: there is nothing of that name."""
        import h5py

        found = self._found(name)
        if found is not None and not isinstance(found, h5py.Group):
            raise DatasetError(f"{self._path}: {self._place(name)} is not a group")
        return None if found is None else Hdf5Group(self._path, found)

    def table(self, name: str) -> "Hdf5Table | None":
        """Return the table at ``name``; None: there is nothing of that name."""
        import h5py

        found = self._found(name)
        if found is None:
            return None
        where = f"{self._path}: {self._place(name)}"
        if not isinstance(found, h5py.Dataset):
            raise DatasetError(f"{where} is not a table of numbers")
        with _whole(self._path):
            elsewhere = (
                "virtual: a view of tables" if found.is_virtual
                else "stored in other files" if found.id.get_create_plist().get_external_count()
                else None
            )  # fmt: skip
            if elsewhere:
                raise DatasetError(
                    f"{where} is {elsewhere}, which are not read; write it into the file itself "
                    "(h5repack), if you trust its source"
                )
            return Hdf5Table(self._path, where, found)

    def text(self, attribute: str, otherwise: str) -> str:
        """Return the text of an attribute, ``otherwise`` if there is none."""
        where = f"{self._path}: the attribute {attribute} of {self.name}"
        with _whole(self._path):
            if attribute not in self._group.attrs:
                return otherwise
            if self._group.attrs.get_id(attribute).get_storage_size() > LARGEST_DOCUMENT:
                raise DatasetError(f"{where} has more than {LARGEST_DOCUMENT} bytes")
            value = self._group.attrs[attribute]
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if not isinstance(value, str):
            raise DatasetError(f"{where} is {shorten(value)}, not a text")
        return value

    def _place(self, name: str) -> str:
        return printable(f"{self._group.name}/{name}".replace("//", "/"))

    def _found(self, name: str) -> Any:
        """Return the object at ``name``, of whatever class; None if there is none."""
        import h5py

        here, left, links = self._group, name.split("/")[::-1], 0
        with _whole(self._path):
            while left:
                part = left.pop()
                if part in ("", "."):
                    continue
                if not isinstance(here, h5py.Group):
                    raise DatasetError(f"{self._path}: {printable(here.name)} is not a group")
                # Neither `in` nor `get`: both open what an external link leads to.
                table, key = here.id.links, part.encode("utf-8", "surrogateescape")
                if not table.exists(key):
                    return None
                kind = table.get_info(key).type
                if kind == h5py.h5l.TYPE_HARD:
                    here = here[part]
                    continue
                links += 1
                if kind != h5py.h5l.TYPE_SOFT or links > _MOST_LINKS:
                    what = "a circle of links" if links > _MOST_LINKS else "a link to another file"
                    raise DatasetError(
                        f"{self._path}: {self._place(name)} is {what}, which is not followed; "
                        "write what it leads to into the file itself (h5repack), if you trust its "
                        "source"
                    )
                target = table.get_val(key).decode("utf-8", "surrogateescape")
                here = here.file["/"] if target.startswith("/") else here
                left += target.split("/")[::-1]
        return here


class Hdf5Table:
    """A table of a file, by rows; its sizes are checked when it is opened.

    Attributes:
        where: Its file and place, for messages.
        shape: Empty for a single number, None for a table without numbers.
        dtype: Of one number.
    """

    def __init__(self, path: Path, where: str, dataset: Any) -> None:
        self._path, self._dataset, self.where = path, dataset, where
        self.shape: tuple[int, ...] | None = dataset.shape
        self.dtype: np.dtype[Any] = dataset.dtype
        if self.shape is not None:
            self._check_sizes(self.shape, self.dtype.itemsize)

    def _check_sizes(self, shape: tuple[int, ...], width: int) -> None:
        count, side = max(shape[:1], default=1), max(shape[1:], default=1)
        chunk = int(np.prod(self._dataset.chunks or (), dtype=object)) * width
        block, stored = max(self.row_bytes, chunk), self._stored()
        announced = count * self.row_bytes
        fault = ""
        if announced > _SMALL + MOST_EXPANDED * stored:
            fault = (
                f"{announced} bytes, of which {stored} are stored: it was not written to its end"
            )
        if block > LARGEST_BLOCK.value:
            fault = f"{block} bytes that are read at once; allowed are {LARGEST_BLOCK}"
        if count > MOST_ROWS.value:
            fault = f"{shape}; rows allowed are {MOST_ROWS}"
        elif side > LARGEST_SIDE.value:
            fault = f"{shape}; sides allowed are {LARGEST_SIDE}"
        if fault:
            raise DatasetError(f"{self.where} announces {fault}")

    def _stored(self) -> int:
        """Return the bytes that the file has for it: what its index says may be anything."""
        stored: int = self._dataset.id.get_storage_size()
        return min(stored, self._path.stat().st_size)

    @property
    def row_bytes(self) -> int:
        """Return what one row takes."""
        return int(np.prod((self.shape or ())[1:], dtype=object)) * self.dtype.itemsize

    def numbers(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)``.

        Raises:
            DatasetError: they are damaged.
        """
        if self.dtype.kind not in "biuf":
            raise DatasetError(f"{self.where} holds {self.dtype}, not numbers")
        with _whole(self._path):
            return np.asarray(self._dataset[start:stop])

    def finite(self) -> NDArray[np.float32]:
        """Return all rows, every number of which is one.

        Raises:
            DatasetError: one is not, or they are damaged; names the row.
        """
        with np.errstate(over="ignore"):
            rows = self.numbers(0, self.shape[0] if self.shape else 0).astype(np.float32)
        wrong = ~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DatasetError(
                f"{self.where}, row {at}: {shorten(rows[at].tolist())} is not finite"
            )
        return rows

    def head(self) -> bytes:
        """Return up to 16 bytes of the first row of a list of bytes; none of another table."""
        if not self.shape or len(self.shape) > 2 or not self.shape[0]:
            return b""
        with _whole(self._path):
            first = self._dataset[0] if len(self.shape) == 1 else self._dataset[0, :16]
            return bytes(first if isinstance(first, bytes) else np.atleast_1d(first)[:16])
