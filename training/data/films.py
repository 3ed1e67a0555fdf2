"""When each picture of a video file is shown: from the file's own tables, almost without decoding.

An MP4 or MOV file lists its samples in its header, which is read here; that takes a tenth of the
time of going through its packets. Files whose header leaves a question (fragments, edit lists that
hide pictures, several codecs) and other containers are gone through with FFmpeg. What tables cannot
say, whether a decoder gives the pictures those times, is tried on the first group of one file of
each encoder and setting.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from struct import Struct, unpack_from
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import DatasetError
from dzrobot.files import replacing, stand_in
from dzrobot.untrusted import attempted, parsing, reason

Ints = NDArray[np.int64]

_LARGEST_HEADER = 256 * 2**20
_TURNS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 3, (-1, 0, 0, -1): 2, (0, -1, 1, 0): 1}
"""Display matrix -> quarter turns against the clock that show a picture upright."""

_PARENTS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"}
_BOX = Struct(">I4s")
_STILL = 4
"""Sizes of samples that a film of a picture that does not change has at most."""

_UNREAD = {b"stps", b"sgpd", b"mvex"}
"""Boxes that change which samples are key frames, or say that the list goes on elsewhere."""


@dataclass(frozen=True)
class FrameTable:
    """Presentation times of one file, in its time base and in display order."""

    pts: Ints
    seconds_per_tick: float
    key_frames: Ints
    """Numbers of the frames that decode on their own, or the first shown after such a one."""

    key_pts: Ints
    """Presentation time of each key frame, which itself may be hidden by an edit list."""

    key_dts: Ints
    """Decoding time of each key frame."""

    turns: int
    """Quarter turns against the clock that show a picture upright, as players do."""

    size: tuple[int, int] = (0, 0)
    """Height and width of an upright picture, as it is decoded."""

    pixels: str = ""
    """Pixel format, by FFmpeg's name."""

    counted: bool = False
    """Whether the times are those of the packets, so that pictures are told by counting."""

    kind: str = ""
    """Equal for files of one encoder and its settings; empty where that is not known."""

    @classmethod
    def of(cls, path: Path, cache: Path | None = None) -> "FrameTable":
        """Return the table of ``path``, as :func:`read_film` does."""
        return read_film(path, cache)[0]

    def at(self, seconds: float) -> float:
        """Return which frame is shown at ``seconds``, with the share of a frame before or after."""
        ticks = seconds / self.seconds_per_tick + int(self.pts[0])
        after = int(np.searchsorted(self.pts, ticks))
        near = [number for number in (after - 1, after) if 0 <= number < len(self.pts)]
        number = min(near, key=lambda number: abs(int(self.pts[number]) - ticks))
        return number + (ticks - int(self.pts[number])) / self.ticks_per_frame

    @cached_property
    def ticks_per_frame(self) -> float:
        """Usual distance of two frames."""
        return float(np.median(np.diff(self.pts))) if len(self.pts) > 1 else 1.0

    @property
    def begins_hidden(self) -> bool:
        """Whether an edit list hides the key frame that the first pictures are made from.

        Decoders then mark all pictures as damaged.
        """
        return bool(self.key_pts[0] < self.pts[0])

    @cached_property
    def seek_cost(self) -> int:
        """Frames whose decoding a seek must save to be worth it.

        A decoder that reorders frames takes some in after a seek before the first comes out, and
        what it had taken in before is lost.
        """
        if len(self.pts) < 2:
            return 0
        delay = max(0, round(int(self.key_pts[0] - self.key_dts[0]) / self.ticks_per_frame))
        return delay + 1 if delay else 0

    @cached_property
    def _wander(self) -> float:
        """Frames by which pictures come earlier or later than at equal distances."""
        late = (self.pts - self.pts[0]) / self.ticks_per_frame - np.arange(len(self.pts))
        return float(np.ptp(late))

    def keeps(self, rate: float, most: float) -> bool:
        """Return whether all stretches surely show ``rate`` frames a second, ``most`` off at most.

        Args:
            rate: Frames per second.
            most: Share of a frame.
        """
        away = abs(self.ticks_per_frame * self.seconds_per_tick * rate - 1) * len(self.pts)
        return self._wander * (1 + away) + away < most

    def key_before(self, frame: int) -> int:
        """Return the position, in ``key_frames``, of the last key frame up to ``frame``."""
        return int(np.searchsorted(self.key_frames, frame, side="right")) - 1


@dataclass(frozen=True)
class _Samples:
    """Samples of a file, in decoding order."""

    times: Ints
    """When each is shown, in ticks."""

    decoding: Ints
    keys: NDArray[np.bool_]
    hidden: NDArray[np.bool_]
    seconds_per_tick: float
    turns: int


def read_film(path: Path | str, cache: Path | None = None) -> tuple[FrameTable, str]:
    """Return the table of ``path``; one that takes long is kept in the folder ``cache``.

    A text is read faster than a :class:`~pathlib.Path`, whose making costs a tenth of the time.

    Returns:
        The table, shared by files that show pictures at the same times, and a text that is equal
        for copies of a film; empty where that is not known.

    Raises:
        DatasetError: The file is damaged, holds no video, or cannot be read rightly.
    """
    # What this cannot read FFmpeg says what is wrong with, or reads nevertheless.
    found = attempted(lambda: _from_header(path))
    if found is not None and found[0].pixels:
        return found
    path = Path(path)
    table, content = found or (None, "")
    return _kept(path, cache, lambda: _counted(path, table or _from_packets(path))), content


def _table(path: Path, samples: _Samples, kind: str = "") -> FrameTable:
    pts = np.sort(samples.times[~samples.hidden])
    if not len(pts):
        raise DatasetError(f"{path} holds no frame")
    if (np.diff(pts) == 0).any():
        raise DatasetError(
            f"{path} shows several pictures at one time, so that rows have no picture of their "
            f"own: {reencode(path)}"
        )
    order = np.flatnonzero(samples.keys)
    order = order[np.argsort(samples.times[order], kind="stable")]
    numbers = np.searchsorted(pts, samples.times[order])
    # Of several hidden key frames before a shown one, the last is where its decoding begins.
    kept = np.append(numbers[1:] != numbers[:-1], True) & (numbers < len(pts))
    order, numbers = order[kept], numbers[kept]
    if not len(numbers) or numbers[0] != 0:
        raise DatasetError(
            f"{path} does not begin with a key frame, so that its first pictures cannot be "
            f"decoded: {reencode(path)}"
        )
    return FrameTable(
        pts, samples.seconds_per_tick, numbers.astype(np.int64), samples.times[order],
        samples.decoding[order], samples.turns, kind=kind,
    )  # fmt: skip


def does_not_decode(error: Exception) -> str:
    """Return what is wrong with a video whose frames cannot be decoded, to put behind its name."""
    return f"does not decode: {reason(error)}"


def is_not_readable(error: Exception) -> str:
    """Return what is wrong with a file that cannot be opened as a video, as above."""
    return f"is not a readable video: {reason(error)}"


def unreadable(path: Path, error: Exception) -> str:
    """Return what is wrong with a file that is not a video, and what helps, to put behind its name.

    Args:
        path: The file.
        error: What FFmpeg raised.
    """
    if (kind := stand_in(path)) is not None:
        return f"is {kind.one}; {kind.remedy}"
    if path.exists():
        with path.open("rb") as file:
            begun = file.read(12)[4:8] == b"ftyp"
        if begun:
            return (
                "begins as a video and lacks the index at its end: its recorder was not "
                "closed (LeRobot: finalize()), or it was cut short on the way; copy it again, or "
                "leave its episodes out"
            )
    return is_not_readable(error)


def reencode(path: Path | str) -> str:
    """Return the command that writes a video anew, every picture upright and in its place."""
    options = "-an -fps_mode passthrough -c:v libx264 -bf 0 -pix_fmt yuv420p"
    return f"`ffmpeg -i {Path(path).name} {options} new.mp4`"


