"""Results that other programs wrote, as counts to stand beside ours; their episodes are others.

Read are LeRobot's ``eval_info.json`` (0.4 and later), vla-eval's ``recording-*.sqlite``, and the
table of episodes that MolmoSpaces logs to Weights & Biases, exported there as CSV.
"""

import csv
import io
import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dzrobot.documents import read_bytes, read_json, shorten
from dzrobot.errors import ProtocolError
from dzrobot.rollout.protocol import Count
from dzrobot.untrusted import MOST_ROWS, MOST_TEXT, parsing

TaskKey = tuple[str, int] | str
"""A suite and a task's number in it, or an instruction in lower case."""

Outcome = tuple[TaskKey, bool | None]
"""Outcome of one episode; None for an error."""

_MOST_TASKS = 20_000
"""Tasks of one result; LIBERO-Plus has 10,030."""

_OPERATIONS, _MOST_LOOKS = 100_000, 1000
"""Operations of SQLite's machine between two looks, and looks: reading a million episodes needs a
tenth of them."""

_SQLITE = b"SQLite format 3\0"


class _LeRobotMetrics(BaseModel):
    model_config = ConfigDict(extra="ignore")

    successes: list[Annotated[bool, Field(strict=True)]]


class _LeRobotTask(BaseModel):
    model_config = ConfigDict(extra="ignore")

    task_group: str
    task_id: Count
    metrics: _LeRobotMetrics


class _LeRobotInfo(BaseModel):
    """What is read of ``eval_info.json``."""

    model_config = ConfigDict(extra="ignore")

    per_task: list[_LeRobotTask]


@dataclass(frozen=True, kw_only=True)
class ForeignResult:
    """What another program found."""

    path: Path
    program: str
    tasks: Mapping[TaskKey, tuple[int, int]]
    """Successes and episodes with a result."""

    errors: int
    """Episodes that failed for technical reasons; they are in no count."""

    @property
    def count(self) -> tuple[int, int]:
        """Successes and episodes over all tasks."""
        return sum(won for won, _ in self.tasks.values()), sum(n for _, n in self.tasks.values())

    def of(self, suite: str, task_id: int | None, instruction: str) -> tuple[int, int] | None:
        """Return the count of one of our tasks; None where this result has none of it."""
        if task_id is None:
            return None
        return self.tasks.get((suite, task_id)) or self.tasks.get(_spoken(instruction))


def read_foreign(path: Path) -> ForeignResult:
    """Return the result in a file of LeRobot's, vla-eval's or MolmoSpaces'.

    Raises:
        ProtocolError: it is none of them, is damaged, or holds no finished episode.
    """
    head = read_bytes(path, ProtocolError)[: len(_SQLITE)]
    if head == _SQLITE:
        return _counted(path, "vla-eval", _vla_eval(path))
    if path.suffix == ".csv":
        return _counted(path, "MolmoSpaces", _molmospaces(path))
    info = read_json(path, _LeRobotInfo, ProtocolError)
    keys = Counter((task.task_group, task.task_id) for task in info.per_task)
    if twice := [key for key, times in keys.items() if times > 1]:
        raise ProtocolError(f"{path} lists the task {shorten(twice[0])} more than once")
    outcomes = (
        ((task.task_group, task.task_id), won)
        for task in info.per_task
        for won in task.metrics.successes
    )
    return _counted(path, "LeRobot", outcomes)


def _counted(path: Path, program: str, outcomes: Iterable[Outcome]) -> ForeignResult:
    won: Counter[TaskKey] = Counter()
    finished: Counter[TaskKey] = Counter()
    errors, most = 0, MOST_ROWS.value
    for number, (key, success) in enumerate(outcomes):
        if number == most:
            raise ProtocolError(f"{path}: more episodes than allowed: {MOST_ROWS}")
        if len(finished) > _MOST_TASKS:
            raise ProtocolError(f"{path} has more than {_MOST_TASKS} tasks; compare parts of it")
        errors += success is None
        if success is not None:
            finished[key] += 1
            won[key] += success
    if not finished:
        raise ProtocolError(f"{path}: no finished episode of {program} in it, {errors} errors")
    tasks = {key: (won[key], number) for key, number in finished.items()}
    return ForeignResult(path=path, program=program, tasks=tasks, errors=errors)


def _vla_eval(path: Path) -> Iterator[Outcome]:
    known = {"success": True, "fail": False, "error": None}
    # Opened so that nothing is written, not even a journal.
    address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    whole = parsing(path, ProtocolError, "is not a whole recording of vla-eval")
    with whole, closing(sqlite3.connect(address, uri=True)) as database:
        _restrain(database)
        stored = "SELECT rootpage FROM sqlite_master WHERE type='table' AND name='episode_results'"
        # A view or a virtual table is a program of whoever wrote the file, and has no page.
        if not (database.execute(stored).fetchone() or (0,))[0]:
            raise ProtocolError(f"{path} has no stored table episode_results, as vla-eval's have")
        for task, status in database.execute(
            "SELECT task_name, status FROM episode_results ORDER BY rowid"
        ):
            if status not in known or not isinstance(task, str):
                raise ProtocolError(
                    f"{path}: an episode of task {shorten(task)} has the status {shorten(status)}; "
                    f"known are {', '.join(known)}"
                )
            yield _spoken(task), known[status]


def _restrain(database: sqlite3.Connection) -> None:
    """Bound what reading ``database`` may take: its schema can compute without end."""
    looks = itertools.count()
    database.execute("PRAGMA trusted_schema=OFF")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_TEXT)
    database.set_progress_handler(lambda: next(looks) >= _MOST_LOOKS, _OPERATIONS)


def _molmospaces(path: Path) -> Iterator[Outcome]:
    known = {"Success": True, "Failed": False}
    text = read_bytes(path, ProtocolError).decode("utf-8-sig", "replace")
    needed = ("task_description", "result")
    with parsing(path, ProtocolError, "is not a table that can be read", "export it again"):
        # Not splitlines: a text may hold line breaks of other kinds.
        table = csv.DictReader(io.StringIO(text, newline=""))
        if missing := [name for name in needed if name not in (table.fieldnames or ())]:
            raise ProtocolError(
                f"{path} has no column {' or '.join(missing)}: export MolmoSpaces' table "
                "eval/video_results as CSV"
            )
        for row in table:
            if row["result"] not in known:
                raise ProtocolError(
                    f"{path}:{table.line_num}: result is {shorten(row['result'])}; allowed are "
                    f"{', '.join(known)}"
                )
            yield _spoken(row["task_description"] or ""), known[row["result"]]


def _spoken(instruction: str) -> str:
    return " ".join(instruction.lower().split())
