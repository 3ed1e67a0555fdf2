"""YAML as people mean it, and no more: plain values, bounded before they are built."""

import math
import re
from collections.abc import Hashable, Iterator
from typing import Any

import yaml

from dzrobot.errors import ConfigError
from dzrobot.untrusted import parsing, reason

Place = tuple[str | int, ...]
"""Keys and list positions from the root to one value."""

LARGEST = 2**20
"""Bytes of a file."""

DEEPEST = 24
"""Levels of nesting. The parser recurses."""

MOST = 10_000
"""Values of a file, counted after its aliases are followed: nine lines can stand for 10^9."""


def read_yaml(text: str, source: str) -> tuple[Any, dict[Place, int]]:
    """Return the value that ``text`` holds, and the line of every key and list item, from 1.

    Args:
        text: One YAML document; nothing at all is None.
        source: Names it in an error.

    Raises:
        ConfigError: it is not YAML, or has what no configuration needs: tags, several documents,
            keys that are neither text nor number, a key twice, an alias inside of its own anchor,
            too much of anything.
    """
    with parsing(source, ConfigError, _fault):
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[Place, int] = {}
        for place, line in _lines(node, ()):
            if place in lines:
                raise ConfigError(
                    f"{dotted(place)} is given twice: {source}:{lines[place]} and {source}:{line}; "
                    "keep one"
                )
            lines[place] = line
        return loader.construct_document(node), lines


def _fault(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        at = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        return f"is not YAML that is taken here: {error.problem or error.context}{at}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"is not YAML: character {error.character!r} at position {error.position}"
    return f"is not YAML: {reason(error)}"


def dotted(place: Place) -> str:
    """Return ``place`` as one name, such as ``data.train_data_paths.0.weight``."""
    return ".".join(map(str, place)) or "the whole"


class _Loader(yaml.SafeLoader):
    """Refuses what is too large, too deep or odd, before any value is made of it.

    PyYAML follows YAML 1.1, which takes `1e-4` for text, `no` for false, `1:30` for ninety, `010`
    for eight and `2026-01-02` for a date. Here they are a number and four words.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0
        self._sizes: dict[int, int] = {}
        """Values below a finished node, aliases followed, by the identity of the node."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if (
            isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
            and event.tag is not None
        ):
            raise _refusal(f"the tag {event.tag!r}; write the value without, text in quotes", event)
        before = self._count
        self._depth += 1
        if self._depth > DEEPEST:
            raise _refusal(f"more than {DEEPEST} levels of nesting", event)
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _refusal(f"*{event.anchor} is inside of itself", event)
            self._count += self._sizes[id(node)]
        else:
            self._count += 1
            self._sizes[id(node)] = self._count - before
        if self._count > MOST:
            raise _refusal(f"more than {MOST} values, aliases followed", event)
        return node

    def construct_text(self, node: yaml.ScalarNode) -> str:
        # Escapes can write what no file name and no UTF-8 text can hold.
        if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in node.value):
            raise _refusal("a NUL or half of a surrogate pair in a text", node)
        return str(node.value)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > 20 or not -(2**63) <= int(node.value) < 2**64:
            raise _refusal(f"the number {node.value[:24]}... has more than 64 bits", node)
        return int(node.value)

    def construct_fraction(self, node: yaml.ScalarNode) -> float:
        value = float(node.value)
        if not math.isfinite(value):
            raise _refusal(f"{node.value[:24]} is larger than any number here", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        made: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        for key in made:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise _refusal(f"the key {key!r}; a key is text or a whole number: quote it", node)
        return made


_KINDS = {
    "null": (r"^(?:~|null|)$", ["~", "n", ""]),
    "bool": (r"^(?:true|false|True|False)$", list("tfTF")),
    "int": (r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    "float": (
        r"^[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$",
        list("-+.0123456789"),
    ),
    "merge": ("^<<$", ["<"]),
}
_Loader.yaml_implicit_resolvers = {}
for _kind, (_pattern, _first) in _KINDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_fraction)


def _refusal(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    mark: Any = at.start_mark
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _lines(node: yaml.Node, place: Place) -> Iterator[tuple[Place, int]]:
    """Yield every key and list item below ``node`` with its line, from 1."""
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                below = (*place, str(key.value))
                yield below, key.start_mark.line + 1
                yield from _lines(value, below)
        case yaml.SequenceNode():
            for index, value in enumerate(node.value):
                below = (*place, index)
                yield below, value.start_mark.line + 1
                yield from _lines(value, below)
