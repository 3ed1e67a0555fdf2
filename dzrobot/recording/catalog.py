"""What a LeRobot folder holds: episodes, columns, tasks and files; v2.0, v2.1 and v3.0 alike."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from string import Formatter
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dzrobot.documents import parse_json, read_json, read_json_lines, validated
from dzrobot.embodiments.spec import ActionAnchor
from dzrobot.errors import DatasetError, counted, preview
from dzrobot.recording import formats
from dzrobot.recording.episode_list import ListTable, read_parquet, read_table
from dzrobot.recording.folder import check_whole
from dzrobot.recording.formats import (
    LONGEST_EPISODE,
    Column,
    EpisodeChoice,
    EpisodeFacts,
    EpisodeRow,
    EpisodeStatistics,
    Info,
    Modality,
    TaskRow,
    Writer,
    read_info,
)
from dzrobot.untrusted import parsing

_SAMPLED_FOOTERS = 64
_FOOTER_BYTES = 8192

_UNPLACED = "what meta/episodes says of {prefix} (chunk_index, file_index or times)"
"""Stands for the file of an episode where the list of a v3.0 folder lacks a value; is missing."""

CAMERA_KINDS = ("image", "video")

FAILED = "marked as failures"
"""Why an episode is left out."""

RATE_TOLERANCE = 0.01
"""Share by which the rate of a recording may differ from the robot's without a warning."""


@dataclass(frozen=True)
class VideoPlace:
    """Where the frames of every episode lie, for one camera."""

    files: NDArray[np.int64]
    """(episodes, 2): chunk and file number of v3.0, -1 where the list lacks one; unused before."""

    start_s: NDArray[np.float64]
    """(episodes,): time of the first frame within the file, in seconds."""


@dataclass(frozen=True)
class Episodes:
    """All episodes as arrays, so that a hundred thousand of them cost megabytes."""

    index: NDArray[np.int64]
    length: NDArray[np.int64]
    data_files: NDArray[np.int64]
    """(episodes, 2): chunk and file number of v3.0, -1 where the list lacks one; unused before."""

    videos: Mapping[str, VideoPlace]

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def offset(self) -> NDArray[np.int64]:
        """(episodes + 1,): row of each episode's first frame when all are laid end to end."""
        return np.concatenate([[0], np.cumsum(self.length, dtype=np.int64)])


