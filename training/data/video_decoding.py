"""Frames of a video by number, without float time stamps and without decoding other frames.

A table of presentation times is made once per file. To reach a frame, the reader either decodes on
from its position or seeks to the key frame before it, whichever costs fewer frames
(benchmarks/growth.py). After a seek, a decoder that reorders frames takes some in before the first
comes out; the table says how many.
"""

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import DatasetError, MissingDependencyError, find
from dzrobot.importing import install
from dzrobot.training.data.embedded_images import empty_after_fork

OPEN_FILES = 16
"""Videos a reader keeps open; each holds a decoder, hence megabytes."""


@dataclass(frozen=True)
class FrameTable:
    """Presentation times of one file, in its time base and in display order."""

    pts: NDArray[np.int64]
    seconds_per_tick: float
    key_frames: NDArray[np.int64]
    """Numbers of the frames that decode on their own."""

    key_dts: NDArray[np.int64]
    """Decoding time of each key frame."""

    @classmethod
    def of(cls, path: Path) -> "FrameTable":
        """Read the table from the packets, without decoding.

        Raises:
            DatasetError: The file is damaged or holds no video.
        """
        import av

        try:
            with av.open(str(path)) as container:
                stream = container.streams.video[0]
                packets = [
                    (packet.pts, packet.dts, packet.is_keyframe)
                    for packet in container.demux(stream)
                    if packet.pts is not None and not packet.is_corrupt and not packet.is_discard
                ]
                tick = float(stream.time_base)
        except (av.FFmpegError, IndexError) as error:
            raise DatasetError(f"{path} is not a readable video: {error}") from error
        if not packets:
            raise DatasetError(f"{path} holds no frame")
        packets.sort()
        keys = [(number, dts) for number, (_, dts, key) in enumerate(packets) if key]
        if not keys or keys[0][0] != 0:
            raise DatasetError(f"{path} does not begin with a key frame")
        return cls(
            pts=np.array([pts for pts, _, _ in packets], dtype=np.int64),
            seconds_per_tick=tick,
            key_frames=np.array([number for number, _ in keys], dtype=np.int64),
            key_dts=np.array([dts for _, dts in keys], dtype=np.int64),
        )

    @classmethod
    def cached(cls, path: Path, folder: Path | None) -> "FrameTable":
        """Return the table of ``path``, from ``folder`` if it was made before."""
        if folder is None:
            return cls.of(path)
        stat = path.stat() if path.exists() else None
        if stat is None:
            raise DatasetError(f"{path} is missing")
        name = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
        file = folder / f"frames-{name.hexdigest()[:24]}.npz"
        if not file.exists():
            table = cls.of(path)
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f"aside-{uuid.uuid4().hex}.npz"
            np.savez(temporary, **{**table.__dict__})
            temporary.replace(file)
            return table
        with np.load(file) as known:
            return cls(
                known["pts"],
                float(known["seconds_per_tick"]),
                known["key_frames"],
                known["key_dts"],
            )

    def at(self, seconds: float) -> int:
        """Return the number of the frame shown at ``seconds``, to the nearest frame."""
        ticks = seconds / self.seconds_per_tick + self.pts[0]
        after = int(np.searchsorted(self.pts, ticks))
        near = [number for number in (after - 1, after) if 0 <= number < len(self.pts)]
        return min(near, key=lambda number: abs(int(self.pts[number]) - ticks))

    @cached_property
    def seek_cost(self) -> int:
        """Frames whose decoding a seek must save to be worth it.

        A decoder that reorders frames takes some in after a seek before the first comes out, and
        what it had taken in before is lost.
        """
        if len(self.pts) < 2:
            return 0
        wait = int(self.pts[0]) - int(self.key_dts[0])
        delay = max(0, round(wait / float(np.median(np.diff(self.pts)))))
        return delay + 1 if delay else 0

    def key_before(self, frame: int) -> int:
        """Return the position, in ``key_frames``, of the last key frame up to ``frame``."""
        return int(np.searchsorted(self.key_frames, frame, side="right")) - 1


