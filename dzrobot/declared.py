"""Options declared once: the field of a dataclass holds type, default and help of its flag.

``dzrobot.commands.options.flags`` makes parsers of them, and objects of what a parser found.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

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
