"""How a finished episode joins a dataset, and how an interrupted one leaves no trace.

Order of a commit: images and numbers, tasks, statistics, the list of episodes, and last
``info.json``. Its ``total_episodes`` is the commit: when the folder is opened again, whatever lies
beyond that count is removed and every list and statistic is what it was at that count, to the bit.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from dzrobot.documents import read_json, read_json_lines, validated
from dzrobot.errors import DatasetError, preview, printable
from dzrobot.files import move, write_json, write_json_lines
from dzrobot.recording import column_statistics, folder, formats
from dzrobot.recording.column_statistics import ColumnStatistics
from dzrobot.recording.formats import Count, EpisodeStatistics, Seconds, TaskRow, Text, Writer

WRITER = "dzrobot"
"""Name of this program in ``meta/recording.json``."""


@dataclass(frozen=True, kw_only=True)
class FinishedEpisode:
    """An episode whose files lie complete in the aside folder."""

    index: int
    first_row: int
    """Rows of all episodes before it."""

    length: int
    seconds: float
    tasks: tuple[str, ...]
    data: Path
    videos: dict[str, Path]
    statistics: dict[str, ColumnStatistics]

    @property
    def row(self) -> dict[str, Any]:
        """The episode's entry in the list of episodes, in the part that all versions share."""
        return {
            "episode_index": self.index,
            "tasks": list(self.tasks),
            "length": self.length,
        }


class MetaFiles(Protocol):
    """The list of episodes and tasks of one format version."""

    version: str

    def recover(self, episodes: int, tasks: int) -> list[str]:
        """Forget all but the first ``episodes`` and ``tasks``; return the tasks in index order.

        Raises:
            DatasetError: The lists hold fewer, or another program added to them.
        """
        ...

    def add(self, episode: FinishedEpisode, tasks: list[str]) -> None:
        """Move the episode's files into place and enter it in the lists."""
        ...


class MetaFilesV2:
    """One file per episode, lists as JSON lines (v2.0 and v2.1)."""

    def __init__(self, root: Path, version: str) -> None:
        self._root = root
        self.version = version
        self._total: dict[str, ColumnStatistics] = {}

    def recover(self, episodes: int, tasks: int) -> list[str]:
        """Forget all but the first ``episodes`` and ``tasks``; return the tasks in index order."""
        for path in [
            *self._root.glob("data/*/episode_*.parquet"),
            *self._root.glob("videos/*/*/*.mp4"),
        ]:
            number = path.stem.removeprefix("episode_")
            if number.isdecimal() and int(number) >= episodes:
                path.unlink()
        folder.keep_lines(self._root / formats.EPISODES_V2, episodes)
        folder.keep_lines(self._root / formats.EPISODES_STATS_V2, episodes)
        folder.keep_lines(self._root / formats.TASKS_V2, tasks)
        if not episodes:
            (self._root / formats.STATS).unlink(missing_ok=True)
            return []
        self._recover_total(episodes)
        lines = read_json_lines(self._root / formats.TASKS_V2, TaskRow, DatasetError)
        return [row.task for row in lines]

    def _recover_total(self, episodes: int) -> None:
        if self.version != "v2.0":
            return
        path = self._root / formats.EPISODES_STATS_V2
        for line in read_json_lines(path, EpisodeStatistics, DatasetError, limit=episodes):
            self._total = column_statistics.add(self._total, line.stats)
        write_json(self._root / formats.STATS, self._total)

    def add(self, episode: FinishedEpisode, tasks: list[str]) -> None:
        """Move the episode's files into place and enter it in the lists."""
        where = formats.place(episode.index)
        move(episode.data, self._root / formats.DATA_PATH[self.version].format(**where))
        for key, path in episode.videos.items():
            target = formats.VIDEO_PATH[self.version].format(video_key=key, **where)
            move(path, self._root / target)
        write_json_lines(
            self._root / formats.TASKS_V2,
            [{"task_index": i, "task": task} for i, task in enumerate(tasks)],
        )
        if self.version == "v2.0":
            self._total = column_statistics.add(self._total, episode.statistics)
            write_json(self._root / formats.STATS, self._total)
        # v2.0 knows no statistics per episode; we need them to take an episode back.
        line = {"episode_index": episode.index, "stats": episode.statistics}
        folder.append_json_line(self._root / formats.EPISODES_STATS_V2, line)
        folder.append_json_line(self._root / formats.EPISODES_V2, episode.row)


