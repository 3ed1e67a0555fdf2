"""The one reader of JSON documents that come from outside: bounded, checked, typed.

A document is read once, where it enters, into a pydantic model. Whatever is wrong with it is one
error that names the file, the field, what was given and what is allowed.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from dzrobot.errors import DzrobotError, printable
from dzrobot.files import diagnosed, stand_in
from dzrobot.untrusted import DEEPEST_DOCUMENT, LARGEST_DOCUMENT, attempted, parsing

T = TypeVar("T")

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_PLAIN = bytes(set(range(256)) - {*_STEPS, ord('"')})


def read_json(
    path: Path, model: type[T], error_class: type[DzrobotError], *, largest: int = LARGEST_DOCUMENT
) -> T:
    """Return the JSON document at ``path`` as a ``model``.

    Args:
        path: The file.
        model: A pydantic model, or any type that pydantic can check, such as ``dict[str, int]``.
        error_class: What to raise.
        largest: Bytes that are read; a longer file is refused unread.

    Raises:
        DzrobotError: of class ``error_class``. The file is missing, unreadable, too large, no
            UTF-8, no JSON, nested too deeply, or does not fit; one line a fault.
    """
    content = read_bytes(path, error_class, largest=largest)
    with _fetched(path, error_class):
        return parse_json(content, model, str(path), error_class)


def read_json_lines(
    path: Path,
    model: type[T],
    error_class: type[DzrobotError],
    *,
    limit: int | None = None,
    appended: bool = False,
) -> Iterator[T]:
    """Yield the first ``limit`` lines of ``path``, each as a ``model``; blank lines are skipped.

    Args:
        path: The file.
        model: As :func:`read_json` takes it.
        error_class: What to raise.
        limit: Lines that are read at most. None: all.
        appended: Whether lines are added to the file one by one: a last one that a kill cut short
            is left out.

    Raises:
        DzrobotError: as :func:`read_json`; the line's number is named.
    """
    content = read_bytes(path, error_class, largest=16 * LARGEST_DOCUMENT)
    lines = content.split(b"\n")
    if appended and not _is_json(lines[-1]):
        lines.pop()
    rows = _read_together([line for line in lines if line.strip()][:limit], model)
    if rows is not None:
        yield from rows
        return
    count = 0
    for number, line in enumerate(lines, start=1):
        if count == limit:
            return
        if line.strip():
            count += 1
            with _fetched(path, error_class):
                row = parse_json(line, model, f"{path}:{number}", error_class)
            yield row


def _read_together(lines: list[bytes], model: type[T]) -> list[T] | None:
    """Return all lines as read, in half the time of one by one; None where one is odd."""
    adapter = _adapter(model)
    if any(line.count(b"[") + line.count(b"{") > DEEPEST_DOCUMENT for line in lines):
        return None
    # An odd one is read by itself, so that what is wrong is said.
    return attempted(
        lambda: [adapter.validate_python(_DECODER.decode(line.decode())) for line in lines]
    )


def parse_json(content: bytes, model: type[T], where: str, error_class: type[DzrobotError]) -> T:
    """Return the JSON text ``content`` as a ``model``; ``where`` names it in an error."""
    return validated(_loads(content, where, error_class), model, where, error_class)


def validated(value: object, model: type[T], where: str, error_class: type[DzrobotError]) -> T:
    """Return ``value``, already parsed, as a ``model``; ``where`` names it in an error.

    Raises:
        DzrobotError: of class ``error_class``, one line a fault.
    """
    try:
        return _adapter(model).validate_python(value)
    except ValidationError as error:
        faults = [_fault(fault) for fault in error.errors(include_url=False)]
        shown = faults[:8] + ([f"and {len(faults) - 8} more"] if len(faults) > 8 else [])
        if len(shown) == 1:
            raise error_class(f"{where}: {shown[0]}") from error
        lines = "".join(f"\n  {line}" for line in shown)
        raise error_class(f"{where} has {len(faults)} faults:{lines}") from error


def read_bytes(
    path: Path, error_class: type[DzrobotError], *, largest: int = LARGEST_DOCUMENT
) -> bytes:
    """Return the content of the regular file ``path``.

    Raises:
        DzrobotError: of class ``error_class``. It is missing, no regular file, unreadable or larger
            than ``largest`` bytes.
    """
    try:
        if path.exists() and not path.is_file():
            raise error_class(f"{path} is not a regular file; a document is expected there")
        size = path.stat().st_size
        if size > largest:
            raise error_class(
                f"{path} has {size} bytes; such a document has at most {largest}: is it the right "
                "file?"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        known = stand_in(path) is not None
        raise error_class(
            diagnosed(path, "is not there") if known else f"there is no file {path}"
        ) from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise error_class(f"cannot read {str(path)[:200]}: {reason}") from error


@contextmanager
def _fetched(path: Path, error_class: type[DzrobotError]) -> Iterator[None]:
    """Say of a document that cannot be read if a pointer or part of it lies in its place."""
    try:
        yield
    except error_class as error:
        if stand_in(path) is None:
            raise
        raise error_class(diagnosed(path, "")) from error


def shorten(value: object, limit: int = 60) -> str:
    """Return ``value`` as one line of at most ``limit`` characters."""
    # repr of a huge value costs what the value costs; its kind says enough.
    if isinstance(value, dict | list | tuple | set) and len(value) > limit:
        return f"{_kind(value)} with {len(value)} items"
    text = repr(value[:limit]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _adapter(model: type[T]) -> TypeAdapter[T]:
    # Making one costs more than checking a line with it.
    if model not in _ADAPTERS:
        _ADAPTERS[model] = TypeAdapter(model)
    return _ADAPTERS[model]


def _loads(content: bytes, where: str, error_class: type[DzrobotError]) -> Any:
    try:
        text = content.decode().removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise error_class(f"{where} is not UTF-8 text (byte {error.start})") from error
    if (depth := _depth(content)) > DEEPEST_DOCUMENT:
        raise error_class(f"{where} is nested {depth} levels deep; allowed are {DEEPEST_DOCUMENT}")

    with parsing(where, error_class, "is not JSON", "write it again"):
        return _DECODER.decode(text)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    """Return a number; one beyond a float's range could be read, but not written again."""
    if math.isinf(number := float(digits)):
        raise ValueError(f"{shorten(digits)} does not fit into a number")
    return number


_BYTE_ORDER_MARK = "\ufeff"
_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
"""Made once: making one takes as long as reading a line."""


def _is_json(content: bytes) -> bool:
    try:
        _loads(content, "", DzrobotError)
    except DzrobotError:
        return False
    return True


def _depth(content: bytes) -> int:
    """Return how deep brackets are nested outside texts, without parsing."""
    if content.count(b"[") + content.count(b"{") <= DEEPEST_DOCUMENT:
        return 0
    # Without escapes, every second piece between quotes lies outside texts.
    plain = content.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _PLAIN)
    brackets = b"".join(plain.split(b'"')[::2])
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _fault(fault: Any) -> str:
    place = printable(".".join(map(str, fault["loc"])))
    given, message = fault["input"], fault["msg"]
    match fault["type"]:
        case "missing":
            text = "is missing"
        case "extra_forbidden":
            text = "no such field"
        case "value_error" | "assertion_error":
            text = f"got {shorten(given)}: {message.partition(', ')[2]}"
        case _:
            allowed = message.removeprefix("Input should be ")
            text = f"got {shorten(given)} ({_kind(given)}), allowed: {allowed}"
    return f"{place}: {text}" if place else text


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    kinds |= {int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)
