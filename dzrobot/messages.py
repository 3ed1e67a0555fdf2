"""Messages between programs: msgpack with arrays of numbers, every size bounded; no pickle.

The format is that of openpi's clients and servers. An array is the map ``{b"__ndarray__": True,
b"data": bytes, b"dtype": str, b"shape": [..]}``, one number ``{b"__npgeneric__": True, b"data":
number, b"dtype": str}``. Source: openpi-client 0.1.2, ``msgpack_numpy``. MolmoSpaces' client packs
with the library of that name from PyPI (0.4.8): ``{b"nd": True, b"type": str, b"kind": b"",
b"shape": [..], b"data": bytes}``, one number ``{b"nd": False, b"type": str, b"data": bytes}``. It
is answered in that form.
"""

import functools
import math
import re
from typing import Any, Literal

import msgpack
import numpy as np
from numpy.typing import NDArray

from dzrobot.documents import shorten
from dzrobot.errors import ProtocolError
from dzrobot.untrusted import DEEPEST_MESSAGE, MOST_AXES, MOST_ITEMS, MOST_TEXT, parsing

_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])\Z")
_ARRAY, _NUMBER = b"__ndarray__", b"__npgeneric__"
_ND = b"nd"

ArrayForm = Literal["openpi", "nd"]
"""How arrays are written: as openpi's clients do, or as the library msgpack_numpy does."""


def pack(value: object, form: ArrayForm = "openpi") -> bytes:
    """Return ``value`` as one message.

    Raises:
        ProtocolError: it holds something else than texts, bytes, numbers, lists, maps and arrays of
            numbers.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_written if form == "openpi" else _written_nd)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent: {error}") from error
    return packed


def unpack(message: bytes, forms: set[ArrayForm] | None = None) -> Any:
    """Return what ``message`` holds; arrays are views of it and cannot be written to.

    Args:
        message: As it arrived.
        forms: In which arrays were written; added to.

    Raises:
        ProtocolError: no msgpack, cut short, more behind its end, too many items or levels, too
            much text, or an array that is none.
    """
    where = f"a message of {len(message)} bytes"
    with parsing(where, ProtocolError, "is not msgpack of openpi's kind"):
        _check_size(message)
        hook = functools.partial(_read, set() if forms is None else forms)
        return msgpack.unpackb(message, object_hook=hook, ext_hook=_no_extension)


_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
          0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip
"""First byte of an item of msgpack -> bytes that follow."""

_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4,
            0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # fmt: skip
"""First byte of an item of msgpack -> bytes of the count that follows."""


def _check_size(message: bytes) -> None:
    """Raise ValueError if ``message`` holds more than a request does; nothing of it is built.

    What is not msgpack passes: the reader refuses it.
    """
    at, announced, text, left = 0, 1, 0, [1]
    while left and at < len(message):
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        at, inside, letters = _item(message, at)
        announced, text = announced + inside, text + letters
        if inside:
            left.append(inside)
        if announced > MOST_ITEMS or text > MOST_TEXT or len(left) > DEEPEST_MESSAGE:
            raise ValueError(
                f"more than {MOST_ITEMS} items, {DEEPEST_MESSAGE} levels or {MOST_TEXT} bytes of "
                "text"
            )


def _item(message: bytes, at: int) -> tuple[int, int, int]:
    """Return where the item at ``at`` ends, the items inside it (which follow), bytes of text."""
    first, at = message[at], at + 1
    match first:
        case _ if first < 0x80 or first >= 0xE0 or first in _FIXED:
            return at + _FIXED.get(first, 0), 0, 0
        case _ if first < 0x90:
            return at, 2 * (first & 15), 0
        case _ if first < 0xA0:
            return at, first & 15, 0
        case _ if first < 0xC0:
            return at + (first & 31), 0, first & 31
    width = _COUNTED.get(first, 0)
    count, at = int.from_bytes(message[at : at + width]), at + width
    match first:
        case 0xDC | 0xDD:
            return at, count, 0
        case 0xDE | 0xDF:
            return at, 2 * count, 0
        case 0xD9 | 0xDA | 0xDB:
            return at + count, 0, count
        case 0xC7 | 0xC8 | 0xC9:
            return at + 1 + count, 0, 0
    return at + count, 0, 0


def _written(value: object) -> dict[bytes, Any]:
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


def _written_nd(value: object) -> object:
    """Return ``value`` as the library msgpack_numpy writes it."""
    plain = _written(value)
    kind = plain[b"dtype"]
    if _NUMBER in plain:
        return {_ND: False, b"type": kind, b"data": np.array(plain[b"data"], kind).tobytes()}
    kept = {name: plain[name] for name in (b"shape", b"data")}
    return {_ND: True, b"type": kind, b"kind": b"", **kept}


def _read(forms: set[ArrayForm], found: dict[Any, Any]) -> Any:
    if _ARRAY in found:
        return _array(found)
    if _NUMBER in found:
        return _number(found)
    if _ND in found:
        forms.add("nd")
        kept = {b"dtype": found.get(b"type"), b"data": found.get(b"data")}
        whole = found[_ND] is True
        array = _array({**kept, b"shape": found.get(b"shape") if whole else []})
        return array if whole else array[()]
    return found


def _array(found: dict[Any, Any]) -> NDArray[Any]:
    data, shape = found.get(b"data"), found.get(b"shape")
    dtype = _dtype(found)
    if not isinstance(shape, list) or len(shape) > MOST_AXES:
        raise ValueError(f"the shape {shorten(shape)} of an array is not a list of few numbers")
    if any(type(count) is not int or count < 0 for count in shape):
        raise ValueError(f"the shape {shorten(shape)} of an array is not a list of whole numbers")
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
