"""Flags whose text means more than itself."""

from typing import Any

from dzrobot.config import parse_value
from dzrobot.errors import ConfigError


def keywords(pairs: list[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs of ``--env-arg`` as keyword arguments, values read as YAML."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env-arg takes KEY=VALUE, got {pair!r}")
        found[name] = parse_value(value)
    return found


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Return ``0,1,5-7``, given to ``flag``, as numbers."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"{flag} {text!r}: write numbers and ranges, such as 0,1,5-7")
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))
