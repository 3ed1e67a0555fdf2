"""Which column of a dataset feeds which modality key: stated, never inferred from widths.

And the other way round: a robot whose parts are the columns of a dataset, for its statistics.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dzrobot.embodiments.spec import Embodiment, Part, View
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import DatasetError, ModalityError, preview, suggest
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.formats import Modality, ModalityEntry

TASK_COLUMN = "task_index"

_DEFAULT_COLUMN = {"state": "observation.state", "action": "action"}
"""What ``modality.json`` means when an entry names no ``original_key``."""


@dataclass(frozen=True)
class ColumnSource:
    """Where one modality key is read."""

    key: str
    column: str
    start: int | None
    """First number within the column; None for images and texts."""

    stop: int | None
    kind: str
    """``image``, ``video``, ``vector``, ``text`` or ``task`` (an index into the task table)."""

    stated_by: str
    """Where that is stated: ``modality.json``, ``embodiment`` or ``alias``."""

    @property
    def cell(self) -> str:
        """The column with its range: ``action[14:21]``."""
        return self.column if self.start is None else f"{self.column}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class ResolvedColumns:
    """The table for one dataset and one embodiment."""

    views: Mapping[str, ColumnSource]
    vectors: Mapping[str, ColumnSource]
    """State and action parts."""

    texts: tuple[ColumnSource, ...]
    """Instructions; one of several is drawn per sample."""

    @property
    def rows(self) -> tuple[ColumnSource, ...]:
        """All entries, in the embodiment's order."""
        return (*self.views.values(), *self.vectors.values(), *self.texts)


def resolve(catalog: DatasetCatalog, embodiment: Embodiment) -> ResolvedColumns:
    """Return the source of every key of ``embodiment``.

    ``meta/modality.json`` decides where it names a key; then the column named by the embodiment, or
    the one alias that exists.

    Raises:
        DatasetError: Keys without a column, with several, or of another width; all are listed.
    """
    faults: list[str] = []
    views: dict[str, ColumnSource] = {}
    texts: tuple[ColumnSource, ...] = ()
    for view in embodiment.views:
        with _Collect(faults):
            views[view.key] = _view(catalog, view)
    vectors = _vectors(catalog, embodiment, faults)
    with _Collect(faults):
        texts = _texts(catalog, embodiment)
    _refuse(catalog, embodiment, faults)
    _check_frame(catalog, embodiment)
    return ResolvedColumns(views, vectors, texts)


def resolve_vectors(catalog: DatasetCatalog, embodiment: Embodiment) -> Mapping[str, ColumnSource]:
    """Return the source of every state and action part, whatever the images are.

    Raises:
        DatasetError: as :func:`resolve`.
    """
    faults: list[str] = []
    vectors = _vectors(catalog, embodiment, faults)
    _refuse(catalog, embodiment, faults)
    _check_frame(catalog, embodiment)
    return vectors


def _check_frame(catalog: DatasetCatalog, embodiment: Embodiment) -> None:
    """Refuse actions in another frame: the same numbers would mean other motions."""
    there, here = catalog.action_frame, embodiment.action_frame
    if there is not None and here is not None and there != here:
        raise DatasetError(
            f"{catalog.root} was recorded with actions in the frame {there!r}, and "
            f"{embodiment.tag} here reads them in {here!r}: set action.frame of the workcell to "
            f"{there!r}, or describe the robot with action_frame={there!r}"
        )


def _vectors(
    catalog: DatasetCatalog, embodiment: Embodiment, faults: list[str]
) -> dict[str, ColumnSource]:
    vectors: dict[str, ColumnSource] = {}
    for part in (*embodiment.state, *embodiment.action):
        with _Collect(faults):
            vectors[part.key] = _vector(catalog, part)
    return vectors


def _refuse(catalog: DatasetCatalog, embodiment: Embodiment, faults: list[str]) -> None:
    if not faults:
        return
    absent = {f"{part.key}: no column" for part in embodiment.action}
    missing = absent and all(any(f.startswith(start) for f in faults) for start in absent)
    hint = (
        " If the recordings have no actions, say so: recorded: state (or images, where there is no "
        "state) in their entry of data.train_data_paths, --recorded for dzrobot stats and "
        "inspect-data; they then train the video alone."
    )
    columns = ", ".join(f"{name} {table}" for name, table in catalog.features.items())
    remedy = (
        f"\nColumns: {columns}\nName the right ones in meta/modality.json, or in feature, start "
        "and dim of your own embodiment." + (hint if missing else "")
    )
    # What is of another size says itself what to do; other names would not help.
    if all(_SIZE_REMEDY in fault for fault in faults):
        remedy = ""
    raise DatasetError(
        f"{catalog.root} does not fit the embodiment {embodiment.tag!r}:\n  "
        + "\n  ".join(faults)
        + remedy
    )


_SIZE_REMEDY = "if that is meant, write"
"""What the fault of a size, and no other, says."""


class _Collect:
    """Collects faults, so that all are reported together."""

    def __init__(self, faults: list[str]) -> None:
        self._faults = faults

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, DatasetError | ModalityError):
            self._faults.append(str(error))
            return True
        return False


