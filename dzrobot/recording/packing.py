"""Pack the files of a v3.0 recording: many episodes per file, nothing compressed again.

New files are written beside the old ones, then the files of the list of episodes are replaced one
by one, then the old files go. Interrupted anywhere, the folder is whole: what is listed is there.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dzrobot.errors import DatasetError
from dzrobot.files import explained, replacing, undone_on_error
from dzrobot.recording import folder, formats
from dzrobot.recording.episode_list import (
    located,
    location,
    number_of,
    read_rows,
    remove_unlisted,
    replace_rows,
)
from dzrobot.recording.formats import Info
from dzrobot.untrusted import parsing

MEGABYTE = 2**20


@dataclass(frozen=True)
class _Stored:
    """A file and the episodes (positions in the list) that lie in it."""

    path: Path
    episodes: tuple[int, ...]
    frames: int


def consolidate(root: Path, *, data_mb: float = 100, video_mb: float = 200) -> None:
    """Join neighboring files of ``root`` up to the given sizes.

    Args:
        root: Folder of a v3.0 dataset.
        data_mb: Largest joined data file, in MiB.
        video_mb: Largest joined video file, in MiB.

    Raises:
        DatasetError: Not a v3.0 dataset, or another writer is at work.
    """
    info = formats.read_info(root)
    if info.codebase_version != "v3.0":
        raise DatasetError(
            f"{root} is {info.codebase_version}: only v3.0 keeps many episodes in a file"
        )
    handle = folder.lock(root)
    try:
        with explained(f"pack {root}", DatasetError):
            _pack(root, info, data_mb, video_mb)
    finally:
        handle.close()
        shutil.rmtree(root / formats.ASIDE, ignore_errors=True)


def _pack(root: Path, info: Info, data_mb: float, video_mb: float) -> None:
    table = read_rows(root, info.videos)
    if table is None:
        return
    rows: list[dict[str, Any]] = table.to_pylist()
    # Who reads by pattern, not by list, would find the rows of a joined file twice. The list on the
    # disk decides, also where it was replaced just before an error.
    with undone_on_error(lambda: remove_unlisted(root, read_rows(root))):
        _join_data(root, rows, data_mb)
        for key in info.videos:
            _join_videos(root, rows, key, video_mb, info.fps)
        replace_rows(root, pa.Table.from_pylist(rows, schema=table.schema))
    remove_unlisted(root, read_rows(root))
    folder.remove_unfinished(root)


def _join_data(root: Path, rows: list[dict[str, Any]], limit_mb: float) -> None:
    def write(target: Path, group: Sequence[_Stored]) -> None:
        with _joining(target), replacing(target) as temporary:
            _append_rows(temporary, group)

    _join(root, rows, "data", limit_mb, write)


def _join_videos(
    root: Path, rows: list[dict[str, Any]], key: str, limit_mb: float, rate: float
) -> None:
    fps = Fraction(rate).limit_denominator(1001)

    def write(target: Path, group: Sequence[_Stored]) -> None:
        with _joining(target), replacing(target) as temporary:
            _append_packets(temporary, group, fps)
        before = 0
        for stored in group:
            shift = float(before / fps)
            for episode in stored.episodes:
                for end in ("from_timestamp", "to_timestamp"):
                    rows[episode][f"videos/{key}/{end}"] += shift
            before += stored.frames

    _join(root, rows, f"videos/{key}", limit_mb, write)


def _join(
    root: Path,
    rows: list[dict[str, Any]],
    prefix: str,
    limit_mb: float,
    write: Callable[[Path, Sequence[_Stored]], None],
) -> None:
    """Write joined files under new numbers and point ``rows`` to them."""
    stored = _stored(root, rows, prefix)
    number = 1 + max(number_of(row, prefix) for row in rows)
    for group in _groups(stored, limit_mb * MEGABYTE):
        where = formats.place(number)
        number += 1
        write(root / formats.file_name("v3.0", prefix, where), group)
        for one in group:
            for episode in one.episodes:
                rows[episode] |= location(prefix, where)


def _stored(root: Path, rows: list[dict[str, Any]], prefix: str) -> list[_Stored]:
    found: dict[Path, list[int]] = {}
    for episode, row in enumerate(rows):
        path = root / formats.file_name("v3.0", prefix, located(row, prefix))
        found.setdefault(path, []).append(episode)
    return [
        _Stored(path, tuple(inside), sum(rows[episode]["length"] for episode in inside))
        for path, inside in found.items()
    ]


def _groups(stored: Sequence[_Stored], limit: float) -> list[list[_Stored]]:
    groups: list[list[_Stored]] = []
    room = 0.0
    for one in stored:
        size = one.path.stat().st_size
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(one)
        room -= size
    return groups


@contextmanager
def _joining(target: Path) -> Iterator[None]:
    with (
        parsing(
            f"a file that goes into {target}", DatasetError, "cannot be read", "see inspect-data"
        ),
        explained(f"write {target}", DatasetError),
    ):
        yield


def _append_rows(target: Path, group: Sequence[_Stored]) -> None:
    """Write the rows of ``group`` one after the other into ``target``."""
    schema = pq.read_schema(group[0].path)
    with pq.ParquetWriter(target, schema) as writer:
        for stored in group:
            source = pq.ParquetFile(stored.path)
            if not source.schema_arrow.equals(schema):
                raise DatasetError(
                    f"{stored.path} has other columns than {group[0].path}: they cannot share a "
                    "file; use data_mb=0 to keep one file per episode"
                )
            for number in range(source.num_row_groups):
                writer.write_table(source.read_row_group(number))


def _append_packets(target: Path, group: Sequence[_Stored], fps: Fraction) -> None:
    """Copy the compressed frames of ``group`` one after the other into ``target``."""
    import av

    before = 0
    with av.open(str(target), "w", format="mp4") as output:
        stream: Any = None
        header: bytes | None = None
        for stored in group:
            with av.open(str(stored.path)) as container:
                source = next(iter(container.streams.video), None)
                if source is None or source.codec_context is None:
                    raise DatasetError(f"{stored.path} holds no video that can be decoded")
                if stream is None:
                    # Opaque: packets are copied, so no encoder of that name is needed.
                    stream = output.add_stream_from_template(source, opaque=True)
                    header = source.codec_context.extradata
                if source.codec_context.extradata != header:
                    raise DatasetError(
                        f"{stored.path} was compressed with other settings than {group[0].path}: "
                        "they cannot share a file; set video_mb=0 to keep one file per episode"
                    )
                shift = round(before / fps / source.time_base)
                for packet in container.demux(source):
                    if packet.dts is None:
                        continue
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = stream
                    output.mux(packet)
            before += stored.frames
