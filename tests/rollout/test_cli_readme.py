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

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
TEXT = "\n".join((ROOT / name).read_text() for name in DOCUMENTS)
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


def test_files_that_are_named_exist():
    linked = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    named = re.findall(r"\b(?:examples|training|benchmarks|tests|dzrobot|docs)/[\w/.]+\.\w+", TEXT)
    missing = [name for name in {*linked, *named} if not (ROOT / name).exists()]
    assert not missing


def test_environments_that_are_named_are_registered():
    named = set(re.findall(r"\b(?:dzrobot/)?[A-Za-z_-]+-v0\b", TEXT))
    assert named
    assert named <= set(gym.registry)


def test_code_for_people_compiles():
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        compile(block, "README.md", "exec")
