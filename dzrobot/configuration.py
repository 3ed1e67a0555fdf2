"""One strict way from a YAML file and ``key=value`` overrides to a frozen, typed configuration."""

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from dzrobot.documents import read_bytes, shorten
from dzrobot.errors import ConfigError, suggest
from dzrobot.files import check_path
from dzrobot.yaml_values import DEEPEST, LARGEST, Place, dotted, read_yaml

Model = TypeVar("Model", bound=BaseModel)

_POSITION = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")
GIVEN = "given as"
"""How the origin of an override begins."""

_SHOWN = 40
"""Faults that one error lists."""


class FrozenConfig(BaseModel):
    """Base of configurations: never edited after construction, unknown fields are errors.

    Values are taken as they are written: ``"5"`` is not a number and ``1`` is not a boolean. A list
    becomes a tuple, text a path, and ``1e3`` an integer where the field asks for one.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_written(cls, value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        taken = handler(value)
        if isinstance(taken, Path):
            check_path(taken)
        for written, became in _bent(value, taken):
            kinds = {str: "text", bool: "a boolean", int: "a number", float: "a number"}
            raise ValueError(
                f"got {written!r}, which is {kinds[type(written)]}; allowed: {kinds[type(became)]}"
            )
        return taken


@dataclass(frozen=True)
class FieldNote:
    """One field of a configuration, for people."""

    name: str
    """Dotted, as in ``name=value``; ``*`` stands for a position or a key of the user's."""

    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class RawConfig:
    """Values as they were written, and where each was written."""

    values: dict[str, Any]
    origins: Mapping[Place, str] = field(default_factory=dict)
    """``file:line`` or the override itself, by place."""

    def where(self, place: Place) -> str:
        """Return where the value at ``place`` was written, else what it holds or is in; else ''."""
        if place in self.origins:
            return self.origins[place]
        for known, origin in self.origins.items():
            if known[: len(place)] == place:
                return origin
        for length in range(len(place) - 1, 0, -1):
            if place[:length] in self.origins:
                return self.origins[place[:length]]
        return ""

    def build(self, model: type[Model], faults: Sequence[tuple[str, str]] = ()) -> Model:
        """Return the values as a ``model``.

        Args:
            model: What to build.
            faults: Already known; reported together with those of the values.

        Raises:
            ConfigError: they do not fit, or ``faults`` are given; one line per fault.
        """
        try:
            built = model.model_validate(self.values)
        except ValidationError as error:
            raise self.error([*faults, *_faults(error, model)]) from error
        if faults:
            raise self.error(faults)
        return built

    def faults(self, model: type[BaseModel]) -> list[tuple[str, str]]:
        """Return what keeps the values from being a ``model``: dotted field and message each."""
        try:
            model.model_validate(self.values)
        except ValidationError as error:
            return _faults(error, model)
        return []

    def error(self, faults: Sequence[tuple[str, str]]) -> ConfigError:
        """Return the error that lists ``faults``, pairs of dotted field and message."""
        lines = []
        for name, message in faults[:_SHOWN]:
            origin = self.where(place_of(name))
            lines.append(f"  {name}: {message}" + (f" ({origin})" if origin else ""))
        if len(faults) > _SHOWN:
            lines.append(f"  and {len(faults) - _SHOWN} more")
        count = f"{len(faults)} fault" + ("s" if len(faults) != 1 else "")
        return ConfigError("\n".join([f"the configuration has {count}:", *lines]))