def _view(catalog: DatasetCatalog, view: View) -> ColumnSource:
    entry = _entry(catalog, "video", view.name)
    if entry is None:
        column, stated_by = _choose(catalog, view.key, view.feature, view.aliases)
    else:
        column, stated_by = _named(catalog, view.key, entry.original_key or view.feature)
    if column not in catalog.cameras:
        raise DatasetError(
            f"{view.key}: {column} is {catalog.features[column]}, no camera; cameras are "
            f"{preview(catalog.cameras, 12)}"
        )
    recorded = catalog.frame_size(column)
    if recorded != view.resolution:
        raise DatasetError(
            f"{view.key}: {column} was recorded at {recorded[0]}x{recorded[1]} (height x width), "
            f"the embodiment says {view.resolution[0]}x{view.resolution[1]}; "
            f"{_SIZE_REMEDY} @{recorded[0]}x{recorded[1]} behind the robot's name, wherever it is "
            "named, or record in the robot's size (in a simulator: collect --env-arg resolution=N)"
        )
    return ColumnSource(view.key, column, None, None, catalog.features[column].dtype, stated_by)


_KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("gripper", frozenset({"gripper", "jaw", "claw"})),
    ("hand", frozenset({"hand", "finger", "thumb", "pinky", "effector"})),
    ("base", frozenset({"base", "wheel", "wheels", "mobile", "chassis"})),
    ("head", frozenset({"head", "neck"})),
    ("torso", frozenset({"waist", "torso", "trunk"})),
    ("leg", frozenset({"leg", "hip", "knee", "ankle"})),
)


