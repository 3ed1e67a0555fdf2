"""Results on disk: a line per finished episode; a kill loses no whole line."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
)

from dzrobot import files
from dzrobot.documents import parse_json, read_bytes, shorten
from dzrobot.errors import ProtocolError
from dzrobot.rollout.episode import LONGEST_CLASS, EpisodeResult, Measures
from dzrobot.rollout.protocol import Count, EpisodeSpec

RECORDS_FILE = "records.jsonl"
LOCK_FILE = ".lock"
VIDEO_FOLDER = "videos"
PREDICTION_FOLDER = "predictions"

UNFINISHED = "unfinished"
"""Folder within these two for what is still being written."""

ERROR_FOLDER = "errors"
"""Tracebacks of episodes that ended in an exception, the policy's or another."""


_LARGEST = 2**30
"""Bytes of a file of records; a million episodes have about 600 MB."""


def _percentiles(times: Mapping[str, float]) -> Mapping[str, float]:
    if not {"p50", "p95"} <= set(times):
        raise ValueError("it holds p50 and p95")
    return times


Duration = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Durations = Annotated[Mapping[str, Duration], AfterValidator(_percentiles)]

ERROR_CLASS = "error"
"""Failure class of an episode without a result."""

NOT_STATED = "not stated"
"""Failure class where the environment says none."""

Fact = str | bool | int | float | None
"""A plain value as JSON holds it."""

_RESULT = tuple(
    field.name
    for field in fields(EpisodeResult)
    if field.name not in ("fault", "stop", "policy_failure")
)
"""What a record keeps of an outcome."""

_FINISHED = (
    "task", "steps", "success", "ended", "action_sha256", "policy_ms", "env_ms", "wall_s",
)  # fmt: skip
"""What every outcome says; only an episode with an error may lack it."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One episode that was run; with an error, one that has no result.

    Checked when it is read back: hence the types that say more.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    case: str
    env: str
    suite: str
    task_id: Count
    task: str | None
    episode: Count
    init_state_id: Count | None
    seed: Count
    repeat_of: Count | None
    steps: Count | None
    success: Annotated[bool, Field(strict=True)] | None
    ended: str | None
    action_sha256: str | None
    policy_ms: Durations | None
    plan_ms: Durations | None = None
    """Records of earlier versions do not have it."""

    env_ms: Durations | None
    wall_s: Duration | None
    video: str | None
    """Path below the results folder."""

    measures: Measures | None = None
    """Timing of an episode in which time passes while the policy thinks."""

    clipped: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    """Share of state numbers beyond the policy's statistics; earlier versions did not say."""

    error: str | None
    """What was raised; such an episode is neither success nor failure, and is run again."""

    failure_class: Annotated[str, Field(max_length=LONGEST_CLASS)] | None = None
    """How it failed, in the environment's words; records of earlier versions do not have it."""

    policy_error: str | None = None
    """What the policy did that ended the episode as a failure; earlier versions did not say it."""

    code: str | None = None
    """Which code of the card's list ran it, as `CodeIdentity.name`; earlier versions did not say.
    """

    robot: Mapping[str, Fact | Mapping[str, Fact]] | None = None
    """Further facts from a robot's environment: aborts, recoveries, drivers, workcell."""

    def __post_init__(self) -> None:
        absent = [name for name in _FINISHED if vars(self)[name] is None]
        if self.error is None and absent:
            raise ValueError(f"{absent[0]} is null; an episode that has no error has one")
        if self.error is not None and self.success is not None:
            raise ValueError("an episode has either success, or an error")

    @classmethod
    def of(cls, case: EpisodeSpec, outcome: EpisodeResult, video: str | None) -> Self:
        """Return the record of a finished episode; one with a fault is an error, no result."""
        if outcome.fault:
            failed = cls.failed(case, outcome.fault, video)
            return replace(
                failed, task=outcome.task, steps=outcome.steps, ended=outcome.ended,
                robot=outcome.robot,
            )  # fmt: skip
        kept = {name: value for name, value in vars(outcome).items() if name in _RESULT}
        failure = outcome.policy_failure
        return cls(
            **_about(case), **kept, video=video, error=None,
            policy_error=None if failure is None else failure.error,
        )  # fmt: skip

    @classmethod
    def failed(cls, case: EpisodeSpec, error: str, video: str | None = None) -> Self:
        """Return the record of an episode that ended in an exception."""
        nothing = dict.fromkeys(_RESULT)
        about = {**nothing, **_about(case), "init_state_id": case.init_state_id}
        return cls(**about, video=video, error=error)

    @property
    def failed_by(self) -> str | None:
        """How the episode failed, `ERROR_CLASS` and `NOT_STATED` included; None of a success."""
        if self.error is not None:
            return ERROR_CLASS
        return None if self.success else self.failure_class or NOT_STATED

    def result(self) -> dict[str, Any]:
        """Return what does not differ from run to run: all but times, video, code, the robot's own.

        Nor what earlier versions did not say: the failure class, clipped states.
        """
        other = (
            "policy_ms", "plan_ms", "env_ms", "wall_s", "video", "robot", "failure_class", "code",
            "clipped",
        )  # fmt: skip
        return {name: value for name, value in asdict(self).items() if name not in other}


