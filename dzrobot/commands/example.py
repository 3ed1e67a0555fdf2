"""``dzrobot example``: the example programs, listed or written here."""

import argparse
import ast
import json
from pathlib import Path

import dzrobot
from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError, find
from dzrobot.files import explained, write_text

SUMMARY = "list the example programs, or write one into a file to change"

_PACKAGED, _OF_CHECKOUT = "dzrobot_examples", "examples"
"""Folders beside the package: of a wheel, and of a checkout."""


def _next(arguments: argparse.Namespace) -> str:
    if arguments.name is None:
        return "dzrobot example loop.py"
    return "python {output} --help" if arguments.output.suffix == ".py" else "dzrobot example"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot example``."""
    parser.add_argument(
        "name", nargs="?", type=flags.text, help="such as add_a_policy.py (default: list all)"
    )
    parser.add_argument(
        "--output", type=flags.path, metavar="FILE", help="where to (default: its name, here)"
    )


def run(arguments: argparse.Namespace) -> int:
    """List the examples, or write one."""
    known = examples()
    if arguments.name is None:
        if arguments.output is not None:
            raise ConfigError("--output is where one example goes: name it besides")
        width = max(map(len, known))
        for name, file in known.items():
            print(f"{name:<{width}}  {about(file)}")
        print("`dzrobot example NAME` writes one of them here.")
        return 0
    file = find(known, "example", arguments.name)
    output = arguments.output or Path(file.name)
    arguments.output = output
    if output.exists():
        raise ConfigError(f"{output} exists: name another file with --output")
    with explained(f"write {output}", ConfigError):
        # Its own words say how it is called in a checkout.
        text = file.read_text(encoding="utf-8").replace(f"{_OF_CHECKOUT}/{file.name}", output.name)
        write_text(output, text)
    print(f"wrote {output}")
    return 0


def examples() -> dict[str, Path]:
    """Return the example files by their names."""
    beside = Path(dzrobot.__file__).parents[1]
    folder = next(beside / one for one in (_PACKAGED, _OF_CHECKOUT) if (beside / one).is_dir())
    return {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}


def about(file: Path) -> str:
    """Return the first sentence of what an example says of itself."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    elif file.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    lines = (line.lstrip("# ") for line in text.splitlines() if not line.startswith(("#!", "#SB")))
    return next((line for line in lines if line), "")
