"""``dzrobot sweep``: which of several checkpoints is the best, and how good it is."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.commands.options.evaluation import (
    add_acting,
    add_how,
    add_what,
    check_flags,
    read_request,
    read_session,
)
from dzrobot.rollout.asynchronous.execution import ExecutionOptions
from dzrobot.rollout.evaluation.evaluate import EvaluationSession, run_session
from dzrobot.rollout.evaluation.studies.series import (
    CONFIRMATION,
    evaluate_sweep,
    read_candidates,
)
from dzrobot.rollout.policy_spec import ELSEWHERE

COMMON = (
    "--suite", "--env", "--env-arg", "--protocol", "--tasks", "--episodes", "--confirm",
    "--device", "--output", "--workers", "--videos",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""


def _next(arguments: argparse.Namespace) -> str:
    if arguments.confirm == 0 and len(arguments.folders) > 1:
        return "dzrobot compare {folders}"
    return f"dzrobot report {{output}}/{CONFIRMATION}"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot sweep``."""
    parser.description = (
        "Evaluate several checkpoints on the same episodes, and the best of them once more on "
        "others: the score it was selected by is too high for it. The same command again runs what "
        "is missing."
    )
    parser.add_argument(
        "policies", nargs="+", type=flags.text, metavar="CHECKPOINT",
        help="folder or Hugging Face id; random, hold, expert, module:factory and a server's ws:// "
        "address too",
    )  # fmt: skip
    what = parser.add_argument_group("episodes")
    add_what(what)
    what.add_argument(
        "--confirm", type=flags.whole(0), metavar="N",
        help="episodes per task of the confirmation, which follow those of the selection; 0: none "
        "(default: as many)",
    )  # fmt: skip
    add_acting(parser.add_argument_group("policies"), without=ELSEWHERE)
    time = parser.add_argument_group("time that passes while the policy plans (default: none)")
    flags.declare(time, ExecutionOptions)
    add_how(parser.add_argument_group("how it is run; none of this changes a result"))
    parser.set_defaults(checkpoint=None)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the tables, and return 0 if every episode has a result, else 1."""
    check_flags(arguments)
    session, request = read_session(arguments), read_request(arguments)
    output = session.parent("a sweep")
    candidates = read_candidates(
        request, arguments.policies, lambda folder: output / folder, taken=[CONFIRMATION]
    )

    arguments.folders = [one.folder for one in candidates.values()]

    def direct(session: EvaluationSession) -> int:
        return evaluate_sweep(session, candidates, arguments.confirm)

    return run_session(session, request.policy, direct)
