"""The episode being recorded: checked frames, kept aside until they are committed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import DatasetError, preview
from dzrobot.recording import features
from dzrobot.recording.column_statistics import ColumnStatistics, ImageStatistics
from dzrobot.recording.features import ColumnSlice, Feature
from dzrobot.recording.media import VideoCodec, VideoFile, encode_png

_IMAGE_SAMPLE_HZ = 2.0
"""Images per second that enter the statistics."""


class OpenEpisode:
    """Frames since the last save: numbers in memory, videos in the aside folder."""

    def __init__(
        self, aside: Path, embodiment: Embodiment, fps: float, codec: VideoCodec | None
    ) -> None:
        self.length = 0
        self.tasks: list[str] = []
        self.extra_features: dict[str, Feature] = {}
        self._embodiment = embodiment
        self._state = features.slots(embodiment.state)
        self._action = features.slots(embodiment.action)
        self._rows: dict[str, list[Any]] = {}
        self._moments = {view.feature: ImageStatistics() for view in embodiment.views}
        self._sample_every = max(1, round(fps / _IMAGE_SAMPLE_HZ))
        self._videos: dict[str, VideoFile] = {}
        self._paths: dict[str, Path] = {}
        if codec:
            self._paths = {
                view.feature: aside / "episode" / f"{view.feature}.mp4" for view in embodiment.views
            }
            self._videos = {name: VideoFile(path, fps, codec) for name, path in self._paths.items()}

    def add(self, observation: Mapping[str, Any], action: Any, extras: dict[str, Any]) -> None:
        """Add one step; see :meth:`EpisodeWriter.add_frame`."""
        # Everything is checked before anything is kept, so that a refused frame leaves the columns
        # even.
        images = {
            view.feature: _image(observation, view.key, view.resolution)
            for view in self._embodiment.views
        }
        state = {slot.key: _vector(observation, slot) for slot in self._state}
        vectors = state | self._split(action)
        task = _present(observation, self._embodiment.language)
        if not isinstance(task, str) or not task:
            raise DatasetError(
                f"{self._embodiment.language!r} is {task!r}; give the instruction as text"
            )
        self._check_extras(extras)
        for name, image in images.items():
            self._keep_image(name, image)
        for column, row in _join((*self._state, *self._action), vectors).items():
            self._rows.setdefault(column, []).append(row)
        for name, value in extras.items():
            self._rows.setdefault(name, []).append(
                value if isinstance(value, str) else np.asarray(value)
            )
        self.tasks.append(task)
        self.length += 1

    def columns(self) -> dict[str, Any]:
        """Return every recorded column as a list of rows (scalars where the width is one)."""
        table: dict[str, Any] = {}
        for name, rows in self._rows.items():
            if isinstance(rows[0], np.ndarray):
                array = np.stack(rows)
                flat = array.reshape(len(array)) if array.size == len(array) else array
                table[name] = flat if flat.ndim == 1 else list(flat)
            else:
                table[name] = rows
        return table

    def image_statistics(self) -> dict[str, ColumnStatistics]:
        """Return the statistics of every camera."""
        return {name: sampled.result() for name, sampled in self._moments.items()}

    def finish_videos(self) -> dict[str, Path]:
        """Finish the video files and return where they lie aside."""
        self.close()
        return self._paths

    def close(self) -> None:
        """Finish the encoders."""
        for video in self._videos.values():
            video.close()
        self._videos = {}

    def _keep_image(self, name: str, image: np.ndarray) -> None:
        if self.length % self._sample_every == 0:
            self._moments[name].see(image)
        if name in self._videos:
            self._videos[name].add(image)
        else:
            data = {"bytes": encode_png(image), "path": f"frame_{self.length:06d}.png"}
            self._rows.setdefault(name, []).append(data)

    def _split(self, action: Any) -> dict[str, np.ndarray]:
        if isinstance(action, Mapping):
            return {slot.key: _vector(action, slot) for slot in self._action}
        joined = np.asarray(action, dtype=np.float32)
        if joined.shape != (self._embodiment.action_dim,):
            raise DatasetError(
                f"the action has shape {joined.shape}; expected ({self._embodiment.action_dim},)"
            )
        parts, start = {}, 0
        for part in self._embodiment.action:
            parts[part.key] = _finite(part.key, joined[start : start + part.dim])
            start += part.dim
        return parts

    def _check_extras(self, extras: dict[str, Any]) -> None:
        given = {name: features.describe_extra(name, value) for name, value in extras.items()}
        if self.length == 0:
            taken = given.keys() & {slot.column for slot in (*self._state, *self._action)}
            if taken:
                raise DatasetError(
                    f"extra columns {preview(taken)} are columns of the robot: rename them"
                )
            self.extra_features = given
        features.check_same(self.extra_features, given)


def _present(table: Mapping[str, Any], key: str) -> Any:
    if key not in table:
        raise DatasetError(f"{key!r} is missing; given: {preview(table, 12)}")
    return table[key]


def _image(observation: Mapping[str, Any], key: str, resolution: tuple[int, int]) -> np.ndarray:
    image = np.asarray(_present(observation, key))
    if image.dtype != np.uint8 or image.shape != (*resolution, 3):
        raise DatasetError(
            f"{key!r} is {image.dtype} of shape {image.shape}; expected uint8 of shape "
            f"{(*resolution, 3)}"
        )
    return image


def _vector(table: Mapping[str, Any], slot: ColumnSlice) -> np.ndarray:
    value = np.asarray(_present(table, slot.key), dtype=np.float32)
    if value.shape != (slot.stop - slot.start,):
        raise DatasetError(
            f"{slot.key!r} has shape {value.shape}; expected ({slot.stop - slot.start},)"
        )
    return _finite(slot.key, value)


def _finite(key: str, value: np.ndarray) -> np.ndarray:
    if not np.isfinite(value).all():
        raise DatasetError(f"{key!r} holds a number that is not finite: {value}")
    return value


def _join(
    slots: tuple[ColumnSlice, ...], vectors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    columns: dict[str, list[np.ndarray]] = {}
    for slot in slots:
        columns.setdefault(slot.column, []).append(vectors[slot.key])
    return {name: np.concatenate(parts) for name, parts in columns.items()}
