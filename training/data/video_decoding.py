"""Frames of a video by number, without float time stamps and without decoding other frames.

A table of presentation times is made once per file (films.py). To reach a frame, the reader either
decodes on from its position or seeks to the key frame before it, whichever costs fewer frames
(benchmarks/growth.py). After a seek, a decoder that reorders frames takes some in before the first
comes out; the table says how many.

A picture that does not decode is an error, never the picture that a decoder puts in its place.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import DatasetError, MissingDependencyError, find
from dzrobot.importing import install
from dzrobot.training.data.embedded_images import empty_after_fork
from dzrobot.training.data.films import FrameTable, does_not_decode, is_not_readable, reencode
from dzrobot.untrusted import parsing

OPEN_FILES = 16
"""Videos a reader keeps open; each holds a decoder, hence megabytes."""


class Decoder(Protocol):
    """One open video."""

    table: FrameTable

    @staticmethod
    def unfit(path: Path | str, table: FrameTable) -> str:
        """Return why this decoder would give other pictures of a file than the others do."""
        ...

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
        with parsing(path, DatasetError, is_not_readable):
            self._container: Any = av.open(str(path))
            self._stream: Any = self._container.streams.video[0]
        # Workers are processes; threads inside each would only compete.
        self._stream.codec_context.thread_count = 1
        # One converter for all frames: setting one up costs as much as a small frame.
        self._converter: Any = VideoReformatter()
        self._conversion = _one_thread()
        self._decoded: Any = iter(())
        self._next = len(table.pts)
        self._is_damaged = False

    @staticmethod
    def unfit(_: Path | str, __: FrameTable) -> str:
        """Return an empty text: this is the decoder that others are measured by."""
        return ""

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
            with parsing(self._path, DatasetError, does_not_decode):
                images = [self._frame(int(number)) for number in distinct]
        except DatasetError:
            self._next = len(self.table.pts)
            raise
        return np.ascontiguousarray(np.rot90(np.stack(images), self.table.turns, (1, 2)))[places]

    def close(self) -> None:
        """Close the file."""
        self._decoded = iter(())
        self._container.close()

    def _frame(self, number: int) -> NDArray[np.uint8]:
        # Where pictures are told by counting, the first of the file is the only sure place.
        key = 0 if self.table.counted else self.table.key_before(number)
        saved = int(self.table.key_frames[key]) - self._next
        if number < self._next or saved > self.table.seek_cost:
            self._seek(key)
        frame = self._decode_to(number)
        if (frame is None or self._is_damaged) and key > 0:
            # The container landed on a later key frame, or a decoder that begins there lacks
            # pictures before it: begin at the file's start instead.
            self._seek(0)
            frame = self._decode_to(number)
        if frame is None or self._is_damaged:
            raise DatasetError(f"{self._path}: frame {number} does not decode")
        self._next = number + 1
        rgb = self._converter.reformat(frame, format="rgb24", **self._conversion)
        image: NDArray[np.uint8] = rgb.to_ndarray()
        return image

    def _seek(self, key: int) -> None:
        # By presentation time: FFmpeg subtracts the delay itself, and by decoding time it lands on
        # the key frame before this one.
        first = int(self.table.key_pts[key])
        self._container.seek(first, stream=self._stream, backward=True)
        self._decoded = self._container.decode(self._stream)
        self._next = int(self.table.key_frames[key])
        self._is_damaged = False

    def _decode_to(self, number: int) -> Any:
        left, pts = number - self._next, self.table.pts[number]
        for frame in self._decoded:
            # FFmpeg fills what is damaged with parts of other pictures, and says so of the first
            # picture alone; all that follow are made from it, up to the next key frame.
            self._is_damaged = not frame.key_frame and self._is_damaged
            self._is_damaged |= frame.is_corrupt and not self.table.begins_hidden
            if self.table.counted:
                left -= 1
                if left < 0:
                    return frame
            elif frame.pts is not None and frame.pts >= pts:
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
        with parsing(path, DatasetError, is_not_readable):
            self._video: Any = video_decoder(
                str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
            )

    @staticmethod
    def unfit(path: Path | str, table: FrameTable) -> str:
        """Return why torchcodec would give other pictures of a file than PyAV; empty: it does not.

        Formats of 8 bits are converted alike to the bit, those of 10 are not.
        """
        instead = f"decode with PyAV (data.video_backend=pyav), or {reencode(path)}"
        if table.turns and _numbers_of(version("torchcodec")) < _TURNS_PICTURES:
            release = version("torchcodec")
            return (
                f"{path} is to be shown turned, which torchcodec {release} does not do: {instead}"
            )
        if table.pixels not in _CONVERTED_ALIKE:
            return f"{path} holds {table.pixels}, which torchcodec converts otherwise: {instead}"
        return ""

    @staticmethod
    def library() -> Any:
        """Return torchcodec's decoder.

        Raises:
            MissingDependencyError: It is not installed, or does not load.
        """
        try:
            from torchcodec.decoders import VideoDecoder
        except _DOES_NOT_LOAD as error:
            raise _unusable(error) from error
        return VideoDecoder

    def frames(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return the frames ``numbers`` as (N, H, W, 3) uint8 RGB."""
        with parsing(self._path, DatasetError, does_not_decode):
            batch = self._video.get_frames_at(indices=[int(number) for number in numbers])
        images: NDArray[np.uint8] = batch.data.numpy()
        return images

    def close(self) -> None:
        """Close the file."""
        self._video = None


