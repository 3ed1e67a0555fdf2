"""Reference pages made from the code itself: commands, configuration fields, public names.

`mkdocs build` calls this file as a hook; nothing that it writes lies in the repository. A public
name without documentation ends the build.
"""

import argparse
import ast
import html
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    # The code beside these pages is described, wherever another copy is installed.
    sys.path.insert(0, str(ROOT))

import dzrobot  # noqa: E402
from dzrobot import errors  # noqa: E402
from dzrobot.cli import COMMANDS, available, build_parser  # noqa: E402
from dzrobot.configuration import field_notes  # noqa: E402
from dzrobot.envs.franka.franka_config import FrankaConfig  # noqa: E402
from dzrobot.envs.teleop.devices import DEVICES  # noqa: E402
from dzrobot.training.recipes import rlinf, rlinf_files  # noqa: E402
from dzrobot.training.sft_config import SFTConfig  # noqa: E402

CONFIGURATIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Training recipe", "A YAML file for `dzrobot train`, or `section.field=value`.", SFTConfig),
    ("Workcell", "`cell.yaml`: what is around one arm.", FrankaConfig),
    *(
        (f"Device {name}", f"`--teleop {name}`, each field by `--teleop-arg`.", kind.settings)
        for name, kind in DEVICES.items()
    ),
)

ARRAYS = ("NDArray", "ndarray", "Tensor")
"""Annotations whose shape a docstring has to say."""


