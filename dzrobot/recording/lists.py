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
from dzrobot.recording.column_statistics import ColumnStatistics
from dzrobot.recording.commit import check_own, read_tasks, write_tasks
from dzrobot.recording.episode_list import read_rows, write_list
from dzrobot.recording.formats import (
    EpisodeFacts,
    EpisodeStatistics,
    Info,
    LostAttempt,
    RecordedRow,
    TaskRow,
)

Row = dict[str, Any]

T = TypeVar("T")


@dataclass
class RecordingLists:
    """What the lists of a recording say of its episodes, in order."""

    root: Path
    info: Row
    """``info.json``."""

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
        info = read_json(root / formats.INFO, Row, DatasetError)
        checked = validated(info, Info, str(root / formats.INFO), DatasetError)
        version, count = checked.codebase_version, checked.total_episodes
        formats.data_template(version)
        facts_file = root / formats.FACTS
        facts = _lines(facts_file, Row) if facts_file.exists() else []
        # Rows keep what this version does not know; what it uses is checked.
        validated(facts, list[EpisodeFacts], str(facts_file), DatasetError)
        lists = cls(
            root=root, info=info, rows=[],
            statistics=[], tasks=[], facts={row["episode_index"]: row for row in facts},
            schema=None,
        )  # fmt: skip
        if version == "v3.0":
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

    @property
    def version(self) -> str:
        """Version of the format."""
        return str(self.info["codebase_version"])

    @property
    def cameras(self) -> list[str]:
        """Columns whose images lie in videos."""
        features = self.info["features"]
        return [name for name, feature in features.items() if feature["dtype"] == "video"]

    def data_file(self, episode: int) -> str:
        """Return the data file of ``episode``, below the root."""
        return formats.DATA_PATH[self.version].format(**self._place(episode, "data"))

    def video_file(self, episode: int, camera: str) -> str:
        """Return the video file of ``episode``, below the root."""
        place = self._place(episode, f"videos/{camera}")
        return formats.VIDEO_PATH[self.version].format(video_key=camera, **place)

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

    def _place(self, episode: int, prefix: str) -> dict[str, int]:
        if self.version != "v3.0":
            return formats.place(episode)
        row = self.rows[episode]
        return {name: int(row[f"{prefix}/{name}"]) for name in ("chunk_index", "file_index")}

    def _read_v2(self) -> None:
        root = self.root
        self.rows = _lines(root / formats.EPISODES_V2, Row)
        validated(self.rows, list[RecordedRow], str(root / formats.EPISODES_V2), DatasetError)
        lines = _lines(root / formats.EPISODES_STATS_V2, EpisodeStatistics)
        self.statistics = [line.stats for line in lines]
        self.tasks = [line.task for line in _lines(root / formats.TASKS_V2, TaskRow)]

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
        self.schema, self.tasks = table.schema, read_tasks(self.root)
        for row in table.to_pylist():
            statistics: dict[str, ColumnStatistics] = {}
            for name in [name for name in row if name.startswith("stats/")]:
                column, measure = name.removeprefix("stats/").rsplit("/", 1)
                if (value := row.pop(name)) is not None:
                    statistics.setdefault(column, {})[measure] = value
            self.rows.append(row)
            self.statistics.append(statistics)
        measures = list[dict[formats.Name, dict[str, formats.Measure]]]
        validated(self.statistics, measures, f"the list of episodes of {self.root}", DatasetError)

    def _write_v3(self, folder: Path) -> None:
        joined = [
            row | {f"stats/{column}/{name}": value for column, table in one.items()
                   for name, value in table.items()}
            for row, one in zip(self.rows, self.statistics, strict=True)
        ]  # fmt: skip
        table = pa.Table.from_pylist(joined, schema=self.schema)
        write_list(folder, table)
        write_tasks(folder, self.tasks)


def episode_facts(root: Path) -> dict[int, EpisodeFacts]:
    """Return what the recording in ``root`` says of its episodes, by their number.

    An interrupted recording may say something of an episode that is not there.

    Raises:
        DatasetError: The file of facts cannot be read.
    """
    path = root / formats.FACTS
    rows = _lines(path, EpisodeFacts) if path.exists() else []
    return {row.episode_index: row for row in rows}


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
