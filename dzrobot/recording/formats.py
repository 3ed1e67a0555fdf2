"""LeRobot's documents as typed values, read when a dataset is opened, and the paths of its files.

Limits are far beyond any recording; they keep a wrong number from being allocated.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dzrobot.documents import read_json
from dzrobot.errors import DatasetError, find

LONGEST_EPISODE = 10_000_000
"""Frames: four days at 30 per second."""

INTERVENTION = "intervention"
"""Column that says whose action a row holds: a person's, in the place of a policy's. LeRobot's
name for it."""

RESIZED_FROM = "video.resized_from"
"""Entry of a camera's ``info``: (height, width) that it recorded, where the pictures are small
copies; see :mod:`dzrobot.recording.small_films`."""

EpisodeChoice = Literal["successes", "all"]
"""Which episodes of a recording are used: see :attr:`.DataConfig.episodes`."""

EPISODE_CHOICES: tuple[EpisodeChoice, ...] = get_args(EpisodeChoice)

_MOST = 10**9
_WIDEST = 100_000
_LONGEST_NAME = 200

_INDICES = ("episode_chunk", "episode_index", "chunk_index", "file_index")
_PLACES = (*_INDICES, "video_key", "total_episodes")
_WIDTH = re.compile(r"(0?[0-9]{1,2})?d?")


def _text(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("allowed is text without half characters (lone surrogates)") from error
    if "\0" in value:
        raise ValueError("allowed is text without NUL characters")
    return value


def _name(value: str) -> str:
    if not value or len(value) > _LONGEST_NAME or ".." in PurePosixPath(value).parts:
        raise ValueError(f"allowed is a name of 1 to {_LONGEST_NAME} characters without '..'")
    return _text(value)


def _template(value: str) -> str:
    """Refuse a path template that reads more than numbers and camera names, or leads outside."""
    try:
        parts = list(Formatter().parse(value))
    except ValueError as error:
        raise ValueError(f"no path template: {error}") from error
    for _, field, width, conversion in parts:
        if field is None:
            continue
        plain = not width if field == "video_key" else _WIDTH.fullmatch(width or "")
        if field not in _PLACES or conversion or not plain:
            raise ValueError(
                f"allowed are {', '.join(_PLACES)} in braces, such as {{{_PLACES[1]}:06d}}"
            )
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or not value:
        raise ValueError("allowed is a path below the dataset's folder")
    return _name(value)


Count = Annotated[int, Field(strict=True, ge=0, le=_MOST)]
Rate = Annotated[float, Field(strict=True, gt=0, le=10_000, allow_inf_nan=False)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, AfterValidator(_name)]
Template = Annotated[str, AfterValidator(_template)]


def axes(names: Iterable[object] | None) -> list[str]:
    """Return the axes of a camera's shape, ``h``, ``w`` and ``c``, from their names."""
    return [str(name)[:1].lower() for name in names or ("h", "w", "c")]


class Column(BaseModel):
    """One entry of ``features`` in ``info.json``."""

    # Other fields (codecs, the kind of quantity) are kept for whoever writes the entry again.
    model_config = ConfigDict(frozen=True, extra="allow")

    dtype: Name
    shape: Annotated[
        list[Annotated[int, Field(strict=True, ge=0, le=_WIDEST)]],
        Field(min_length=1, max_length=8),
    ]
    names: list[Any] | dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape))}"


class Info(BaseModel):
    """``meta/info.json``, in the part that reading needs."""

    model_config = ConfigDict(frozen=True)

    codebase_version: Text
    total_episodes: Count
    total_frames: Annotated[int, Field(strict=True, ge=0)] = 0
    total_tasks: Count | None = None
    chunks_size: Annotated[int, Field(strict=True, ge=1, le=_MOST)] = 1000
    fps: Rate
    data_path: Template
    video_path: Template | None = None
    features: dict[Name, Column]

    @property
    def videos(self) -> list[str]:
        """Columns whose images lie in videos."""
        return [name for name, column in self.features.items() if column.dtype == "video"]


class EpisodeRow(BaseModel):
    """A line of ``meta/episodes.jsonl``."""

    episode_index: Count
    length: Annotated[int, Field(strict=True, ge=0, le=LONGEST_EPISODE)]


class RecordedRow(EpisodeRow):
    """The same of a recording of ours, whose lists may be changed."""

    tasks: list[Text]


Measure = list[int | Finite] | list[list[list[int | Finite]]]
"""A statistic of a column of numbers, or of images: (3, 1, 1)."""


class EpisodeStatistics(BaseModel):
    """A line of ``meta/episodes_stats.jsonl``."""

    episode_index: Count
    stats: dict[Name, dict[str, Measure]]


