"""Images of a request in fewer bytes, between dzrobot's own client and server, which announces it.

``jpeg`` changes pixels, hence actions, and is on the card of a result; ``zstd`` changes nothing.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dzrobot.documents import shorten
from dzrobot.errors import ProtocolError

ImageCoding = Literal["raw", "jpeg", "zstd"]
"""``raw``: as they are; ``jpeg``: every frame as JPEG of quality 95; ``zstd``: compressed."""

Images = NDArray[np.uint8]

_QUALITY = 95
_CODING = b"__images__"
_MOST_AXES = 4
_FRAME_HEADERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of JPEG that are followed by the size of the image."""


def write_images(images: NDArray[Any], coding: ImageCoding) -> object:
    """Return images ``(..., H, W, 3)`` as they are sent."""
    if coding == "raw":
        return images
    if coding == "zstd":
        import pyarrow as pa

        data: list[bytes] = [pa.compress(images.tobytes(), codec="zstd", asbytes=True)]
    else:
        data = [_jpeg(frame) for frame in images.reshape(-1, *images.shape[-3:])]
    return {_CODING: coding, b"shape": list(images.shape), b"data": data}


def read_images(value: object, size: tuple[int, int], most: int) -> object:
    """Return the images that :func:`write_images` wrote; anything else as it is.

    Nothing larger than was agreed on is decoded.

    Args:
        value: Of one view, from a message.
        size: ``(height, width)`` of the view.
        most: Most frames.

    Raises:
        ProtocolError: images of another size or number, or damaged data.
    """
    if not isinstance(value, Mapping) or _CODING not in value:
        return value
    coding, data = value[_CODING], value.get(b"data")
    given = value.get(b"shape")
    shape: list[int] = given if isinstance(given, list) else []
    whole = all(type(side) is int for side in shape)
    if not whole or shape[-3:] != [*size, 3] or len(shape) > _MOST_AXES:
        raise ProtocolError(
            f"images of the shape {shorten(given)}: give (frames, {size[0]}, {size[1]}, 3), or one "
            "image without frames"
        )
    frames = math.prod(shape[:-3])
    if not 1 <= frames <= most or not isinstance(data, list):
        raise ProtocolError(f"{frames} frames of one view: give 1 to {most}")
    if not all(isinstance(part, bytes) for part in data):
        raise ProtocolError("coded images are bytes")
    if coding == "zstd" and len(data) == 1:
        return np.frombuffer(_expanded(data[0], math.prod(shape)), np.uint8).reshape(shape)
    if coding == "jpeg" and len(data) == frames:
        return np.stack([_decoded(part, size) for part in data]).reshape(shape)
    raise ProtocolError(
        f"{len(data)} parts of {shorten(coding)} for {frames} frames: allowed are one of zstd, or "
        "a JPEG for each frame"
    )


def _jpeg(frame: NDArray[Any]) -> bytes:
    import cv2

    bgr = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
    done, data = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    assert done, "any image of bytes can be written as JPEG"
    return data.tobytes()


def _decoded(data: bytes, size: tuple[int, int]) -> Images:
    import cv2

    if _jpeg_size(data) != size:
        raise ProtocolError(
            f"a JPEG of {len(data)} bytes that does not say it has {size[0]} x {size[1]} pixels"
        )
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None or image.shape != (*size, 3):
        raise ProtocolError(f"a JPEG of {len(data)} bytes is damaged")
    rgb: Images = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return rgb


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return ``(height, width)`` as the header says, before anything is decoded."""
    at = 2
    while data[:2] == b"\xff\xd8" and at + 9 <= len(data) and data[at] == 0xFF:
        if data[at + 1] in _FRAME_HEADERS:
            height, width = (int.from_bytes(data[at + i : at + i + 2]) for i in (5, 7))
            return height, width
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def _expanded(data: bytes, count: int) -> bytes:
    import pyarrow as pa

    try:
        # No more than `count` bytes are written, whatever the data announces.
        expanded: bytes = pa.decompress(data, decompressed_size=count, codec="zstd", asbytes=True)
    except (OSError, pa.ArrowException) as error:
        raise ProtocolError(f"{len(data)} bytes of zstd are damaged: {error}") from error
    return expanded


def coded_card(coding: ImageCoding) -> dict[str, Any]:
    """Return what a result depends on of it."""
    return {"images": f"jpeg {_QUALITY}"} if coding == "jpeg" else {}