def load_config(
    model: type[Model],
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Model:
    """Return a ``model`` from ``source`` with ``overrides`` on top.

    Args:
        model: The pydantic model to build; its own rules decide.
        source: YAML file, or a mapping; None for an empty one.
        overrides: ``a.b=value`` each, the value read as YAML; ``a.0.b=value`` for list items.

    Raises:
        ConfigError: the file cannot be read, or any value is unknown or wrong. All faults are
            listed, one a line: dotted name, what is wrong, what to do, and where it was written.
    """
    return read_config(source, overrides).build(model)


def read_config(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> RawConfig:
    """Return the values of ``source`` with ``overrides`` on top, unchecked; see `load_config`.

    Raises:
        ConfigError: the file is missing, no YAML mapping, names a key twice; or an override is not
            ``key=value``.
    """
    if isinstance(source, str | Path):
        values, origins = _read_file(Path(source))
    else:
        values, origins = _copied(dict(source or {})), {}
    for override in overrides:
        place, value = _parsed(override)
        _put(values, place, value, override)
        origins = {known: at for known, at in origins.items() if known[: len(place)] != place}
        origins[place] = f"{GIVEN} {shorten(override)}"
    return RawConfig(values, origins)


def field_notes(model: type[BaseModel], prefix: str = "") -> Iterator[FieldNote]:
    """Yield every field of ``model`` and of the sections below it, in order."""
    for name, info in model.model_fields.items():
        sections = list(dict.fromkeys(_models(info.annotation)))
        many = typing.get_origin(info.annotation) in (tuple, list, dict)
        if not sections or not info.is_required():
            yield FieldNote(
                name=prefix + name,
                type=_type_name(info.annotation),
                default="needed" if info.is_required() else _default(info.get_default()),
                meaning=info.description or "",
            )
        for section in sections:
            yield from field_notes(section, f"{prefix}{name}.{'*.' if many else ''}")


def _default(value: object) -> str:
    return type(value).__name__ if isinstance(value, BaseModel) else shorten(value)


def _type_name(annotation: Any) -> str:
    """Return a type as it is written in code, without the checks attached to it."""
    inner = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case typing.Annotated:
            return _type_name(inner[0])
        case typing.Union | types.UnionType:
            return " | ".join(map(_type_name, inner))
        case typing.Literal:
            return " | ".join(map(repr, inner))
        case None:
            if annotation is type(None):
                return "null"
            return (
                "..."
                if annotation is ...
                else (annotation.__name__ if isinstance(annotation, type) else str(annotation))
            )
        case origin:
            return f"{origin.__name__}[{', '.join(map(_type_name, inner))}]"


def _bent(value: object, taken: object) -> Iterator[tuple[object, object]]:
    """Yield every (written, became) where one kind of value was read as another."""
    scalars = (str, bool, int, float)
    if isinstance(value, list | tuple) and isinstance(taken, list | tuple):
        for one, other in zip(value, taken, strict=False):
            yield from _bent(one, other)
    elif type(value) in scalars and type(taken) in scalars:
        text = isinstance(value, str) != isinstance(taken, str)
        if text or isinstance(value, bool) != isinstance(taken, bool):
            yield value, taken


def _read_file(path: Path) -> tuple[dict[str, Any], dict[Place, str]]:
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}; write the folder's full name") from error
    try:
        text = read_bytes(path, ConfigError, largest=LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as such"
        ) from error
    values, lines = read_yaml(text, str(path))
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a configuration is a mapping")
    # Aliases give one object several places; an override is meant for one of them.
    return _copied(values), {place: f"{path}:{line}" for place, line in lines.items()}


def _parsed(override: str) -> tuple[Place, Any]:
    name, equals, text = override.partition("=")
    if not equals or not name or not all(name.split(".")):
        raise ConfigError(
            f"{shorten(override)} is not an override; write key=value or section.key=value"
        )
    if name.count(".") >= DEEPEST:
        raise ConfigError(f"{shorten(override)}: a name has at most {DEEPEST} parts")
    return place_of(name), parse_value(text)


def parse_value(text: str) -> Any:
    """Return ``text`` read as a YAML value: ``1e-4`` a float, ``[1, 2]`` a list, ``null`` None.

    Raises:
        ConfigError: it is not YAML.
    """
    value, _ = read_yaml(text, shorten(text))
    return value


def _put(values: dict[str, Any], place: Place, value: Any, override: str) -> None:
    inner: Any = values
    for depth, key in enumerate(place):
        if isinstance(inner, list):
            if not isinstance(key, int) or key >= len(inner):
                raise ConfigError(
                    f"{shorten(override)}: {dotted(place[:depth])} is a list of {len(inner)} "
                    "items; name one by its position, from 0"
                )
        elif not isinstance(inner, dict):
            raise ConfigError(
                f"{shorten(override)}: {dotted(place[:depth])} is a value, not a section"
            )
        if depth == len(place) - 1:
            inner[key] = value
        elif isinstance(inner, list):
            inner = inner[int(key)]
        else:
            inner = inner.setdefault(key, {})
            if inner is None:
                raise ConfigError(
                    f"{shorten(override)}: {dotted(place[: depth + 1])} is null, not a section"
                )


def lay_over(values: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put ``over`` on top of ``values``, section by section; a list is one value.

    Args:
        values: Sections, which are changed.
        over: Stays as it is.
    """
    for key, value in over.items():
        there = values.get(key)
        if isinstance(there, dict) and isinstance(value, Mapping):
            lay_over(there, value)
        else:
            values[key] = _copied(value)


def _copied(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _copied(item) for key, item in value.items()}
        case list() | tuple():
            return [_copied(item) for item in value]
    return value


def place_of(name: str) -> Place:
    """Return the place of a dotted name: its keys, and list positions as numbers."""
    # int() takes digits of every script, and "²" is one that it does not take.
    return tuple(int(part) if _POSITION.match(part) else part for part in name.split("."))


def _faults(error: ValidationError, model: type[BaseModel]) -> list[tuple[str, str]]:
    """Return ``(dotted name, message)`` of every fault, one per field."""
    found: dict[Place, list[str]] = {}
    # More than anyone reads: sorting out the places costs the square of their number.
    for fault in error.errors(include_url=False)[: 10 * _SHOWN]:
        place, models = _resolve(fault["loc"], model)
        match fault["type"]:
            case "extra_forbidden":
                known = sorted({name for owner in models for name in owner.model_fields})
                guess = suggest(str(place[-1]), known) or _elsewhere(str(place[-1]), model)
                message = f"no such field.{guess} Known: {', '.join(known)}"
            case "missing":
                message = "is needed; give it a value"
            case "value_error" | "assertion_error":
                message = fault["msg"].partition(", ")[2]
            case "model_type" | "model_attributes_type":
                inner = _inner(models, place[-1] if isinstance(place[-1], str) else place[-2])
                message = f"got {shorten(fault['input'])}, allowed: a map of {', '.join(inner)}"
            case _:
                what = fault["msg"].removeprefix("Input should be ")
                message = f"got {shorten(fault['input'])}, allowed: {what}"
        found.setdefault(place, []).append(message)
    # Every branch of a union reports: what lies deeper is the branch that was meant.
    deepest = [
        place
        for place in found
        if not any(other != place and other[: len(place)] == place for other in found)
    ]
    return [(dotted(place), "; or ".join(dict.fromkeys(found[place]))) for place in deepest]


def _elsewhere(name: str, model: type[BaseModel]) -> str:
    """Return a suggestion if ``name`` is a field of another section."""
    for path in _fields(model, ""):
        if path.endswith(f".{name}"):
            return f" Did you mean {path!r}?"
    return ""


def _fields(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _models(info.annotation):
            yield from _fields(inner, f"{prefix}{name}.")


def _resolve(
    loc: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[Place, list[type[BaseModel]]]:
    """Return the place without pydantic's branch names, and the models that own its last key."""
    models: list[type[BaseModel]] = [model]
    owners = models
    place: list[str | int] = []
    for index, key in enumerate(loc):
        fields = [owner.model_fields[key] for owner in models if key in owner.model_fields]
        last = index == len(loc) - 1
        if isinstance(key, int):
            place.append(key)
        elif fields:
            place.append(key)
            owners = models
            models = [inner for info in fields for inner in _models(info.annotation)]
        elif last and not _is_branch(key, models):
            place.append(key)
            owners = models
        elif named := [owner for owner in models if owner.__name__ == key]:
            models = named
    return tuple(place), owners


def _inner(owners: Sequence[type[BaseModel]], key: object) -> list[str]:
    """Return the fields of the sections that the field ``key`` of ``owners`` holds."""
    fields = [owner.model_fields[key] for owner in owners if key in owner.model_fields]
    models = [inner for info in fields for inner in _models(info.annotation)]
    return sorted({name for model in models for name in model.model_fields})


def _is_branch(key: str, models: Sequence[type[BaseModel]]) -> bool:
    """Return whether pydantic names a branch of a union, rather than a key, by ``key``."""
    kinds = {"str", "int", "float", "bool", "path", "dict", "list", "tuple", "none", "constrained"}
    return (
        key in {model.__name__ for model in models}
        or re.split(r"[-\[(]", key)[0] in kinds | {"function", "literal", "lax", "json"}
        or key.startswith("is-")
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)
