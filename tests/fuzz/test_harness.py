"""The harness notices what it is there to notice, and its mutations are what they say."""

import json
import resource
import sys

import pytest
from harness import assert_held, fields, mutations, run

DOCUMENT = {"name": "x", "sizes": [{"width": 4}, {"width": 5}]}

COMMAND = """
import os
from dzrobot.errors import ConfigError

SUMMARY = "do what is asked"
NEXT = "dzrobot example"

def add_arguments(parser):
    parser.add_argument("what")

def run(arguments):
    match arguments.what:
        case "raise":
            raise KeyError("x")
        case "refuse":
            raise ConfigError("give something else")
        case "swell":
            print(len(b"x" * 700 * 2**20))
        case "explode":
            b"x" * 5 * 2**30
        case "toil":
            for _ in range(10**9): pass
        case "die":
            os._exit(7)
        case "silent":
            return 2
        case "write":
            open("big", "wb").write(b"x" * 10_000)
    return 0
"""


@pytest.fixture(autouse=True)
def counted():
    """What is made here to fail is no bad input of the product: it is not counted."""


@pytest.fixture(autouse=True)
def probe(tmp_path, monkeypatch):
    """Make ``dzrobot inspect`` run the command above."""
    (tmp_path / "probe_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dzrobot.cli.available", lambda: {"probe": "probe_command"})
    yield
    sys.modules.pop("probe_command", None)


def test_what_holds():
    good = run(["probe", "nothing"])
    assert good.code == 0
    refused = run(["probe", "refuse"])
    assert_held(refused, good)
    assert (refused.code, refused.output) == (2, "dzrobot probe: give something else\n")


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["raise", "swell", "explode", "toil", "die", "silent"])
def test_what_does_not_hold(what):
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (3, 3))  # noqa: E731
    with pytest.raises(AssertionError):
        assert_held(run(["probe", what], prepare=limit), run(["probe", "nothing"]))


def test_limits_are_the_child_s():
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # noqa: E731
    assert "File too large" in run(["probe", "write"], prepare=limit).output
    assert run(["probe", "write"]).code == 0


def test_every_field_is_corrupted_in_every_way():
    assert list(fields(DOCUMENT)) == [
        ("name",), ("sizes",), ("sizes", 0), ("sizes", 0, "width")
    ]  # fmt: skip
    made = dict(mutations(DOCUMENT, head=b"above\n", tail=b"\nbelow"))
    assert len(made) > 100
    assert b"above\n" + json.dumps(DOCUMENT).encode() + b"\nbelow" not in made.values()
    for content in made.values():
        assert content.startswith(b"above\n")
        assert content.endswith(b"\nbelow")
    removed = made["sizes.0.width removed"].split(b"\n")[1]
    assert json.loads(removed) == {"name": "x", "sizes": [{}, {"width": 5}]}
    assert made["sizes.0.width not a number"].split(b"\n")[1].count(b'"width": NaN') == 1
