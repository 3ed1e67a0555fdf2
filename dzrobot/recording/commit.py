"""How a finished episode joins a dataset, and how an interrupted one leaves no trace.

Order of a commit: images and numbers, tasks, statistics, the list of episodes, and last
``info.json``. Its ``total_episodes`` is the commit: when the folder is opened again, whatever lies
beyond that count is removed and every list and statistic is what it was at that count, to the bit.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from dzrobot.documents import read_json, read_json_lines
from dzrobot.errors import DatasetError
from dzrobot.files import append_json_line, move, write_json
from dzrobot.recording import column_statistics, folder, formats
from dzrobot.recording.catalog import read_tasks
from dzrobot.recording.column_statistics import ColumnStatistics
from dzrobot.recording.episode_list import EpisodeList, location, remove_unlisted
from dzrobot.recording.formats import EpisodeStatistics, Writer

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
        self._tasks = 0
        """Listed in ``tasks.jsonl``."""

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
        self._tasks = tasks
        if not episodes:
            (self._root / formats.STATS).unlink(missing_ok=True)
            return []
        self._recover_total(episodes)
        return read_tasks(self._root, self.version)

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
        move(episode.data, self._root / formats.file_name(self.version, "data", where))
        for key, path in episode.videos.items():
            move(path, self._root / formats.file_name(self.version, f"videos/{key}", where))
        for number in range(self._tasks, len(tasks)):
            line = {"task_index": number, "task": tasks[number]}
            append_json_line(self._root / formats.TASKS_V2, line)
        self._tasks = len(tasks)
        if self.version == "v2.0":
            self._total = column_statistics.add(self._total, episode.statistics)
            write_json(self._root / formats.STATS, self._total)
        # v2.0 knows no statistics per episode; we need them to take an episode back.
        line = {"episode_index": episode.index, "stats": episode.statistics}
        append_json_line(self._root / formats.EPISODES_STATS_V2, line)
        append_json_line(self._root / formats.EPISODES_V2, episode.row)


class MetaFilesV3:
    """Numbered files that may hold many episodes, lists as parquet (v3.0).

    Each episode first gets files of its own; :func:`dzrobot.recording.consolidate` packs them.
    """

    version = "v3.0"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._list = EpisodeList(root)
        self._tasks = 0
        """Listed in ``tasks.parquet``."""

    def recover(self, episodes: int, tasks: int) -> list[str]:
        """Forget all but the first ``episodes`` and ``tasks``; return the tasks in index order."""
        rows = self._list.recover(episodes)
        texts = [] if rows is None else read_tasks(self._root, self.version)[:tasks]
        if texts:
            write_tasks(self._root, texts)
        else:
            (self._root / formats.TASKS_V3).unlink(missing_ok=True)
        self._tasks = len(texts)
        remove_unlisted(self._root, rows)
        return texts

    def add(self, episode: FinishedEpisode, tasks: list[str]) -> None:
        """Move the episode's files into place and enter it in the lists."""
        where = formats.place(self._list.next_file)
        move(episode.data, self._root / formats.file_name(self.version, "data", where))
        row = episode.row | {
            "dataset_from_index": episode.first_row,
            "dataset_to_index": episode.first_row + episode.length,
        }
        row |= location("data", where)
        for key, path in episode.videos.items():
            move(path, self._root / formats.file_name(self.version, f"videos/{key}", where))
            row |= location(f"videos/{key}", where)
            row |= {
                f"videos/{key}/from_timestamp": 0.0,
                f"videos/{key}/to_timestamp": episode.seconds,
            }
        if len(tasks) > self._tasks:
            write_tasks(self._root, tasks)
            self._tasks = len(tasks)
        self._list.add(row, episode.statistics)


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
