"""Flags whose text means more than itself; each refusal is argparse's, with exit code 2."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dzrobot.configuration import parse_value
from dzrobot.declared import Declared, Flag, Kind, declared
from dzrobot.documents import shorten
from dzrobot.errors import ConfigError
from dzrobot.files import check_path

MANY = 1_000_000
"""More than any count that a command takes: a typo is reported before memory is allocated."""

_LISTED = 10_000
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}\Z")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?\Z")
_SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})\Z")
_DEVICE = re.compile(r"(?:cpu|cuda(?::[0-9]{1,3})?)\Z")


def whole(least: int, most: int = MANY) -> Callable[[str], int]:
    """Return a type of whole numbers from ``least`` to ``most``."""

    def read(written: str) -> int:
        # int() also takes digits of other scripts, blanks and underscores.
        if not _WHOLE.match(written) or not least <= int(written) <= most:
            raise _refusal(written, f"a whole number from {least} to {most}")
        return int(written)

    return read


episode_number = whole(0, 10**9)
"""Type of numbers of recorded episodes."""

seed = whole(0, 2**32 - 1)
"""Type of seeds, which every generator in use takes."""


def number(least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    """Return a type of finite numbers from ``least`` to ``most``."""

    def read(written: str) -> float:
        value = parse_value(written)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not least <= value <= most:
            upper = "" if most == sys.float_info.max else f" to {most:g}"
            raise _refusal(written, f"a number from {least:g}{upper}")
        return float(value)

    return read


def angles(count: int) -> Callable[[str], tuple[float, ...]]:
    """Return a type of so many angles in radians, such as ``0,-0.5,1.2``."""
    one = number(-math.tau, math.tau)

    def read(written: str) -> tuple[float, ...]:
        parts = written.split(",")
        if len(parts) != count:
            raise _refusal(written, f"{count} angles (rad) with commas between them")
        return tuple(map(one, parts))

    return read


def text(written: str) -> str:
    """Type of names: anything but nothing."""
    if not written.strip():
        raise _refusal(written, "a name")
    return written


def path(written: str) -> Path:
    """Type of paths: nothing at all would be the folder one happens to be in."""
    if not written or "\0" in written:
        raise _refusal(written, "a path; . is this folder")
    try:
        check_path(Path(written))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(written)


def output(written: str) -> Path:
    """Type of a path that is written to: absolute, as code of a user's may change the folder."""
    return path(written).absolute()


def names(written: str) -> tuple[str, ...]:
    """Type of ``a,b``: names, each once."""
    listed = written.split(",")
    if not all(name.strip() for name in listed) or len(set(listed)) < len(listed):
        raise _refusal(written, "names, each once, such as a,b")
    return tuple(listed)


