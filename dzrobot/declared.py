"""What annotations declare: flags of the command line, and what a public call takes.

The field of a dataclass holds type, default and help of its flag once;
``dzrobot.commands.options.flags`` makes parsers of them, and objects of what a parser found.
"""

import functools
import inspect
import numbers
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dzrobot.errors import ConfigError, printable, suggest

P = ParamSpec("P")
R = TypeVar("R")

Kind = Literal["device", "devices", "GiB", "names", "numbers", "path", "shard"]
"""What text stands for where the field's type does not say it."""


@dataclass(frozen=True, eq=False)
class Flag:
    """How a user gives a field on the command line; belongs into the field's ``Annotated``."""

    help: str
    _: KW_ONLY
    name: str | None = None
    """Without its dashes. None: as the field is called."""

    alias: str | None = None
    """Another name of the flag."""

    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    """Bounds of a number; a whole number has at least the first."""

    kind: Kind | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
    """Words that are taken besides those of a ``Literal``, and what each stands for."""

    becomes: Callable[[Any], Any] | None = None
    """Makes the field's value of the flag's. None: they are the same."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A field that has a flag."""

    field: str
    flag: Flag
    type: Any
    """The field's, without what ``Annotated`` adds."""

    default: Any
    """None where the field has none."""

    @property
    def option(self) -> str:
        """Return the flag as it is written, such as ``--dit-steps``."""
        return "--" + (self.flag.name or self.field).replace("_", "-")

    @property
    def options(self) -> tuple[str, ...]:
        """Return the flag, and its other name."""
        return (self.option, *(() if self.flag.alias is None else (f"--{self.flag.alias}",)))

    @property
    def dest(self) -> str:
        """Return the attribute of a parser's result that holds what was given."""
        return self.option[2:].replace("-", "_")


def declared(cls: type, marker: type = Flag) -> Iterator[Declared]:
    """Yield the fields of a dataclass that have a flag: its own first, then those it inherits.

    Args:
        cls: The dataclass.
        marker: Instead, those whose ``Annotated`` has one of these, with a flag or without.
    """
    hints = get_type_hints(cls, include_extras=True)
    defaults = {one.name: one.default for one in fields(cls)}
    names = [name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})]
    for name in dict.fromkeys(names):
        if name not in defaults or get_origin(hints[name]) is not Annotated:
            continue
        of, *notes = get_args(hints[name])
        if any(isinstance(note, marker) for note in notes):
            flag = next((note for note in notes if isinstance(note, Flag)), Flag(""))
            default = None if defaults[name] is MISSING else defaults[name]
            yield Declared(field=name, flag=flag, type=of, default=default)


def at_the_door(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function that refuses arguments its annotations do not allow.

    What is annotated with ``Any``, a protocol, or a name that is imported for type checkers alone
    is not looked at.

    Raises:
        ConfigError: says what was given, and what is allowed.
    """
    parameters = inspect.signature(function).parameters
    what = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in [*zip(parameters, args, strict=False), *kwargs.items()]:
            known = parameters.get(name)
            if known is not None and (fault := misfit(known.annotation, value)):
                raise ConfigError(f"{what}: {name}={fault}")
        return function(*args, **kwargs)

    return checked


def check_fields(given: Any) -> None:
    """Check every field of a dataclass against its annotation; called by ``__post_init__``.

    Raises:
        ConfigError: names all that are not allowed.
    """
    kind: Any = type(given)
    hints = _field_types(kind)
    faults = [
        f"{name}={fault}"
        for name, hint in hints.items()
        if (fault := misfit(hint, vars(given)[name]))
    ]
    if faults:
        raise ConfigError("; ".join(faults))


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def misfit(annotation: Any, value: Any) -> str:
    """Return why a value is not of the annotated type, with what is allowed; empty: it is."""
    members = list(_members(annotation))
    words = [word for member in members if get_origin(member) is Literal
             for word in get_args(member)]  # fmt: skip
    kinds = [member for member in members if get_origin(member) is not Literal]
    if any(_is_of(kind, value) for kind in kinds) or any(
        value == word and type(value) is type(word) for word in words
    ):
        return ""
    shown = printable(repr(value), 60)
    near = suggest(value, [word for word in words if isinstance(word, str)]) if isinstance(
        value, str
    ) else ""  # fmt: skip
    allowed = [repr(word) for word in words] + [_name(kind) for kind in kinds]
    return f"{shown} ({type(value).__name__}); allowed: {', '.join(allowed)}.{near}"


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _is_of(kind: Any, value: Any) -> bool:
    kind = get_origin(kind) or kind
    if kind is None:
        return value is None
    if kind is inspect.Parameter.empty:
        return True
    if kind is Sequence:
        # A text is a sequence too, of letters, and is not meant by one.
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if kind in (int, float):
        # Numbers of NumPy count as what they are.
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:
        # A protocol, which cannot be asked.
        return True


def _name(kind: Any) -> str:
    known = get_origin(kind) or kind
    if known in (None, type(None)):
        return "None"
    return known.__name__ if isinstance(known, type) else str(known)
