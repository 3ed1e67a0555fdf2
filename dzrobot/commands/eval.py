"""``dzrobot eval``: success rates of a policy, resumed by the same command."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.commands.options.evaluation import (
    add_acting,
    add_how,
    add_studies,
    add_what,
    check_flags,
    is_default,
    read_request,
    read_session,
)
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.progress import waiting
from dzrobot.rollout.asynchronous.execution import ExecutionOptions
from dzrobot.rollout.evaluation.evaluate import EvaluationSession, run_session
from dzrobot.rollout.evaluation.planning import EvaluationRequest
from dzrobot.rollout.evaluation.tables import print_conclusion

COMMON = (
    "--suite", "--env", "--env-arg", "--protocol", "--tasks", "--episodes", "--checkpoint",
    "--policy", "--server", "--device", "--output", "--workers", "--videos",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""

EXAMPLE = (
    "dzrobot eval --suite libero_spatial --protocol standard-10x50 --checkpoint PATH_OR_HUB_ID "
    "--workers 8"
)


def _next(arguments: argparse.Namespace) -> str:
    if arguments.steps:
        return "dzrobot plot {checkpoint}"
    if arguments.perturb:
        return "dzrobot report {output}/unperturbed"
    if arguments.blind:
        return "dzrobot compare {folders}"
    if arguments.against:
        return "dzrobot report {against} {output}"
    if not is_default(arguments):
        return "dzrobot report {output}"
    # Its page is written: the next is another policy from the same starts.
    other = "" if arguments.policy == "random" else "--policy random "
    return f"dzrobot eval {other}--against {{output}}"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot eval``."""
    parser.description = (
        "Evaluate a policy. Every finished episode is one line of OUTPUT/records.jsonl; the same "
        "command again runs what is missing. Without arguments: a bundled policy in LIBERO, "
        "and the page of `dzrobot report`."
    )
    add_what(parser.add_argument_group("episodes"))
    policy = parser.add_argument_group("policy")
    _policy(policy)
    add_acting(policy)
    time = parser.add_argument_group("time that passes while the policy plans (default: none)")
    flags.declare(time, ExecutionOptions)
    add_studies(parser.add_argument_group("studies: several evaluations, compared"))
    add_how(parser.add_argument_group("how it is run; none of this changes a result"))


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the table, and return 0 if every episode has a result, else 1."""
    check_flags(arguments)
    request = read_request(arguments)
    name = next((flag for flag in STUDIES if vars(arguments)[flag]), None)
    study = _alone if name is None else STUDIES[name]
    if name is None and is_default(arguments):
        study = _by_default

    def direct(session: EvaluationSession) -> int:
        return study(session, request, arguments)

    return run_session(read_session(arguments), request.policy, direct)


def _alone(
    session: EvaluationSession, request: EvaluationRequest, arguments: argparse.Namespace
) -> int:
    done = session.run(request)
    arguments.output = done.folder
    return print_conclusion(session.console, done.summary, done.folder, done.title)


def _by_default(
    session: EvaluationSession, request: EvaluationRequest, arguments: argparse.Namespace
) -> int:
    from dzrobot.commands.report import report

    spec = request.spec
    tasks = ",".join(map(str, spec.tasks or ()))
    session.say(
        f"By default: --suite {','.join(spec.suites)} --tasks {tasks} --episodes {spec.episodes}"
    )
    session.say("Without LIBERO's assets: --env dzrobot/lift-v0")
    if not arguments.checkpoint:
        session.say(f"With your checkpoint: {EXAMPLE}")
    done = session.run(request)
    code = print_conclusion(session.console, done.summary, done.folder, done.title)
    report([done.folder])
    arguments.output = done.folder
    return code


def _steps(
    session: EvaluationSession, request: EvaluationRequest, arguments: argparse.Namespace
) -> int:
    from dzrobot.rollout.evaluation.studies.series import evaluate_steps

    steps = listed_steps(Path(arguments.checkpoint), arguments.steps)
    return evaluate_steps(session, request, steps)


def _blind(
    session: EvaluationSession, request: EvaluationRequest, arguments: argparse.Namespace
) -> int:
    from dzrobot.rollout.evaluation.studies.blind import evaluate_blind
    from dzrobot.rollout.evaluation.studies.series import candidate_folders

    output = session.parent("--blind")
    arguments.folders = [output / name for name in candidate_folders(arguments.blind)]
    return evaluate_blind(session, request, arguments.blind)


def _perturb(
    session: EvaluationSession, request: EvaluationRequest, arguments: argparse.Namespace
) -> int:
    from dzrobot.rollout.evaluation.studies.series import evaluate_perturbed

    return evaluate_perturbed(session, request, arguments.perturb)


def _against(
    session: EvaluationSession, request: EvaluationRequest, arguments: argparse.Namespace
) -> int:
    from dzrobot.rollout.evaluation.studies.series import evaluate_against

    base, early = arguments.against, arguments.stop_early
    code, arguments.output = evaluate_against(session, request, base, stop_early=early)
    return code


STUDIES: Mapping[str, Callable[[EvaluationSession, EvaluationRequest, argparse.Namespace], int]] = {
    "blind": _blind,
    "steps": _steps,
    "perturb": _perturb,
    "against": _against,
}
"""Flag -> what runs the evaluations of its study, and judges their folders."""


def listed_steps(run: Path, wanted: str) -> dict[int, Path]:
    """Return the training checkpoints of a run that ``wanted`` names, by step, oldest first.

    Args:
        run: ``runner.output_dir`` of a training run.
        wanted: ``all``, or steps as ``1000,2000``.

    Raises:
        CheckpointError: There is none, or not the one that is named.
        ConfigError: ``wanted`` is neither.
    """
    with waiting("looking for the run's checkpoints"):
        from dzrobot.training.run.checkpoint import complete_checkpoints

        found = {saved.step: saved.path for saved in complete_checkpoints(run / "checkpoints")}
    if not found:
        raise CheckpointError(
            f"{run} holds no training checkpoint: --checkpoint names a run (runner.output_dir), "
            "whose checkpoints/step_N are kept by checkpoint.keep_last_k"
        )
    if wanted == "all":
        return dict(sorted(found.items()))
    if not all(part.isascii() and part.isdecimal() for part in wanted.split(",")):
        raise ConfigError(f"--steps {wanted}: write all, or numbers such as 1000,2000")
    steps = sorted({int(part) for part in wanted.split(",")})
    if missing := [step for step in steps if step not in found]:
        raise CheckpointError(
            f"{run} has no checkpoint of step {missing[0]}; it has {preview(found)}"
        )
    return {step: found[step] for step in steps}


def _policy(group: Any) -> None:
    group.add_argument(
        "--checkpoint", type=flags.text, help="folder or Hugging Face id of a DreamZero checkpoint"
    )
    group.add_argument(
        "--steps", type=flags.text, metavar="all|N,N",
        help="of the training run that --checkpoint names: success at each of its checkpoints",
    )  # fmt: skip
    group.add_argument(
        "--policy", type=flags.text,
        help="instead: random, hold, expert, remote, module:factory, or LeRobot's as lerobot:ID",
    )  # fmt: skip
