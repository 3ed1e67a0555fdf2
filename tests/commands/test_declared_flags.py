"""An option is declared in one field: parser, policy and card have it without another edit."""

import argparse
import functools
import json
import shlex
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

import pytest

from dzrobot.cli import available, build_parser, main
from dzrobot.commands import curve, following, record, serve, sweep
from dzrobot.commands import eval as evaluate
from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import read_policy
from dzrobot.commands.options.sampling import recorded_robot
from dzrobot.declared import Flag, declared
from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.rollout.evaluation.planning import EvaluationRequest
from dzrobot.rollout.policy_spec import Elsewhere, PolicySpec
from dzrobot.rollout.protocol import DEFAULT

WORDS = {
    "device": "cuda:0", "devices": "cuda:0,cuda:1", "GiB": "2", "path": "somewhere",
}  # fmt: skip
"""What is said where the kind of a flag decides."""

FIELDS = {one.field: one for one in declared(PolicySpec)}
AWAY = {one.field for one in declared(PolicySpec, Elsewhere)}

LEFT_OUT = {serve: ("api_key_file", "execute"), record: ("noise", "video")}
"""What clients of a server say, and what a recording calls by the same names."""

NEEDED = {sweep: ["one"], curve: ["one"], record: ["--output", "somewhere"]}


def spoken(one):
    """Return the words that give the field of a flag another value than its default's."""
    kinds = [kind for kind in get_args(one.type) or (one.type,) if kind is not NoneType]
    if get_origin(one.type) is Literal:
        kinds = [one.type]
    if one.flag.kind is not None:
        return [one.option, WORDS[one.flag.kind]]
    if kinds == [bool]:
        return [one.option]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return [one.option, next(word for word in get_args(kind) if word != one.default)]
    number = kinds[0] in (int, float)
    return [one.option, str(one.flag.least + 1) if number else "other"]


@functools.cache
def parser_of(command):
    """Return the parser of a module's command, made once."""
    return build_parser("dzrobot", command)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "command", [evaluate, sweep, curve, serve, record], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("field", FIELDS)
def test_every_option_of_a_policy_is_a_flag_and_reaches_the_policy_and_its_card(command, field):
    one, parser = FIELDS[field], parser_of(command)
    parsed = {name: action for action in parser._actions for name in action.option_strings}
    if command is not evaluate and field in {*AWAY, *LEFT_OUT.get(command, ())}:
        assert field in LEFT_OUT.get(command, ()) or one.option not in parsed
        return
    beside = ["--device", "cuda"] if field == "memory" else []
    arguments = parser.parse_intermixed_args([*NEEDED.get(command, ()), *spoken(one), *beside])
    policy = read_policy(arguments, "some/checkpoint", without=LEFT_OUT.get(command, ()))
    assert vars(policy)[field] != one.default
    assert {name for name in FIELDS if vars(policy)[name] != FIELDS[name].default} <= {
        field, *(["device"] if field in ("cfg_device", "memory") else []),
    }  # fmt: skip
    request = EvaluationRequest(spec=DEFAULT, policy=policy)
    assert EvaluationRequest.of({"request": request.written()}) == request


@dataclass(frozen=True, kw_only=True)
class Base:
    """Has an option that others inherit."""

    pace: Annotated[Literal["slow", "fast"], Flag("how fast", words={"quick": "fast"})] = "slow"
    hidden: int = 3


@dataclass(frozen=True, kw_only=True)
class Toy(Base):
    """Has an option of every type."""

    count: Annotated[int | None, Flag("how many", least=1, most=9)] = None
    share: Annotated[float, Flag("how much", least=0, most=1)] = 0.5
    either: Annotated[int | Literal["all"], Flag("which", least=0)] = "all"
    file: Annotated[Path | None, Flag("where")] = None
    name: Annotated[str | None, Flag("who", name="who-is-it", alias="who")] = None
    loud: Annotated[bool, Flag("whether")] = False
    wait_s: Annotated[
        float, Flag("wait", name="wait-ms", least=0, becomes=lambda ms: ms / 1000)
    ] = 0.0


