"""Images to PNG bytes and to video files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from dzrobot.errors import DatasetError, find
from dzrobot.files import explained

_ENCODERS = {"h264": "libx264", "h264rgb": "libx264rgb", "av1": "libsvtav1"}
_PNG_LEVEL = 2
"""Level 2 costs a third of the default's time for a few per cent more bytes."""


@dataclass(frozen=True, kw_only=True)
class VideoCodec:
    """How videos are compressed.

    Training reads strided clips from random places, so the distance between key frames decides its
    speed: AV1 with 2 or H.264 with 10 read fastest for their size.
    """

    name: str = "h264"
    """``h264`` or ``av1``; or ``h264rgb``, which loses nothing with ``crf=0`` and
    ``pixel_format="rgb24"``."""

    gop: int = 10
    """Frames from one key frame to the next."""

    crf: int = 18
    """Constant quality; lower is better. 0 with ``pixel_format="yuv444p"`` is nearly lossless."""

    pixel_format: str = "yuv420p"
    """``yuv420p`` halves the color's resolution, ``yuv444p`` keeps it."""

    def __post_init__(self) -> None:
        find(_ENCODERS, "video codec", self.name)
        if not 1 <= self.gop <= 250:
            raise DatasetError(
                f"gop={self.gop}: the distance between key frames is 1 to 250 frames"
            )

    @property
    def encoder(self) -> str:
        """Name of the encoder library."""
        return _ENCODERS[self.name]


def encode_png(image: np.ndarray) -> bytes:
    """Return ``image`` (H, W, 3) uint8 RGB as a PNG file."""
    bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    done, data = cv2.imencode(".png", bgr, [cv2.IMWRITE_PNG_COMPRESSION, _PNG_LEVEL])
    if not done:
        raise DatasetError(f"an image of shape {image.shape} could not be compressed")
    return bytes(data)


def read_png(path: Path) -> np.ndarray:
    """Return the image (H, W, 3) uint8 RGB in a file.

    Raises:
        DatasetError: it is not an image.
    """
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if image is None:
        raise DatasetError(f"{path} is not an image; remove it, or copy it again")
    rgb: np.ndarray = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return rgb


class VideoFile:
    """A video being written, one frame at a time, at a constant rate."""

    def __init__(self, path: Path, fps: float, codec: VideoCodec) -> None:
        import av

        path.parent.mkdir(parents=True, exist_ok=True)
        # The writer would follow a link.
        path.unlink(missing_ok=True)
        self._path = path
        self._codec = codec
        self._rate = Fraction(fps).limit_denominator(1001)
        self._container: Any = av.open(str(path), "w")
        self._stream: Any = None
        self._frames = 0

    def add(self, image: np.ndarray) -> None:
        """Append ``image`` (H, W, 3) uint8 RGB."""
        from av import VideoFrame

        if self._stream is None:
            self._stream = self._open(*image.shape[:2])
        frame = VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        frame.pts = self._frames
        frame.time_base = 1 / self._rate
        self._frames += 1
        # The encoder opens at the first frame.
        quiet = _ordinary_scheduling() if self._frames == 1 else nullcontext()
        with explained(f"write {self._path}", DatasetError), quiet:
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        """Write what is still in the encoder and finish the file."""
        with explained(f"write {self._path}", DatasetError):
            if self._stream is not None:
                self._container.mux(self._stream.encode(None))
            self._container.close()

    def _open(self, height: int, width: int) -> Any:
        codec = self._codec
        options = {"crf": str(codec.crf), "g": str(codec.gop)}
        if codec.name != "av1":
            # Without B frames and with a fixed key-frame grid, reading order is showing order and a
            # seek lands exactly.
            options |= {"bf": "0", "preset": "veryfast", "sc_threshold": "0"}
            # x264 weighs macroblocks by how much later images need them (mbtree). The weight of an
            # image's last one is not the same in every run: once in some hundred videos it got
            # another quantizer, so that the same images, on one thread, gave other bytes.
            options["mbtree"] = "0"
        else:
            # The library reports every setting of every file by default.
            os.environ.setdefault("SVT_LOG", "1")
            options |= {"preset": "9"}
        stream = self._container.add_stream(codec.encoder, rate=self._rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, codec.pixel_format
        stream.time_base = 1 / self._rate
        stream.codec_context.gop_size = codec.gop
        # One thread: what is written must not depend on how the machine shares its cores.
        stream.codec_context.thread_count = 1
        return stream


@contextmanager
def _ordinary_scheduling() -> Iterator[None]:
    """Leave the calling thread scheduled as it was, and threads that are started like it.

    SVT-AV1, run by root, makes its caller and its own threads real-time ones of the highest
    priority. On a robot's machine that is the priority of the loop that controls the arm.
    """
    tasks = Path("/proc/self/task")
    policy, priority, known = os.sched_getscheduler(0), os.sched_getparam(0), set(tasks.iterdir())
    try:
        yield
    finally:
        for thread in [0, *(int(task.name) for task in set(tasks.iterdir()) - known)]:
            with suppress(ProcessLookupError):
                if os.sched_getscheduler(thread) != policy:
                    os.sched_setscheduler(thread, policy, priority)


def describe_video(
    feature: dict[str, Any], fps: float, codec: VideoCodec, version: str
) -> dict[str, Any]:
    """Return the ``info`` entry of a video feature for a format version."""
    height, width = feature["shape"][:2]
    # LeRobot merges v3.0 datasets only under the name that it uses itself since 0.6.
    depth = "is_depth_map" if version == "v3.0" else "video.is_depth_map"
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": codec.name,
        "video.pix_fmt": codec.pixel_format,
        depth: False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }
