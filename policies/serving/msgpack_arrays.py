"""msgpack with arrays, as openpi's clients and servers write it: no pickle, every size bounded.

An array is the map ``{b"__ndarray__": True, b"data": bytes, b"dtype": str, b"shape": [..]}``, one
number ``{b"__npgeneric__": True, b"data": number, b"dtype": str}``. Source: openpi-client 0.1.2,
``msgpack_numpy``.
"""

import math
import re
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from dzrobot.documents import shorten
from dzrobot.errors import ProtocolError

LARGEST_MESSAGE = 64 * 1024**2
"""Bytes of one message; vLLM-Omni has the same limit."""

_LONGEST_LIST = 4096
_LONGEST_MAP = 256
"""Items: what a header announces is made before its content is read."""

_MOST_AXES = 8
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])\Z")
_ARRAY, _NUMBER = b"__ndarray__", b"__npgeneric__"


def pack(value: object) -> bytes:
    """Return ``value`` as one message.

    Raises:
        ProtocolError: it holds something else than texts, bytes, numbers, lists, maps and arrays of
            numbers.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_written)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent: {error}") from error
    return packed


def unpack(message: bytes) -> Any:
    """Return what ``message`` holds; arrays are views of it and cannot be written to.

    Raises:
        ProtocolError: no msgpack, cut short, more behind its end, nested too deeply, lists or maps
            too long, or an array that is none.
    """
    try:
        return msgpack.unpackb(
            message,
            object_hook=_read,
            ext_hook=_no_extension,
            max_array_len=_LONGEST_LIST,
            max_map_len=_LONGEST_MAP,
        )
    except (ValueError, RecursionError) as error:
        # msgpack's own faults of nesting and of what is behind the end have no text of their own.
        reason = str(error) or type(error).__name__
        raise ProtocolError(
            f"a message of {len(message)} bytes is no msgpack of openpi's kind: {reason[:200]}"
        ) from error


def _written(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        if not _DTYPE.match(value.dtype.str):
            raise ValueError(f"arrays of {value.dtype} are not sent, only numbers")
        kind = value.dtype.str
        if isinstance(value, np.ndarray):
            return {
                _ARRAY: True,
                b"data": value.tobytes(),
                b"dtype": kind,
                b"shape": value.shape,
            }
        return {_NUMBER: True, b"data": value.item(), b"dtype": kind}
    raise TypeError(f"a {type(value).__name__} is not sent")


def _read(found: dict[Any, Any]) -> Any:
    if _ARRAY in found:
        return _array(found)
    if _NUMBER in found:
        return _number(found)
    return found


def _array(found: dict[Any, Any]) -> NDArray[Any]:
    data, shape = found.get(b"data"), found.get(b"shape")
    dtype = _dtype(found)
    if not isinstance(shape, list) or len(shape) > _MOST_AXES:
        raise ValueError(f"the shape {shorten(shape)} of an array is no list of few numbers")
    if any(type(count) is not int or count < 0 for count in shape):
        raise ValueError(f"the shape {shorten(shape)} of an array is no list of whole numbers")
    expected = math.prod(shape) * dtype.itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        given = len(data) if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise ValueError(f"an array {dtype} {shorten(shape)} needs {expected} bytes, got {given}")
    return np.frombuffer(data, dtype).reshape(shape)


def _number(found: dict[Any, Any]) -> np.generic:
    value, dtype = found.get(b"data"), _dtype(found)
    if not isinstance(value, int | float):
        raise ValueError(f"a number of {dtype} is written as a {type(value).__name__}")
    try:
        number: np.generic = dtype.type(value)
    except OverflowError as error:
        raise ValueError(f"{shorten(value)} does not fit into {dtype}") from error
    return number


def _dtype(found: dict[Any, Any]) -> np.dtype[Any]:
    kind = found.get(b"dtype")
    if not isinstance(kind, str) or not _DTYPE.match(kind):
        raise ValueError(f"the dtype {shorten(kind)} is none of a number")
    return np.dtype(kind)


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"an extension of type {code} with {len(data)} bytes")
