"""Numbers and instruction codes of a whole dataset, copied once from Parquet to mapped files.

All workers map the same files, so that even a hundred gigabytes of recordings cost each of them
only the pages it touches.
"""

import hashlib
import itertools
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dzrobot.documents import read_json
from dzrobot.errors import DatasetError, preview, printable
from dzrobot.files import one_at_a_time
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.episode_list import why_unreadable
from dzrobot.recording.formats import LONGEST_EPISODE
from dzrobot.training.data.column_mapping import ResolvedColumns
from dzrobot.untrusted import parsing

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with files done and files in all."""

_READERS = 4
_TOGETHER = 2**18
"""Rows up to which files are copied at once."""

MOST_ROWS = 10 * LONGEST_EPISODE
"""Rows of one data file. A few bytes of Parquet can encode any number of equal rows."""

_FORMAT = 2
"""Raised when the layout of the cache changes."""

_INDEX_FILE = "columns.json"
_LARGEST_INDEX = 2**30
"""Bytes of that file, which holds every instruction of a dataset."""

_NONE = np.zeros(0, np.int64)

_Layout = Mapping[str, tuple[tuple[int, ...], type]]
"""Shape and kind of every array of a cache."""


class _CacheIndex(BaseModel):
    """The content of ``columns.json``."""

    model_config = ConfigDict(extra="forbid")

    widths: dict[str, int]
    texts: dict[str, tuple[str, ...]]
    faults: dict[int, str]
    unlisted: dict[int, str] = {}


@dataclass(frozen=True)
class Columns:
    """Mapped columns of one dataset; row ``catalog.episodes.offset[ordinal] + frame``."""

    folder: Path
    widths: Mapping[str, int]
    texts: Mapping[str, tuple[str, ...]]
    """Instruction by code, for every instruction column."""

    faults: Mapping[int, str]
    """Episodes that cannot be used, by ordinal, and why."""

    unlisted: Mapping[int, str] = field(default_factory=dict)
    """Numbers of episodes that have rows and are not in the list, and the file these are in."""

    _open: dict[str, NDArray[Any]] = field(default_factory=dict, repr=False, compare=False)

    def vector(self, column: str) -> NDArray[np.float32]:
        """Return a column of numbers, (frames, width) float32."""
        return self._map(column)

    def codes(self, column: str) -> NDArray[np.int32]:
        """Return an instruction column, (frames,) int32: positions in ``texts[column]``."""
        return self._map(column)

    def blank(self, column: str) -> NDArray[np.bool_]:
        """Return, by code, whether the instruction says nothing."""
        key = f"blank {column}"
        if key not in self._open:
            self._open[key] = np.array([not text.strip() for text in self.texts[column]], bool)
        return self._open[key]

    @property
    def first_row(self) -> NDArray[np.int64]:
        """Row of each episode's first frame within its data file, (episodes,)."""
        return self._map("first_row")

    def __getstate__(self) -> dict[str, Any]:
        # A pickled mapping would carry the whole column.
        return {**self.__dict__, "_open": {}}

    def _map(self, name: str) -> NDArray[Any]:
        if name not in self._open:
            self._open[name] = np.load(self.folder / _file_name(name), mmap_mode="r")
        return self._open[name]


def open_columns(
    catalog: DatasetCatalog,
    resolution: ResolvedColumns,
    cache: Path,
    progress: Progress | None = None,
    more: Sequence[str] = (),
) -> Columns:
    """Return the columns that ``resolution`` needs; missing or damaged ones are copied again.

    Episodes whose files are absent or damaged end up in ``faults``; nothing is dropped silently.
    ``more`` names further columns of numbers.
    """
    vectors = sorted({*(source.column for source in resolution.vectors.values()), *more})
    texts = {source.column: source.kind for source in resolution.texts}
    filmed = any(source.kind == "video" for source in resolution.views.values())
    key = json.dumps([_FORMAT, catalog.identity, vectors, sorted(texts.items()), filmed])
    folder = cache / f"columns-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    layout = _layout(catalog, vectors, texts)
    cached, _ = _cached(folder, layout)
    if cached is not None:
        return cached
    cache.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(cache / f"{folder.name}.lock", f"reading the columns of {catalog.root}"):
        # Another process may have copied them meanwhile.
        cached, damage = _cached(folder, layout)
        if cached is not None:
            return cached
        if damage:
            _log.warning(
                "the cached columns of %s are damaged and are copied again: %s",
                catalog.root, damage,
            )  # fmt: skip
        temporary = folder.with_name(f"{folder.name}-{uuid.uuid4().hex}")
        temporary.mkdir(parents=True)
        clock = _CLOCK if filmed else ()
        _Builder(catalog, layout, texts, temporary, clock).build(progress)
        _publish(temporary, folder, layout)
    return _read_cache(folder, layout)


