"""The list of episodes of a v3.0 dataset: parquet files of a bounded number of rows each.

A commit rewrites the last of them, so it costs the same however many episodes came before. The
statistics of the dataset are merged file by file: what is known of the earlier files is kept.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dzrobot.documents import validated
from dzrobot.errors import DatasetError, counted, preview, printable
from dzrobot.files import stand_in, write_json
from dzrobot.recording import column_statistics, folder, formats
from dzrobot.recording.column_statistics import ColumnStatistics
from dzrobot.recording.formats import Text
from dzrobot.untrusted import parsing

ROWS_PER_FILE = 100
"""Recordings begun before 2026-12 have all their episodes in the first file."""

_OWN = {b"dzrobot": b"list of episodes"}
"""Marks the files after the first: other programs give theirs the same names."""

Statistics = dict[str, ColumnStatistics]

IN_FILE = ("chunk_index", "file_index")
"""Which file of v3.0: what a column of the list ends with."""


class EpisodeList:
    """The list of a recording, and the statistics of all its episodes.

    Args:
        root: Folder of the recording.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = 0
        """Number of the last file."""

        self._rows: pa.Table | None = None
        self._statistics: list[Statistics] = []
        """Statistics of the last file, by row."""

        self._before: Statistics = {}
        """Statistics of all earlier files."""

        self.next_file = 0
        """Number of the data and video files of the next episode."""

    def recover(self, episodes: int) -> pa.Table | None:
        """Forget all but the first ``episodes``; return the rows of all, None where none is left.

        Raises:
            DatasetError: The list has fewer, or another program added to it.
        """
        left, kept = episodes, []
        for number, path in enumerate(list_files(self._root)):
            if not left:
                path.unlink()
                continue
            rows = read_parquet(path)
            if len(rows) > left:
                rows = rows.slice(0, left)
                _write(self._root, number, rows)
            left -= len(rows)
            kept.append(rows)
            self._begin(number)
            self._rows, self._statistics = rows, _row_statistics(rows)
        if left:
            raise DatasetError(
                f"{self._root / formats.EPISODES_V3_FOLDER} lists fewer episodes than the "
                f"{episodes} of info.json: another program added to this recording; record to a "
                "new folder"
            )
        if self._rows is None:
            (self._root / formats.STATS).unlink(missing_ok=True)
            return None
        last = self._rows.slice(len(self._rows) - 1).to_pylist()[0]
        self.next_file = number_of(last, "data") + 1
        self._write_statistics()
        return _joined(kept)

    def add(self, row: dict[str, Any], statistics: Statistics) -> None:
        """Enter an episode.

        Args:
            row: Its entry, without statistics.
            statistics: Of its columns.
        """
        if self._rows is not None and len(self._rows) >= ROWS_PER_FILE:
            self._begin(self._number + 1)
        row |= location("meta/episodes", formats.place(self._number))
        self._rows = append_row(self._rows, with_statistics(row, statistics))
        self._statistics.append(statistics)
        self._write_statistics()
        _write(self._root, self._number, self._rows)
        self.next_file += 1

    def _begin(self, number: int) -> None:
        """Go on in another file."""
        if self._statistics:
            self._before = column_statistics.add(
                self._before, column_statistics.merge(self._statistics)
            )
        self._number, self._rows, self._statistics = number, None, []

    def _write_statistics(self) -> None:
        last = column_statistics.merge(self._statistics)
        write_json(self._root / formats.STATS, column_statistics.add(self._before, last))


def list_files(root: Path) -> list[Path]:
    """Return the files of the list of a v3.0 folder, in order.

    Raises:
        DatasetError: Another program added some of its own, or one cannot be read.
    """
    there = formats.own_files(root.glob("meta/episodes/*/*.parquet"))
    own = [_path(root, number) for number in range(len(there))]
    others = set(there) - set(own)
    others |= {path for path in own[1:] if path in there and not _is_marked(path)}
    if others:
        names = sorted(str(path.relative_to(root)) for path in others)
        raise DatasetError(
            f"{root}: another program added {preview(names)} to this recording. It can be read, "
            "but not changed here: record to a new folder"
        )
    return own


def read_rows(root: Path, cameras: Sequence[str] = ()) -> pa.Table | None:
    """Return the list of episodes of a v3.0 folder, or None before the first.

    What places files is checked: numbers, for ``cameras`` too.

    Raises:
        DatasetError: Another program added lists of its own, or the list cannot be read.
    """
    tables = []
    for path in list_files(root):
        lists = ListTable(read_parquet(path), path)
        lists.integers("episode_index")
        lists.integers("length")
        lists.check("tasks", list[Text])
        for prefix in ("data", *(f"videos/{key}" for key in cameras)):
            lists.files(prefix)
        for key in cameras:
            lists.seconds(f"videos/{key}/from_timestamp")
            lists.seconds(f"videos/{key}/to_timestamp")
        tables.append(lists.table)
    return _joined(tables) if tables else None


