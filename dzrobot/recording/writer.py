"""Write LeRobot datasets one episode at a time; an interruption never costs a finished episode."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dzrobot.declared import at_the_door
from dzrobot.documents import read_json, read_json_lines, validated
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import DatasetError, counted
from dzrobot.files import append_json_line, explained, undone_on_error, whole_lines, write_json
from dzrobot.recording import column_statistics, folder, formats
from dzrobot.recording.commit import (
    WRITER,
    FinishedEpisode,
    MetaFiles,
    MetaFilesV2,
    MetaFilesV3,
    check_own,
)
from dzrobot.recording.formats import EpisodeFacts, Info, Rate
from dzrobot.recording.media import VideoCodec, describe_video
from dzrobot.recording.open_episode import (
    Feature,
    OpenEpisode,
    arrow_schema,
    check_same,
    describe,
    modality,
)

_log = logging.getLogger(__name__)

IMAGE_ROWS_PER_GROUP = 64
"""Rows of images read together: a training window touches two or three such groups, not the whole
episode.
"""


class EpisodeWriter:
    """Append episodes of one embodiment to a LeRobot folder.

    Frames are added one by one; :meth:`save_episode` commits them all, :meth:`discard` none. After
    a crash, even ``kill -9``, the folder holds exactly the committed episodes, and a new writer
    continues after them.

    Args:
        root: Folder of the dataset; created, or continued when this class wrote it.
        embodiment: Says which cameras, states and actions a frame holds and what their columns are
            called; or its tag.
        fps: Frames per second of the recording; frame ``i`` is stamped ``i / fps``.
        version: ``v2.0``, ``v2.1`` or ``v3.0``.
        video: ``False`` stores images as PNG in the data files, ``True`` as H.264 video, a codec
            as that.

    Raises:
        DatasetError: The folder holds something else, another writer is at work, or its columns
            differ.
    """

    @at_the_door
    def __init__(
        self,
        root: Path | str,
        embodiment: Embodiment | str,
        *,
        fps: float,
        version: str = "v2.1",
        video: VideoCodec | bool = False,
    ) -> None:
        formats.check_written(version)
        self._version = version
        self._root = Path(root)
        self._embodiment = (
            load_embodiment(embodiment) if isinstance(embodiment, str) else embodiment
        )
        self._fps = _whole(validated(fps, Rate, "fps", DatasetError))
        self._codec = VideoCodec() if video is True else (video or None)
        self._features = self._base_features()
        self._catalog: MetaFiles = (
            MetaFilesV3(self._root) if version == "v3.0" else MetaFilesV2(self._root, version)
        )
        self._lock = folder.lock(self._root)
        with (
            undone_on_error(self._lock.close),
            explained(f"record to {self._root}", DatasetError),
        ):
            self._episodes, self._rows, self._tasks = self._open()
        if self._episodes:
            _log.warning(
                "%s holds %s: continuing after %s", self._root,
                counted(self._episodes, "episode"), "it" if self._episodes == 1 else "them",
            )  # fmt: skip
        self._task_index = {task: number for number, task in enumerate(self._tasks)}
        self._episode: OpenEpisode | None = None

    @property
    def root(self) -> Path:
        """Folder of the dataset."""
        return self._root

    @property
    def embodiment(self) -> Embodiment:
        """Robot that is recorded."""
        return self._embodiment

    @property
    def fps(self) -> float:
        """Rows per second."""
        return self._fps

    @property
    def episodes(self) -> int:
        """Committed episodes."""
        return self._episodes

    @property
    def pending(self) -> int:
        """Frames of the episode being recorded."""
        return 0 if self._episode is None else self._episode.length

    @property
    def columns(self) -> frozenset[str]:
        """Columns that every episode of the dataset has."""
        return frozenset(self._features)

    def add_frame(
        self,
        observation: Mapping[str, Any],
        action: Mapping[str, np.ndarray] | np.ndarray,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one step to the current episode.

        Args:
            observation: ``video.*`` (H, W, 3) uint8, ``state.*`` (D,), and the instruction under
                the language key.
            action: ``action.*`` vectors by key, or all of them joined, ``(action_dim,)``.
            extras: Further columns (time stamps of sensors, reward): numbers, flat vectors or
                strings; every frame of a dataset has the same ones.

        Raises:
            DatasetError: A value is missing, of another size, or not finite.
        """
        if self._episode is None:
            with explained(f"record to {self._root}", DatasetError):
                self._episode = OpenEpisode(
                    self._root / formats.ASIDE, self._embodiment, self._fps, self._codec
                )
        self._episode.add(observation, action, dict(extras or {}))

    def save_episode(self, *, success: bool | None = None, **facts: Any) -> int:
        """Commit the current episode and return its index.

        Args:
            success: Whether the task was done; kept in ``meta/recording_facts.jsonl``. What is
                marked as no success is not trained on unless that is asked for.
            facts: Further numbers, booleans or strings, kept there too. ``reason`` is a text that
                says why it failed; ``interventions`` counts the rows in which a person acted in a
                policy's place; ``seed`` and ``init_state_id`` say where it began.

        Raises:
            DatasetError: There is no frame, a fact is of another kind, the extra columns differ
                from those of earlier episodes, or the disk is full. Then close the writer: earlier
                episodes are kept, and the next writer continues after them.
        """
        if self._episode is None:
            raise DatasetError("there is no frame to save: call add_frame first")
        extra = facts if success is None else {"success": success, **facts}
        known = {"episode_index": self._episodes, **extra}
        validated(known, EpisodeFacts, "the episode's facts", DatasetError)
        episode, self._episode = self._episode, None
        described = self._features | episode.extra_features
        if self._episodes:
            check_same(self._features, described)
        self._features = described
        with explained(f"save an episode in {self._root}", DatasetError):
            finished = self._finish(episode)
            if extra:
                append_json_line(self._root / formats.FACTS, known)
            self._catalog.add(finished, self._tasks)
            self._episodes += 1
            self._rows += finished.length
            self._write_info()
        shutil.rmtree(self._root / formats.ASIDE / "episode", ignore_errors=True)
        return finished.index

    def discard(self) -> None:
        """Forget the frames since the last save."""
        if self._episode is not None:
            self._episode.close()
            self._episode = None
        shutil.rmtree(self._root / formats.ASIDE / "episode", ignore_errors=True)

    def close(self) -> None:
        """Drop what was not saved, with a warning, and let other writers in."""
        if self.pending:
            _log.warning(
                "%s: %s after the last save_episode() %s dropped: call save_episode() after each "
                "episode, or discard() for one that is not wanted", self._root,
                counted(self.pending, "row"), "is" if self.pending == 1 else "are",
            )  # fmt: skip
        self.discard()
        self._lock.close()
        shutil.rmtree(self._root / formats.ASIDE, ignore_errors=True)

    def __enter__(self) -> "EpisodeWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _base_features(self) -> dict[str, Feature]:
        table = describe(self._embodiment, dtype="video" if self._codec else "image")
        if self._codec:
            for view in self._embodiment.views:
                table[view.feature]["info"] = describe_video(
                    table[view.feature], self._fps, self._codec, self._version
                )
        return table

    def _open(self) -> tuple[int, int, list[str]]:
        info_path = self._root / formats.INFO
        if not info_path.exists():
            if not (self._root / formats.RECORDING).exists() and self._holds_other_files():
                raise DatasetError(
                    f"{self._root} is not empty and is not a recording: give a new folder"
                )
            folder.remove_unfinished(self._root)
            self._catalog.recover(0, 0)
            self._recover_facts(0)
            (self._root / formats.MODALITY).unlink(missing_ok=True)
            write_json(self._root / formats.RECORDING, self._identity)
            return 0, 0, []
        info = read_json(info_path, Info, DatasetError)
        self._check_continues(info)
        folder.remove_unfinished(self._root)
        self._features = _described(info)
        tasks = self._catalog.recover(info.total_episodes, info.total_tasks or 0)
        self._recover_facts(info.total_episodes)
        shutil.rmtree(self._root / formats.ASIDE / "episode", ignore_errors=True)
        return info.total_episodes, info.total_frames, tasks

    def _recover_facts(self, episodes: int) -> None:
        """Forget what was noted of episodes that were not committed."""
        path = self._root / formats.FACTS
        if path.exists():
            whole_lines(path)
            rows = list(read_json_lines(path, EpisodeFacts, DatasetError))
            folder.keep_lines(path, sum(row.episode_index < episodes for row in rows))

    def _holds_other_files(self) -> bool:
        return any(
            path.is_file()
            and formats.ASIDE.name not in path.relative_to(self._root).parts
            and not folder.is_unfinished(path)
            for path in self._root.rglob("*")
        )

    def _check_continues(self, info: Info) -> None:
        known = check_own(self._root)
        given = self._identity | {"version": self._catalog.version, "fps": self._fps}
        there = {
            **known.model_dump(exclude_none=True),
            "version": info.codebase_version,
            "fps": _whole(info.fps),
        }
        faults = [
            f"{name}: {there.get(name)} there, {given[name]} given"
            for name in given
            if there.get(name) != given[name]
        ]
        if faults:
            raise DatasetError(
                f"{self._root} cannot be continued ({'; '.join(faults)}): record to a new folder"
            )
        described = _described(info)
        extra = described.keys() - self._features.keys()
        check_same(
            {name: value for name, value in described.items() if name not in extra}, self._features
        )

    @property
    def _identity(self) -> dict[str, str]:
        robot = self._embodiment
        frame = {} if robot.action_frame is None else {"action_frame": robot.action_frame}
        return {"writer": WRITER, "embodiment": robot.tag, **frame}

    def _finish(self, episode: OpenEpisode) -> FinishedEpisode:
        for task in episode.tasks:
            if task not in self._task_index:
                self._task_index[task] = len(self._tasks)
                self._tasks.append(task)
        columns = episode.columns() | self._standard_columns(episode)
        schema = arrow_schema(self._features)
        table = pa.table({name: columns[name] for name in schema.names}, schema=schema)
        data = self._root / formats.ASIDE / "episode" / "data.parquet"
        images = any(feature["dtype"] == "image" for feature in self._features.values())
        folder.write_parquet(data, table, row_group_size=IMAGE_ROWS_PER_GROUP if images else None)
        numbers = {
            name: column_statistics.of_rows(np.array(columns[name]))
            for name, feature in self._features.items()
            if feature["dtype"] not in ("image", "video", "string")
        }
        return FinishedEpisode(
            index=self._episodes,
            first_row=self._rows,
            length=episode.length,
            seconds=episode.length / self._fps,
            tasks=tuple(dict.fromkeys(episode.tasks)),
            data=data,
            videos=episode.finish_videos(),
            statistics=numbers | episode.image_statistics(),
        )

    def _standard_columns(self, episode: OpenEpisode) -> dict[str, Any]:
        steps = np.arange(episode.length)
        return {
            "timestamp": (steps / self._fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(episode.length, self._episodes),
            "index": self._rows + steps,
            "task_index": np.array([self._task_index[task] for task in episode.tasks]),
        }

    def _write_info(self) -> None:
        version = self._catalog.version
        videos = len(self._embodiment.views) if self._codec else 0
        info: dict[str, Any] = {
            "codebase_version": version,
            "robot_type": self._embodiment.tag,
            **formats.totals(version, self._episodes, self._rows, len(self._tasks), videos),
            "chunks_size": formats.CHUNK_SIZE,
            "fps": self._fps,
            "data_path": formats.DATA_PATH[version],
            "video_path": formats.VIDEO_PATH[version] if self._codec else None,
            "features": self._features,
        }
        if version == "v3.0":
            info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
        write_json(self._root / formats.MODALITY, modality(self._embodiment))
        write_json(self._root / formats.INFO, info)


def _whole(rate: float) -> float:
    """Return a whole rate as an integer: LeRobot's encoder takes no other."""
    return int(rate) if float(rate).is_integer() else rate


def _described(info: Info) -> dict[str, Feature]:
    return {name: column.model_dump(exclude_unset=True) for name, column in info.features.items()}
