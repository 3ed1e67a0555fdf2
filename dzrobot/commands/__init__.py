"""The commands, one thin module each, and the line that every one of them ends with."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator

from dzrobot.process import is_first_to_report, is_step

Next = str | Callable[[Namespace], str]
"""What a command's module declares as ``NEXT``: a template of the command that a person types next,
with attributes of the parsed arguments in braces, or a function that returns such a template."""


def following(step: Next, arguments: Namespace) -> list[str]:
    """Return the words of the command that comes after one that has succeeded.

    Args:
        step: ``NEXT`` of the command's module.
        arguments: As they were parsed; ``run`` adds what it found, such as a default folder.
    """
    template = step if isinstance(step, str) else step(arguments)
    return [word for part in template.split() for word in _filled(part, vars(arguments))]


def say_next(step: Next, arguments: Namespace) -> None:
    """Print the command that comes next to stderr, once; what stdout holds may be read by programs.

    A command that does not return, as a server, calls this itself when it is ready. Of a command
    that another one has started as a step, nothing is said: that one knows what comes next.

    Args:
        step: ``NEXT`` of the command's module.
        arguments: As they were parsed, with what was found.
    """
    if "next_is_said" in arguments or is_step():
        return
    arguments.next_is_said = True
    line = f"next: {shlex.join(following(step, arguments))}"
    if is_first_to_report(line):
        print(line, file=sys.stderr, flush=True)


def _filled(part: str, found: dict[str, object]) -> Iterator[str]:
    """Yield the word that ``part`` stands for; of a list alone in braces, each of its words."""
    value = found.get(part[1:-1]) if part[:1] + part[-1:] == "{}" else None
    if isinstance(value, list | tuple):
        yield from map(str, value)
    else:
        yield part.format_map(found)
