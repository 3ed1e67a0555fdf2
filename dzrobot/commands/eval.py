"""``dzrobot eval``: success rates of a policy, resumed by the same command."""

import argparse
from pathlib import Path
from typing import Any

from dzrobot.commands.options import flags
from dzrobot.commands.options.evaluation import (
    add_acting,
    add_execution,
    add_how,
    add_studies,
    add_what,
    check_logger,
    logger_of,
    read_request,
)
from dzrobot.commands.options.policy import add_key
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.rollout.evaluation.report import print_conclusion
from dzrobot.rollout.evaluation.request import EvaluationSession, run_session

COMMON = (
    "--suite", "--env", "--env-arg", "--protocol", "--tasks", "--episodes", "--checkpoint",
    "--policy", "--server", "--device", "--output", "--workers", "--videos",
)  # fmt: skip
"""Flags that ``--help`` shows; ``--help-all`` shows every one."""

_NOT_BLIND = {
    "checkpoint": "it names the policies itself",
    "policy": "it names the policies itself",
    "server": "it takes the addresses of servers itself: --blind ws://A:8000 ws://B:8000",
    "steps": "it compares policies by itself",
    "perturb": "it compares policies by itself",
    "against": "it compares policies by itself",
    "stop_early": "it compares policies by itself",
    "unattended": "a person judges",
    "workers": "one arm takes one process",
    "wandb": "a logger would show the names; send the folders there afterwards",
    "trackio": "a logger would show the names",
}
"""Flags that do not go together with ``--blind``, and why."""


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
    add_execution(
        parser.add_argument_group("time that passes while the policy plans (default: none)")
    )
    add_studies(parser.add_argument_group("studies: several evaluations, compared"))
    add_how(parser.add_argument_group("how it is run; none of this changes a result"))


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the table, and return 0 if every episode has a result, else 1."""
    check_logger(arguments)
    if sum(map(bool, (arguments.steps, arguments.perturb, arguments.against))) > 1:
        raise ConfigError("--steps, --perturb and --against each compare runs; give one of them")
    if arguments.blind:
        for name, why in _NOT_BLIND.items():
            if vars(arguments)[name] not in (None, False, []):
                raise ConfigError(f"--blind without --{name.replace('_', '-')}: {why}")
    if arguments.stop_early and arguments.against is None:
        raise ConfigError("--stop-early needs --against RESULTS, to know what to decide")
    if arguments.stop_early and arguments.shard != (0, 1):
        raise ConfigError("--stop-early looks at the pairs in their order: leave --shard out")

    def direct(session: EvaluationSession) -> int:
        return _directed(session, arguments)

    return run_session(read_request(arguments), direct, logger_of(arguments))


def _directed(session: EvaluationSession, arguments: argparse.Namespace) -> int:
    if arguments.blind:
        from dzrobot.rollout.evaluation.studies.blind import evaluate_blind

        return evaluate_blind(session, arguments.blind)
    if arguments.steps is not None:
        from dzrobot.rollout.evaluation.studies.candidates import evaluate_steps

        if arguments.checkpoint is None:
            raise ConfigError("--steps needs --checkpoint RUN, the folder of a training run")
        run = Path(arguments.checkpoint)
        return evaluate_steps(session, listed_steps(run, arguments.steps), run)
    if arguments.perturb or arguments.against is not None:
        from dzrobot.rollout.evaluation.studies import comparisons

        if arguments.perturb:
            return comparisons.evaluate_perturbed(session, arguments.perturb)
        return comparisons.evaluate_against(
            session, arguments.against, stop_early=arguments.stop_early
        )
    done = session.run()
    code = print_conclusion(session.console, done.summary, done.folder, done.title)
    if session.request.is_default:
        from dzrobot.commands.report import report

        report([done.folder])
    return code


def listed_steps(run: Path, wanted: str) -> dict[int, Path]:
    """Return the training checkpoints of a run that ``wanted`` names, by step, oldest first.

    Args:
        run: ``runner.output_dir`` of a training run.
        wanted: ``all``, or steps as ``1000,2000``.

    Raises:
        CheckpointError: There is none, or not the one that is named.
        ConfigError: ``wanted`` is neither.
    """
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
    group.add_argument(
        "--lerobot-python", type=flags.path, metavar="FILE",
        help="Python of an environment that has LeRobot, which serves lerobot:ID from there",
    )  # fmt: skip
    group.add_argument(
        "--server", type=flags.text, metavar="URL",
        help="of the policy 'remote', such as ws://gpu-machine:8000, or zmq://... for GR00T's; see "
            "`dzrobot serve`",
    )  # fmt: skip
    group.add_argument(
        "--server-actions", type=flags.text, metavar="NAME",
        help="what the actions of a server mean that does not say so, such as joint_position",
    )  # fmt: skip
    group.add_argument(
        "--server-images", choices=["raw", "jpeg", "zstd"],
        help="how images are sent to a server of dzrobot's: zstd changes nothing, jpeg changes "
        "pixels and is on the card (default: raw)",
    )  # fmt: skip
    add_key(group)
    group.add_argument(
        "--privileged", action="store_true",
        help="module:factory takes the environment and acts beside it, once per episode",
    )  # fmt: skip
