"""Films in which every picture is a key frame, kept without loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dzrobot.errors import DatasetError
from dzrobot.untrusted import parsing

KEY_FRAMES = "magicyuv"
"""FFmpeg's lossless codec whose pictures decode on their own, and fastest."""

RGB = "gbrp"
"""Format of pictures in red, green and blue."""

_PIXELS = ("yuv420p", "yuv422p", "yuv444p", RGB, "gray")
"""Formats of 8 bits that it keeps as they are."""


def codec_of(path: Path) -> str:
    """Return the codec of a film, by FFmpeg's name; empty: it holds no video."""
    import av

    with parsing(path, DatasetError), av.open(str(path)) as container:
        source = next(iter(container.streams.video), None)
        return "" if source is None else source.codec_context.name


def pictures(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the stream and each picture of a film, in the order in which they are shown.

    Raises:
        DatasetError: a picture does not decode.
    """
    import av

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            if frame.is_corrupt:
                raise DatasetError(f"{path} holds a picture that does not decode; copy it again")
            yield container.streams.video[0], frame


def _shown(frame: Any) -> bytes:
    """Return a hash of a picture as training sees it: red, green and blue."""
    return blake2b(frame.to_ndarray(format="rgb24").tobytes(), digest_size=16).digest()


def check_kept(frame: Any) -> None:
    """Check that a picture is one of those that the codec keeps as they are.

    Raises:
        DatasetError: it has more than 8 bits a color, or is shown turned.
    """
    name = frame.format.name
    if name not in _PIXELS or frame.rotation:
        turned = ", shown turned" if frame.rotation else ""
        raise DatasetError(
            f"a film holds {name}{turned}; {KEY_FRAMES} keeps {', '.join(_PIXELS)}, upright: "
            "leave --films out"
        )


def check_length(path: Path, count: int, rows: int) -> None:
    """Check that a film has as many pictures as its episodes have rows.

    Raises:
        DatasetError: it has not.
    """
    if count != rows:
        raise DatasetError(
            f"{path} shows {count} pictures, its episodes have {rows} "
            "rows: `dzrobot inspect-data` says which are affected"
        )


@contextmanager
def lossless_film(target: Path, fps: Fraction, path: Path) -> Iterator[Callable[[Any, Any], None]]:
    """Yield what writes a picture to the new film ``target``; at the end all are compared.

    It takes the stream that a picture comes from, whose times it has, and the picture.

    Args:
        target: The new film.
        fps: Pictures per second.
        path: Film that the pictures come from, for the message.

    Raises:
        DatasetError: see :func:`check_kept`, or what was written does not decode to the same bits.
    """
    import av

    written: list[bytes] = []
    with av.open(str(target), "w", format="mov") as output:
        stream: Any = None

        def add(source: Any, frame: Any) -> None:
            nonlocal stream
            if stream is None:
                stream = _stream(output, source, frame, fps)
            written.append(_shown(frame))
            output.mux(stream.encode(frame))

        yield add
        if stream is not None:
            output.mux(stream.encode(None))
    if [_shown(frame) for _, frame in pictures(target)] != written:
        raise DatasetError(
            f"pictures of {path} do not decode to the same bits from {KEY_FRAMES}: leave --films "
            "out"
        )


def _stream(output: Any, source: Any, frame: Any, fps: Fraction) -> Any:
    """Return a stream of ``output`` for pictures like ``frame``, with the times of ``source``.

    It has the colors of ``source``, but for pictures in red, green and blue, whose numbers are the
    colors.
    """
    check_kept(frame)
    stream = output.add_stream(KEY_FRAMES, rate=fps)
    stream.width, stream.height, stream.pix_fmt = frame.width, frame.height, frame.format.name
    stream.time_base = stream.codec_context.time_base = source.time_base
    if frame.format.name != RGB:
        written, read = stream.codec_context, source.codec_context
        written.color_range, written.colorspace = read.color_range, read.colorspace
        written.color_primaries, written.color_trc = read.color_primaries, read.color_trc
    return stream