_CONVERTED_ALIKE = {"yuv420p", "yuvj420p", "yuv422p", "yuv444p", "gbrp"}
_TURNS_PICTURES = (0, 11)
"""The first torchcodec that applies display matrices."""


def _numbers_of(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])


DECODERS: dict[str, type[PyAvDecoder] | type[TorchcodecDecoder]] = {
    "pyav": PyAvDecoder,
    "torchcodec": TorchcodecDecoder,
}


_DOES_NOT_LOAD = (
    ImportError, OSError, RuntimeError, AttributeError, NameError, TypeError, ValueError,
    SyntaxError,
)  # fmt: skip
"""What the import of a wheel raises that lacks a library, or was built for another torch."""


def _unusable(error: BaseException) -> MissingDependencyError:
    """Return what to do about a torchcodec that is not installed, or is and does not work."""
    instead = "or decode with PyAV: data.video_backend=pyav (of inspect-data --decoder pyav)"
    if find_spec("torchcodec") is None:
        return MissingDependencyError(
            f"torchcodec is not installed: `{install('video')}` and the FFmpeg libraries "
            f"(`apt-get install ffmpeg`), {instead}"
        )
    reason, torch = _reason(error), version("torch")
    remedy = f"the FFmpeg libraries (`apt-get install ffmpeg`), or the release for torch {torch}"
    if re.match(r"lib(nv|cu|npp)", Path(reason).name):
        # Wheels of the package index need CUDA's libraries from 0.14 on.
        remedy = f"one that needs no CUDA (`pip install 'torchcodec<0.14'`; torch is {torch})"
    return MissingDependencyError(
        f"torchcodec is installed and cannot be used ({reason}): install {remedy}, {instead}"
    )


def _reason(error: BaseException) -> str:
    """Return in one line why a library does not load; torchcodec gives every attempt's traceback.

    The library that the loader missed says most; it may stand in an error that led to this one.
    """
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)
    for text in map(str, chain):
        if missing := re.search(r"\S+\.so[\w.]*: cannot open shared object file", text):
            return missing[0]
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:200]


@cache
def load_decoder(name: str) -> None:
    """Load the library of a decoder, and let it decode a clip.

    Raises:
        MissingDependencyError: It cannot be used on this machine.
        UnknownNameError: There is no such decoder.
    """
    kind = find(DECODERS, "video decoder", name)
    if kind is not TorchcodecDecoder:
        return  # Importing PyAV takes as long as opening a dataset again, which decodes nothing.
    kind.library()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        _write_clip(path)
        # A wheel for another torch may load, and lack the operators that it calls.
        try:
            kind(path, FrameTable.of(path)).frames([1, 0])
        except (DatasetError, *_DOES_NOT_LOAD) as error:
            raise _unusable(error.__cause__ or error) from error


def _write_clip(path: Path) -> None:
    """Write two pictures as a video."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        for frame in (av.VideoFrame(16, 16, "yuv420p"), av.VideoFrame(16, 16, "yuv420p"), None):
            container.mux(stream.encode(frame))


class Videos:
    """Open videos of a reader, the least recently used of them closed first."""

    def __init__(self, decoder: str = "pyav", cache: Path | None = None) -> None:
        self._decoder = find(DECODERS, "video decoder", decoder)
        self._cache = cache
        self._open: OrderedDict[Path, Decoder] = OrderedDict()
        empty_after_fork(self)

    def clip(self, path: Path, first: int, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return frames of an episode.

        Args:
            path: Video file.
            first: Number in the file of the episode's frame 0.
            numbers: Frames of the episode.

        Returns:
            (N, H, W, 3) uint8 RGB.

        Raises:
            DatasetError: The file is missing, damaged or shorter than the episode.
        """
        return self.open(path).frames([first + int(number) for number in numbers])

    def open(self, path: Path) -> Decoder:
        """Return the decoder of ``path``, kept open for later calls."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        decoder = self._decoder(path, FrameTable.of(path, self._cache))
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
