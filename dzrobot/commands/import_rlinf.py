"""``dzrobot import-rlinf``: a training or evaluation file of RLinf as one of ours."""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_text
from dzrobot.training.recipes.rlinf_evaluation import (
    ImportedEvaluation,
    import_evaluation,
    is_evaluation,
)
from dzrobot.training.recipes.rlinf_files import ALIASES, FILES, VERSION, compose
from dzrobot.training.recipes.rlinf_import import Imported, Note, import_composed

_WIDTH = 98


def _next(arguments: argparse.Namespace) -> str:
    return "sh {output}" if arguments.output.suffix == ".sh" else "dzrobot plan {output}"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot import-rlinf``."""
    parser.description = (
        "Read a training file of RLinf (YAML) and write it as a recipe of ours, by what its fields "
        "mean there; or an evaluation file, as a `dzrobot eval`. Every field is taken over, "
        "refused, or listed as without effect here; what the file leaves out has RLinf's default."
    )
    parser.add_argument("recipe", type=flags.path, help="RLinf's YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="under RLinf's names; wins over the file"
    )
    parser.add_argument(
        "--output", type=flags.output, metavar="FILE",
        help="recipe (.yaml) or command (.sh) to write (default: its name with _dzrobot, in this "
        "folder)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Translate, write, and say what differs and what is still to be given."""
    source: Path = arguments.recipe
    composed = compose(source, arguments.overrides, FILES, ALIASES)
    evaluates = is_evaluation(composed.values)
    suffix = "sh" if evaluates else "yaml"
    output: Path = arguments.output or flags.path(f"{source.stem}_dzrobot.{suffix}")
    arguments.output = output
    if output.exists():
        raise ConfigError(f"{output} exists; give another --output, or move it away")
    head = [f"Written by `dzrobot import-rlinf {source.name}`."]
    done = import_evaluation(source, composed) if evaluates else import_composed(source, composed)
    head += _sections(done)
    if isinstance(done, ImportedEvaluation):
        body = f"{done.line}\n"
        said = [f"{output}: an evaluation, not a training run:", f"  {done.line}"]
    else:
        body = yaml.safe_dump(done.values, sort_keys=False)
        said = [f"{output}: {sum(map(_count, done.values.values()))} fields"]
    tail = ["Without effect here:", *_grouped(done.unused)] if done.unused else []
    with explained(f"write {output}", ConfigError):
        write_text(output, f"{_comment(head)}{body}{_comment(tail)}")
    for line in (*said, *head[1:]):
        print(line)
    if done.unused:
        print(f"Without effect here: {len(done.unused)} fields, listed at the end of {output}")
    return 0


def _sections(done: Imported | ImportedEvaluation) -> Iterator[str]:
    """Yield what a reader must know, what changes a run first."""
    if isinstance(done, Imported):
        yield from _listed("Otherwise than with RLinf:", done.changed)
        yield from _listed("`dzrobot train` refuses it as it stands:", done.stopped)
        sources = [(name, f"({source})") for name, source in done.defaults]
        yield from _listed("The file leaves out, and RLinf's default is not ours:", sources, " ")
    title = f"Not beside the file; taken from the table of RLinf {VERSION}'s defaults:"
    yield from _listed(title, done.missing)
    if isinstance(done, Imported) and done.needed:
        yield f"Still to be given: {' '.join(f'{name}=...' for name in done.needed)}"


def _listed(title: str, notes: Sequence[Note], join: str = ": ") -> Iterator[str]:
    if notes:
        yield title
        yield from (f"  {name}{join}{text}" for name, text in notes)


def _grouped(notes: Sequence[Note]) -> Iterator[str]:
    """Yield each reason once, with its fields."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in notes:
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield f"  {', '.join(names)}: {reason}"


def _comment(lines: Sequence[str]) -> str:
    wrapped = [
        part for line in lines for part in textwrap.wrap(
            line, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
    ]  # fmt: skip
    return "".join(f"# {line}\n" for line in wrapped)


def _count(section: object) -> int:
    return len(section) if isinstance(section, dict) else 1
