"""A YAML file written for Hydra, with the files of its ``defaults`` and its references filled in.

Only what recipes of other trainers use: ``group/name@package`` beside the file, ``_self_``, and
``${section.field}``. Hydra itself is not needed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dzrobot.configuration import read_config
from dzrobot.errors import ConfigError
from dzrobot.yaml_values import Place, dotted

OPEN = "???"
"""How OmegaConf writes a value that the user has to give."""

_ENTRY = re.compile(r"(?P<name>[\w./-]+?)(?:@(?P<package>[\w.]+))?\Z")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_DEEPEST = 8
"""Files of defaults that name further ones, and references that lead to references."""


@dataclass(frozen=True)
class Composed:
    """Values of a file and of what it names."""

    values: dict[str, Any]

    written: frozenset[str]
    """Dotted names that the file itself, or the command line, gives."""

    read: tuple[str, ...]
    """Files of defaults that were read, as ``group/name``."""

    missing: tuple[str, ...]
    """Those that do not lie beside the file."""

    origins: Mapping[str, str]
    """Dotted name -> file of defaults that it comes from, read or missing."""


def compose(
    file: Path,
    overrides: Sequence[str],
    known: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
) -> Composed:
    """Read ``file`` with its defaults, as Hydra would.

    Args:
        file: YAML file.
        overrides: ``a.b=value`` each; they win over the file.
        known: Values of files that may be missing, by ``group/name``.
        aliases: Section that references name -> section where it is, if the first is not there.

    Raises:
        ConfigError: A file cannot be read, or names itself.
    """
    found = _Found(known)
    values = found.merged(file, overrides, ())
    _resolve(values, aliases)
    own = read_config(file, overrides).values
    written = frozenset(dotted(place) for place, _ in leaves(own))
    return Composed(values, written, tuple(found.read), tuple(found.missing), found.origins)


def leaves(value: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every value below ``value`` that is not a filled mapping, with its place."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from leaves(inner, (*place, key))
        else:
            yield (*place, key), inner


def put(values: dict[str, Any], place: Place, value: Any, *, over: bool = True) -> bool:
    """Write ``value`` to ``place``; return whether it was."""
    inner: dict[Any, Any] = values
    for key in place[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            return False
    if not over and place[-1] in inner:
        return False
    inner[place[-1]] = value
    return True


def listed_defaults(value: object) -> list[tuple[str, str]]:
    """Return ``(group/name, package)`` of a list of defaults, in order; ``_self_`` has no package.

    Overrides of Hydra's own groups change no value and are left out.
    """
    entries = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, dict) and len(entry) == 1:
            ((group, name),) = entry.items()
            group, _, package = str(group).partition("@")
            entry = f"{group}/{name}@{package}" if package else f"{group}/{name}"
        if not isinstance(entry, str) or entry.startswith("override "):
            continue
        if match := _ENTRY.match(entry.removeprefix("optional ")):
            name = match["name"]
            group = name.rpartition("/")[0].replace("/", ".")
            entries.append((name, "" if name == "_self_" else match["package"] or group))
    return entries


@dataclass
class _Found:
    known: Mapping[str, Mapping[str, Any]]
    read: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def merged(
        self, file: Path, overrides: Sequence[str], above: tuple[Path, ...]
    ) -> dict[str, Any]:
        if file in above or len(above) > _DEEPEST:
            chain = " -> ".join(path.name for path in (*above, file))
            raise ConfigError(f"the files of defaults name each other: {chain}")
        own = read_config(file, overrides).values
        entries = listed_defaults(own.pop("defaults", []))
        if not any(name == "_self_" for name, _ in entries):
            entries.append(("_self_", ""))
        values: dict[str, Any] = {}
        for name, package in entries:
            if name == "_self_":
                _merge(values, own)
                continue
            part = self._default(file.parent, name, (*above, file))
            for key in reversed(package.split(".") if package else ()):
                part = {key: part}
            self.origins |= {dotted(place): name for place, _ in leaves(part)}
            _merge(values, part)
        return values

    def _default(self, folder: Path, name: str, above: tuple[Path, ...]) -> dict[str, Any]:
        beside = folder / f"{name}.yaml"
        if beside.is_file():
            self.read.append(name)
            return self.merged(beside, (), above)
        self.missing.append(name)
        return dict(_copied(self.known.get(name, {})))


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _merge(values: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        there = values.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            _merge(there, value)
        else:
            values[key] = _copied(value)


def _resolve(values: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Fill in what other fields of the file say; what they do not say stays as it is written."""
    for _ in range(_DEEPEST):
        known = {dotted(place): value for place, value in leaves(values)}
        for section, actual in aliases.items():
            for name, value in list(known.items()):
                if name.startswith(f"{actual}."):
                    known.setdefault(f"{section}{name.removeprefix(actual)}", value)
        changed = False
        for place, value in list(leaves(values)):
            if isinstance(value, str) and "${" in value:
                filled = _filled(value, known)
                changed |= filled != value
                put(values, place, filled)
        if not changed:
            return


def _filled(text: str, known: Mapping[str, Any]) -> Any:
    if whole := _REFERENCE.fullmatch(text):
        return known.get(whole[1], text)

    def said(match: re.Match[str]) -> str:
        value = known.get(match[1])
        plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        return str(value) if plain else match[0]

    return _REFERENCE.sub(said, text)