def numbers(written: str) -> tuple[int, ...]:
    """Type of ``0,1,5-7``: numbers from 0, each once."""
    found: list[int] = []
    for part in written.split(","):
        match = _RANGE.match(part)
        if match is None:
            raise _refusal(written, "numbers and ranges, such as 0,1,5-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _LISTED or len(found) >= _LISTED:
            raise _refusal(written, f"rising ranges of together at most {_LISTED} numbers")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise _refusal(written, "each number once")
    return tuple(found)


def episode(written: str) -> tuple[Path, int]:
    """Type of ``DATASET#EPISODE``: a folder, and the number of an episode there."""
    folder, _, number = written.rpartition("#")
    if not folder:
        raise _refusal(written, "DATASET#EPISODE, such as recordings/cups#3")
    return path(folder), episode_number(number)


def size(written: str) -> tuple[int, int]:
    """Type of ``HEIGHTxWIDTH``: whole numbers of pixels."""
    height, _, width = written.partition("x")
    try:
        return whole(1, 10_000)(height), whole(1, 10_000)(width)
    except argparse.ArgumentTypeError:
        raise _refusal(written, "HEIGHTxWIDTH in pixels, such as 96x128") from None


def shard(written: str) -> tuple[int, int]:
    """Type of ``I/N``: part I, from 0, of N."""
    match = _SHARD.match(written)
    if match is None or not int(match[1]) < int(match[2]):
        raise _refusal(written, "I/N with I below N, such as 0/4 for the first of four")
    return int(match[1]), int(match[2])


def device(written: str) -> str:
    """Type of devices.

    What ``auto`` is, and whether a named device exists, is seen when the policy is resolved.
    """
    if written != "auto" and not _DEVICE.match(written):
        raise _refusal(written, "cpu, cuda, cuda:N or auto")
    return written


def two_devices(written: str) -> tuple[str, str]:
    """Type of ``cuda:0,cuda:1``: two different devices."""
    first, comma, second = written.partition(",")
    if not comma or first == second or not all(map(_DEVICE.match, (first, second))):
        raise _refusal(written, "two different devices, such as cuda:0,cuda:1")
    return first, second


def memory(written: str) -> int:
    """Read an amount of memory, such as ``24`` or ``24GiB``; return bytes."""
    amount = written.strip().removesuffix("GiB").strip()
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", amount) or float(amount) == 0:
        raise _refusal(written, "an amount of GiB, such as 24 or 24GiB")
    return round(float(amount) * 2**30)


READERS: Mapping[Kind, Callable[[str], Any]] = {
    "device": device,
    "devices": two_devices,
    "GiB": memory,
    "names": names,
    "numbers": numbers,
    "path": path,
    "shard": shard,
}


def declare(
    group: Any,
    cls: type,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    **changes: Mapping[str, Any],
) -> None:
    """Declare the flags of a dataclass's fields; see :class:`~dzrobot.declared.Flag`.

    A flag that is left out is None in what the parser returns: see :func:`said`.

    Args:
        group: Parser, or a group of one.
        cls: The dataclass.
        only: Fields whose flags are declared. None: all.
        without: Fields whose flags are left out.
        changes: By field, what this command declares otherwise: keywords of ``add_argument``.
    """
    for one in declared(cls):
        if one.field in without or (only is not None and one.field not in only):
            continue
        default, text = one.default, one.flag.help
        plain = isinstance(default, str | int | float) and not isinstance(default, bool)
        if plain and default != "" and "default" not in text:
            shown = f"{default:g}" if isinstance(default, float) else default
            text += f" (default: {shown})"
        options = {"help": text, "metavar": one.flag.metavar, **_reading(one.type, one.flag)}
        options |= {"dest": one.dest, **changes.get(one.field, {})}
        known = {name: value for name, value in options.items() if value is not None}
        group.add_argument(*one.options, default=None, **known)


def said(
    arguments: argparse.Namespace, cls: type, *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return what was given of the flags of a dataclass's fields, by field.

    Args:
        arguments: What the parser returned.
        cls: The dataclass.
        without: Fields whose flags were left out, as of :func:`declare`.

    Raises:
        DzrobotError: what was given cannot become the field's value.
    """
    given = vars(arguments)
    return {
        one.field: _value(one, given[one.dest])
        for one in declared(cls)
        if one.field not in without and given.get(one.dest) is not None
    }


def _value(one: Declared, found: Any) -> Any:
    value = one.flag.words.get(found, found) if isinstance(found, str) else found
    return value if one.flag.becomes is None else one.flag.becomes(value)


def _reading(of: Any, flag: Flag) -> dict[str, Any]:
    """Return the keywords of ``add_argument`` that say how the flag's text is read."""
    kinds = [kind for kind in _kinds(of) if kind is not NoneType]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    others = [kind for kind in kinds if get_origin(kind) is not Literal]
    if flag.kind is not None:
        return {"type": READERS[flag.kind]}
    if not flag.words and others == [bool]:
        return {"action": "store_true"}
    if flag.words or not others:
        return {"choices": [*words, *flag.words]}
    if float in others:
        # A number that may have a fraction; whole ones are written likewise.
        reader: Callable[[str], Any] = number(flag.least or 0, flag.most or sys.float_info.max)
    elif int in others:
        reader = whole(int(flag.least or 0), MANY if flag.most is None else int(flag.most))
    else:
        reader = path if others == [Path] else text
    return {"type": (lambda found: found if found in words else reader(found)) if words else reader}


def _kinds(of: Any) -> tuple[Any, ...]:
    return get_args(of) if get_origin(of) in (UnionType, Union) else (of,)


def add_dataset_format(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say how a recording is stored."""
    parser.add_argument(
        "--version", choices=["v2.1", "v3.0"], default="v2.1", help="of the LeRobot format"
    )
    parser.add_argument("--video", action="store_true", help="store images as video")


def add_keywords(group: Any, option: str, meaning: str) -> None:
    """Declare a flag that is given once for each ``KEY=VALUE``; see :func:`keywords`."""
    group.add_argument(option, action="append", default=[], metavar="KEY=VALUE", help=meaning)


def keywords(pairs: list[str], reserved: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs of ``--env-arg`` as keyword arguments, values read as YAML.

    Args:
        pairs: As they were given.
        reserved: Keyword -> what sets it instead.

    Raises:
        ConfigError: one is not such a pair, is reserved, or given twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env-arg takes KEY=VALUE, got {shorten(pair)}")
        if reserved and name in reserved:
            raise ConfigError(f"--env-arg {name}: it is set by {reserved[name]}")
        if name in found:
            raise ConfigError(f"--env-arg {name} is given twice; keep one")
        found[name] = parse_value(value)
    return found


def _refusal(written: str, allowed: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"got {shorten(written)}; allowed: {allowed}")
