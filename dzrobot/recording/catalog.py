"""What a LeRobot folder holds: episodes, columns, tasks and files; v2.0, v2.1 and v3.0 alike."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dzrobot.documents import read_json, read_json_lines
from dzrobot.embodiments.spec import ActionAnchor
from dzrobot.errors import DatasetError, preview
from dzrobot.recording import formats
from dzrobot.recording.episode_list import ListTable, read_table
from dzrobot.recording.folder import check_whole
from dzrobot.recording.formats import (
    LONGEST_EPISODE,
    Column,
    EpisodeChoice,
    EpisodeFacts,
    EpisodeRow,
    Info,
    Modality,
    TaskRow,
    Writer,
    read_info,
)

_SAMPLED_FOOTERS = 64
_FOOTER_BYTES = 8192

CAMERA_KINDS = ("image", "video")

FAILED, ALONE = "marked as failures", "without an intervention"
"""Why an episode is left out."""

RATE_TOLERANCE = 0.01
"""Share by which the rate of a recording may differ from the robot's without a warning."""


@dataclass(frozen=True)
class VideoPlace:
    """Where the frames of every episode lie, for one camera."""

    files: NDArray[np.int64]
    """(episodes, 2): chunk and file number of v3.0; unused before."""

    start_s: NDArray[np.float64]
    """(episodes,): time of the first frame within the file, in seconds."""


@dataclass(frozen=True)
class Episodes:
    """All episodes as arrays, so that a hundred thousand of them cost megabytes."""

    index: NDArray[np.int64]
    length: NDArray[np.int64]
    data_files: NDArray[np.int64]
    """(episodes, 2): chunk and file number of v3.0; unused before."""

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

    tasks: tuple[str, ...]
    """Instruction by task index."""

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
        modality, recording = root / formats.MODALITY, root / formats.RECORDING
        writer = read_json(recording, Writer, DatasetError) if recording.exists() else Writer()
        return cls(
            root=root,
            version=version,
            fps=info.fps,
            features=info.features,
            modality=read_json(modality, Modality, DatasetError) if modality.exists() else None,
            tasks=tuple(read_tasks(root, version)),
            action_frame=writer.action_frame,
            facts=episode_facts(root),
            episodes=episodes,
            uncommitted=uncommitted,
            templates={"data": info.data_path, "video": info.video_path},
            chunk_size=info.chunks_size,
            sizes=dict(_sizes(root)),
        )

    @property
    def cameras(self) -> tuple[str, ...]:
        """Columns that hold images."""
        return tuple(name for name, column in self.features.items() if column.dtype in CAMERA_KINDS)

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
        failed = {n: FAILED for n, one in facts.items() if one and one.success is False}
        if chosen == "successes":
            return failed
        alone = {n: ALONE for n, one in facts.items() if one is None or not one.interventions}
        return alone | failed

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
        text = json.dumps([self.version, self.fps, lengths, list(self.tasks), data, *marked])
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
        return self._path("data", ordinal, self.episodes.data_files)

    def video_file(self, ordinal: int, camera: str) -> str:
        """Return the video file of the ``ordinal``-th episode, below the root."""
        place = self.episodes.videos.get(camera)
        files = self.episodes.data_files if place is None else place.files
        return self._path("video", ordinal, files, camera)

    def video_start_s(self, ordinal: int, camera: str) -> float:
        """Return when the episode begins within its video file, in seconds."""
        place = self.episodes.videos.get(camera)
        return 0.0 if place is None else float(place.start_s[ordinal])

    def missing(self, cameras: Sequence[str]) -> dict[int, list[str]]:
        """Return, by ordinal, the files needed for ``cameras`` that are absent or empty."""
        videos = [name for name in cameras if self.features[name].dtype == "video"]
        faults: dict[int, list[str]] = {}
        for ordinal in range(len(self.episodes)):
            needed = [self.data_file(ordinal), *(self.video_file(ordinal, key) for key in videos)]
            absent = [name for name in needed if not self.sizes.get(name)]
            if absent:
                faults[ordinal] = absent
        return faults

    def _path(
        self, kind: str, ordinal: int, files: NDArray[np.int64], camera: str | None = None
    ) -> str:
        template = self.templates[kind]
        if template is None:
            raise DatasetError(f"{self.root / formats.INFO} gives no {kind}_path")
        number = int(self.episodes.index[ordinal])
        return template.format(
            episode_chunk=number // self.chunk_size,
            episode_index=number,
            chunk_index=int(files[ordinal, 0]),
            file_index=int(files[ordinal, 1]),
            video_key=camera,
            total_episodes=len(self.episodes) + self.uncommitted,
        )


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
    paths = sorted(folder.glob("*/*.parquet"))
    if not paths:
        raise DatasetError(f"{folder} is empty: the dataset is incomplete")
    try:
        tables = [read_table(path) for path in paths]
        table = pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise DatasetError(f"the lists in {folder} do not fit together: {error}") from error
    lists = ListTable(table, folder)
    order = np.argsort(lists.integers("episode_index"), kind="stable")
    return Episodes(
        index=lists.integers("episode_index")[order],
        length=lists.integers("length", LONGEST_EPISODE)[order],
        data_files=lists.files("data")[order],
        videos={
            name: VideoPlace(
                files=lists.files(f"videos/{name}")[order],
                start_s=lists.seconds(f"videos/{name}/from_timestamp")[order],
            )
            for name in info.videos
        },
    )