def _from_header(path: Path | str) -> tuple[FrameTable, str] | None:
    """Return the table from the header, and what copies share; None where it leaves a question.

    The table has no size where a decoder gives other times than its own.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        header = _movie_header(file, size)
    finally:
        os.close(file)
    scale = b""
    for name, box in _boxes(header):
        if name == b"mvhd":  # What follows the dates begins with the time scale.
            scale = box[20:24] if box[0] else box[12:16]
        elif name == b"trak":
            boxes = _leaves(box)
            if boxes.get(b"hdlr", b"")[8:12] == b"vide":
                return _from_track(path, boxes, scale, size)
    return None


def _movie_header(file: int, size: int) -> bytes:
    """Return the content of the box ``moov``; empty where there is none, or fragments are.

    Args:
        file: Descriptor of an open file.
        size: Bytes of the file.
    """
    at, found = 0, b""
    # Most films are a few boxes of some bytes, all pictures, and the header at the end.
    begin, piece = 0, os.pread(file, _FIRST_READ, 0)
    while at + 8 <= size:
        if at + 16 > begin + len(piece):
            begin, piece = at, os.pread(file, _LATER_READ, at)
        length, name = _BOX.unpack_from(piece, at - begin)
        skip = 8
        if length == 1:
            (length,), skip = unpack_from(">Q", piece, at - begin + 8), 16
        length = length or size - at
        if length < skip or name == b"moof":
            return b""
        if name == b"moov":
            if found or length > _LARGEST_HEADER:
                return b""
            found = piece[at - begin + skip : at - begin + length]
            if len(found) < length - skip:
                found = os.pread(file, length - skip, at + skip)
        at += length
    return found


_FIRST_READ, _LATER_READ = 64, 8192
"""Bytes of a film that are read at once while its header is looked for."""


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of every box of ``data``."""
    at, end = 0, len(data)
    while at + 8 <= end:
        length, name = _BOX.unpack_from(data, at)
        if length < 8 or at + length > end:
            raise ValueError("a box is longer than what holds it")
        yield name, data[at + 8 : at + length]
        at += length


def _leaves(data: bytes) -> dict[bytes, bytes]:
    """Return the content of every box of ``data`` that holds none itself, by name."""
    found, at, ends = {}, 0, [len(data)]
    while ends:
        if at + 8 > ends[-1]:
            at = ends.pop()
            continue
        length, name = _BOX.unpack_from(data, at)
        end = at + length
        if length < 8 or end > ends[-1]:
            raise ValueError("a box is longer than what holds it")
        if name in _PARENTS:
            ends.append(end)
            at += 8
        else:
            found[name] = data[at + 8 : end]
            at = end
    return found


def _numbers(box: bytes, columns: int) -> Ints:
    """Return the table of 32-bit numbers of a box, (entries, columns)."""
    (count,) = unpack_from(">I", box, 4)
    return np.frombuffer(box, ">i4", count * columns, 8).astype(np.int64).reshape(-1, columns)


_ABOUT_TIMES = (b"mdhd", b"stts", b"ctts", b"stss", b"elst")
"""Boxes that say when each sample is shown, beside the display matrix and the scale of the film."""


def _from_track(
    path: Path | str, boxes: dict[bytes, bytes], movie_scale: bytes, size: int
) -> tuple[FrameTable, str] | None:
    if _UNREAD & boxes.keys():
        return None
    sizes = boxes[b"stsz"]
    _, samples = unpack_from(">II", sizes, 4)
    if not _is_whole(boxes, size):
        return None
    matrix, coded = boxes[b"tkhd"][-44:-8], _coded(boxes[b"stsd"])
    times = [boxes.get(name) for name in _ABOUT_TIMES]
    # The dates of a track come before its scale.
    times[0] = boxes[b"mdhd"][20 if boxes[b"mdhd"][0] else 12 :]
    known = (matrix, coded, movie_scale, samples, *times)
    if known not in _tables:
        if len(_tables) >= _MOST_TABLES:
            _tables.clear()
        scale = unpack_from(">I", movie_scale)[0]
        _tables[known] = _timed(Path(path), boxes, scale, samples, coded)
    table = _tables[known]
    if table is None:
        return None
    content = hashlib.sha256(sizes + coded).hexdigest()[:16] if _moves(sizes) else ""
    return table, content


_tables: dict[tuple[object, ...], FrameTable | None] = {}
"""Tables by all that they are made of: most films of a dataset share theirs with others."""

_MOST_TABLES = 512


def _coded(described: bytes) -> bytes:
    """Return how samples are coded: the box ``stsd`` without the bit rate, which tells nothing.

    Raises:
        ValueError: There are several such descriptions.
    """
    if unpack_from(">I", described, 4) != (1,):
        raise ValueError("several codecs")
    fixed = 8 + 8 + 78  # Count, head of the entry, and what every kind of picture has.
    if b"btrt" not in described:
        return described
    parts = (name + box for name, box in _boxes(described[fixed:]) if name != b"btrt")
    return described[12:fixed] + b"".join(parts)


