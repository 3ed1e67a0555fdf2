"""Images stored in Parquet files, read a few row groups at a time; and open files after a fork.

File handles and decoders must not be used or freed after fork(): file positions are shared with the
parent, and freeing a decoder may wait for threads that the fork did not copy. So after a fork every
holder of open files starts empty, and its old files stay untouched until the process ends.
"""

import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dzrobot.documents import shorten
from dzrobot.errors import DatasetError
from dzrobot.untrusted import parsing

_inherited: list[object] = []


class FileHolder(Protocol):
    """Something with open files."""

    def detach(self) -> object:
        """Return all open files and forget them."""
        ...


_holders: weakref.WeakSet[FileHolder] = weakref.WeakSet()


def empty_after_fork(holder: FileHolder) -> None:
    """Make ``holder`` start empty in every process forked from now on."""
    _holders.add(holder)


def _after_fork() -> None:
    _inherited.extend(holder.detach() for holder in list(_holders))


os.register_at_fork(after_in_child=_after_fork)


OPEN_FILES = 64
CACHE_BYTES = 64 * 2**20
"""Compressed images a reader keeps."""


class EmbeddedImages:
    """Reader of image columns with a bounded memory."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, tuple[Any, NDArray[np.int64]]] = OrderedDict()
        self._groups: OrderedDict[tuple[Path, int, str], pa.ChunkedArray] = OrderedDict()
        self._bytes = 0
        empty_after_fork(self)

    def clip(self, path: Path, column: str, rows: Sequence[int]) -> NDArray[np.uint8]:
        """Return the images of ``rows`` of ``path`` as (N, H, W, 3) uint8 RGB.

        Raises:
            DatasetError: The file is missing or damaged, or an image does not decode.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        distinct, places = np.unique(wanted, return_inverse=True)
        with parsing(path, DatasetError, "cannot be read"):
            parquet, ends = self._file(path)
            groups = np.searchsorted(ends, distinct, side="right")
            cells = [
                self._group(path, parquet, int(group), column)[
                    int(row - (ends[group - 1] if group else 0))
                ].as_py()
                for row, group in zip(distinct, groups, strict=True)
            ]
        images = [
            _decode(cell, path, column, int(row)) for cell, row in zip(cells, distinct, strict=True)
        ]
        return np.stack(images)[places]

    def detach(self) -> object:
        """Return all open files and forget them."""
        known = (self._files, self._groups)
        self._files, self._groups, self._bytes = OrderedDict(), OrderedDict(), 0
        return known

    def __getstate__(self) -> dict[str, Any]:
        # Open files do not cross processes; each worker opens its own.
        return {**self.__dict__, "_files": OrderedDict(), "_groups": OrderedDict(), "_bytes": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        empty_after_fork(self)

    def _file(self, path: Path) -> tuple[Any, NDArray[np.int64]]:
        if path not in self._files:
            parquet = pq.ParquetFile(path, memory_map=True)
            sizes = [
                parquet.metadata.row_group(i).num_rows
                for i in range(parquet.metadata.num_row_groups)
            ]
            self._files[path] = (parquet, np.cumsum(sizes, dtype=np.int64))
            if len(self._files) > OPEN_FILES:
                _, (oldest, _) = self._files.popitem(last=False)
                oldest.close()
        self._files.move_to_end(path)
        return self._files[path]

    def _group(self, path: Path, parquet: Any, group: int, column: str) -> pa.ChunkedArray:
        key = (path, group, column)
        if key not in self._groups:
            cells = parquet.read_row_group(group, columns=[column], use_threads=False)[column]
            self._groups[key] = cells
            self._bytes += cells.nbytes
            while self._bytes > CACHE_BYTES and len(self._groups) > 1:
                _, oldest = self._groups.popitem(last=False)
                self._bytes -= oldest.nbytes
        self._groups.move_to_end(key)
        return self._groups[key]


def _decode(cell: Any, path: Path, column: str, row: int) -> NDArray[np.uint8]:
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(data, bytes):
        raise DatasetError(
            f"{path}: {column} of row {row} holds {shorten(data)}, expected the bytes of an image"
        )
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise DatasetError(f"{path}: {column} of row {row} is not a readable image")
    rgb: NDArray[np.uint8] = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return rgb