@dataclass(frozen=True, kw_only=True)
class DatasetCatalog:
    """One LeRobot folder, its files not yet opened."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Column]
    """Columns as ``info.json`` describes them."""

    modality: Modality | None
    """``meta/modality.json``, where there is one."""

    tasks: Mapping[int, str]
    """Instruction by task index, in the order of the indices, which may have gaps."""

    action_frame: str | None
    """Axes of the actions, if the recording names them."""

    facts: Mapping[int, EpisodeFacts]
    """Facts about episodes beyond LeRobot's lists, by number; empty for other tools' datasets."""

    episodes: Episodes
    uncommitted: int
    """Episodes that an interrupted recording left unfinished; they are not part of ``episodes``."""

    templates: Mapping[str, str | None]
    chunk_size: int
    sizes: Mapping[str, int]
    """Bytes of every data and video file, by path below the root."""

    changed: Mapping[str, int]
    """When each of them was changed last, in ns."""

    notes: tuple[str, ...]
    """What is odd about the folder, and how it is read nevertheless."""

    @classmethod
    def open(cls, path: str | Path) -> "DatasetCatalog":
        """Read the lists of ``path``, a folder or the name of a dataset on the Hugging Face hub.

        Raises:
            DatasetError: A list is missing or unreadable, or the format is another one.
        """
        root = locate(path)
        check_whole(root)
        info = read_info(root)
        version = info.codebase_version
        listed = _episodes_v3(root, info) if version == "v3.0" else _episodes_v2(root)
        episodes, uncommitted = _recorded(root, listed, info.total_episodes)
        modality, notes = _modality(root)
        template, more = _video_template(root, info)
        if (lacking := info.total_episodes - len(episodes)) > 0:
            more.append(
                f"info.json counts {info.total_episodes} episodes, the list has {len(episodes)}: "
                f"{counted(lacking, 'episode')} cannot be used; a recorder that was killed leaves "
                "it so (LeRobot: finalize()), and so does a download of a part"
            )
        found = dict(_found_files(root, (info.data_path, template)))
        recording = root / formats.RECORDING
        writer = read_json(recording, Writer, DatasetError) if recording.exists() else Writer()
        return cls(
            root=root,
            version=version,
            fps=info.fps,
            features=info.features,
            modality=modality,
            tasks=task_table(root, version),
            action_frame=writer.action_frame,
            facts=episode_facts(root),
            episodes=episodes,
            uncommitted=uncommitted,
            templates={"data": info.data_path, "video": template},
            chunk_size=info.chunks_size,
            sizes={name: state.st_size for name, state in found.items()},
            changed={name: state.st_mtime_ns for name, state in found.items()},
            notes=(*notes, *more),
        )

    @property
    def cameras(self) -> tuple[str, ...]:
        """Columns that hold images."""
        return tuple(name for name, column in self.features.items() if column.dtype in CAMERA_KINDS)

    def frame_size(self, camera: str) -> tuple[int, int]:
        """Return ``(height, width)`` of a camera's pictures, whichever way its shape is written.

        Raises:
            DatasetError: the shape names no height and width.
        """
        feature = self.features[camera]
        sizes = dict(zip(formats.axes(feature.names), feature.shape, strict=False))
        if not {"h", "w"} <= sizes.keys():
            raise DatasetError(f"{camera}: the shape {feature} names no height and width")
        return sizes["h"], sizes["w"]

    def resized_from(self, camera: str) -> tuple[int, int] | None:
        """Return the size that a camera recorded, where the pictures here are small copies.

        Raises:
            DatasetError: ``info.json`` says something else in its place.
        """
        described = (self.features[camera].model_extra or {}).get("info")
        size = described.get(formats.RESIZED_FROM) if isinstance(described, dict) else None
        if size is None:
            return None
        match size:
            case [int(height), int(width)] if height > 0 and width > 0:
                return height, width
        raise DatasetError(
            f"{self.root}: {camera} has {formats.RESIZED_FROM}={size!r} in {formats.INFO}; it is "
            "[height, width] in pixels"
        )

    @property
    def action_anchor(self) -> ActionAnchor | None:
        """What the steps of an arm's actions are measured from, if the recording says it.

        Raises:
            DatasetError: its episodes differ, or name something else.
        """
        known: tuple[ActionAnchor, ...] = get_args(ActionAnchor)
        named = [facts.model_dump().get("action.anchor") for facts in self.facts.values()]
        stated = {str(anchor) for anchor in named if anchor is not None}
        if len(stated) > 1 or not stated <= set(known):
            raise DatasetError(
                f"{self.root}: the episodes in {formats.FACTS} have action.anchor = "
                f"{preview(stated)}; all have one of {', '.join(known)}: train on those of one"
            )
        return next((anchor for anchor in known if anchor in stated), None)

    def left_out(self, chosen: EpisodeChoice) -> dict[int, str]:
        """Return the episodes that ``chosen`` leaves out, by number, with the reason."""
        if chosen == "all":
            return {}
        facts = {int(number): self.facts.get(int(number)) for number in self.episodes.index}
        return {n: FAILED for n, one in facts.items() if one and one.success is False}

    @cached_property
    def identity(self) -> str:
        """Hex digest of the recording: changes when episodes are added, removed or re-recorded.

        Copies have the same one. Numbers enter through LeRobot's own statistics, and through the
        footers of some data files, which hold the extremes of every column.
        """
        data = sorted((name, size) for name, size in self.sizes.items() if name.startswith("data/"))
        lengths = self.episodes.length.tolist()
        # Which episodes are failures decides what is measured and trained on.
        marked = [sorted(failed)] if (failed := self.left_out("successes")) else []
        tasks = [*self.tasks.values()]
        if list(self.tasks) != list(range(len(tasks))):
            marked.append([*self.tasks])
        text = json.dumps([self.version, self.fps, lengths, tasks, data, *marked])
        digest = hashlib.sha256(text.encode())
        for table in (formats.STATS, formats.EPISODES_STATS_V2):
            if (self.root / table).is_file():
                digest.update((self.root / table).read_bytes())
        for name, size in data[:: -(-len(data) // _SAMPLED_FOOTERS) or 1]:
            with (self.root / name).open("rb") as file:
                file.seek(max(0, size - _FOOTER_BYTES))
                digest.update(file.read())
        return digest.hexdigest()

    def data_file(self, ordinal: int) -> str:
        """Return the data file of the ``ordinal``-th episode, below the root."""
        return self._names("data", None, slice(ordinal, ordinal + 1))[0]

    def video_file(self, ordinal: int, camera: str) -> str:
        """Return the video file of the ``ordinal``-th episode, below the root."""
        return self._names("video", camera, slice(ordinal, ordinal + 1))[0]

    def missing(self, cameras: Sequence[str]) -> dict[int, list[str]]:
        """Return, by ordinal, the files needed for ``cameras`` that are absent or empty."""
        videos = [name for name in cameras if self.features[name].dtype == "video"]
        faults: dict[int, list[str]] = {}
        for needed in (self.files("data"), *(self.files("video", key) for key in videos)):
            for ordinal, name in enumerate(needed):
                if not self.sizes.get(name):
                    faults.setdefault(ordinal, []).append(name)
        return dict(sorted(faults.items()))

    def files(self, kind: str, camera: str | None = None) -> list[str]:
        """Return the file of every episode, below the root; ``kind`` is ``data`` or ``video``."""
        if (kind, camera) not in self._named:
            self._named[kind, camera] = self._names(kind, camera, slice(None))
        return self._named[kind, camera]

    @cached_property
    def _named(self) -> dict[tuple[str, str | None], list[str]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # Processes that read the folder make the names that they need.
        return {name: value for name, value in self.__dict__.items() if name != "_named"}

    def _names(self, kind: str, camera: str | None, some: slice) -> list[str]:
        """Return the files of ``some`` episodes."""
        template = self.templates[kind]
        if template is None:
            raise DatasetError(f"{self.root / formats.INFO} gives no {kind}_path")
        place = self.episodes.videos.get(camera or "")
        files = (self.episodes.data_files if place is None else place.files)[some]
        index = self.episodes.index[some]
        known = {"video_key": camera, "total_episodes": len(self.episodes) + self.uncommitted}
        numbers = {
            "episode_chunk": index // self.chunk_size, "episode_index": index,
            "chunk_index": files[:, 0], "file_index": files[:, 1],
        }  # fmt: skip
        # Filling in by %, with what is the same for all filled in before, is three times as fast
        # as str.format for each.
        pattern, varying = "", []
        for text, field, width, _ in Formatter().parse(template):
            pattern += text.replace("%", "%%")
            if field in numbers:
                pattern += f"%{(width or '').removesuffix('d')}d"
                varying.append(numbers[field].tolist())
            elif field is not None:
                pattern += format(known[field], width or "").replace("%", "%%")
        rows = zip(*varying, strict=True) if varying else itertools.repeat((), len(index))
        names = [pattern % row for row in rows]
        for at in np.flatnonzero(files[:, 0] < 0).tolist():
            names[at] = _UNPLACED.format(prefix="data" if camera is None else f"videos/{camera}")
        return names


def locate(path: str | Path) -> Path:
    """Return the local folder of a dataset; one on the Hugging Face hub is downloaded first.

    Raises:
        DatasetError: Neither a folder nor a dataset that can be fetched.
    """
    name = str(path)
    try:
        folder = Path(path).expanduser()
        if (folder / formats.INFO).is_file():
            return folder
        there = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise DatasetError(f"{name[:200]!r} cannot be a dataset: {error}") from error
    if there or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise DatasetError(
            f"{folder} holds no {formats.INFO}: give the folder of a LeRobot dataset "
            f"({', '.join(formats.VERSIONS)}) or the owner/name of one on the Hugging Face hub"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise DatasetError(
            f"{name!r} is not a folder here and could not be fetched from the hub ({error}): "
            "download it on a machine with access and give its folder"
        ) from error


def _episodes_v2(root: Path) -> Episodes:
    lines = read_json_lines(root / formats.EPISODES_V2, EpisodeRow, DatasetError, appended=True)
    rows = sorted(lines, key=lambda row: row.episode_index)
    return Episodes(
        index=np.array([row.episode_index for row in rows], dtype=np.int64),
        length=np.array([row.length for row in rows], dtype=np.int64),
        data_files=np.zeros((len(rows), 2), dtype=np.int64),
        videos={},
    )


def _episodes_v3(root: Path, info: Info) -> Episodes:
    folder = root / formats.EPISODES_V3_FOLDER
    paths = formats.own_files(folder.glob("*/*.parquet"))
    if not paths:
        raise DatasetError(f"{folder} is empty: the dataset is incomplete")
    tables = [read_table(path) for path in paths]
    with parsing(f"the lists in {folder}", DatasetError, "do not fit together"):
        table = pa.concat_tables(tables, promote_options="default")
    lists = ListTable(table, folder)
    order = np.argsort(lists.integers("episode_index"), kind="stable")
    return Episodes(
        index=lists.integers("episode_index")[order],
        length=lists.integers("length", LONGEST_EPISODE)[order],
        data_files=lists.known_files("data")[order],
        videos={name: _video_place(lists, f"videos/{name}", order) for name in info.videos},
    )


def _video_place(lists: ListTable, prefix: str, order: NDArray[np.int64]) -> VideoPlace:
    begins = f"{prefix}/from_timestamp"
    files = lists.known_files(prefix, begins)
    start_s = np.zeros(len(files))
    known = files[:, 0] >= 0
    start_s[known] = ListTable(lists.table.filter(pa.array(known)), lists.where).seconds(begins)
    return VideoPlace(files[order], start_s[order])


def _modality(root: Path) -> tuple[Modality | None, list[str]]:
    """Return GR00T's description of the columns, and what to say where it is another's file.

    Raises:
        DatasetError: It is GR00T's, and one of its entries cannot be read.
    """
    path = root / formats.MODALITY
    if not path.exists():
        return None, []
    given = read_json(path, object, DatasetError)
    sections: Mapping[str, Any] = given if isinstance(given, dict) else {}
    entries = (sections.get(name) for name in Modality.model_fields)
    if sections and not any(isinstance(entry, dict) for entry in entries):
        return None, [
            f"{formats.MODALITY} is not of GR00T's form (an object of entries for state, action "
            "and video) and is not used: the robot's description names the columns"
        ]
    return validated(given, Modality, str(path), DatasetError), []


def _video_template(root: Path, info: Info) -> tuple[str | None, list[str]]:
    """Return where videos lie: where ``info.json`` says, or beside that under an old name."""
    template = info.video_path
    first, _, rest = (template or "").partition("/")
    other = {"videos": "video", "video": "videos"}.get(first)
    if not (other and rest) or (root / first).exists() or not (root / other).is_dir():
        return template, []
    return f"{other}/{rest}", [
        f"info.json says that videos lie in {first}/, which is not there: {other}/ is used"
    ]


def _recorded(root: Path, listed: Episodes, total: int) -> tuple[Episodes, int]:
    """Return the episodes that ``info.json`` counts: a longer list is an interrupted recording."""
    numbers, counts = np.unique(listed.index, return_counts=True)
    if (counts > 1).any():
        raise DatasetError(
            f"{root}: the list of episodes has episode {numbers[counts > 1][0]} more than once"
        )
    videos = {
        name: VideoPlace(place.files[:total], place.start_s[:total])
        for name, place in listed.videos.items()
    }
    kept = Episodes(listed.index[:total], listed.length[:total], listed.data_files[:total], videos)
    return kept, max(0, len(listed) - total)


def task_table(root: Path, version: str) -> dict[int, str]:
    """Return the instructions of the dataset in ``root`` by their index, in its order.

    Raises:
        DatasetError: The list cannot be read, or has an index twice.
    """
    if version != "v3.0":
        lines = read_json_lines(root / formats.TASKS_V2, TaskRow, DatasetError, appended=True)
        pairs = [(row.task_index, row.task) for row in lines]
    else:
        table = read_table(root / formats.TASKS_V3)
        lists = ListTable(table, root / formats.TASKS_V3)
        numbers = lists.integers("task_index").tolist()
        pairs = list(zip(numbers, lists.texts(_text_column(table, lists.where)), strict=True))
    tasks = dict(sorted(pairs))
    if len(tasks) != len(pairs):
        raise DatasetError(f"{root}: the list of tasks has an index more than once")
    return tasks


def _text_column(table: pa.Table, where: Path) -> str:
    """Return the column of a list of tasks that holds the instructions.

    Pandas keeps them in its index, whose column has had several names; later versions of LeRobot
    and other tools have columns of texts beside it.
    """
    names = [str(name) for name in table.column_names if name != "task_index"]
    note = (table.schema.metadata or {}).get(b"pandas", b"{}")
    stated = parse_json(note, dict[str, Any], f"{where}, pandas' note", DatasetError)
    named = sorted({str(name) for name in stated.get("index_columns") or ()})
    for name in ("task", *named, "__index_level_0__"):
        if name in names:
            return name
    if len(names) != 1:
        raise DatasetError(
            f"{where} has the columns {preview(table.column_names)}: none is called 'task', and it "
            "is not said which holds the instructions; rename that one"
        )
    return names[0]


def read_tasks(root: Path, version: str) -> list[str]:
    """Return the instructions of a recording of ours, by their index.

    Raises:
        DatasetError: As :func:`task_table`, or the indices have gaps.
    """
    tasks = task_table(root, version)
    if list(tasks) != list(range(len(tasks))):
        raise DatasetError(f"{root}: task indices are not 0 to {len(tasks) - 1}")
    return list(tasks.values())


def episode_facts(root: Path) -> dict[int, EpisodeFacts]:
    """Return what the recording in ``root`` says of its episodes, by their number.

    An interrupted recording may say something of an episode that is not there.

    Raises:
        DatasetError: The file of facts cannot be read.
    """
    path = root / formats.FACTS
    rows = read_json_lines(path, EpisodeFacts, DatasetError, appended=True) if path.exists() else []
    return {row.episode_index: row for row in rows}


def _found_files(
    root: Path, templates: Sequence[str | None]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every data and video file; broken and circular links are left out."""
    seen: set[tuple[int, int]] = set()
    named = [template.partition("/")[0] for template in templates if template]
    folders = list(dict.fromkeys(["data", "videos", *(name for name in named if "{" not in name)]))
    while folders:
        name = folders.pop()
        try:
            state = (root / name).stat()
            # Names and one call for each: paths would cost ten times as much.
            with os.scandir(root / name) as found:
                entries = sorted(found, key=attrgetter("name"))
        except OSError:
            continue
        if (state.st_dev, state.st_ino) in seen:
            continue
        seen.add((state.st_dev, state.st_ino))
        for entry in entries:
            try:
                there = entry.stat()
            except OSError:
                continue
            if S_ISDIR(there.st_mode):
                folders.append(f"{name}/{entry.name}")
            elif S_ISREG(there.st_mode):
                yield f"{name}/{entry.name}", there


def listed_colors(catalog: DatasetCatalog, camera: str) -> dict[int, NDArray[np.float64]]:
    """Return the mean color (3,), 0 to 1, of each episode, as far as the lists tell it."""
    means: dict[int, Any] = {}
    for path in formats.own_files((catalog.root / formats.EPISODES_V3_FOLDER).glob("*/*.parquet")):
        # Lists without statistics of images are usual.
        with suppress(DatasetError):
            table = read_parquet(path, ["episode_index", f"stats/{camera}/mean"])
            means |= zip(*(column.to_pylist() for column in table.columns), strict=True)
    path = catalog.root / formats.EPISODES_STATS_V2
    if path.is_file():
        for line in read_json_lines(path, EpisodeStatistics, DatasetError, appended=True):
            means[line.episode_index] = line.stats.get(camera, {}).get("mean")
    found = {number: np.ravel(np.array(mean, dtype=object)) for number, mean in means.items()}
    return {
        number: mean.astype(np.float64) for number, mean in found.items()
        if len(mean) == 3 and all(isinstance(value, float | int) for value in mean)
    }  # fmt: skip