class MetaFilesV3:
    """Numbered files that may hold many episodes, lists as parquet (v3.0).

    Each episode first gets files of its own; :func:`dzrobot.recording.consolidate` packs them.
    """

    version = "v3.0"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rows: pa.Table | None = None

    def recover(self, episodes: int, tasks: int) -> list[str]:
        """Forget all but the first ``episodes`` and ``tasks``; return the tasks in index order."""
        listed = self._root / formats.EPISODES_V3.format(**formats.place(0))
        if not episodes:
            for path in (listed, self._root / formats.STATS, self._root / formats.TASKS_V3):
                path.unlink(missing_ok=True)
            remove_unlisted(self._root, self._rows)
            return []
        table = read_rows(self._root)
        if table is None or len(table) < episodes:
            raise DatasetError(
                f"{listed} lists fewer episodes than the {episodes} of info.json: another program "
                "added to this recording; record to a new folder"
            )
        self._rows = table.slice(0, episodes)
        if len(table) > episodes:
            write_rows(self._root, self._rows)
        texts = read_tasks(self._root)[:tasks]
        write_tasks(self._root, texts)
        write_json(self._root / formats.STATS, merged_statistics(self._rows))
        remove_unlisted(self._root, self._rows)
        return texts

    def add(self, episode: FinishedEpisode, tasks: list[str]) -> None:
        """Move the episode's files into place and enter it in the lists."""
        number = self._next_number()
        where = formats.place(number)
        move(episode.data, self._root / formats.DATA_PATH[self.version].format(**where))
        row = episode.row | {
            "dataset_from_index": episode.first_row,
            "dataset_to_index": episode.first_row + episode.length,
        }
        row |= _location("data", where)
        for key, path in episode.videos.items():
            target = formats.VIDEO_PATH[self.version].format(video_key=key, **where)
            move(path, self._root / target)
            row |= _location(f"videos/{key}", where)
            row |= {
                f"videos/{key}/from_timestamp": 0.0,
                f"videos/{key}/to_timestamp": episode.seconds,
            }
        row |= _location("meta/episodes", formats.place(0))
        for column, table in episode.statistics.items():
            row |= {f"stats/{column}/{name}": value for name, value in table.items()}
        write_tasks(self._root, tasks)
        self._rows = append_row(self._rows, row)
        write_json(self._root / formats.STATS, merged_statistics(self._rows))
        write_rows(self._root, self._rows)

    def _next_number(self) -> int:
        if self._rows is None or not len(self._rows):
            return 0
        last = self._rows.slice(len(self._rows) - 1).to_pylist()[0]
        return int(last["data/chunk_index"]) * formats.CHUNK_SIZE + int(last["data/file_index"]) + 1


def check_own(root: Path) -> Writer:
    """Return who recorded ``root``.

    Raises:
        DatasetError: Another program.
    """
    recording = root / formats.RECORDING
    known = read_json(recording, Writer, DatasetError) if recording.exists() else Writer()
    if known.writer != WRITER:
        raise DatasetError(
            f"{root} was not recorded by dzrobot, so it is left as it is: record to a new folder"
        )
    return known