def _layout(
    catalog: DatasetCatalog, vectors: Sequence[str], texts: Mapping[str, str]
) -> dict[str, tuple[tuple[int, ...], type]]:
    frames = int(catalog.episodes.offset[-1])
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        name: ((frames, catalog.features[name].shape[0]), np.float32) for name in vectors
    }
    shapes |= dict.fromkeys(texts, ((frames,), np.int32))
    shapes["first_row"] = ((len(catalog.episodes),), np.int64)
    return shapes


def _cached(folder: Path, layout: _Layout) -> tuple[Columns | None, str]:
    """Return what was copied, or None and what is wrong with it, if anything is there."""
    if not folder.exists():
        return None, ""
    try:
        return _read_cache(folder, layout), ""
    except DatasetError as error:
        return None, str(error)


def _read_cache(folder: Path, layout: _Layout) -> Columns:
    """Return the columns in ``folder``; raise :class:`DatasetError` where they are damaged."""
    known = read_json(folder / _INDEX_FILE, _CacheIndex, DatasetError, largest=_LARGEST_INDEX)
    if (*known.widths, *known.texts, "first_row") != tuple(layout):
        raise DatasetError(f"{folder / _INDEX_FILE} lists other columns than were asked for")
    for name, (shape, kind) in layout.items():
        file = folder / _file_name(name)
        try:
            array = np.load(file, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DatasetError(f"{file} cannot be read: {printable(str(error))}") from error
        if (array.shape, array.dtype) != (shape, np.dtype(kind)):
            raise DatasetError(f"{file} holds {array.dtype} of shape {array.shape}")
    return Columns(folder=folder, **dict(known))


def _check_free_space(folder: Path, frames: int, size: int) -> None:
    """Raise :class:`DatasetError` if the disk has no room for the copies."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DatasetError(
            f"the dataset lists {frames:,} frames, which need up to {size:,} bytes in {folder}; "
            f"{free:,} are free: check the lengths, or set DZROBOT_CACHE to another folder"
        )


def _publish(temporary: Path, folder: Path, layout: _Layout) -> None:
    """Move a finished cache into place; if another process was faster, keep its result."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        aside = temporary
        try:
            _read_cache(folder, layout)
        except DatasetError:
            aside = temporary.with_name(f"{temporary.name}-damaged")
            folder.rename(aside)
            temporary.rename(folder)
        shutil.rmtree(aside)


def _file_name(column: str) -> str:
    return f"{column.replace('/', '_')}.npy"


class _Builder:
    """One pass over the data files."""

    def __init__(
        self,
        catalog: DatasetCatalog,
        layout: _Layout,
        texts: Mapping[str, str],
        folder: Path,
        clock: Sequence[str],
    ) -> None:
        self._catalog = catalog
        self._clock = [name for name in clock if name in catalog.features]
        self._elsewhere: dict[int, str] = {}
        """Episodes found in a file that the list does not give them, by number."""

        self._texts = texts
        self._folder = folder
        self._widths = {name: shape[1] for name, (shape, _) in layout.items() if len(shape) == 2}
        frames = int(catalog.episodes.offset[-1])
        _check_free_space(folder, frames, sum(prod(shape) * 8 for shape, _ in layout.values()))
        self._arrays = {
            name: np.lib.format.open_memmap(folder / _file_name(name), "w+", dtype, shape)
            for name, (shape, dtype) in layout.items()
        }
        self._codes: dict[str, dict[str, int]] = {name: {} for name in texts}
        self._faults: dict[int, str] = {}

    def build(self, progress: Progress | None) -> None:
        groups = self._files()
        with ThreadPoolExecutor(_READERS) as readers:
            # In slices, so that only a few hundred files are in memory at a time.
            step = 64
            for first in range(0, len(groups), step):
                part = groups[first : first + step]
                tables = [*readers.map(self._read, [name for name, _ in part])]
                if not self._copy_together([ordinals for _, ordinals in part], tables):
                    for (name, ordinals), table in zip(part, tables, strict=True):
                        self._copy_file(name, ordinals, table)
                if progress:
                    progress(min(first + step, len(groups)), len(groups))
        for array in self._arrays.values():
            array.flush()
        content = {
            "widths": self._widths,
            "texts": {
                name: list(self._catalog.tasks.values() if kind == "task" else self._codes[name])
                for name, kind in self._texts.items()
            },
            "faults": self._found(),
            "unlisted": {
                number: name for number, name in self._elsewhere.items()
                if number not in set(self._catalog.episodes.index.tolist())
            },
        }  # fmt: skip
        (self._folder / _INDEX_FILE).write_text(json.dumps(content))

    def _found(self) -> dict[int, str]:
        """Return the faults; those of episodes that lie in another file name it."""
        for ordinal in self._faults:
            other = self._elsewhere.get(int(self._catalog.episodes.index[ordinal]))
            if other is not None:
                self._faults[ordinal] += f"; there are rows of it in {other}: correct the list"
        return self._faults

    def _files(self) -> list[tuple[str, list[int]]]:
        groups: dict[str, list[int]] = {}
        for ordinal, name in enumerate(self._catalog.files("data")):
            groups.setdefault(name, []).append(ordinal)
        return list(groups.items())

    def _read(self, name: str) -> pa.Table | str:
        """Return the needed columns of a data file, or why there are none."""
        try:
            return read_data_file(self._catalog, name, [*self._widths, *self._texts, *self._clock])
        except DatasetError as error:
            return str(error)

    def _copy_file(self, name: str, ordinals: list[int], table: pa.Table | str) -> None:
        if isinstance(table, str):
            self._faults |= dict.fromkeys(ordinals, table)
            return
        try:
            rows = EpisodeRows(self._catalog, table)
        except DatasetError as error:
            self._faults |= dict.fromkeys(ordinals, f"{name}: {error}")
            return
        listed = {int(self._catalog.episodes.index[ordinal]) for ordinal in ordinals}
        self._elsewhere |= dict.fromkeys(rows.numbers - listed, name)
        for ordinal in ordinals:
            try:
                first, part = rows.of(ordinal)
                self._copy_rows(ordinal, np.array([first]), part)
            except DatasetError as error:
                self._faults[ordinal] = f"{name}: {error}"

    def _copy_together(self, groups: list[list[int]], tables: list[pa.Table | str]) -> bool:
        """Copy many small files at once, which takes a third of the time of one after another.

        Returns:
            False where a file is not just the rows of its episodes in their order, where something
            is wrong, or where the files are large: then nothing is copied.
        """
        read = [table for table in tables if not isinstance(table, str)]
        ordinals = [ordinal for group in groups for ordinal in group]
        start, stop = ordinals[0], ordinals[-1] + 1
        if len(read) < len(tables) or ordinals != [*range(start, stop)]:
            return False
        episodes = self._catalog.episodes
        lengths, held = [episodes.length[group] for group in groups], [len(table) for table in read]
        if held != [int(each.sum()) for each in lengths] or sum(held) > _TOGETHER:
            return False
        expected = np.repeat(episodes.index[start:stop], episodes.length[start:stop])
        try:
            with parsing("the files", DatasetError, "do not fit together"):
                rows = pa.concat_tables(read).combine_chunks()
            if not np.array_equal(_episode_numbers(rows["episode_index"]), expected):
                return False
            first = np.concatenate([np.cumsum(each) - each for each in lengths])
            self._copy_rows(start, first, rows)
        except DatasetError:
            return False
        return True

    def _copy_rows(self, start: int, first: NDArray[np.int64], rows: pa.Table) -> None:
        """Copy the ``rows`` of the episodes from ``start`` on, which begin at ``first`` in files.

        Raises:
            DatasetError: Something is wrong with one of them.
        """
        episodes, stop = self._catalog.episodes, start + len(first)
        _check_clock(rows, self._clock, self._catalog.fps, episodes.length[start:stop])
        at = slice(episodes.offset[start], episodes.offset[stop])
        for name, width in self._widths.items():
            try:
                self._arrays[name][at] = matrix(rows[name], name, width)
            except DatasetError as error:
                raise DatasetError(f"episode {int(episodes.index[start])}: {error}") from error
        for name, kind in self._texts.items():
            self._arrays[name][at] = self._encode(name, kind, rows[name])
        self._arrays["first_row"][start:stop] = first

    def _encode(self, name: str, kind: str, column: pa.ChunkedArray) -> NDArray[np.int32]:
        if column.null_count:
            raise DatasetError(f"{name} has {column.null_count} empty rows")
        if kind == "task":
            if not pa.types.is_integer(column.type):
                raise DatasetError(f"{name} is {column.type}, allowed are whole numbers")
            numbers = np.concatenate([plain_numbers(chunk) for chunk in column.chunks] or [_NONE])
            known = np.array([*self._catalog.tasks], np.int64)
            codes: NDArray[np.int32] = np.searchsorted(known, numbers).astype(np.int32)
            strange = numbers[~np.isin(numbers, known)]
            if len(strange):
                raise DatasetError(
                    f"{name} holds {strange[0]}, which the list of tasks does not have: it has "
                    f"{preview([str(number) for number in known])}"
                )
            return codes
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise DatasetError(f"{name} is {column.type}, allowed are texts")
        table = self._codes[name]
        encoded = column.combine_chunks().dictionary_encode()
        known_codes = [
            table.setdefault(text, len(table)) for text in encoded.dictionary.to_pylist()
        ]
        rows: NDArray[np.int32] = np.array(known_codes, np.int32)[encoded.indices.to_numpy()]
        return rows


def read_data_file(catalog: DatasetCatalog, name: str, columns: Sequence[str]) -> pa.Table:
    """Return ``columns`` of the data file ``name``, and the number of each row's episode.

    Raises:
        DatasetError: It is missing, damaged, announces too many rows, or lacks a column.
    """
    wanted = {"episode_index", *columns}
    path = catalog.root / name
    if not catalog.sizes.get(name):
        raise DatasetError(f"{name} is missing")
    # Not `pq.read_table`: what it does beside reading takes six times as long for an episode. Nor
    # the path itself, nor reading ahead: looking for its file system and handing reads to other
    # threads take half of what is left.
    with (
        parsing(name, DatasetError, partial(why_unreadable, path)),
        pa.OSFile(str(path)) as opened,
        pq.ParquetFile(opened, pre_buffer=False) as file,
    ):
        rows = file.metadata.num_rows
        if rows > MOST_ROWS:
            raise DatasetError(
                f"{name} says that it holds {rows:,} rows; allowed are {MOST_ROWS:,}"
            )
        table = file.read(columns=sorted(wanted), use_threads=False)
    if absent := wanted - set(table.column_names):
        raise DatasetError(f"{name} lacks the columns {preview(absent)}")
    if len(table.column_names) > len(wanted):
        raise DatasetError(f"{name} has some of the columns {preview(wanted)} more than once")
    return table


class EpisodeRows:
    """Where each episode lies in a data file; the file's rows are looked through once.

    Args:
        catalog: Says how long the episodes are.
        table: The file, or some of its columns.

    Raises:
        DatasetError: The column that tells is none of whole numbers.
    """

    def __init__(self, catalog: DatasetCatalog, table: pa.Table) -> None:
        self._catalog, self._table = catalog, table
        numbers = _episode_numbers(table["episode_index"])
        bounds = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        bounds = np.concatenate([[0], bounds, [len(numbers)]]) if len(numbers) else np.zeros(1, int)
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        for first, stop in itertools.pairwise(bounds.tolist()):
            self._pieces.setdefault(int(numbers[first]), []).append((first, stop))

    @property
    def numbers(self) -> set[int]:
        """Episodes that the file holds rows of."""
        return set(self._pieces)

    def of(self, ordinal: int) -> tuple[int, pa.Table]:
        """Return the first row of the ``ordinal``-th episode in the file, and its rows.

        Raises:
            DatasetError: There are not as many as the list of episodes says, or not in one piece.
        """
        index = int(self._catalog.episodes.index[ordinal])
        length = int(self._catalog.episodes.length[ordinal])
        pieces = self._pieces.get(index, [(0, 0)])
        rows = sum(stop - first for first, stop in pieces)
        if len(pieces) > 1 or rows != length:
            raise DatasetError(
                f"episode {index} has {rows} rows in {len(pieces)} pieces, the list of episodes "
                f"says {length}"
            )
        return pieces[0][0], self._table.slice(pieces[0][0], length)


def _episode_numbers(column: pa.ChunkedArray) -> NDArray[np.integer]:
    """Return the number of the episode of every row.

    Raises:
        DatasetError: A row has none, or they are not whole numbers.
    """
    if not pa.types.is_integer(column.type) or column.null_count:
        raise DatasetError(
            f"episode_index is {column.type} with {column.null_count} empty rows, allowed are "
            "whole numbers in every row"
        )
    return np.concatenate([plain_numbers(chunk) for chunk in column.chunks] or [_NONE])


def _check_clock(
    rows: pa.Table, clock: Sequence[str], fps: float, lengths: NDArray[np.int64]
) -> None:
    """Check that the rows of episodes with films follow each other as their pictures do.

    Args:
        rows: Of one or several episodes.
        clock: Columns that tell it.
        fps: Rows per second.
        lengths: Rows of each episode.

    Raises:
        DatasetError: Rows are missing, in another order, or of another rate.
    """
    expected = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    for name in clock:
        rate = fps if name == "timestamp" else 1.0
        values = matrix(rows[name], name, 1)[:, 0].astype(np.float64)
        off = np.abs(values * rate - expected)
        if len(off) and off.max() > _LATE:
            row = int(off.argmax())
            raise DatasetError(
                f"row {row} has {name} {values[row]:g}, at {fps:g} rows per second that is row "
                f"{values[row] * rate:.1f}: which picture belongs to it is not known"
            )


_CLOCK = ("frame_index", "timestamp")
"""LeRobot's columns that say which picture of its episode's film belongs to a row."""

_LATE = 0.5
"""Rows by which the two may be off."""


def matrix(column: pa.ChunkedArray, name: str, width: int) -> NDArray[np.float32]:
    """Return a column of vectors as (rows, width) float32.

    Raises:
        DatasetError: A row is of another size, empty, no numbers, or not finite.
    """
    try:
        values = [_flat(chunk) for chunk in column.chunks]
    except DatasetError as error:
        raise DatasetError(f"{name}: {error}") from error
    flat = np.concatenate(values) if values else np.zeros(0, np.float32)
    if len(flat) != len(column) * width or column.null_count:
        raise DatasetError(f"{name} does not hold {width} numbers in every row")
    with np.errstate(over="ignore"):  # What float32 cannot hold becomes infinite, and is refused.
        table: NDArray[np.float32] = flat.astype(np.float32, copy=False).reshape(-1, width)
    if not np.isfinite(table).all():
        row, number = np.argwhere(~np.isfinite(table))[0]
        raise DatasetError(f"{name}[{number}] of frame {row} is not finite")
    return table


def _flat(chunk: pa.Array) -> NDArray[Any]:
    kind = chunk.type
    if pa.types.is_fixed_size_list(kind):
        # Twice as fast as `flatten`; rows that are empty are refused by whoever counts them.
        chunk = chunk.values.slice(chunk.offset * kind.list_size, len(chunk) * kind.list_size)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        first, stop = (chunk.offsets[at].as_py() for at in (0, -1)) if len(chunk) else (0, 0)
        chunk = chunk.values.slice(first, stop - first)
    kind = chunk.type
    if not any(
        is_(kind) for is_ in (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)
    ):
        raise DatasetError(f"its rows are {chunk.type}, allowed are numbers")
    return plain_numbers(chunk)


def plain_numbers(chunk: pa.Array) -> NDArray[Any]:
    """Return an array of numbers; empty ones are NaN.

    `to_numpy` imports pandas first, which takes as long as reading hundreds of files.
    """
    if chunk.null_count or not len(chunk) or pa.types.is_boolean(chunk.type):
        return np.asarray(chunk.to_numpy(zero_copy_only=False))
    return np.from_dlpack(chunk)
