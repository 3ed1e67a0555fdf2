"""``dzrobot import-rlinf``: one of RLinf's recipes as one of ours."""

import argparse
import textwrap

import yaml

from dzrobot.commands.options import flags
from dzrobot.configuration import read_config
from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_text
from dzrobot.training.recipes.rlinf import import_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot import-rlinf``."""
    parser.description = (
        "Read a recipe of RLinf (YAML) and write it under the names of ours. What has no "
        "counterpart is listed, here and at the head of the new file, with what to do instead."
    )
    parser.add_argument("recipe", type=flags.path, help="RLinf's YAML file")
    parser.add_argument(
        "--output", type=flags.path, metavar="YAML",
        help="recipe to write (default: its name with _dzrobot, in this folder)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Translate, write, and say what was left out and what is still to be given."""
    source = arguments.recipe
    output = arguments.output or flags.path(f"{source.stem}_dzrobot.yaml")
    if output.exists():
        raise ConfigError(f"{output} exists; give another --output, or move it away")
    done = import_recipe(read_config(source))
    notes = [f"{name}: {reason}" for name, reason in done.dropped]
    needed = [f"{name}=..." for name in done.needed]
    head = [f"Written by `dzrobot import-rlinf {source.name}`."]
    if notes:
        head += ["Not taken over:", *(f"  {note}" for note in notes)]
    if needed:
        head += [f"Still to be given: {' '.join(needed)}"]
    lines = [part for line in head for part in textwrap.wrap(line, 98, subsequent_indent="    ")]
    comment = "".join(f"# {line}\n" for line in lines)
    with explained(f"write {output}", ConfigError):
        write_text(output, comment + yaml.safe_dump(done.values, sort_keys=False))
    print(f"{output}: {sum(map(_count, done.values.values()))} fields")
    for note in notes:
        print(f"not taken over: {note}")
    if needed:
        print(f"still to be given: {' '.join(needed)}")
    return 0


def _count(section: object) -> int:
    return len(section) if isinstance(section, dict) else 1
