"""An option is declared in one field: parser, policy and card have it without another edit."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

import pytest

from dzrobot.cli import build_parser
from dzrobot.commands import curve, record, serve, sweep
from dzrobot.commands import eval as evaluate
from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import read_policy
from dzrobot.declared import Flag, declared
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


@pytest.mark.parametrize(
    "command", [evaluate, sweep, curve, serve, record], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("field", FIELDS)
def test_every_option_of_a_policy_is_a_flag_and_reaches_the_policy_and_its_card(command, field):
    one, parser = FIELDS[field], build_parser("dzrobot", command)
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
