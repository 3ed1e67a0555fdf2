"""A robot as far as statistics need it, from the columns of a dataset: no code of the user's."""

from collections.abc import Iterator, Mapping, Sequence

from dzrobot.embodiments.spec import Embodiment, Part, View
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import DatasetError, preview, suggest
from dzrobot.recording.formats import ModalityEntry
from dzrobot.training.data.lerobot import DatasetCatalog

_HORIZON = 16
"""Of a robot that nobody has described. Its actions are absolute, so no number depends on it."""


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
    for column in (*columns.values(), *videos):
        if column not in catalog.features:
            raise DatasetError(
                f"{dataset} has no column {column!r}.{suggest(column, catalog.features)} It has "
                f"{preview(catalog.features, 20)}"
            )
    if strange := [name for name in videos if name not in catalog.cameras]:
        raise DatasetError(f"{strange[0]} holds no images; these do: {preview(catalog.cameras)}")
    views = tuple(_view(catalog, column) for column in videos)
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


def _view(catalog: DatasetCatalog, column: str) -> View:
    sides = [side for side in catalog.features[column].shape if side > 4]
    size = (sides[0], sides[1]) if len(sides) == 2 else (256, 256)
    return View(
        key=f"video.{column.rpartition('.')[2]}", feature=column, size=size, resolution=size
    )


def _whole(catalog: DatasetCatalog, kind: str, column: str) -> Part:
    name = column.rpartition(".")[2]
    return Part(key=f"{kind}.{name}", feature=column, dim=_width(catalog, column))


def _cut(catalog: DatasetCatalog, kind: str, column: str) -> Iterator[Part]:
    entries: Mapping[str, ModalityEntry] = (
        {} if catalog.modality is None else getattr(catalog.modality, kind)
    )
    if not entries:
        raise DatasetError(
            f"{catalog.root} has no meta/modality.json with an entry for {kind}: leave "
            "--use-modality-json out to take whole columns"
        )
    for name, entry in entries.items():
        feature = entry.original_key or column
        start = entry.start or 0
        stop = _width(catalog, feature) if entry.end is None else entry.end
        yield Part(key=f"{kind}.{name}", feature=feature, start=start, dim=stop - start)


def _width(catalog: DatasetCatalog, column: str) -> int:
    feature = catalog.features.get(column)
    if feature is None or len(feature.shape) != 1 or feature.dtype in ("image", "video", "string"):
        raise DatasetError(f"{column} is {feature or 'not there'}, no vector of numbers")
    return feature.shape[0]
