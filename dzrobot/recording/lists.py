"""The episode lists of a finished recording as one value for every format, and its facts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from dzrobot.documents import parse_json, read_json, read_json_lines, validated
from dzrobot.errors import DatasetError
from dzrobot.files import append_line, explained, whole_lines, write_json, write_json_lines
from dzrobot.recording import column_statistics, formats
from dzrobot.recording.catalog import read_tasks
from dzrobot.recording.column_statistics import ColumnStatistics
from dzrobot.recording.commit import check_own, write_tasks
from dzrobot.recording.episode_list import (
    located,
    read_rows,
    take_statistics,
    with_statistics,
    write_list,
)
from dzrobot.recording.formats import (
    EpisodeFacts,
    EpisodeStatistics,
    LostAttempt,
    RecordedRow,
)

Row = dict[str, Any]

T = TypeVar("T")


@dataclass
class RecordingLists:
    """What the lists of a recording say of its episodes, in order."""

    root: Path
    info: Row
    """``info.json``."""

    version: str
    """Version of the format."""

    cameras: list[str]
    """Columns whose images lie in videos."""

    rows: list[Row]
    """The list of episodes, without their statistics."""

    statistics: list[dict[str, ColumnStatistics]]
    tasks: list[str]
    """By task index."""

    facts: dict[int, Row]
    """What is known beyond LeRobot's lists, by episode; an episode may have nothing."""

    schema: pa.Schema | None
    """Columns of the list of v3.0."""

    @classmethod
    def read(cls, root: Path) -> "RecordingLists":
        """Read the lists of the recording in ``root``, which the caller has locked.

        Raises:
            DatasetError: Another program wrote it, it is unreadable, or an episode of it was not
                committed.
        """
        check_own(root)
        checked = formats.read_info(root)
        count = checked.total_episodes
        facts_file = root / formats.FACTS
        facts = _lines(facts_file, Row) if facts_file.exists() else []
        # Rows keep what this version does not know; what it uses is checked.
        validated(facts, list[EpisodeFacts], str(facts_file), DatasetError)
        lists = cls(
            root=root, info=read_json(root / formats.INFO, Row, DatasetError),
            version=checked.codebase_version, cameras=checked.videos, rows=[], statistics=[],
            tasks=[], facts={row["episode_index"]: row for row in facts}, schema=None,
        )  # fmt: skip
        if lists.version == "v3.0":
            lists._read_v3()
        else:
            lists._read_v2()
        if not len(lists.rows) == len(lists.statistics) == count or set(lists.facts) - set(
            range(count)
        ):
            raise DatasetError(
                f"{root}: an episode that was not committed is in its lists; record to it once "
                "more, which mends them"
            )
        return lists

    def data_file(self, episode: int) -> str:
        """Return the data file of ``episode``, below the root."""
        return self._file(episode, "data")

    def video_file(self, episode: int, camera: str) -> str:
        """Return the video file of ``episode``, below the root."""
        return self._file(episode, f"videos/{camera}")

    def write(self, folder: Path) -> None:
        """Write all lists to ``folder``, laid out like a recording."""
        self.info |= formats.totals(
            self.version, len(self.rows), sum(row["length"] for row in self.rows),
            len(self.tasks), len(self.cameras),
        )  # fmt: skip
        write_json(folder / formats.INFO, self.info)
        facts = [self.facts[number] for number in sorted(self.facts)]
        if facts:
            write_json_lines(folder / formats.FACTS, facts)
        if self.version == "v3.0":
            self._write_v3(folder)
        else:
            self._write_v2(folder)

    def _file(self, episode: int, prefix: str) -> str:
        v3 = self.version == "v3.0"
        where = located(self.rows[episode], prefix) if v3 else formats.place(episode)
        return formats.file_name(self.version, prefix, where)

    def _read_v2(self) -> None:
        root = self.root
        self.rows = _lines(root / formats.EPISODES_V2, Row)
        validated(self.rows, list[RecordedRow], str(root / formats.EPISODES_V2), DatasetError)
        lines = _lines(root / formats.EPISODES_STATS_V2, EpisodeStatistics)
        self.statistics = [line.stats for line in lines]
        self.tasks = read_tasks(root, self.version)

    def _write_v2(self, folder: Path) -> None:
        write_json_lines(folder / formats.EPISODES_V2, self.rows)
        write_json_lines(
            folder / formats.EPISODES_STATS_V2,
            [{"episode_index": n, "stats": one} for n, one in enumerate(self.statistics)],
        )
        tasks = [{"task_index": n, "task": task} for n, task in enumerate(self.tasks)]
        write_json_lines(folder / formats.TASKS_V2, tasks)
        if self.version == "v2.0":
            total: dict[str, ColumnStatistics] = {}
            for one in self.statistics:
                total = column_statistics.add(total, one)
            write_json(folder / formats.STATS, total)

    def _read_v3(self) -> None:
        table = read_rows(self.root, self.cameras)
        if table is None:
            return
        self.schema, self.tasks = table.schema, read_tasks(self.root, self.version)
        for row in table.to_pylist():
            self.statistics.append(take_statistics(row))
            self.rows.append(row)
        measures = list[dict[formats.Name, dict[str, formats.Measure]]]
        validated(self.statistics, measures, f"the list of episodes of {self.root}", DatasetError)

    def _write_v3(self, folder: Path) -> None:
        joined = [
            with_statistics(row, one) for row, one in zip(self.rows, self.statistics, strict=True)
        ]
        write_list(folder, pa.Table.from_pylist(joined, schema=self.schema))
        write_tasks(folder, self.tasks)


def lost_attempts(root: Path) -> list[LostAttempt]:
    """Return the attempts at ``root`` that left no episode, in order.

    Raises:
        DatasetError: A line is not an attempt.
    """
    path = root / formats.ATTEMPTS
    with explained(f"record to {root}", DatasetError):
        lines = whole_lines(path)
    return [
        parse_json(line, LostAttempt, f"{path}:{number}", DatasetError)
        for number, line in enumerate(lines, start=1)
    ]


def note_lost(root: Path, attempt: LostAttempt) -> None:
    """Add ``attempt`` to those of ``root`` that left no episode.

    Raises:
        DatasetError: The disk is full.
    """
    with explained(f"record to {root}", DatasetError):
        append_line(root / formats.ATTEMPTS, json.dumps(attempt.model_dump()))


def _lines(path: Path, model: type[T]) -> list[T]:
    return list(read_json_lines(path, model, DatasetError, appended=True))