class RecordFile:
    """The records of one results folder, by case; a later record replaces an earlier error."""

    def __init__(
        self, folder: Path, cases: Iterable[EpisodeSpec] | None = None, *, writable: bool = True
    ) -> None:
        """Read what is there; a last line that a crash left partial is dropped.

        Args:
            folder: The results folder.
            cases: Episodes of the evaluation; None: not compared.
            writable: Whether records will be added. Otherwise nothing in the folder is changed.

        Raises:
            ProtocolError: the file holds something else, records of another evaluation, or two
                results of one episode.
        """
        self._path = folder / RECORDS_FILE
        self.records: dict[str, Record] = {}
        known = None if cases is None else {case.name: _about(case) for case in cases}
        for number, line in enumerate(stored_lines(self._path, writable=writable), start=1):
            where = f"{self._path}:{number}"
            record = parse_json(line, Record, where, ProtocolError)
            if known is not None:
                _check_known(record, known, where)
            self._keep(record, where)

    def add(self, record: Record) -> None:
        """Append ``record``; when this returns, it is on the disk."""
        self._keep(record, str(self._path))
        with storing(self._path.parent):
            files.append_line(self._path, json.dumps(asdict(record), sort_keys=True))

    def finished(self) -> set[str]:
        """Return the cases that have a result."""
        return {name for name in self.records if self.has_result(name)}

    def has_result(self, case: str) -> bool:
        """Return whether ``case`` has been run, and not ended in an error."""
        record = self.records.get(case)
        return record is not None and record.error is None

    def _keep(self, record: Record, where: str) -> None:
        """Raise ProtocolError where one episode has two results, unless they are equal."""
        known = self.records.get(record.case)
        if known is not None and known.error is None:
            if record.error is None and record.result() != known.result():
                raise ProtocolError(
                    f"{where}: {record.case} has two results: {known.result()} and "
                    f"{record.result()}; the folder was written by two runs: move it away and "
                    "evaluate again"
                )
            return
        self.records[record.case] = record


def stored_lines(path: Path, *, writable: bool = True) -> list[bytes]:
    """Return the lines of a file of results, none where there is no file.

    A last line that a crash left partial is dropped.

    Args:
        path: The file.
        writable: Whether lines will be added, so that such a rest must go from the file too.

    Raises:
        ProtocolError: it cannot be read, or is too large.
    """
    if not path.exists() and not path.is_symlink():
        return []
    # Read by the bounded reader first: a link may lead to what has no end.
    content = read_bytes(path, ProtocolError, largest=_LARGEST)
    if writable and not content.endswith(b"\n"):
        with storing(path.parent):
            return files.whole_lines(path)
    return content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]


def ordered(records: Iterable[Record], cases: Iterable[EpisodeSpec]) -> list[Record]:
    """Return the records in the order of ``cases``."""
    by_case = {record.case: record for record in records}
    return [by_case[case.name] for case in cases if case.name in by_case]


def remove_unfinished(folder: Path) -> None:
    """Remove the partial videos and predictions that killed runs left below ``folder``."""
    for kind in (VIDEO_FOLDER, PREDICTION_FOLDER):
        shutil.rmtree(folder / kind / UNFINISHED, ignore_errors=True)


def predictions_size(folder: Path) -> int:
    """Return the bytes that the predictions in ``folder`` take."""
    found = (folder / PREDICTION_FOLDER).rglob("*")
    return sum(file.stat().st_size for file in found if file.is_file())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder`` if need be, and hold it for this process alone.

    A killed process holds nothing.

    Raises:
        ProtocolError: another run is writing there, or the folder cannot be written.
    """
    refusal = ProtocolError(
        f"another run is writing to {folder}; wait for it, or use another --output "
        "(shards go to a folder each, `dzrobot merge` puts them together)"
    )
    with ExitStack() as held:
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(files.locked(folder / LOCK_FILE, refusal))
        yield


def storing(folder: Path) -> AbstractContextManager[None]:
    """Return a block in which a refusal of the operating system becomes one message."""
    return files.explained(f"write results to {shorten(str(folder), 200)}", ProtocolError)


def _check_known(record: Record, known: Mapping[str, Mapping[str, Any]], where: str) -> None:
    about = known.get(record.case)
    if about is None:
        raise ProtocolError(
            f"{where}: {shorten(record.case)} is not an episode of this evaluation; move the "
            "folder away and evaluate again"
        )
    for name, value in about.items():
        given = vars(record)[name]
        if given != value:
            raise ProtocolError(
                f"{where}: {name} is {shorten(given)}, but {value!r} in this evaluation; move the "
                "folder away and evaluate again"
            )


def _about(case: EpisodeSpec) -> dict[str, Any]:
    return {
        "case": case.name,
        "env": case.env,
        "suite": case.suite,
        "task_id": case.task_id,
        "episode": case.episode,
        "seed": case.seed,
        "repeat_of": case.repeat_of,
    }