def toy(*words, **changes):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.declare(parser, Toy, **changes)
    return Toy(**flags.said(parser.parse_args(words), Toy))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), {}),
        (("--count", "9", "--share", "1"), {"count": 9, "share": 1.0}),
        (("--either", "all"), {}),
        (("--either", "0", "--file", "a/b"), {"either": 0, "file": Path("a/b")}),
        (("--who", "me", "--loud"), {"name": "me", "loud": True}),
        (("--who-is-it", "me", "--pace", "quick"), {"name": "me", "pace": "fast"}),
        (("--wait-ms", "250"), {"wait_s": 0.25}),
    ],
)
def test_what_is_said_becomes_the_fields_and_the_rest_stays_as_declared(words, said):
    assert toy(*words) == Toy(**said)


@pytest.mark.parametrize(
    "words",
    [
        ("--count", "0"), ("--count", "10"), ("--share", "1.5"), ("--either", "some"),
        ("--file", ""), ("--pace", "other"), ("--hidden", "3"), ("--wait-ms", "-1"),
    ],
)  # fmt: skip
def test_what_a_field_cannot_hold_ends_with_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        toy(*words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_own_options_come_first_and_a_command_leaves_some_out():
    parser = argparse.ArgumentParser(add_help=False)
    flags.declare(parser, Toy, without=("file", "name"), count={"help": "otherwise"})
    shown = {action.option_strings[0]: action.help for action in parser._actions}
    assert [*shown] == ["--count", "--share", "--either", "--loud", "--wait-ms", "--pace"]
    assert shown["--count"] == "otherwise"
    assert shown["--share"] == "how much (default: 0.5)"


ENDED = {
    "acknowledge 10.0.0.2": {},
    "bench": {},
    "bench --json b.json": {},
    "bench --rate 15": {},
    "collect --env dzrobot/lift-v0 --output 'my lift'": {"robot": "libero_sim@128x128"},
    "compare a b": {},
    "compare a b c": {},
    "compare a --published 3/4": {},
    "consolidate data": {},
    "convert one.pt two": {},
    "credit data --embodiment franka_pnp": {},
    "credit data --embodiment franka_pnp --episode 3": {},
    "curve dit-steps=16 --output c": {"base": "dit-steps=16"},
    "doctor franka": {},
    "doctor franka --config cell.yaml": {},
    "doctor device spacemouse": {},
    "doctor data data": {},
    "doctor policy --checkpoint c --dataset d": {},
    "doctor policy --policy m:f --dataset d": {},
    "doctor policy --server ws://h:1 --dataset d": {},
    "download": {},
    "download owner/name --output there": {},
    "download owner/name --output there --dataset": {},
    "emulate franka": {},
    "eval": {"output": Path("results/a b")},
    "eval --policy random": {"output": Path("results/a")},
    "eval --env dzrobot/lift-v0": {"output": Path("results/a")},
    "eval --checkpoint run --steps all --env dzrobot/lift-v0": {"output": None},
    "eval --perturb camera --env dzrobot/lift-v0 --output p": {},
    "eval --env dzrobot/lift-v0 --against a": {"output": Path("results/b")},
    "eval --env E --blind random hold --output t": {"folders": [Path("t/random"), Path("t/hold")]},
    "example": {},
    "example loop.py": {"output": Path("loop.py")},
    "example train.sbatch": {"output": Path("train.sbatch")},
    "export run": {"output": Path("run/export/step_5")},
    "import-hdf5 a.hdf5 --output data": {},
    "import-rlinf a.yaml": {"output": Path("a_dzrobot.yaml")},
    "import-rlinf e.yaml --output e.sh": {"output": Path("e.sh")},
    "improve runs/a": {"over": False, "last": None},
    "improve runs/a --all": {"over": True, "last": Path("runs/a/round_1/test/unperturbed")},
    "init start --dataset a b --metadata m.json": {"words": ["tiny_cpu", "data.pad_tail=True"]},
    "init-robot data": {"reference": "robot:ROBOT"},
    "init-workcell cell.yaml --address emulated": {},
    "inspect checkpoint": {},
    "inspect-data data --embodiment libero_sim@64x64": {},
    "libero setup": {},
    "libero check": {},
    "libero list": {},
    "libero list --suite libero_goal": {},
    "merge whole a b": {},
    "plan tiny_cpu": {},
    "plan tiny_cpu --gpus 8 data.train_data_paths=[a,b]": {},
    "plot run": {"run": Path("run")},
    "push export owner/name": {},
    "record --output data": {"robot": "franka_pnp"},
    "relabel data": {},
    "relabel data --episode 1 --success": {"robot": "franka_pnp"},
    "replay data": {},
    "report a": {},
    "report a b": {},
    "serve": {"address": "ws://localhost:8000"},
    "serve-env dzrobot/lift-v0": {"address": "ws://localhost:9000"},
    "stats libero_mini --dataset a --output m.json": {"words": ["mini_lift_cpu"]},
    "sweep a b --env E --output s": {"folders": [Path("s/a"), Path("s/b")]},
    "sweep a b --env E --output s --confirm 0": {"folders": [Path("s/a"), Path("s/b")]},
    "train --list-recipes": {},
    "train tiny_cpu --fields": {},
    "train tiny_cpu": {"run": Path("logs/a"), "exported": Path("logs/a/export/step_5")},
    "train tiny_cpu checkpoint.export=false": {"run": Path("logs/a"), "exported": None},
}  # fmt: skip
"""Lines that have ended well -> what the command found."""


def parsed(words):
    """Return the module and arguments of a line, which must be one that is taken."""
    assert words[0] == "dzrobot"
    command = import_module(available()[words[1]])
    parser = parser_of(command)
    try:
        return command, parser.parse_intermixed_args(words[2:])
    except TypeError:
        # It has subcommands.
        return command, parser.parse_args(words[2:])


def test_every_command_is_among_those_that_have_ended():
    assert {shlex.split(line)[0] for line in ENDED} == {*available()}


@pytest.mark.parametrize("line", ENDED)
def test_the_command_that_comes_next_is_one_that_parses(line):
    command, arguments = parsed(["dzrobot", *shlex.split(line)])
    vars(arguments).update(ENDED[line])
    words = following(command.NEXT, arguments)
    assert not [word for word in words if "{" in word or "None" in word], words
    if words[0] == "dzrobot":
        parsed(words)
    else:
        assert words[0] in ("python", "sh")


def test_it_is_said_once_after_success_and_on_stderr(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["example", "loop.py"]) == 0
    said = capsys.readouterr()
    assert said.out == "wrote loop.py\n"
    assert said.err == "next: python loop.py --help\n"
    assert main(["example", "loop.py"]) == 2
    assert "next:" not in capsys.readouterr().err


def test_names_with_blanks_stay_one_word(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["example", "loop.py", "--output", "my {loop}.py"]) == 0
    line = capsys.readouterr().err.removeprefix("next: ")
    assert shlex.split(line) == ["python", "my {loop}.py", "--help"]


def images(height, width):
    shape = {"shape": [height, width, 3]}
    return {view.feature: shape for view in EMBODIMENTS["libero_sim"].views}


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ({"robot_type": "libero_mini"}, "libero_mini"),
        ({"robot_type": "libero_sim", "features": images(256, 256)}, "libero_sim"),
        ({"robot_type": "libero_sim", "features": images(64, 96)}, "libero_sim@64x96"),
        ({"robot_type": "so100", "features": {}}, "MODULE:NAME"),
        ({"robot_type": None}, "MODULE:NAME"),
        ({}, "MODULE:NAME"),
    ],
)
def test_a_recording_names_its_robot_as_a_command_takes_it(info, named, tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    assert recorded_robot(tmp_path, None) == named
    assert recorded_robot(tmp_path, "my_robot:UR5") == "my_robot:UR5"
