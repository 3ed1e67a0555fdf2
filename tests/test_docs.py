"""What the documents tell a user to type exists and is accepted."""

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path

import gymnasium as gym
import pytest

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot import cli
from dzrobot.envs.franka.safety import Abort

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
LINES = [line.partition("  #")[0].strip() for line in BLOCKS.splitlines() if line.strip()]


def commands(*prefix):
    return [words for words in map(shlex.split, LINES) if tuple(words[: len(prefix)]) == prefix]


def test_the_documents_have_commands():
    assert len(commands("dzrobot")) >= 4
    assert commands("make")


@pytest.mark.parametrize("words", commands("dzrobot"), ids=" ".join)
def test_dzrobot_lines_are_accepted(words):
    module = import_module(cli.available()[words[1]])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    module.add_arguments(parser)
    nested = parser._subparsers is not None
    (parser.parse_args if nested else parser.parse_intermixed_args)(words[2:])


def test_commands_named_in_the_text_exist():
    named = set(re.findall(r"`dzrobot ([a-z][a-z-]*)", TEXT))
    assert named <= cli.available().keys()


def test_make_targets_exist():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    text = page.read_text()
    linked = {page.parent / name for name in re.findall(r"\]\(([^)#:]+)\)", text)}
    # Reference pages are made when the site is built.
    linked = {path for path in linked if path.parent != ROOT / "docs" / "reference"}
    named = re.findall(r"\b(?:examples|training|benchmarks|tests|dzrobot|docs)/[\w/.]+\.\w+", text)
    missing = [path for path in {*linked, *(ROOT / name for name in named)} if not path.exists()]
    assert not [path for path in missing if path.resolve().parent.name != "reference"]


def test_environments_that_are_named_are_registered():
    named = set(re.findall(r"\b(?:dzrobot/)?[A-Za-z_-]+-v0\b", TEXT))
    assert named
    assert named <= set(gym.registry)


@pytest.mark.parametrize(
    "words", [w for w in map(shlex.split, LINES) if w[0] in ("python", "torchrun")], ids=" ".join
)
def test_scripts_that_are_named_take_the_flags(words):
    script = next(word for word in words[1:] if word.endswith(".py"))
    text = (ROOT / script).read_text()
    for flag in (word.partition("=")[0] for word in words[words.index(script) :]):
        if flag.startswith("--"):
            assert f'"{flag}"' in text or "dzrobot.commands" in text, flag


def test_every_kind_of_stop_has_an_entry():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(kind.value for kind in Abort if kind)