def group_of(name: str) -> str:
    """Return what part of a robot the name of a number speaks of, as ``left_arm``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = set(re.findall("[a-z]+", spaced.lower()))
    kind = next((kind for kind, known in _KINDS if words & known), "arm")
    sides = [side for side in ("left", "right") if side in words]
    return f"{sides[0]}_{kind}" if len(sides) == 1 else kind


def number_names(names: object, width: int) -> list[str] | None:
    """Return the names of a column's numbers, whichever way ``info.json`` nests them.

    None: it has none, or not one for each number.
    """
    found = list(_flat_names(names))
    return found if len(found) == width and len(set(found)) == width else None


def _flat_names(names: object) -> Iterator[str]:
    if isinstance(names, Mapping):
        # {"motors": [...]}, or {"x": 0, "y": 1}.
        for key, value in names.items():
            yield from [str(key)] if isinstance(value, int) else _flat_names(value)
    elif isinstance(names, list | tuple):
        for name in names:
            yield from _flat_names(name)
    elif names is not None:
        yield str(names)


def _vector(catalog: DatasetCatalog, part: Part) -> ColumnSource:
    kind = part.key.partition(".")[0]
    entry = _entry(catalog, kind, part.name)
    if entry is None:
        column, stated_by = _choose(catalog, part.key, part.feature, part.aliases)
        start = part.start or 0
        width = _width(catalog, part.key, column)
        stop = width if part.start is None else start + part.dim
    else:
        name = entry.original_key or _DEFAULT_COLUMN[kind]
        column, stated_by = _named(catalog, part.key, name)
        width = _width(catalog, part.key, column)
        start, stop = entry.start or 0, width if entry.end is None else entry.end
    if not 0 <= start < stop <= width:
        raise DatasetError(f"{part.key}: {column} is {width} wide and has no [{start}:{stop}]")
    if stop - start != part.dim:
        raise DatasetError(
            f"{part.key}: {column}[{start}:{stop}] is {stop - start} wide, the embodiment says "
            f"{part.dim}"
        )
    return ColumnSource(part.key, column, start, stop, "vector", stated_by)


def _texts(catalog: DatasetCatalog, embodiment: Embodiment) -> tuple[ColumnSource, ...]:
    key = embodiment.language
    found = []
    for feature in embodiment.language_features:
        entry = _entry(catalog, "annotation", feature.removeprefix("annotation."))
        if entry is not None:
            column, stated_by = _named(catalog, key, entry.original_key or feature)
            found.append(_text(catalog, key, column, stated_by))
        elif feature in catalog.features:
            found.append(_text(catalog, key, feature, "embodiment"))
    if found:
        return tuple(found)
    entry = _entry(catalog, "annotation", key.removeprefix("annotation."))
    if entry is not None:
        return (_text(catalog, key, *_named(catalog, key, entry.original_key or TASK_COLUMN)),)
    if embodiment.language_features:
        raise DatasetError(
            f"{key}: no column {preview(embodiment.language_features)}; for the task table use an "
            "embodiment with language_features=()"
        )
    return (_text(catalog, key, *_named(catalog, key, TASK_COLUMN), "embodiment"),)


def _text(catalog: DatasetCatalog, key: str, column: str, *stated_by: str) -> ColumnSource:
    kind = "text" if catalog.features[column].dtype == "string" else "task"
    if kind == "task" and _width(catalog, key, column) != 1:
        raise DatasetError(f"{key}: {column} is {catalog.features[column]}, no instruction")
    return ColumnSource(key, column, None, None, kind, stated_by[-1])


def _entry(catalog: DatasetCatalog, kind: str, name: str) -> ModalityEntry | None:
    return _entries(catalog, kind).get(name)


def _entries(catalog: DatasetCatalog, kind: str) -> Mapping[str, ModalityEntry]:
    given = catalog.modality or Modality()
    tables = {
        "video": given.video, "state": given.state, "action": given.action,
        "annotation": given.annotation,
    }  # fmt: skip
    return tables[kind]


def _named(catalog: DatasetCatalog, key: str, column: str) -> tuple[str, str]:
    if column not in catalog.features:
        raise DatasetError(
            f"{key}: modality.json names the column {column!r}, which does not exist"
        )
    return column, "modality.json"


def _choose(
    catalog: DatasetCatalog, key: str, feature: str, aliases: tuple[str, ...]
) -> tuple[str, str]:
    present = [name for name in (feature, *aliases) if name in catalog.features]
    if len(present) > 1:
        raise DatasetError(f"{key}: {preview(present)} all exist; which one is meant?")
    if not present:
        raise DatasetError(f"{key}: no column {' or '.join((feature, *aliases))}")
    return present[0], "embodiment" if present[0] == feature else "alias"


def _width(catalog: DatasetCatalog, key: str, column: str) -> int:
    feature = catalog.features.get(column)
    if feature is None or len(feature.shape) != 1 or feature.dtype in ("image", "video", "string"):
        raise DatasetError(f"{key}: {column} is {feature or 'missing'}, no vector of numbers")
    return feature.shape[0]


def table_lines(resolution: ResolvedColumns) -> Iterator[str]:
    """Yield the table as aligned text, one key a line."""
    rows = [(row.key, row.cell, row.kind, row.stated_by) for row in resolution.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=False))
        yield "  ".join((*cells, row[3])).rstrip()


_HORIZON = 16
"""Horizon of a robot without a description. Its actions are absolute, so no number needs it."""


def described_robot(
    tag: str,
    dataset: str,
    columns: Mapping[str, str],
    videos: Sequence[str],
    *,
    use_modality: bool,
) -> Embodiment:
    """Return a robot whose parts are columns of ``dataset``, or entries of its modality.json.

    Args:
        tag: Name of the robot, and of its entry in metadata.json.
        dataset: Folder or hub name.
        columns: ``state`` and ``action`` -> column.
        videos: Columns of the cameras.
        use_modality: Whether ``meta/modality.json`` cuts the columns into parts; entries without
            ``original_key`` are of ``columns``.

    Raises:
        DatasetError: A column is not there or of another kind, or there is no modality.json.
    """
    catalog = DatasetCatalog.open(dataset)
    if not videos:
        raise DatasetError(
            "nothing says which columns are the robot's cameras, in their order: give --video-keys "
            f"COLUMN ...; {dataset} has {preview(catalog.cameras, 20) or 'none'}"
        )
    for column in (*columns.values(), *videos):
        if column not in catalog.features:
            raise DatasetError(
                f"{dataset} has no column {column!r}.{suggest(column, catalog.features)} It has "
                f"{preview(catalog.features, 20)}"
            )
    if imageless := [name for name in videos if name not in catalog.cameras]:
        raise DatasetError(f"{imageless[0]} holds no images; these do: {preview(catalog.cameras)}")
    views = tuple(_camera_view(catalog, column) for column in videos)
    parts = {
        kind: tuple(
            _cut(catalog, kind, columns[kind]) if use_modality
            else [_whole(catalog, kind, columns[kind])]
        )
        for kind in ("state", "action")
    }  # fmt: skip
    return Embodiment(
        tag=tag, views=views, state=parts["state"], action=parts["action"],
        tiles=(tuple(view.key for view in views),), prompt="{task}",
        timing=Timing(control_hz=catalog.fps, action_horizon=_HORIZON, blocks=1),
    )  # fmt: skip


def _camera_view(catalog: DatasetCatalog, column: str) -> View:
    sides = [side for side in catalog.features[column].shape if side > 4]
    size = (sides[0], sides[1]) if len(sides) == 2 else (256, 256)
    return View(
        key=f"video.{column.rpartition('.')[2]}", feature=column, size=size, resolution=size
    )


def _whole(catalog: DatasetCatalog, kind: str, column: str) -> Part:
    name = column.rpartition(".")[2]
    return Part(key=f"{kind}.{name}", feature=column, dim=_width(catalog, f"{kind}.{name}", column))


def _cut(catalog: DatasetCatalog, kind: str, column: str) -> Iterator[Part]:
    entries = _entries(catalog, kind)
    if not entries:
        raise DatasetError(
            f"{catalog.root} has no meta/modality.json with an entry for {kind}: leave "
            "--use-modality-json out to take whole columns"
        )
    for name, entry in entries.items():
        feature = entry.original_key or column
        start = entry.start or 0
        stop = _width(catalog, f"{kind}.{name}", feature) if entry.end is None else entry.end
        yield Part(key=f"{kind}.{name}", feature=feature, start=start, dim=stop - start)
