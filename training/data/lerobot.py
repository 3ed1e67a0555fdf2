"""What a LeRobot folder holds: episodes, columns, tasks and files; v2.0, v2.1 and v3.0 alike."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dzrobot.errors import DatasetError, preview
from dzrobot.recording import layout

VERSIONS = ("v2.0", "v2.1", "v3.0")

_SAMPLED_FOOTERS = 64
_FOOTER_BYTES = 8192

CAMERA_KINDS = ("image", "video")


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
class Catalog:
    """One LeRobot folder, its files not yet opened."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    """Columns as ``info.json`` describes them."""

    modality: Mapping[str, Any] | None
    """``meta/modality.json``, where there is one."""

    tasks: tuple[str, ...]
    """Instruction by task index."""

    episodes: Episodes
    uncommitted: int
    """Episodes that an interrupted recording left unfinished; they are not part of ``episodes``."""

    templates: Mapping[str, str | None]
    chunk_size: int
    sizes: Mapping[str, int]
    """Bytes of every data and video file, by path below the root."""

    @classmethod
    def open(cls, path: str | Path) -> "Catalog":
        """Read the lists of ``path``, a folder or the name of a dataset on the Hugging Face hub.

        Raises:
            DatasetError: A list is missing or unreadable, or the format is another one.
        """
        root = locate(path)
        info = _json(root / layout.INFO)
        version = str(info.get("codebase_version", "missing"))
        if version not in VERSIONS:
            raise DatasetError(
                f"{root / layout.INFO}: codebase_version is {version!r}; readable are "
                f"{', '.join(VERSIONS)}. Convert the dataset with LeRobot's own tools."
            )
        listed = _episodes_v3(root, info) if version == "v3.0" else _episodes_v2(root)
        episodes, uncommitted = _committed(root, listed, int(info["total_episodes"]))
        modality = root / layout.MODALITY
        return cls(
            root=root,
            version=version,
            fps=float(info["fps"]),
            features=info["features"],
            modality=_json(modality) if modality.exists() else None,
            tasks=_tasks(root, version),
            episodes=episodes,
            uncommitted=uncommitted,
            templates={"data": info["data_path"], "video": info.get("video_path")},
            chunk_size=int(info.get("chunks_size", layout.CHUNK_SIZE)),
            sizes=dict(_sizes(root)),
        )

    @property
    def cameras(self) -> tuple[str, ...]:
        """Columns that hold pictures."""
        return tuple(
            name for name, table in self.features.items() if table["dtype"] in CAMERA_KINDS
        )

    @cached_property
    def identity(self) -> str:
        """Hex digest of the recording: changes when episodes are added, removed or re-recorded.

        Copies have the same one. Numbers enter through LeRobot's own statistics, and through the
        footers of some data files, which hold the extremes of every column.
        """
        data = sorted((name, size) for name, size in self.sizes.items() if name.startswith("data/"))
        lengths = self.episodes.length.tolist()
        text = json.dumps([self.version, self.fps, lengths, list(self.tasks), data])
        digest = hashlib.sha256(text.encode())
        for table in (layout.STATS, layout.EPISODES_STATS_V2):
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
        videos = [name for name in cameras if self.features[name]["dtype"] == "video"]
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
            raise DatasetError(f"{self.root / layout.INFO} gives no {kind}_path")
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
    folder = Path(path).expanduser()
    if (folder / layout.INFO).is_file():
        return folder
    name = str(path)
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise DatasetError(
            f"{folder} holds no {layout.INFO}: give the folder of a LeRobot dataset "
            f"({', '.join(VERSIONS)}) or the owner/name of one on the Hugging Face hub"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DatasetError(
            f"{name!r} is no folder here and could not be fetched from the hub ({error}); download "
            "it on a machine with access and give its folder"
        ) from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is incomplete") from error
    except ValueError as error:
        raise DatasetError(f"{path} is no JSON: {error}") from error


def _json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is incomplete") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise DatasetError(f"{path}:{number} is no JSON: {error}") from error
    return rows


def _parquet(path: Path) -> pa.Table:
    try:
        names = [name for name in pq.read_schema(path).names if not name.startswith("stats/")]
        return pq.read_table(path, columns=names)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is incomplete") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


def _episodes_v2(root: Path) -> Episodes:
    rows = sorted(_json_lines(root / layout.EPISODES_V2), key=lambda row: row["episode_index"])
    count = len(rows)
    return Episodes(
        index=np.array([row["episode_index"] for row in rows], dtype=np.int64),
        length=np.array([row["length"] for row in rows], dtype=np.int64),
        data_files=np.zeros((count, 2), dtype=np.int64),
        videos={},
    )


def _episodes_v3(root: Path, info: Mapping[str, Any]) -> Episodes:
    paths = sorted((root / layout.EPISODES_V3_FOLDER).glob("*/*.parquet"))
    if not paths:
        raise DatasetError(
            f"{root / layout.EPISODES_V3_FOLDER} is empty: the dataset is incomplete"
        )
    table = pa.concat_tables([_parquet(path) for path in paths], promote_options="default")
    table = table.sort_by("episode_index")
    cameras = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    return Episodes(
        index=_column(table, "episode_index"),
        length=_column(table, "length"),
        data_files=_numbers(table, "data"),
        videos={
            name: VideoPlace(
                files=_numbers(table, f"videos/{name}"),
                start_s=_column(table, f"videos/{name}/from_timestamp").astype(np.float64),
            )
            for name in cameras
        },
    )


def _numbers(table: pa.Table, prefix: str) -> NDArray[np.int64]:
    columns = [_column(table, f"{prefix}/{name}") for name in ("chunk_index", "file_index")]
    return np.stack(columns, axis=1)


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    if name not in table.column_names:
        raise DatasetError(
            f"the list of episodes has no column {name!r}; it has {preview(table.column_names, 20)}"
        )
    values: NDArray[Any] = table.column(name).to_numpy()
    return values


def _committed(root: Path, listed: Episodes, total: int) -> tuple[Episodes, int]:
    """Return the episodes that ``info.json`` counts: a longer list is an interrupted recording."""
    if len(listed) < total:
        raise DatasetError(
            f"{root}: info.json counts {total} episodes, the list of episodes has {len(listed)}: "
            "the dataset is incomplete; fetch it again"
        )
    videos = {
        name: VideoPlace(place.files[:total], place.start_s[:total])
        for name, place in listed.videos.items()
    }
    kept = Episodes(listed.index[:total], listed.length[:total], listed.data_files[:total], videos)
    return kept, len(listed) - total


def _tasks(root: Path, version: str) -> tuple[str, ...]:
    if version != "v3.0":
        rows = _json_lines(root / layout.TASKS_V2)
        pairs = [(int(row["task_index"]), str(row["task"])) for row in rows]
    else:
        table = _parquet(root / layout.TASKS_V3)
        # Pandas keeps the text in its index, whose column has had several names.
        texts = [name for name in table.column_names if name != "task_index"]
        if len(texts) != 1:
            raise DatasetError(
                f"{root / layout.TASKS_V3} has the columns {preview(table.column_names)}; expected "
                "task_index and one column of texts"
            )
        pairs = list(zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True))
    ordered = sorted(pairs)
    if [index for index, _ in ordered] != list(range(len(ordered))):
        raise DatasetError(f"{root}: task indices are not 0 to {len(ordered) - 1}")
    return tuple(text for _, text in ordered)


def _sizes(root: Path) -> Iterator[tuple[str, int]]:
    for top in ("data", "videos"):
        folders = [root / top]
        while folders:
            folder = folders.pop()
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                if entry.is_dir():
                    folders.append(Path(entry.path))
                else:
                    yield Path(entry.path).relative_to(root).as_posix(), entry.stat().st_size
