"""The columns of a recording, as an embodiment implies them, and the frames of its open episode."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import DatasetError, preview
from dzrobot.recording.column_statistics import ColumnStatistics, ImageStatistics
from dzrobot.recording.formats import STANDARD_COLUMNS
from dzrobot.recording.media import VideoCodec, VideoFile, encode_png

Feature = dict[str, Any]
"""One entry of ``features`` in ``info.json``: dtype, shape, names."""


@dataclass(frozen=True)
class ColumnSlice:
    """Where one state or action part lies: ``column[start:stop]``."""

    key: str
    column: str
    start: int
    stop: int


def slots(parts: tuple[Part, ...]) -> tuple[ColumnSlice, ...]:
    """Return where each part is written.

    Parts that share a column lie side by side, in order of ``start``. A recording holds the parts
    and nothing else, so a column may be narrower than in the dataset the embodiment was written
    for; ``modality.json`` says where each key went.
    """
    widths: dict[str, int] = {}
    placed = []
    for part in sorted(parts, key=lambda part: (part.feature, part.start or 0)):
        start = widths.get(part.feature, 0)
        widths[part.feature] = start + part.dim
        placed.append(ColumnSlice(part.key, part.feature, start, start + part.dim))
    return tuple(placed)


def short(key: str) -> str:
    """Return a modality key without its kind."""
    return key.split(".", 1)[1]


def describe(embodiment: Embodiment, *, dtype: str) -> dict[str, Feature]:
    """Return the ``features`` of ``info.json``; ``dtype`` of images is ``image`` or ``video``."""
    features: dict[str, Feature] = {}
    for view in embodiment.views:
        features[view.feature] = {
            "dtype": dtype,
            "shape": [*view.resolution, 3],
            "names": ["height", "width", "channels"],
        }
    for slot in (*slots(embodiment.state), *slots(embodiment.action)):
        feature = features.setdefault(slot.column, {"dtype": "float32", "shape": [0], "names": []})
        feature["shape"] = [slot.stop]
        feature["names"] += [f"{short(slot.key)}_{i}" for i in range(slot.stop - slot.start)]
    for name, kind in STANDARD_COLUMNS.items():
        features[name] = {"dtype": kind, "shape": [1], "names": None}
    return features


def describe_extra(name: str, value: Any) -> Feature:
    """Return the feature of an extra column: a number, a flat vector or a string.

    Raises:
        DatasetError: Anything else, a number that is not finite, or a name that LeRobot misreads.
    """
    if "image" in name or "/" in name:
        raise DatasetError(
            f"extra column {name!r}: LeRobot takes every column with 'image' in its name for "
            "images, and allows no '/'; choose another name, such as 'camera' for 'image'"
        )
    if isinstance(value, str):
        return {"dtype": "string", "shape": [1], "names": None}
    array = np.asarray(value)
    if array.ndim > 1 or array.dtype.kind not in "fiub":
        raise DatasetError(
            f"extra column {name!r} holds {array.dtype} of shape {array.shape}; allowed are "
            "numbers, booleans, strings and flat vectors of numbers"
        )
    if not np.isfinite(array).all():
        raise DatasetError(f"extra column {name!r} holds a number that is not finite: {array}")
    kind = {"f": f"float{8 * array.dtype.itemsize}", "i": "int64", "u": "int64", "b": "bool"}[
        array.dtype.kind
    ]
    return {"dtype": kind, "shape": list(array.shape or (1,)), "names": None}


def modality(embodiment: Embodiment) -> dict[str, Any]:
    """Return ``modality.json``: where each modality key is found in the columns."""
    tables: dict[str, Any] = {
        group: {
            short(slot.key): {"original_key": slot.column, "start": slot.start, "end": slot.stop}
            for slot in slots(parts)
        }
        for group, parts in (("state", embodiment.state), ("action", embodiment.action))
    }
    tables["video"] = {short(view.key): {"original_key": view.feature} for view in embodiment.views}
    tables["annotation"] = {short(embodiment.language): {"original_key": "task_index"}}
    return tables


def check_same(known: Mapping[str, Feature], given: Mapping[str, Feature]) -> None:
    """Raise :class:`DatasetError` unless both describe the same columns, codecs aside."""
    faults = list(known.keys() ^ given.keys())
    faults += [
        name
        for name in known.keys() & given.keys()
        if any(known[name][field] != given[name][field] for field in ("dtype", "shape"))
    ]
    if faults:
        raise DatasetError(
            f"this frame and the recording it is added to differ in the columns {preview(faults)}; "
            "record to a new folder or give the same embodiment, cameras and extra columns"
        )


def arrow_type(feature: Feature) -> pa.DataType:
    """Return the Arrow type of a column."""
    if feature["dtype"] == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    scalar = {"bool": pa.bool_(), "string": pa.string()}.get(feature["dtype"])
    scalar = scalar or pa.type_for_alias(feature["dtype"])
    if feature["shape"] == [1]:
        return scalar
    return pa.list_(scalar, feature["shape"][0])


def arrow_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Return the schema of data files, with the note by which `datasets` recognizes images."""
    stored = {name: feature for name, feature in features.items() if feature["dtype"] != "video"}
    note = {"info": {"features": {name: _note(feature) for name, feature in stored.items()}}}
    fields = [pa.field(name, arrow_type(feature)) for name, feature in stored.items()]
    return pa.schema(fields, metadata={"huggingface": json.dumps(note)})


def _note(feature: Feature) -> dict[str, Any]:
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    value = {"dtype": feature["dtype"], "_type": "Value"}
    if feature["shape"] == [1]:
        return value
    return {"feature": value, "length": feature["shape"][0], "_type": "Sequence"}


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
        self._state = slots(embodiment.state)
        self._action = slots(embodiment.action)
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
        given = {name: describe_extra(name, value) for name, value in extras.items()}
        if self.length == 0:
            taken = given.keys() & {slot.column for slot in (*self._state, *self._action)}
            if taken:
                raise DatasetError(
                    f"extra columns {preview(taken)} are columns of the robot: rename them"
                )
            self.extra_features = given
        check_same(self.extra_features, given)


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