def _recorded(root: Path, listed: Episodes, total: int) -> tuple[Episodes, int]:
    """Return the episodes that ``info.json`` counts: a longer list is an interrupted recording."""
    if len(listed) < total:
        raise DatasetError(
            f"{root}: info.json counts {total} episodes, the list of episodes has {len(listed)}: "
            "the dataset is incomplete; fetch it again"
        )
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
    return kept, len(listed) - total


def read_tasks(root: Path, version: str) -> list[str]:
    """Return the instructions of the dataset in ``root``, by their index.

    Raises:
        DatasetError: The list cannot be read, or its indices have gaps.
    """
    if version != "v3.0":
        lines = read_json_lines(root / formats.TASKS_V2, TaskRow, DatasetError, appended=True)
        pairs = [(row.task_index, row.task) for row in lines]
    else:
        table = read_table(root / formats.TASKS_V3)
        # Pandas keeps the text in its index, whose column has had several names.
        texts = [name for name in table.column_names if name != "task_index"]
        if len(texts) != 1:
            raise DatasetError(
                f"{root / formats.TASKS_V3} has the columns {preview(table.column_names)}; "
                "expected task_index and one column of texts"
            )
        lists = ListTable(table, root / formats.TASKS_V3)
        numbers = lists.integers("task_index").tolist()
        pairs = list(zip(numbers, lists.texts(texts[0]), strict=True))
    ordered = sorted(pairs)
    if [index for index, _ in ordered] != list(range(len(ordered))):
        raise DatasetError(f"{root}: task indices are not 0 to {len(ordered) - 1}")
    return [text for _, text in ordered]


def episode_facts(root: Path) -> dict[int, EpisodeFacts]:
    """Return what the recording in ``root`` says of its episodes, by their number.

    An interrupted recording may say something of an episode that is not there.

    Raises:
        DatasetError: The file of facts cannot be read.
    """
    path = root / formats.FACTS
    rows = read_json_lines(path, EpisodeFacts, DatasetError, appended=True) if path.exists() else []
    return {row.episode_index: row for row in rows}


def _sizes(root: Path) -> Iterator[tuple[str, int]]:
    """Yield every data and video file; broken and circular links are left out."""
    seen: set[tuple[int, int]] = set()
    folders = ["data", "videos"]
    while folders:
        name = folders.pop()
        try:
            state = (root / name).stat()
            # Names and one call for each: paths would cost ten times as much.
            with os.scandir(root / name) as found:
                entries = sorted(found, key=lambda entry: entry.name)
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
                yield f"{name}/{entry.name}", there.st_size
