"""Results on disk: one line per finished episode, safe against being killed at any moment."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from dzrobot.errors import ProtocolError
from dzrobot.rollout.episode import Outcome
from dzrobot.rollout.protocol import Case

RECORDS_FILE = "records.jsonl"
LOCK_FILE = ".lock"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One episode that was run; with an error, one that has no result."""

    case: str
    env: str
    suite: str
    task_id: int
    task: str | None
    episode: int
    init_state_id: int | None
    seed: int
    repeat_of: int | None
    steps: int | None
    success: bool | None
    ended: str | None
    action_sha256: str | None
    policy_ms: Mapping[str, float] | None
    env_ms: Mapping[str, float] | None
    wall_s: float | None
    video: str | None
    """Path below the results folder."""

    error: str | None
    """What was raised; such an episode is neither success nor failure, and is run again."""

    @classmethod
    def of(cls, case: Case, outcome: Outcome, video: str | None) -> Self:
        """Return the record of a finished episode."""
        return cls(**_about(case), **vars(outcome), video=video, error=None)

    @classmethod
    def failed(cls, case: Case, error: str, video: str | None = None) -> Self:
        """Return the record of an episode that ended in an exception."""
        nothing = dict.fromkeys(field.name for field in fields(Outcome))
        about = {**nothing, **_about(case), "init_state_id": case.init_state_id}
        return cls(**about, video=video, error=error)

    def result(self) -> dict[str, Any]:
        """Return what does not differ from run to run: all but times and the video."""
        timed = ("policy_ms", "env_ms", "wall_s", "video")
        return {name: value for name, value in asdict(self).items() if name not in timed}


class RecordFile:
    """The records of one results folder, by case; a later record replaces an earlier one."""

    def __init__(self, folder: Path) -> None:
        """Read what is there; a last line that was torn by a crash is dropped.

        Raises:
            ProtocolError: the file holds something else.
        """
        self._path = folder / RECORDS_FILE
        self.records: dict[str, Record] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self._path, len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            record = self._parsed(line, number)
            self.records[record.case] = record

    def add(self, record: Record) -> None:
        """Append ``record``; when this returns, it is on the disk."""
        with self._path.open("ab") as file:
            file.write(json.dumps(asdict(record), sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[record.case] = record

    def finished(self) -> set[str]:
        """Return the cases that have a result."""
        return {name for name, record in self.records.items() if record.error is None}

    def _parsed(self, line: bytes, number: int) -> Record:
        try:
            return Record(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ProtocolError(
                f"{self._path}:{number} is no record of this version ({error}); move the folder "
                "away and evaluate anew"
            ) from error


def ordered(records: Iterable[Record], cases: Iterable[Case]) -> list[Record]:
    """Return the records in the order of ``cases``."""
    by_case = {record.case: record for record in records}
    return [by_case[case.name] for case in cases if case.name in by_case]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process alone; a killed process holds nothing.

    Raises:
        ProtocolError: another run is writing there.
    """
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ProtocolError(
                f"another run is writing to {folder}; wait for it, or use another --output "
                "(shards go to a folder each, `dzrobot merge` puts them together)"
            ) from error
        yield


def _about(case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "env": case.env,
        "suite": case.suite,
        "task_id": case.task_id,
        "episode": case.episode,
        "seed": case.seed,
        "repeat_of": case.repeat_of,
    }
