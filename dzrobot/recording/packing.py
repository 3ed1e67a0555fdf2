"""Pack the files of a v3.0 recording: many episodes per file, nothing compressed again.

With ``films="exact"`` the films are written anew so that every picture decodes on its own, and is
the same to the bit: training then decodes the pictures of a sample and no others.

New files are written beside the old ones, then the files of the list of episodes are replaced one
by one, then the old files go. Interrupted anywhere, the folder is whole: what is listed is there.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dzrobot.documents import read_json
from dzrobot.errors import DatasetError
from dzrobot.files import explained, in_parts, replacing, undone_on_error, write_json
from dzrobot.progress import Show
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
from dzrobot.recording.key_frames import (
    KEY_FRAMES,
    check_length,
    codec_of,
    lossless_film,
    pictures,
)
from dzrobot.untrusted import parsing

MEGABYTE = 2**20

Films = Literal["kept", "exact"]

_MOST_BYTES_PER_PIXEL = 3


@dataclass(frozen=True)
class _Stored:
    """A file and the episodes (positions in the list) that lie in it."""

    path: Path
    episodes: tuple[int, ...]
    frames: int


def consolidate(
    root: Path, *, data_mb: float = 100, video_mb: float = 200, films: Films = "kept",
    show: Show | None = None,
) -> None:  # fmt: skip
    """Join neighboring files of ``root`` up to the given sizes.

    Args:
        root: Folder of a v3.0 dataset.
        data_mb: Largest joined data file, in MiB.
        video_mb: Largest joined video file, in MiB.
        films: ``kept``: compressed pictures are copied. ``exact``: they are decoded and written
            without loss, each one a key frame, and compared with what they were.
        show: Takes how many pictures are written of how many, with ``exact``.

    Raises:
        DatasetError: Not a v3.0 dataset, another writer is at work, or a film cannot be kept to the
            bit. What was there stays then.
    """
    info = formats.read_info(root)
    if info.codebase_version != "v3.0":
        raise DatasetError(
            f"{root} is {info.codebase_version}: only v3.0 keeps many episodes in a file"
        )
    if films == "exact" and not info.videos:
        raise DatasetError(f"{root} has no films, only images: leave --films exact out")
    handle = folder.lock(root)
    try:
        with explained(f"pack {root}", DatasetError):
            _pack(root, info, (data_mb, video_mb), films, show or (lambda *_: None))
    finally:
        handle.close()
        shutil.rmtree(root / formats.ASIDE, ignore_errors=True)


def _pack(root: Path, info: Info, limits_mb: tuple[float, float], films: Films, show: Show) -> None:
    table = read_rows(root, info.videos)
    if table is None:
        return
    rows: list[dict[str, Any]] = table.to_pylist()
    data_mb, video_mb = limits_mb

    def commit() -> None:
        replace_rows(root, pa.Table.from_pylist(rows, schema=table.schema))

    # Who reads by pattern, not by list, would find the rows of a joined file twice. The list on the
    # disk decides, also where it was replaced just before an error.
    with undone_on_error(lambda: remove_unlisted(root, read_rows(root))):
        _join_data(root, rows, data_mb)
        for number, key in enumerate(info.videos):
            again = films == "exact" and not _is_exact(root, rows, key)
            if again:
                done = number * sum(row["length"] for row in rows)
                _rewrite_videos(root, rows, key, video_mb, _Exact(info, key, done, show))
                # Minutes of work: the same command again goes on with the next camera.
                commit()
            else:
                _join_videos(root, rows, key, video_mb, info.fps)
        commit()
    remove_unlisted(root, read_rows(root))
    folder.remove_unfinished(root)
    if films == "exact":
        _describe_exact(root, info)


def _join_data(root: Path, rows: list[dict[str, Any]], limit_mb: float) -> None:
    groups = _groups(_stored(root, rows, "data"), limit_mb)
    _join(root, rows, "data", groups, _append_rows)


def _join_videos(
    root: Path, rows: list[dict[str, Any]], key: str, limit_mb: float, rate: float
) -> None:
    fps, prefix = _rational(rate), f"videos/{key}"
    groups = _groups(_stored(root, rows, prefix), limit_mb)
    _join(root, rows, prefix, groups, partial(_append_packets, fps=fps))
    _shift(rows, key, groups, fps)


@dataclass
class _Exact:
    """How the films of one camera are written without loss."""

    info: Info
    key: str
    done: int
    """Pictures of other cameras that are written already."""

    show: Show

    @property
    def fps(self) -> Fraction:
        return _rational(self.info.fps)

    @property
    def total(self) -> int:
        return len(self.info.videos) * self.info.total_frames

    @property
    def most_bytes(self) -> int:
        """Return the largest size of a picture."""
        height, width = self.info.features[self.key].shape[:2]
        return _MOST_BYTES_PER_PIXEL * height * width


def _rewrite_videos(
    root: Path, rows: list[dict[str, Any]], key: str, limit_mb: float, exact: _Exact
) -> None:
    prefix, size = f"videos/{key}", exact.most_bytes
    groups = _groups(_stored(root, rows, prefix), limit_mb, lambda one: one.frames * size)
    _join(root, rows, prefix, groups, partial(_append_exact, exact=exact))
    _shift(rows, key, groups, exact.fps)


def _rational(rate: float) -> Fraction:
    return Fraction(rate).limit_denominator(1001)


def _shift(
    rows: list[dict[str, Any]], key: str, groups: Sequence[Sequence[_Stored]], fps: Fraction
) -> None:
    """Write into ``rows`` where the episodes of each file now begin and end."""
    for group in groups:
        before = 0
        for stored in group:
            shift = float(before / fps)
            for episode in stored.episodes:
                for end in ("from_timestamp", "to_timestamp"):
                    rows[episode][f"videos/{key}/{end}"] += shift
            before += stored.frames


def _bytes_on_disk(stored: _Stored) -> int:
    return stored.path.stat().st_size


def _join(
    root: Path,
    rows: list[dict[str, Any]],
    prefix: str,
    groups: Sequence[Sequence[_Stored]],
    append: Callable[[Path, Sequence[_Stored]], None],
) -> None:
    """Write joined files under new numbers and point ``rows`` to them.

    Args:
        root: The dataset.
        rows: Of the list of episodes.
        prefix: Of what is joined, in that list.
        groups: What goes into each file.
        append: Writes the content of a group to a new file.
    """
    number = 1 + max(number_of(row, prefix) for row in rows)
    for group in groups:
        where = formats.place(number)
        number += 1
        target = root / formats.file_name("v3.0", prefix, where)
        what = f"a file that goes into {target}"
        with (
            parsing(what, DatasetError, "cannot be read", "see inspect-data"),
            explained(f"write {target}", DatasetError),
            replacing(target) as temporary,
        ):
            append(temporary, group)
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


def _groups(
    stored: Sequence[_Stored],
    limit_mb: float,
    size: Callable[[_Stored], int] = _bytes_on_disk,
) -> list[list[_Stored]]:
    return in_parts(stored, size, limit_mb * MEGABYTE)


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
    with av.open(str(target), "w", format=_container(group[0].path)) as output:
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


def _container(path: Path) -> str:
    """Return the format of a file of the codec in ``path``: MP4 has no name for all of them."""
    return "mov" if codec_of(path) == KEY_FRAMES else "mp4"


def _is_exact(root: Path, rows: list[dict[str, Any]], key: str) -> bool:
    return all(codec_of(one.path) == KEY_FRAMES for one in _stored(root, rows, f"videos/{key}"))


def _append_exact(target: Path, group: Sequence[_Stored], exact: _Exact) -> None:
    """Write the pictures of ``group`` without loss."""
    before = 0
    with lossless_film(target, exact.fps, group[0].path) as add:
        for stored in group:
            begun = exact.done
            for source, frame in pictures(stored.path):
                frame.pts += round(before / exact.fps / source.time_base)
                frame.time_base = source.time_base
                add(source, frame)
                exact.done += 1
                exact.show(exact.done, exact.total)
            check_length(stored.path, exact.done - begun, stored.frames)
            before += stored.frames


def _describe_exact(root: Path, info: Info) -> None:
    """Say in ``info.json`` how films are compressed, and how they were before."""
    content = read_json(root / formats.INFO, dict[str, Any], DatasetError)
    for key in info.videos:
        described = content["features"][key].setdefault("info", {})
        if described.get("video.codec") != KEY_FRAMES:
            described["video.written_without_loss_from"] = described.get("video.codec")
            described["video.codec"] = KEY_FRAMES
    write_json(root / formats.INFO, content)
