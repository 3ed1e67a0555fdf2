"""The columns of a recording, as an embodiment implies them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import DatasetError, preview
from dzrobot.recording.layout import STANDARD_COLUMNS

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
