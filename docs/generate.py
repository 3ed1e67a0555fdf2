"""Reference pages made from the code itself: commands, configuration fields, public names.

`mkdocs build` runs this file; nothing that it writes lies in the repository.
"""

import argparse
import io
import os
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import mkdocs_gen_files
from pydantic import BaseModel

import dzrobot
from dzrobot.cli import COMMANDS, available, build_parser
from dzrobot.config import field_notes
from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.training import rlinf
from dzrobot.training.config import SFTConfig

CONFIGURATIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Training recipe", "A YAML file for `dzrobot train`, or `section.field=value`.", SFTConfig),
    ("Workcell", "`cell.yaml`: what is around one arm.", FrankaConfig),
)


def parsers() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield each command with what it does and its parser."""
    for name, module in available().items():
        yield name, COMMANDS[name][1], build_parser(f"dzrobot {name}", import_module(module))


def write_commands(page: io.TextIOBase) -> None:
    """Write every command with its options."""
    page.write("# Command line\n\n`dzrobot COMMAND --help` prints the same.\n")
    for name, purpose, parser in parsers():
        page.write(f"\n## dzrobot {name}\n\n{purpose[:1].upper()}{purpose[1:]}.\n\n")
        page.write(f"```text\n{_plain_help(parser)}\n```\n")


def _plain_help(parser: argparse.ArgumentParser) -> str:
    # Of its own width, whatever the terminal's.
    os.environ["COLUMNS"] = "100"
    return re.sub(r"\x1b\[[0-9;]*m", "", parser.format_help()).strip()


def write_configuration(page: io.TextIOBase) -> None:
    """Write every field of every configuration file with type, default and meaning."""
    page.write("# Configuration\n\nUnknown fields and wrong values are errors that name them.\n")
    for title, purpose, model in CONFIGURATIONS:
        page.write(f"\n## {title}\n\n{purpose}\n\n| field | type | default | meaning |\n")
        page.write("|---|---|---|---|\n")
        for field in field_notes(model):
            cells = (f"`{field.name}`", f"`{field.type}`", field.default, field.meaning)
            page.write("| " + " | ".join(_cell(text) for text in cells) + " |\n")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def write_rlinf(page: io.TextIOBase) -> None:
    """Write what the names of RLinf's recipes are here, from the table that a recipe is read by."""
    page.write(
        "# Names of RLinf's recipes\n\n`dzrobot import-rlinf YAML` writes a whole recipe of theirs "
        "as one of ours and lists what it dropped. A name of theirs in a recipe or on the command "
        "line is refused with its name here.\n"
    )
    tables: tuple[tuple[str, Iterator[tuple[str, str]]], ...] = (
        ("Sections", ((f"`{a}.*`", f"`{b}.*`") for a, b in rlinf.SECTIONS.items())),
        ("Fields", ((f"`{a}`", f"`{b}`") for a, b in rlinf.RENAMED.items())),
        ("Values, taken as they are", (
            (f"`{name}={value}`", ", ".join(f"`{a}={b}`" for a, b in meaning.items()))
            for name, meanings in rlinf.VALUES.items() for value, meaning in meanings.items()
        )),
        ("Without a counterpart", ((f"`{a}`", b) for a, b in sorted(rlinf.DROPPED.items()))),
    )  # fmt: skip
    for title, rows in tables:
        page.write(f"\n## {title}\n\n| there | here |\n|---|---|\n")
        for theirs, ours in rows:
            page.write(f"| {_cell(theirs)} | {_cell(ours)} |\n")


def write_python(page: io.TextIOBase) -> None:
    """Write one entry a public module, which mkdocstrings fills."""
    page.write("# Python\n\nPublic names by module. A name with a leading underscore is ours.\n")
    for module in public_modules(dzrobot):
        page.write(f"\n::: {module}\n")


def public_modules(package: ModuleType) -> Iterator[str]:
    """Yield the names of the package's public modules, the top first."""
    yield package.__name__
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield found.name


for _name, _write in (
    ("reference/commands.md", write_commands),
    ("reference/configuration.md", write_configuration),
    ("reference/rlinf.md", write_rlinf),
    ("reference/python.md", write_python),
):
    with mkdocs_gen_files.open(_name, "w") as _page:
        _write(_page)