ELSEWHERE = {"metadata", "observation_space", "action_space", "render_mode", "model_config"}
"""Attributes that Gymnasium and pydantic define and document."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List a page per package under Reference, so that a new package needs no entry by hand."""
    reference = next(entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    pages = [{name: f"reference/python/{name}.md"} for name in ["dzrobot", *packages()]]
    reference.append({"All modules": pages})
    return config


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the reference pages.

    Raises:
        PluginError: a public name is not documented.
    """
    missing = complaints(griffe.load("dzrobot", search_paths=[str(ROOT)]))
    if missing:
        raise PluginError("public names that are not documented:\n  " + "\n  ".join(missing))
    pages = {"commands": commands(), "configuration": configuration(), "rlinf": names_of_rlinf()}
    pages |= {"python": doors()}
    pages |= {f"python/{name}": modules(name) for name in ["dzrobot", *packages()]}
    for name, lines in pages.items():
        content = "\n".join(lines) + "\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def commands() -> Iterator[str]:
    """Yield the page of all commands and their options."""
    yield "# Command line\n\n`dzrobot COMMAND --help` prints the same; so does"
    yield "`python -m dzrobot COMMAND --help`.\n"
    for name, module in available().items():
        parser = build_parser(f"dzrobot {name}", import_module(module))
        purpose = COMMANDS[name][1]
        yield f"\n## dzrobot {name}\n\n{purpose[:1].upper()}{purpose[1:]}.\n"
        yield f"```text\n{_plain_help(parser)}\n```"


def _plain_help(parser: argparse.ArgumentParser) -> str:
    # Of its own width, whatever the terminal's.
    os.environ["COLUMNS"] = "100"
    return re.sub(r"\x1b\[[0-9;]*m", "", parser.format_help()).strip()


def configuration() -> Iterator[str]:
    """Yield every field of every configuration file with type, default and meaning."""
    yield "# Configuration\n\nUnknown fields and wrong values are errors that name them."
    for title, purpose, model in CONFIGURATIONS:
        yield f"\n## {title}\n\n{purpose}\n\n| field | type | default | meaning |"
        yield "|---|---|---|---|"
        for field in field_notes(model):
            # A bar within backticks would show its backslash; long names may break after a dot.
            code = [html.escape(text).replace("|", "&#124;") for text in (field.name, field.type)]
            cells = [f"<code>{text}</code>" for text in (code[0].replace(".", ".<wbr>"), code[1])]
            cells += [_cell(field.default), _cell(field.meaning)]
            yield f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def names_of_rlinf() -> Iterator[str]:
    """Yield what the names of RLinf's recipes are here, from the table that a recipe is read by."""
    yield "# Names of RLinf's recipes\n"
    yield "`dzrobot import-rlinf YAML` writes a whole recipe of theirs"
    yield "as one of ours and lists what it dropped. A name of theirs in a recipe or on the command"
    yield "line is refused with its name here."
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
        yield f"\n## {title}\n\n| there | here |\n|---|---|"
        for theirs, ours in rows:
            yield f"| {_cell(theirs)} | {_cell(ours)} |"
    yield "\n## Where a file is silent\n\nA recipe that `dzrobot import-rlinf` writes has these"
    yield f"values of RLinf {rlinf_files.VERSION}, not our defaults.\n\n| field here | value |"
    yield "|---|---|"
    for name, value in rlinf_files.PROGRAM.items():
        yield f"| `{name}` | {_cell(str(value))} |"


def doors() -> Iterator[str]:
    """Yield the names that packages export, each with its first sentence and a link.

    The link is resolved when the site is built, so an exported name without an entry in the
    reference is an error there.
    """
    yield "# Python\n\nThe names to start from. They are loaded when they are used first; editors"
    yield "and type checkers see them. All modules: see the pages that follow."
    for package, names in exports(griffe.load("dzrobot", search_paths=[str(ROOT)])):
        yield f"\n## {package}\n\n| name | what it is |\n|---|---|"
        for name, member in names.items():
            first = member.docstring.value.split("\n\n")[0] if member.docstring else ""
            meaning = _cell(re.sub(r":[a-z]+:", "", first))
            yield f"| [`{name}`][{member.canonical_path}] | {meaning} |"


def modules(package: str) -> Iterator[str]:
    """Yield one entry a public module of ``package``, which mkdocstrings fills."""
    yield f"# {package}\n\nA name with a leading underscore is ours and may change."
    if package == "dzrobot":
        found = [
            module.name
            for module in pkgutil.iter_modules(dzrobot.__path__, "dzrobot.")
            if not module.ispkg
        ]
    else:
        full = f"dzrobot.{package}"
        inside = pkgutil.walk_packages(import_module(full).__path__, f"{full}.")
        found = [full, *(module.name for module in inside)]
    for name in found:
        if not any(part.startswith("_") for part in name.split(".")):
            yield f"\n::: {name}"


def packages() -> list[str]:
    """Return the packages right below dzrobot."""
    return [module.name for module in pkgutil.iter_modules(dzrobot.__path__) if module.ispkg]


def exports(package: griffe.Module) -> Iterator[tuple[str, dict[str, griffe.Object]]]:
    """Yield each package that exports names (``__all__``), with what they are."""
    if package.exports:
        found: dict[str, griffe.Object] = {}
        for name in map(str, package.exports):
            member: Any = package[name]
            found[name] = member.final_target if member.is_alias else member
        yield package.path, found
    for member in package.members.values():
        if isinstance(member, griffe.Module):
            yield from exports(member)


def complaints(package: griffe.Module) -> list[str]:
    """Return what a reader of the reference would miss, one line each.

    Everything public has a docstring. What packages export is held to more: attributes are
    documented, parameters named, arrays have a shape, and errors are said where they are raised.
    """
    exported = {member.path: member for _, names in exports(package) for member in names.values()}
    lines = [f"{found.path}: no docstring" for found in _bare(package)]
    for member in exported.values():
        lines += _gaps(member)
    return lines


def _bare(owner: griffe.Object) -> Iterator[griffe.Object]:
    """Yield modules, classes, functions and methods without a docstring."""
    for member in _public(owner):
        if not member.is_attribute:
            if not member.has_docstring and not _is_empty(member):
                yield member
            if not member.is_function:
                yield from _bare(member)


def _is_empty(member: griffe.Object) -> bool:
    """Return whether this is a package whose ``__init__`` only marks a folder."""
    return member.is_module and not [m for m in member.members.values() if not m.is_module]


def _public(owner: griffe.Object) -> Iterator[griffe.Object]:
    for name, member in owner.members.items():
        if isinstance(member, griffe.Object) and not name.startswith("_"):
            yield member


def _gaps(member: griffe.Object) -> Iterator[str]:
    text = member.docstring.value if member.docstring else ""
    if isinstance(member, griffe.Function):
        for parameter in member.parameters:
            name = parameter.name.lstrip("*")
            if name not in ("self", "cls") and not re.search(rf"\b{name}\b", text):
                yield f"{member.path}: says nothing of the parameter {name!r}"
        annotations = [member.returns, *(p.annotation for p in member.parameters)]
        if any(word in str(found) for found in annotations for word in ARRAYS) and "(" not in text:
            yield f"{member.path}: takes or returns an array and says no shape"
        for error in sorted(_raised(member)):
            if error not in text:
                yield f"{member.path}: raises {error} and does not say so"
    elif isinstance(member, griffe.Class):
        for inside in _public(member):
            # The page shows the annotation, and with it the help of the option.
            said = inside.has_docstring or "Flag(" in str(inside.annotation)
            if inside.is_attribute and not said and inside.name not in ELSEWHERE:
                yield f"{inside.path}: an attribute without a docstring"
            yield from _gaps(inside)


def _raised(function: griffe.Function) -> set[str]:
    """Return the names of our errors that ``function`` itself raises."""
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    raises = [
        node for node in ast.walk(ast.parse(_source(function))) if isinstance(node, ast.Raise)
    ]
    called = {ast.unparse(node.exc.func) for node in raises if isinstance(node.exc, ast.Call)}
    return called & known


def _source(function: griffe.Function) -> str:
    lines = function.source.splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)
