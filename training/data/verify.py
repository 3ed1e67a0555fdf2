"""Whether every file of a dataset holds what its metadata says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import DatasetError
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.checks import idle, is_blank
from dzrobot.training.data.column_mapping import ColumnSource
from dzrobot.training.data.columns import EpisodeRows, Progress, read_data_file
from dzrobot.training.data.dataset import DatasetReader
from dzrobot.training.data.embedded_images import EmbeddedImages
from dzrobot.training.data.reading_pool import EpisodePiece, ReadingPool, pieces_of
from dzrobot.training.data.video_decoding import FrameTable, Videos


@dataclass(frozen=True)
class CameraPreview:
    """Size and brightness of a camera's first frame."""

    key: str
    shape: tuple[int, ...]
    mean: float
    blank: bool
    """Whether the image is all one color: a covered or dead camera."""


def first_frames(reader: DatasetReader) -> list[CameraPreview]:
    """Return the first frame that training would see, of every camera.

    Raises:
        DatasetError: It cannot be read.
    """
    ordinal, start = reader.windows.locate(0)
    previews = []
    for key, source in reader.resolution.views.items():
        frame = reader.frames(ordinal, source, [start])[0]
        previews.append(CameraPreview(key, frame.shape, float(frame.mean()), is_blank(frame)))
    return previews


def first_images(
    catalog: DatasetCatalog, views: Mapping[str, ColumnSource], ordinal: int
) -> dict[str, NDArray[np.uint8]]:
    """Return the first image (H, W, 3) of each view of an episode, whether training can use it.

    Args:
        catalog: The folder.
        views: Where each view is read, by key.
        ordinal: Which episode, counted from 0.

    Raises:
        DatasetError: A file is missing or damaged.
    """
    found = {}
    for key, source in views.items():
        if source.kind == "video":
            path = catalog.root / catalog.video_file(ordinal, source.column)
            start_s = catalog.video_start_s(ordinal, source.column)
            found[key] = Videos().clip(path, start_s, [0])[0]
            continue
        name = catalog.data_file(ordinal)
        row, _ = EpisodeRows(catalog, read_data_file(catalog, name, [])).of(ordinal)
        found[key] = EmbeddedImages().clip(catalog.root / name, source.column, [row])[0]
    return found


def unreadable(reader: DatasetReader) -> Iterator[str]:
    """Yield a line for every episode whose numbers cannot be read; no file is opened again."""
    for ordinal, fault in sorted(reader.columns.faults.items()):
        yield f"episode {int(reader.catalog.episodes.index[ordinal])}: {fault}"


def idle_episodes(pool: ReadingPool) -> Iterator[str]:
    """Yield a line for every used episode whose states or actions never change.

    None for recordings without actions: nothing was asked of a robot.
    """
    (reader,) = pool.readers
    used = np.unique(reader.windows.episode).tolist()
    for faults in pool.map(_idle, pieces_of(0, used)):
        yield from faults


def _idle(readers: Sequence[DatasetReader], piece: EpisodePiece) -> list[str]:
    (reader,) = readers
    robot, faults = reader.embodiment, []
    if not robot.action:
        return []
    for ordinal in piece.ordinals:
        rows = reader.states(ordinal)
        actions, states = (
            np.concatenate([rows[part.key] for part in parts], axis=1)
            for parts in (robot.action, robot.state)
        )
        number = int(reader.catalog.episodes.index[ordinal])
        faults += [f"episode {number}: {fault}" for fault in idle(actions, states)]
    return faults


def video_faults(pool: ReadingPool, progress: Progress | None = None) -> Iterator[str]:
    """Yield a line for every episode and camera whose video differs from the metadata.

    Videos are opened and their frames counted and compared with the frame grid, but not decoded.
    What was counted is kept beside the numbers, so that a second time is fast, and so is the rest
    of one that was interrupted.
    """
    (reader,) = pool.readers
    pieces = pieces_of(0, range(len(reader.catalog.episodes)))
    for faults in pool.map(_video_faults, pieces, progress):
        yield from faults


def _video_faults(readers: Sequence[DatasetReader], piece: EpisodePiece) -> list[str]:
    (reader,) = readers
    cameras = [source for source in reader.resolution.views.values() if source.kind == "video"]
    tables: dict[str, tuple[str, FrameTable]] = {}
    faults = []
    for ordinal in piece.ordinals:
        number = int(reader.catalog.episodes.index[ordinal])
        for source in cameras:
            try:
                fault = _video_fault(reader, ordinal, source, tables)
            except DatasetError as error:
                fault = str(error)
            if fault:
                faults.append(f"episode {number}: {source.key}: {fault}")
    return faults


def _video_fault(
    reader: DatasetReader,
    ordinal: int,
    source: ColumnSource,
    tables: dict[str, tuple[str, FrameTable]],
) -> str:
    catalog = reader.catalog
    name = catalog.video_file(ordinal, source.column)
    known, table = tables.get(source.column, ("", None))
    if table is None or known != name:
        # Episodes of one file follow each other: one table a camera at a time is enough.
        table = FrameTable.cached(catalog.root / name, reader.options.folder(catalog))
        tables[source.column] = name, table
    length = int(catalog.episodes.length[ordinal])
    if catalog.version != "v3.0" and len(table.pts) != length:
        return f"{name} has {len(table.pts)} frames, the list says {length}"
    first = table.at(catalog.video_start_s(ordinal, source.column))
    if first + length > len(table.pts):
        return f"{name} has {len(table.pts) - first} frames left, the list says {length}"
    times = (table.pts[first : first + length] - table.pts[first]) * table.seconds_per_tick
    deviation = np.abs(times - np.arange(length) / catalog.fps)
    if deviation.max() > 0.5 / catalog.fps:
        frame = int(deviation.argmax())
        return (
            f"{name}: frame {frame} is shown {deviation[frame]:.3f} s off the grid of "
            f"{catalog.fps:g} frames per second"
        )
    return ""
