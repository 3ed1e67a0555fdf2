"""The lists of a finished recording as one value, whatever its format: read, changed, written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dzrobot.documents import read_json, read_json_lines, validated
from dzrobot.errors import DatasetError
from dzrobot.files import write_json, write_json_lines
from dzrobot.recording import column_statistics, layout
from dzrobot.recording.column_statistics import ColumnStatistics
from dzrobot.recording.commit import (
    check_own,
    merged_statistics,
    read_rows,
    read_tasks,
    write_rows,
    write_tasks,
)
from dzrobot.recording.formats import EpisodeStatistics, Info, TaskRow

Row = dict[str, Any]


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
    """Of the list of v3.0."""

    @classmethod
    def read(cls, root: Path) -> "RecordingLists":
        """Read the lists of the recording in ``root``, which the caller has locked.

        Raises:
            DatasetError: Another program wrote it, it is unreadable, or an episode of it was not
                committed.
        """
        check_own(root)
        info = read_json(root / layout.INFO, Row, DatasetError)
        checked = validated(info, Info, str(root / layout.INFO), DatasetError)
        version, count = checked.codebase_version, checked.total_episodes
        layout.data_template(version)
        facts_file = root / layout.FACTS
        facts = read_json_lines(facts_file, Row, DatasetError) if facts_file.exists() else []
        lists = cls(
            root=root, info=info, rows=[],
            statistics=[], tasks=[], facts={int(row["episode_index"]): row for row in facts},
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
        return layout.DATA_PATH[self.version].format(**self._place(episode, "data"))

    def video_file(self, episode: int, camera: str) -> str:
        """Return the video file of ``episode``, below the root."""
        place = self._place(episode, f"videos/{camera}")
        return layout.VIDEO_PATH[self.version].format(video_key=camera, **place)

    def write(self, folder: Path) -> None:
        """Write all lists to ``folder``, laid out like a recording."""
        self.info |= layout.totals(
            self.version, len(self.rows), sum(row["length"] for row in self.rows),
            len(self.tasks), len(self.cameras),
        )  # fmt: skip
        write_json(folder / layout.INFO, self.info)
        facts = [self.facts[number] for number in sorted(self.facts)]
        if facts:
            write_json_lines(folder / layout.FACTS, facts)
        if self.version == "v3.0":
            self._write_v3(folder)
        else:
            self._write_v2(folder)

    def _place(self, episode: int, prefix: str) -> dict[str, int]:
        if self.version != "v3.0":
            return layout.place(episode)
        row = self.rows[episode]
        return {name: int(row[f"{prefix}/{name}"]) for name in ("chunk_index", "file_index")}

    def _read_v2(self) -> None:
        root = self.root
        self.rows = list(read_json_lines(root / layout.EPISODES_V2, Row, DatasetError))
        lines = read_json_lines(root / layout.EPISODES_STATS_V2, EpisodeStatistics, DatasetError)
        self.statistics = [line.stats for line in lines]
        tasks = read_json_lines(root / layout.TASKS_V2, TaskRow, DatasetError)
        self.tasks = [line.task for line in tasks]

    def _write_v2(self, folder: Path) -> None:
        write_json_lines(folder / layout.EPISODES_V2, self.rows)
        write_json_lines(
            folder / layout.EPISODES_STATS_V2,
            [{"episode_index": n, "stats": one} for n, one in enumerate(self.statistics)],
        )
        tasks = [{"task_index": n, "task": task} for n, task in enumerate(self.tasks)]
        write_json_lines(folder / layout.TASKS_V2, tasks)
        if self.version == "v2.0":
            total: dict[str, ColumnStatistics] = {}
            for one in self.statistics:
                total = column_statistics.add(total, one)
            write_json(folder / layout.STATS, total)

    def _read_v3(self) -> None:
        table = read_rows(self.root)
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

    def _write_v3(self, folder: Path) -> None:
        joined = [
            row | {f"stats/{column}/{name}": value for column, table in one.items()
                   for name, value in table.items()}
            for row, one in zip(self.rows, self.statistics, strict=True)
        ]  # fmt: skip
        table = pa.Table.from_pylist(joined, schema=self.schema)
        write_rows(folder, table)
        write_tasks(folder, self.tasks)
        write_json(folder / layout.STATS, merged_statistics(table))