class EpisodeFacts(BaseModel):
    """A line of ``meta/recording_facts.jsonl``, our own."""

    model_config = ConfigDict(extra="allow")

    episode_index: Count
    success: Annotated[bool, Field(strict=True)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    """What the environment was reset with."""

    init_state_id: Annotated[int, Field(strict=True, ge=-1, lt=2**63)] | None = None
    """Initial state that it began from; -1 for none."""

    reason: Text = ""
    """Why it failed."""

    interventions: Count = 0
    """Rows in which a person acted in the place of a policy."""

    takeovers: list[tuple[Count, Count]] = []
    """First and last row of every stretch in which a person did."""

    policy: Text = ""
    """Policy that acted; empty: the episode is a demonstration."""

    round: Count | None = None
    """Which round of improvement it was recorded in."""

    robot_s: Seconds | None = None
    """How long the robot ran."""

    person_s: Seconds | None = None
    """For how much of it a person steered."""


class LostAttempt(BaseModel):
    """A line of ``meta/recording_attempts.jsonl``, our own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Literal["failure", "discarded"]
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    """What the environment was reset with."""

    reason: Text = ""
    """Why it failed."""


class TaskRow(BaseModel):
    """A line of ``meta/tasks.jsonl``."""

    task_index: Count
    task: Text


class ModalityEntry(BaseModel):
    """Where one modality key lies; what is absent is the key's usual column, whole."""

    model_config = ConfigDict(frozen=True)

    original_key: Name | None = None
    start: Annotated[int, Field(strict=True, ge=0, le=_WIDEST)] | None = None
    end: Annotated[int, Field(strict=True, ge=0, le=_WIDEST)] | None = None


class Modality(BaseModel):
    """``meta/modality.json``."""

    model_config = ConfigDict(frozen=True)

    state: dict[Text, ModalityEntry] = {}
    action: dict[Text, ModalityEntry] = {}
    video: dict[Text, ModalityEntry] = {}
    annotation: dict[Text, ModalityEntry] = {}


class Writer(BaseModel):
    """``meta/recording.json``: who wrote the folder."""

    writer: Text | None = None
    embodiment: Text | None = None
    action_frame: Text | None = None
    """Axes of the recorded actions, for robots that have several."""


INFO = Path("meta/info.json")
MODALITY = Path("meta/modality.json")
STATS = Path("meta/stats.json")
TASKS_V2 = Path("meta/tasks.jsonl")
EPISODES_V2 = Path("meta/episodes.jsonl")
EPISODES_STATS_V2 = Path("meta/episodes_stats.jsonl")
TASKS_V3 = Path("meta/tasks.parquet")
EPISODES_V3_FOLDER = Path("meta/episodes")
EPISODES_V3 = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
RECORDING = Path("meta/recording.json")
"""Ours: says which program and embodiment wrote the folder. Other readers ignore it."""

FACTS = Path("meta/recording_facts.jsonl")
"""Ours: what is known of each episode beyond LeRobot's lists (success, operator, ...). A file of
its own, because LeRobot's readers want the same columns in all lists of a dataset.
"""

ATTEMPTS = Path("meta/recording_attempts.jsonl")
"""Ours: attempts that left no episode, because they failed or were discarded."""

COLLECTION = Path("meta/collection.json")
"""Ours: the plan that a collection follows, attempt by attempt."""

ASIDE = Path(".aside")
"""Ours: files of the episode being written; never part of the dataset."""

CHUNK_SIZE = 1000

DATA_PATH = {
    "v2.0": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
VIDEO_PATH = {
    "v2.0": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
VERSIONS = tuple(DATA_PATH)

STANDARD_COLUMNS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


def check_written(version: str) -> None:
    """Raise for a version that is not written here."""
    find(DATA_PATH, "LeRobot version", version)


def file_name(version: str, prefix: str, where: Mapping[str, int]) -> str:
    """Return the path of a file below the root of a recording of ours.

    Args:
        version: Of the format.
        prefix: ``data``, or ``videos/`` and the camera, as the list of v3.0 names its columns.
        where: Indices, as :func:`place` gives them.
    """
    if prefix == "data":
        return DATA_PATH[version].format(**where)
    return VIDEO_PATH[version].format(video_key=prefix.removeprefix("videos/"), **where)


def own_files(paths: Iterable[Path]) -> list[Path]:
    """Return ``paths`` sorted, without what macOS leaves beside every file it copies."""
    return sorted(path for path in paths if not path.name.startswith("._"))


def read_info(root: Path) -> Info:
    """Return ``meta/info.json`` of the dataset in ``root``.

    Raises:
        DatasetError: It is unreadable, or of another format.
    """
    path = root / INFO
    version = read_json(path, _Versioned, DatasetError).codebase_version
    if version not in VERSIONS:
        raise DatasetError(
            f"{path}: codebase_version is {version!r}; readable are {', '.join(VERSIONS)}. Convert "
            "the dataset with LeRobot's own tools."
        )
    return read_json(path, Info, DatasetError)


class _Versioned(BaseModel):
    """The field that determines how the rest of ``info.json`` is read."""

    codebase_version: str


def totals(version: str, episodes: int, frames: int, tasks: int, cameras: int) -> dict[str, Any]:
    """Return what ``info.json`` counts; ``cameras`` are those whose images lie in videos."""
    counts = {
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "splits": {"train": f"0:{episodes}"},
    }
    if version == "v3.0":
        return counts
    return counts | {
        "total_videos": cameras * episodes,
        "total_chunks": -(-episodes // CHUNK_SIZE),
    }


def place(number: int) -> dict[str, int]:
    """Return every index a template may ask for, for the ``number``-th episode or file."""
    chunk, file = divmod(number, CHUNK_SIZE)
    return {
        "episode_chunk": chunk,
        "episode_index": number,
        "chunk_index": chunk,
        "file_index": file,
    }