def _moves(sizes: bytes) -> bool:
    """Return whether the sizes of samples (the box ``stsz``) differ, as those of a still do not."""
    listed = memoryview(sizes)[12 : len(sizes) // 4 * 4].cast("I")
    return len(set(listed[:16])) > _STILL or len(set(listed)) > _STILL


def _timed(
    path: Path, boxes: dict[bytes, bytes], movie_scale: int, samples: int, coded: bytes
) -> FrameTable | None:
    """Return the table that the boxes of a track tell; without a size where decoders disagree."""
    (scale,) = unpack_from(">I", boxes[b"mdhd"], 20 if boxes[b"mdhd"][0] else 12)
    steps = _numbers(boxes[b"stts"], 2)
    decoding = np.repeat(steps[:, 1], steps[:, 0])
    decoding = np.cumsum(decoding) - decoding
    if not len(decoding) or len(decoding) != samples:
        return None
    times = decoding
    if b"ctts" in boxes:
        delays = _numbers(boxes[b"ctts"], 2)
        if len(delays) and delays[:, 1].min() < 0:
            return None
        times = decoding + np.repeat(delays[:, 1], delays[:, 0])
    begin = _shown_from(boxes, times, scale, movie_scale)
    if begin is None:
        return None
    keys = np.ones(len(times), bool)
    if b"stss" in boxes:
        keys[:] = False
        keys[_numbers(boxes[b"stss"], 1)[:, 0] - 1] = True
    turns = _turns(path, np.frombuffer(boxes[b"tkhd"][-44:-8], ">i4"))
    kind = hashlib.sha256(coded + bytes([b"ctts" in boxes, turns])).hexdigest()[:16]
    hidden = np.zeros(len(times), bool)
    listed = _Samples(times - begin, decoding - begin, keys, hidden, 1 / scale, turns)
    table = _table(path, listed, kind=kind)
    shown, in_order = _tried_kind(kind, path, table)
    return replace(table, size=shown.size, pixels=shown.pixels) if in_order else table


def _is_whole(boxes: dict[bytes, bytes], size: int) -> bool:
    """Return whether the last chunk of samples lies within the file."""
    each, count = unpack_from(">II", boxes[b"stsz"], 4)
    long = b"co64" in boxes
    offsets = boxes[b"co64" if long else b"stco"]
    (chunks,) = unpack_from(">I", offsets, 4)
    kind, width = (">Q", 8) if long else (">I", 4)
    (last,) = unpack_from(kind, offsets, 8 + width * (chunks - 1))
    (runs,) = unpack_from(">I", boxes[b"stsc"], 4)
    _, together, _ = unpack_from(">III", boxes[b"stsc"], 8 + 12 * (runs - 1))
    together = min(together, count)
    if each:
        return bool(last + each * together <= size)
    sizes = unpack_from(f">{together}I", boxes[b"stsz"], 12 + 4 * (count - together))
    return bool(last + sum(sizes) <= size)


def _shown_from(boxes: dict[bytes, bytes], times: Ints, scale: int, movie_scale: int) -> int | None:
    """Return the time that is shown first; None where an edit list hides or delays pictures."""
    edits = boxes.get(b"elst")
    if edits is None:
        return 0
    kind = ">Qqhh" if edits[0] else ">Iihh"
    if unpack_from(">I", edits, 4) != (1,):
        return None
    length, begin, rate, fraction = unpack_from(kind, edits, 8)
    shown = begin == int(times.min()) and length * scale > (int(times.max()) - begin) * movie_scale
    return int(begin) if shown and (rate, fraction) == (1, 0) else None


def _turns(path: Path, matrix: NDArray[np.integer]) -> int:
    """Return the quarter turns of a display matrix (9 numbers of 16.16 bits).

    Raises:
        DatasetError: It mirrors or skews.
    """
    (a, b, _, c, d, *_) = (matrix / 65536).tolist()
    sides = tuple(int(np.sign(side)) for side in (a, b, c, d))
    if sides not in _TURNS:
        raise DatasetError(
            f"{path} says that its pictures are to be mirrored or skewed, which is not done here: "
            f"{reencode(path)}"
        )
    return _TURNS[sides]


def _from_packets(path: Path) -> FrameTable:
    """Return the table from the packets."""
    import av

    with parsing(path, DatasetError, partial(unreadable, path)):
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            packets = [
                (packet.pts, packet.dts or 0, packet.is_keyframe, packet.is_discard)
                for packet in container.demux(stream)
                if packet.pts is not None and not packet.is_corrupt
            ]
            tick = float(stream.time_base)
        with av.open(str(path)) as container:
            frame = next(container.decode(container.streams.video[0]), None)
    if not packets:
        raise DatasetError(f"{path} holds no frame")
    degrees = 0 if frame is None else int(frame.rotation)
    if degrees % 90:
        raise DatasetError(f"{path} is turned by {degrees} degrees: {reencode(path)}")
    times, decoding, keys, hidden = (np.array(row) for row in zip(*packets, strict=True))
    samples = _Samples(
        times.astype(np.int64), decoding.astype(np.int64), keys.astype(bool), hidden.astype(bool),
        tick, degrees // 90 % 4,
    )  # fmt: skip
    return _table(path, samples)


@dataclass(frozen=True)
class _Shown:
    """What a decoder gives."""

    times: Ints
    size: tuple[int, int]
    """Height and width of an upright picture."""

    pixels: str


def _decoded(path: Path, table: FrameTable, most: int | None) -> _Shown:
    """Return what the first ``most`` pictures of a file are when they are decoded."""
    import av

    times, size, pixels = [], (0, 0), ""
    try:
        with parsing(path, DatasetError, does_not_decode), av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for frame in islice(container.decode(stream), most):
                times.append(-1 if frame.pts is None else frame.pts)
                size, pixels = (frame.height, frame.width), frame.format.name
    except DatasetError:
        if not times:
            raise
    upright = (size[1], size[0]) if table.turns % 2 else size
    return _Shown(np.array(times, np.int64), upright, pixels)


_tried: dict[str, tuple[_Shown, bool]] = {}
"""What decoding showed of each kind of file."""

_FIRST_GROUP = 60
"""Pictures that are decoded at most of the first group."""


def _tried_kind(kind: str, path: Path, table: FrameTable) -> tuple[_Shown, bool]:
    """Return what pictures of a kind are, and whether they come at the times of ``table``.

    Files of one kind are alike; of each, the first group of one file is decoded.
    """
    if kind not in _tried:
        group = int(table.key_frames[1]) if len(table.key_frames) > 1 else len(table.pts)
        shown = _decoded(path, table, min(group, _FIRST_GROUP))
        in_order = np.array_equal(shown.times, table.pts[: len(shown.times)])
        _tried[kind] = shown, in_order and len(shown.times) > 0
    return _tried[kind]


def _counted(path: Path, table: FrameTable) -> FrameTable:
    """Return the table of a file that has been decoded whole.

    Raises:
        DatasetError: It gives other pictures than its samples.
    """
    shown = _decoded(path, table, None)
    if len(shown.times) != len(table.pts):
        raise DatasetError(
            f"{path} lists {len(table.pts)} pictures, and {len(shown.times)} of them can be "
            f"decoded at all, so that what a row shows is not known: {reencode(path)}"
        )
    counted = not np.array_equal(shown.times, table.pts)
    return replace(table, size=shown.size, pixels=shown.pixels, counted=counted)


def _kept(path: Path, folder: Path | None, make: Callable[[], FrameTable]) -> FrameTable:
    """Return the table of ``path`` from ``folder`` if it was made before, else make it."""
    if folder is None or not path.exists():
        return make()
    stat = path.stat()
    name = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    file = folder / f"film-{name.hexdigest()[:24]}.npz"
    # One that is damaged, as by a full disk, is made anew.
    if file.exists() and (kept := attempted(lambda: _read_table(file))) is not None:
        return kept
    table = make()
    with replacing(file, derived=True) as temporary:
        np.savez(temporary, **asdict(table))
    return table


def _read_table(file: Path) -> FrameTable:
    with np.load(file) as known:
        values: dict[str, Any] = {key: known[key] for key in known}
    plain = {key: values[key].item() for key in ("seconds_per_tick", "turns", "counted")}
    texts = {key: str(values[key]) for key in ("kind", "pixels")}
    return FrameTable(**{**values, **plain, **texts, "size": tuple(values["size"].tolist())})


_LOOKED_AT = 4
"""Key frames of an episode whose colors are measured."""


def mean_colors(path: Path, table: FrameTable, start: int, stop: int) -> NDArray[np.float64] | None:
    """Return the mean color (3,), 0 to 1, of some key frames from ``start`` to before ``stop``.

    None where there is no key frame, or where it cannot be told which picture is which.
    """
    import av

    keys = np.flatnonzero((table.key_frames >= start) & (table.key_frames < stop))
    if not len(keys) or table.counted or table.begins_hidden:
        return None
    picked = keys[np.linspace(0, len(keys) - 1, min(_LOOKED_AT, len(keys))).astype(int)]

    def means() -> list[Any] | None:
        found = []
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            for key in picked:
                container.seek(int(table.key_pts[key]), stream=stream, backward=True)
                frame = next(container.decode(stream), None)
                if frame is None or frame.pts != table.key_pts[key]:
                    return None
                found.append(frame.to_ndarray(format="rgb24").mean((0, 1)) / 255)
        return found

    read = attempted(means)
    return None if read is None else np.array(np.mean(read, axis=0))