def read_rows(root: Path, cameras: Sequence[str] = ()) -> pa.Table | None:
    """Return the list of episodes of a v3.0 folder, or None before the first.

    What places files is checked: numbers, for ``cameras`` too.

    Raises:
        DatasetError: Another program added lists of its own, or the list cannot be read.
    """
    path = root / formats.EPISODES_V3.format(**formats.place(0))
    others = [str(one.relative_to(root)) for one in root.glob("meta/episodes/*/*.parquet")]
    if path.exists():
        others.remove(str(path.relative_to(root)))
    if others:
        raise DatasetError(
            f"{root}: another program added {preview(others)} to this recording. It can be read, "
            "but not changed here: record to a new folder"
        )
    if not path.exists():
        return None
    table = read_parquet(path)
    kinds: dict[str, Any] = {"episode_index": Count, "length": Count, "tasks": list[Text]}
    for prefix in ("data", *(f"videos/{key}" for key in cameras)):
        kinds |= {f"{prefix}/{name}": Count for name in ("chunk_index", "file_index")}
    for key in cameras:
        kinds |= {f"videos/{key}/{end}_timestamp": Seconds for end in ("from", "to")}
    for name, kind in kinds.items():
        if name not in table.column_names:
            raise DatasetError(f"{path} has no column {name!r}: it is no list of episodes")
        values = table.column(name).to_pylist()
        validated(values, list[kind], f"{path}, column {name}", DatasetError)  # type: ignore[valid-type]
    return table


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return the table in ``path``, or some of its columns.

    Raises:
        DatasetError: It cannot be read.
    """
    try:
        return pq.read_table(path, columns=columns, partitioning=None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read: {printable(str(error))}") from error


def read_tasks(root: Path) -> list[str]:
    """Return the tasks of a v3.0 folder that :func:`write_tasks` wrote, in index order."""
    path = root / formats.TASKS_V3
    rows = validated(read_parquet(path).to_pylist(), list[TaskRow], str(path), DatasetError)
    return [row.task for row in sorted(rows, key=lambda row: row.task_index)]


def write_rows(root: Path, rows: pa.Table) -> None:
    """Replace the list of episodes of a v3.0 folder in one step."""
    folder.write_parquet(root / formats.EPISODES_V3.format(**formats.place(0)), rows)


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
        template = formats.DATA_PATH["v3.0"] if prefix == "data" else formats.VIDEO_PATH["v3.0"]
        numbers = zip(
            rows.column(f"{prefix}/chunk_index").to_pylist(),
            rows.column(f"{prefix}/file_index").to_pylist(),
            strict=True,
        )
        paths += [
            root
            / template.format(
                chunk_index=chunk, file_index=file, video_key=prefix.removeprefix("videos/")
            )
            for chunk, file in numbers
        ]
    return paths


def remove_unlisted(root: Path, rows: pa.Table | None) -> None:
    """Remove the data and video files of a v3.0 folder that its list ``rows`` does not name."""
    listed = set() if rows is None else set(listed_files(root, rows))
    for path in [*root.glob("data/*/*.parquet"), *root.glob("videos/*/*/*.mp4")]:
        if path not in listed:
            path.unlink()


def merged_statistics(rows: pa.Table) -> dict[str, ColumnStatistics]:
    """Return the statistics over all episodes of a v3.0 list."""
    names = [name for name in rows.column_names if name.startswith("stats/")]
    episodes = []
    for row in rows.select(names).to_pylist():
        table: dict[str, ColumnStatistics] = {}
        for name, value in row.items():
            _, rest = name.split("/", 1)
            column, measure = rest.rsplit("/", 1)
            if value is not None:
                table.setdefault(column, {})[measure] = value
        episodes.append(table)
    return column_statistics.merge(episodes)


def write_tasks(root: Path, tasks: list[str]) -> None:
    """Write ``tasks.parquet`` as pandas would: the text is the index, ``task_index`` the column."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": tasks})
    columns = [_pandas_column("task_index", "int64"), _pandas_column("task", "unicode")]
    note = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    note |= {"pandas_version": "2.0.0"}
    folder.write_parquet(
        root / formats.TASKS_V3, table.replace_schema_metadata({"pandas": json.dumps(note)})
    )


def _pandas_column(name: str, kind: str) -> dict[str, str | None]:
    stored = "object" if kind == "unicode" else kind
    return {
        "name": name,
        "field_name": name,
        "pandas_type": kind,
        "numpy_type": stored,
        "metadata": None,
    }


def _location(prefix: str, where: dict[str, int]) -> dict[str, int]:
    return {f"{prefix}/{name}": where[name] for name in ("chunk_index", "file_index")}