class Decoder(Protocol):
    """One open video."""

    table: FrameTable

    def frames(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return the frames ``numbers`` as (N, H, W, 3) uint8 RGB."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PyAvDecoder:
    """One open video, decoded by PyAV on the calling thread."""

    def __init__(self, path: Path, table: FrameTable) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self.table = table
        self._path = path
        self._failures = av.FFmpegError
        try:
            self._container: Any = av.open(str(path))
            self._stream: Any = self._container.streams.video[0]
        except (av.FFmpegError, IndexError) as error:
            raise DatasetError(f"{path} is not a readable video: {error}") from error
        # Workers are processes; threads inside each would only compete.
        self._stream.codec_context.thread_count = 1
        # One converter for all frames: setting one up costs as much as a small frame.
        self._converter: Any = VideoReformatter()
        self._conversion = _one_thread()
        self._decoded: Any = iter(())
        self._next = len(table.pts)

    @staticmethod
    def library() -> Any:
        """Return PyAV, which every installation has."""
        import av

        return av

    def frames(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return the frames ``numbers`` as (N, H, W, 3) uint8 RGB.

        Raises:
            DatasetError: A number is outside the file, or the frame does not decode.
        """
        wanted = np.asarray(numbers, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self.table.pts):
            raise DatasetError(
                f"{self._path} has {len(self.table.pts)} frames, asked for {wanted.max()}"
            )
        distinct, places = np.unique(wanted, return_inverse=True)
        try:
            images = [self._frame(int(number)) for number in distinct]
        except self._failures as error:
            self._next = len(self.table.pts)
            raise DatasetError(f"{self._path} does not decode: {error}") from error
        return np.stack(images)[places]

    def close(self) -> None:
        """Close the file."""
        self._decoded = iter(())
        self._container.close()

    def _frame(self, number: int) -> NDArray[np.uint8]:
        key = self.table.key_before(number)
        saved = int(self.table.key_frames[key]) - self._next
        if number < self._next or saved > self.table.seek_cost:
            self._seek(key)
        pts = self.table.pts[number]
        frame = self._decode_to(pts)
        if frame is None and key > 0:
            # The container landed on a later key frame: begin at the file's start instead.
            self._seek(0)
            frame = self._decode_to(pts)
        if frame is None:
            raise DatasetError(f"{self._path}: frame {number} does not decode")
        self._next = number + 1
        rgb = self._converter.reformat(frame, format="rgb24", **self._conversion)
        image: NDArray[np.uint8] = rgb.to_ndarray()
        return image

    def _seek(self, key: int) -> None:
        # By presentation time: FFmpeg subtracts the delay itself, and by decoding time it lands on
        # the key frame before this one.
        first = int(self.table.pts[self.table.key_frames[key]])
        self._container.seek(first, stream=self._stream, backward=True)
        self._decoded = self._container.decode(self._stream)
        self._next = int(self.table.key_frames[key])

    def _decode_to(self, pts: int) -> Any:
        for frame in self._decoded:
            if frame.pts is not None and frame.pts >= pts:
                return frame if frame.pts == pts else None
        return None


@cache
def _one_thread() -> dict[str, int]:
    """Return the option that keeps color conversion on the calling thread, if PyAV has it."""
    from av import VideoFrame

    try:
        VideoFrame(16, 16, "yuv420p").reformat(format="rgb24", threads=1)
    except TypeError:
        return {}
    return {"threads": 1}


class TorchcodecDecoder:
    """One open video, decoded by torchcodec."""

    def __init__(self, path: Path, table: FrameTable) -> None:
        self.table = table
        self._path = path
        video_decoder = self.library()
        try:
            self._video: Any = video_decoder(
                str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
            )
        except (RuntimeError, ValueError) as error:
            raise DatasetError(f"{path} is not a readable video: {error}") from error

    @staticmethod
    def library() -> Any:
        """Return torchcodec's decoder.

        Raises:
            MissingDependencyError: It cannot be loaded, as without FFmpeg's libraries.
        """
        try:
            from torchcodec.decoders import VideoDecoder
        except (ImportError, RuntimeError, OSError) as error:
            raise MissingDependencyError(
                f"torchcodec cannot be used ({error}): `{install('video')}` and the "
                "FFmpeg libraries, or data.video_backend=pyav"
            ) from error
        return VideoDecoder

    def frames(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return the frames ``numbers`` as (N, H, W, 3) uint8 RGB."""
        try:
            batch = self._video.get_frames_at(indices=[int(number) for number in numbers])
        except (RuntimeError, IndexError) as error:
            raise DatasetError(f"{self._path} does not decode: {error}") from error
        images: NDArray[np.uint8] = batch.data.numpy()
        return images

    def close(self) -> None:
        """Close the file."""
        self._video = None


DECODERS: dict[str, type[PyAvDecoder] | type[TorchcodecDecoder]] = {
    "pyav": PyAvDecoder,
    "torchcodec": TorchcodecDecoder,
}


def load_decoder(name: str) -> None:
    """Load the library of a decoder.

    Raises:
        MissingDependencyError: It cannot be used on this machine.
        UnknownNameError: There is no such decoder.
    """
    find(DECODERS, "video decoder", name).library()


class Videos:
    """Open videos of a reader, the least recently used of them closed first."""

    def __init__(self, decoder: str = "pyav", cache: Path | None = None) -> None:
        self._decoder = find(DECODERS, "video decoder", decoder)
        self._cache = cache
        self._open: OrderedDict[Path, Decoder] = OrderedDict()
        empty_after_fork(self)

    def clip(self, path: Path, start_s: float, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return frames of an episode that begins at ``start_s`` within ``path``.

        Args:
            path: Video file.
            start_s: Time of the episode's frame 0.
            numbers: Frames of the episode.

        Returns:
            (N, H, W, 3) uint8 RGB.

        Raises:
            DatasetError: The file is missing, damaged or shorter than the episode.
        """
        decoder = self.open(path)
        first = decoder.table.at(start_s)
        return decoder.frames([first + int(number) for number in numbers])

    def open(self, path: Path) -> Decoder:
        """Return the decoder of ``path``, kept open for later calls."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        decoder = self._decoder(path, FrameTable.cached(path, self._cache))
        self._open[path] = decoder
        while len(self._open) > OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            oldest.close()
        return decoder

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()

    def detach(self) -> object:
        """Return all open files and forget them."""
        known, self._open = self._open, OrderedDict()
        return known

    def __getstate__(self) -> dict[str, Any]:
        # Decoders do not cross processes; each worker opens its own.
        return {**self.__dict__, "_open": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        empty_after_fork(self)
