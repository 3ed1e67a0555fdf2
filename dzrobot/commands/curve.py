"""``dzrobot curve``: what fewer steps and other options cost in success and save in time."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from dzrobot.commands.options import flags
from dzrobot.commands.options.evaluation import (
    add_acting,
    add_how,
    add_what,
    check_flags,
    read_request,
    read_session,
)
from dzrobot.errors import ConfigError
from dzrobot.plots import check_can_draw
from dzrobot.rollout.asynchronous.execution import ExecutionOptions
from dzrobot.rollout.evaluation.evaluate import EvaluationSession, run_session
from dzrobot.rollout.evaluation.planning import EvaluationRequest, plan
from dzrobot.rollout.evaluation.studies.curve import (
    OptionSet,
    curve_table,
    draw_curve,
    evaluate_curve,
)
from dzrobot.rollout.policy_spec import ELSEWHERE

COMMON = (
    "--checkpoint", "--suite", "--env", "--env-arg", "--protocol", "--tasks", "--episodes",
    "--device", "--output", "--workers", "--videos", "--execution", "--latency", "--rounds",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""

EXAMPLE = 'dit-steps=16 solver-steps=4 "dit-steps=8 latency=0.1" "checkpoint=STUDENT quantize=int8"'

NEXT = "dzrobot report {output}/{base}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot curve``."""
    parser.description = (
        "Evaluate sets of options on the same episodes, and once more where --latency says how "
        "long plans take; time their chunks on this machine; compare each with the first "
        "(McNemar), and draw time and success. The same command again runs what is missing."
    )
    parser.add_argument(
        "sets", nargs="+", type=flags.text, metavar="OPTIONS",
        help=f"flags of `dzrobot eval` without their dashes, such as {EXAMPLE}; the first set is "
        "the base",
    )  # fmt: skip
    what = parser.add_argument_group("episodes")
    add_what(what)
    acting = parser.add_argument_group("policies")
    _add_checkpoint(acting)
    add_acting(acting, without=ELSEWHERE)
    execution = parser.add_argument_group("how plans are executed that take time")
    flags.declare(execution, ExecutionOptions)
    time = parser.add_argument_group("time of a chunk")
    time.add_argument(
        "--rounds", type=flags.whole(0, 1000), default=5,
        help="measurements of each set's chunks on this machine, in turns; 0: none, and no plot",
    )  # fmt: skip
    add_how(parser.add_argument_group("how it is run; none of this changes a result"))


def _add_checkpoint(group: Any) -> None:
    group.add_argument(
        "--checkpoint", type=flags.text, help="folder or hub id (default: the bundled policy)"
    )


class _SetParser(argparse.ArgumentParser):
    """Raises what is wrong with a set of options."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"options {self.prog!r}: {message}; write them as in {EXAMPLE}")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the table, draw it, and return 0 if every episode has a result, else 1."""
    check_flags(arguments)
    read_session(arguments).parent("a curve")
    if arguments.wandb is not None or arguments.trackio is not None:
        raise ConfigError("--wandb, --trackio: a curve is kept in its folder alone; leave it out")
    check_can_draw()
    sets = [
        OptionSet(name=name, folder=_folder(name), request=_request(name, arguments))
        for name in arguments.sets
    ]
    if len({one.folder for one in sets}) < len(sets):
        raise ConfigError("two sets of options have one name for their folders; keep one")

    arguments.base = sets[0].folder

    def direct(session: EvaluationSession) -> int:
        return _evaluate(session, _with_times(sets, arguments), arguments)

    return run_session(read_session(arguments), read_request(arguments).policy, direct)


def _folder(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in name)


def _evaluate(
    session: EvaluationSession, sets: Sequence[OptionSet], arguments: argparse.Namespace
) -> int:
    points = evaluate_curve(session, sets)
    if points is None:
        session.console.print("the same command runs what has no result")
        return 1
    title = "success of options"
    session.console.print(curve_table(points, title))
    for path in draw_curve(points, title, arguments.output) if arguments.rounds else ():
        session.console.print(str(path), markup=False, soft_wrap=True)
    return 0


def _with_times(sets: Sequence[OptionSet], arguments: argparse.Namespace) -> list[OptionSet]:
    """Return ``sets`` with the times of their chunks, measured here."""
    # Torch only now: faults of the options are reported at once.
    from dzrobot.training.bench.acting import compared_chunks, open_specs

    policies = open_specs([plan(one.request).request.policy for one in sets])
    return [
        one if time is None else replace(one, chunk_ms=time.ms, ratio=time.ratio)
        for one, time in zip(sets, compared_chunks(policies, arguments.rounds), strict=True)
    ]


def _request(text: str, arguments: argparse.Namespace) -> EvaluationRequest:
    """Return the evaluation of one set: the command's own flags, changed where ``text`` says so."""
    parser = _SetParser(prog=text, add_help=False, allow_abbrev=False)
    _add_checkpoint(parser)
    add_acting(parser, without=ELSEWHERE)
    flags.declare(parser, ExecutionOptions)
    try:
        words = [f"--{word}" for word in shlex.split(text)]
    except ValueError as error:
        parser.error(str(error))
    return read_request(parser.parse_args(words, argparse.Namespace(**vars(arguments))))