def write_list(root: Path, rows: pa.Table) -> None:
    """Write a whole list of episodes, and the statistics of all, to ``root``."""
    total: Statistics = {}
    for number, first in enumerate(range(0, len(rows), ROWS_PER_FILE)):
        part = rows.slice(first, ROWS_PER_FILE)
        for name, value in location("meta/episodes", formats.place(number)).items():
            column = pa.array([value] * len(part), part.schema.field(name).type)
            part = part.set_column(part.schema.get_field_index(name), name, column)
        _write(root, number, part)
        total = column_statistics.add(total, column_statistics.merge(_row_statistics(part)))
    write_json(root / formats.STATS, total)


def replace_rows(root: Path, rows: pa.Table) -> None:
    """Replace the rows of a list by as many others, file by file; statistics stay as they are."""
    first = 0
    for number, path in enumerate(list_files(root)):
        count = pq.read_metadata(path).num_rows
        _write(root, number, rows.slice(first, count))
        first += count


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return the table in ``path``, or some of its columns.

    Raises:
        DatasetError: It cannot be read.
    """
    with parsing(path, DatasetError, partial(why_unreadable, path)):
        return pq.read_table(path, columns=columns, partitioning=None)


def why_unreadable(path: Path, error: Exception) -> str:
    """Return what is wrong with a Parquet file, and what helps, to put behind its name."""
    if (kind := stand_in(path)) is not None:
        return f"is {kind.one}; {kind.remedy}"
    with suppress(OSError), path.open("rb") as file:
        begins = file.read(4) == _MARK
        file.seek(-4, 2)
        if begins and file.read() != _MARK:
            return (
                "has no end: its recorder was not closed (LeRobot: finalize()), or it was cut "
                "short on the way; copy it again, or record its episodes again"
            )
    return f"cannot be read: {printable(str(error))}"


_MARK = b"PAR1"
"""What a Parquet file begins and ends with."""


def read_table(path: Path) -> pa.Table:
    """Return a table of lists without the statistics, of which there are hundreds of columns."""
    if not path.exists() and stand_in(path) is None:
        raise DatasetError(f"{path} is missing: the dataset is incomplete")
    with parsing(path, DatasetError, partial(why_unreadable, path)):
        names = [name for name in pq.read_schema(path).names if not name.startswith("stats/")]
    return read_parquet(path, columns=names)


@dataclass(frozen=True)
class ListTable:
    """Columns of a list, checked one by one."""

    table: pa.Table
    where: Path

    def integers(self, name: str, most: int = 10**9) -> NDArray[np.int64]:
        """Return a column of whole numbers from 0 to ``most``, (rows,)."""
        return self._whole(self._column(name), name, most)

    def _whole(self, column: pa.ChunkedArray, name: str, most: int) -> NDArray[np.int64]:
        if not pa.types.is_integer(column.type):
            raise DatasetError(f"{self.where}: {name} is {column.type}, allowed are whole numbers")
        values: NDArray[np.int64] = column.cast(pa.int64(), safe=False).to_numpy()
        if len(values) and not 0 <= values.min() <= values.max() <= most:
            raise DatasetError(
                f"{self.where}: {name} goes from {values.min()} to {values.max()}, allowed is 0 to "
                f"{most}"
            )
        return values

    def seconds(self, name: str) -> NDArray[np.float64]:
        """Return a column of times, (rows,), in seconds; none is negative."""
        column = self._column(name)
        if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            raise DatasetError(f"{self.where}: {name} is {column.type}, allowed are numbers")
        values: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy()
        if not (np.isfinite(values) & (values >= 0)).all():
            raise DatasetError(f"{self.where}: {name} holds a time that is negative or not finite")
        return values

    def check(self, name: str, kind: Any) -> None:
        """Raise :class:`DatasetError` if a value is not of the pydantic type ``kind``."""
        values = self._column(name).to_pylist()
        validated(values, list[kind], f"{self.where}, column {name}", DatasetError)

    def files(self, prefix: str) -> NDArray[np.int64]:
        """Return the chunk and file numbers under ``prefix``, (rows, 2)."""
        return np.stack([self.integers(f"{prefix}/{name}") for name in IN_FILE], axis=1)

    def known_files(self, prefix: str, *times: str) -> NDArray[np.int64]:
        """Return chunk and file numbers as :meth:`files` does, -1 where the list lacks a value.

        Args:
            prefix: Which kind of file.
            times: Columns whose values are needed too.
        """
        names = [*(f"{prefix}/{name}" for name in IN_FILE), *times]
        columns = [self._single(name) for name in names]
        known = np.ones(len(self.table), bool)
        for column in columns:
            known &= column.is_valid().to_numpy() & ~_not_a_number(column)
        files = np.full((len(self.table), 2), -1, np.int64)
        for at, (name, column) in enumerate(zip(names[:2], columns[:2], strict=True)):
            told = column.filter(pa.array(known))
            # Pandas makes a column with gaps one of floats.
            if pa.types.is_floating(column.type) and _all_whole(told):
                told = told.cast(pa.int64())
            files[known, at] = self._whole(told, name, 10**9)
        return files

    def texts(self, name: str) -> list[str]:
        """Return a column of texts."""
        column = self._column(name)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise DatasetError(f"{self.where}: {name} is {column.type}, allowed are texts")
        return list(column.to_pylist())

    def _column(self, name: str) -> pa.ChunkedArray:
        column = self._single(name)
        if column.null_count:
            rows = np.flatnonzero(column.is_null().to_numpy())
            raise DatasetError(
                f"{self.where}: {name} has {counted(len(rows), 'empty row')}, the first is row "
                f"{rows[0]}: write the value into the list, or take the row out of it"
            )
        return column

    def _single(self, name: str) -> pa.ChunkedArray:
        if self.table.column_names.count(name) != 1:
            raise DatasetError(
                f"{self.where}: there is not one column {name!r}; it has "
                f"{preview(self.table.column_names, 20)}"
            )
        return self.table.column(name)


def _not_a_number(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    if not pa.types.is_floating(column.type):
        return np.zeros(len(column), bool)
    return np.asarray(np.isnan(column.to_numpy()), bool)


def _all_whole(column: pa.ChunkedArray) -> bool:
    values = column.to_numpy()
    return bool((values == np.round(values)).all())


def append_row(rows: pa.Table | None, row: dict[str, Any]) -> pa.Table:
    """Return ``rows`` with one more; columns that either side lacks are null there."""
    added = pa.Table.from_pylist([row])
    # As they are when read back, so that a list looks the same however often it was reopened.
    added = added.cast(pa.schema([(field.name, _stored(field.type)) for field in added.schema]))
    return added if rows is None else pa.concat_tables([rows, added], promote_options="default")


def _stored(kind: pa.DataType) -> pa.DataType:
    """Return a type as Parquet gives it back: what a list holds is called ``element``."""
    if not pa.types.is_list(kind):
        return kind
    return pa.list_(pa.field("element", _stored(kind.value_type)))


def listed_files(root: Path, rows: pa.Table) -> list[Path]:
    """Return every data and video file that the list of a v3.0 folder refers to."""
    paths = []
    for prefix in [
        name.removesuffix("/file_index")
        for name in rows.column_names
        if name.endswith("/file_index")
    ]:
        if prefix == "meta/episodes":
            continue
        numbers = ListTable(rows, root).files(prefix).tolist()
        paths += [
            root / formats.file_name("v3.0", prefix, dict(zip(IN_FILE, place, strict=True)))
            for place in numbers
        ]
    return paths


def remove_unlisted(root: Path, rows: pa.Table | None) -> None:
    """Remove the data and video files of a v3.0 folder that its list ``rows`` does not name."""
    listed = set() if rows is None else set(listed_files(root, rows))
    for path in [*root.glob("data/*/file-*.parquet"), *root.glob("videos/*/*/file-*.mp4")]:
        if path not in listed:
            path.unlink()


def _row_statistics(rows: pa.Table) -> list[Statistics]:
    """Return the statistics of every episode of ``rows``."""
    names = [name for name in rows.column_names if name.startswith("stats/")]
    return [take_statistics(row) for row in rows.select(names).to_pylist()]


def take_statistics(row: dict[str, Any]) -> Statistics:
    """Take the statistics out of an entry of a list and return them by column."""
    statistics: Statistics = {}
    for name in [name for name in row if name.startswith("stats/")]:
        column, measure = name.removeprefix("stats/").rsplit("/", 1)
        if (value := row.pop(name)) is not None:
            statistics.setdefault(column, {})[measure] = value
    return statistics


def with_statistics(row: dict[str, Any], statistics: Statistics) -> dict[str, Any]:
    """Return an entry of a list with the statistics of its columns."""
    return row | {
        f"stats/{column}/{name}": value
        for column, table in statistics.items() for name, value in table.items()
    }  # fmt: skip


def location(prefix: str, where: dict[str, int]) -> dict[str, int]:
    """Return the columns of a list that say in which file something lies."""
    return {f"{prefix}/{name}": where[name] for name in IN_FILE}


def located(row: Mapping[str, Any], prefix: str) -> dict[str, int]:
    """Return the indices of the file in which something of an entry lies."""
    return {name: int(row[f"{prefix}/{name}"]) for name in IN_FILE}


def number_of(row: Mapping[str, Any], prefix: str) -> int:
    """Return the number of the file in which something of an entry lies; see :func:`.place`."""
    where = located(row, prefix)
    return where["chunk_index"] * formats.CHUNK_SIZE + where["file_index"]


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="default")


def _path(root: Path, number: int) -> Path:
    return root / formats.EPISODES_V3.format(**formats.place(number))


def _is_marked(path: Path) -> bool:
    with parsing(path, DatasetError, partial(why_unreadable, path)):
        noted = pq.read_schema(path).metadata or {}
    return bool(_OWN.items() <= noted.items())


def _write(root: Path, number: int, rows: pa.Table) -> None:
    if number:
        rows = rows.replace_schema_metadata(_OWN)
    folder.write_parquet(_path(root, number), rows)
