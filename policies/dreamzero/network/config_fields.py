"""Frozen dataclasses from the entries of a config.json and back, whatever the fields mean."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, get_args, get_origin

from dzrobot.documents import shorten
from dzrobot.errors import ConfigError, preview

Config = TypeVar("Config")

LIMITS = "limits"
"""In the metadata of a field: the least and the most that a file may ask for."""

_COMMON = (0, 2**20)
_LONGEST = 16
"""Items of a list."""


def section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping ``data[key]``; raise :class:`ConfigError` where there is none."""
    found = data.get(key)
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"no section {key!r} (found: {preview(data)}); "
            "is this the config.json of a DreamZero checkpoint?"
        )
    return found


def fill(cls: type[Config], data: Mapping[str, Any], where: str) -> Config:
    """Return ``cls`` from the entries of ``data`` that it has a field for; others are ignored.

    A null entry of a required field counts as missing.

    Raises:
        ConfigError: A required field is missing, or an entry has the wrong type or size.
    """
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    required = {
        name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING
    }
    given = {name: data[name] for name in known if name in data}
    given = {
        name: value for name, value in given.items() if value is not None or name not in required
    }
    if missing := required - given.keys():
        raise ConfigError(f"{where} lacks {preview(missing)}")
    typed = {
        name: _typed(value, known[name].type, f"{where}.{name}") for name, value in given.items()
    }
    for name, value in typed.items():
        least, most = known[name].metadata.get(LIMITS, _COMMON)
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) in (int, float) and not least <= number <= most:
                raise ConfigError(
                    f"{where}.{name} is {shorten(value)}, allowed: {least:g} to {most:g}"
                )
    return cls(**typed)


def values(config: Any) -> dict[str, Any]:
    """Return the fields of ``config`` as a dict, one level deep."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def changed(config: Any, base: Any) -> dict[str, Any]:
    """Return the fields in which ``config`` differs from ``base``, ready for JSON."""
    return {
        key: plain(value) for key, value in values(config).items() if value != values(base)[key]
    }


def plain(value: Any) -> Any:
    """Return ``value`` with a tuple as the list that JSON knows."""
    return list(value) if isinstance(value, tuple) else value


def _typed(value: Any, wanted: Any, where: str) -> Any:
    """Return ``value`` as its field's type: lists as tuples, integers as floats where asked."""
    if get_origin(wanted) is Literal:
        if isinstance(value, str) and value in get_args(wanted):
            return value
        allowed = ", ".join(map(repr, get_args(wanted)))
        raise ConfigError(f"{where} is {shorten(value)}, expected one of {allowed}")
    if get_origin(wanted) is tuple and isinstance(value, list | tuple):
        if len(value) > _LONGEST:
            raise ConfigError(f"{where} has {len(value)} items, at most {_LONGEST} are allowed")
        return tuple(_typed(item, get_args(wanted)[0], where) for item in value)
    if get_origin(wanted) is tuple:
        raise ConfigError(f"{where} is {shorten(value)}, expected a list")
    if wanted is float and type(value) is int:
        return float(value)
    allowed_types = get_args(wanted) or (wanted,)
    if type(value) not in allowed_types:
        names = " or ".join(kind.__name__ for kind in allowed_types)
        raise ConfigError(f"{where} is {shorten(value)}, expected {names}")
    return value
