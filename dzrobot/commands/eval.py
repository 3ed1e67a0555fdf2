"""``dzrobot eval``: success rates of a policy, safe against being interrupted."""

import argparse
import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dzrobot.commands.against import Against, add_against, read_against
from dzrobot.commands.blind import add_blind, evaluate_blind
from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import looked_after
from dzrobot.commands.options.devices import render_variables
from dzrobot.commands.options.evaluation import (
    WORKERS,
    AskedEvaluation,
    add_acting,
    add_how,
    add_what,
    read_batch_window,
    read_evaluation,
)
from dzrobot.commands.options.execution import add_execution
from dzrobot.commands.options.keys import add_key
from dzrobot.commands.options.tracking import check_tracking, numbers_of, tracked
from dzrobot.commands.perturb import add_perturbation, evaluate_perturbed
from dzrobot.commands.results import conclude, say_what_it_is, title
from dzrobot.commands.steps import evaluate_steps
from dzrobot.commands.variants import Variant
from dzrobot.documents import parse_json
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.policies.serving.remote_policy import RemotePolicy
from dzrobot.process import terminable
from dzrobot.progress import progress_bar
from dzrobot.rollout.environment import make_environment
from dzrobot.rollout.evaluation.card import card_digest
from dzrobot.rollout.evaluation.comparison import read_results
from dzrobot.rollout.evaluation.evaluate import (
    EvalProgress,
    PreparedEvaluation,
    RunOptions,
    assist,
    evaluate,
    prepare,
)
from dzrobot.rollout.evaluation.ranks import Ranks, join
from dzrobot.rollout.evaluation.report import Summary
from dzrobot.rollout.workers import KeptEnvironment

SUMMARY = "evaluate a policy in an environment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot eval``."""
    parser.description = (
        "Evaluate a policy. Every finished episode is one line of OUTPUT/records.jsonl; the same "
        "command again runs what is missing. With no argument: the embedded default."
    )
    what = parser.add_argument_group("what is run")
    add_what(what)
    add_perturbation(what)
    add_against(what)
    add_blind(what)
    policy = parser.add_argument_group("the policy")
    _policy(policy)
    add_acting(policy)
    add_execution(
        parser.add_argument_group("time that passes while the policy thinks (default: none)")
    )
    add_how(parser.add_argument_group("how it is run; none of this changes a result"))


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the table, and return 0 if every episode has a result, else 1."""
    check_tracking(arguments)
    if sum(map(bool, (arguments.steps, arguments.perturb, arguments.against))) > 1:
        raise ConfigError("--steps, --perturb and --against each compare runs; give one of them")
    return together(arguments, _directed)


def _directed(console: Console, arguments: argparse.Namespace, ranks: Ranks | None) -> int:
    def one(variant: Variant) -> tuple[Summary, Path, str]:
        return evaluate_variant(console, arguments, variant, ranks)

    if arguments.blind:
        return evaluate_blind(console, arguments, _options(arguments, ranks, workers=0))
    if arguments.steps is not None:
        return evaluate_steps(console, arguments, one)
    if arguments.perturb:
        return evaluate_perturbed(console, arguments, one)
    against = read_against(arguments)
    summary, output, heading = evaluate_variant(console, arguments, Variant(), ranks, against)
    if against is None:
        return conclude(console, summary, output, heading)
    own = read_results(output)
    code = conclude(console, summary, output, heading, enough=against.decided(own))
    against.conclude(console, own)
    return code


def together(
    arguments: argparse.Namespace,
    direct: Callable[[Console, argparse.Namespace, Ranks | None], int],
) -> int:
    """Run evaluations in every process that torchrun started, and return the exit code.

    Args:
        arguments: Of the command.
        direct: Called in the main process, which says what is evaluated and tells the results.
    """
    with join() or nullcontext() as ranks:
        if ranks is None or ranks.is_main:
            console = Console(width=None if Console().is_terminal else 110, highlight=False)
            return direct(console, arguments, ranks)
        for job in ranks.jobs():
            variant = parse_json(job.encode(), Variant, "what is evaluated next", ProtocolError)
            own = variant.applied(arguments)
            asked = read_evaluation(own)
            prepared, output, options = _prepared(own, asked, ranks)
            with terminable():
                assist(prepared, output, options)
    return 0


def evaluate_variant(
    console: Console,
    arguments: argparse.Namespace,
    variant: Variant,
    ranks: Ranks | None,
    against: Against | None = None,
) -> tuple[Summary, Path, str]:
    """Run one evaluation; return what it found, its folder and the title of its table.

    Args:
        console: Where to it is said.
        arguments: Of the command.
        variant: What this evaluation has of its own.
        ranks: The processes that run it together; None: this one alone.
        against: Earlier results that it is compared with.
    """
    if ranks is not None:
        ranks.call(variant.model_dump_json())
    arguments = variant.applied(arguments)
    asked = read_evaluation(arguments)
    for line in asked.greeting:
        console.print(line, soft_wrap=True, markup=False)
    prepared, output, options = _prepared(arguments, asked, ranks)
    if against is not None:
        options = against.options(options, prepared.card)
    say_what_it_is(console, prepared.card, output)
    run = _on_an_arm if prepared.moves_an_arm else _in_simulation
    with tracked(arguments.wandb, output, prepared.card) as tell:
        summary = run(arguments, prepared, output, options)
        tell(summary.total.episodes, numbers_of(summary))
    if isinstance(prepared.ready.policy, RemotePolicy) and prepared.ready.policy.timing:
        console.print(prepared.ready.policy.timing.text, soft_wrap=True, markup=False)
    return summary, output, title(prepared.card)


def _prepared(
    arguments: argparse.Namespace, asked: AskedEvaluation, ranks: Ranks | None
) -> tuple[PreparedEvaluation, Path, RunOptions]:
    """Load all that the evaluation needs; return it, the results folder and how it is run."""
    options = _options(arguments, ranks, workers=WORKERS)
    prepared = prepare(asked.evaluation)
    if prepared.moves_an_arm and arguments.workers is None:
        options = replace(options, workers=0)
    output = arguments.output or Path("results") / (
        f"{asked.label}-{asked.evaluation.policy.label}-{card_digest(prepared.card)}"
    )
    return prepared, output, options


def _options(arguments: argparse.Namespace, ranks: Ranks | None, *, workers: int) -> RunOptions:
    """Return how it is run, with ``workers`` unless it is said how many."""
    drawing = render_variables(arguments.render_device)
    # Environments of this process as well.
    os.environ.update(drawing[0] if drawing else {})
    return RunOptions(
        workers=workers if arguments.workers is None else arguments.workers,
        videos=arguments.videos,
        predictions=None if arguments.predictions is None else arguments.predictions == "on",
        shard=arguments.shard,
        batch_window_s=read_batch_window(arguments),
        max_errors=arguments.max_errors,
        variables=drawing,
        ranks=ranks,
    )


def _in_simulation(
    _: argparse.Namespace, prepared: PreparedEvaluation, output: Path, options: RunOptions
) -> Summary:
    with progress_bar("episodes") as advance, terminable():
        return evaluate(
            prepared, output, options, lambda far: advance(far.done, far.total, _how_far(far))
        )


def _on_an_arm(
    arguments: argparse.Namespace, prepared: PreparedEvaluation, output: Path, options: RunOptions
) -> Summary:
    with looked_after(arguments, "dzrobot eval", output / "operator.jsonl") as people:
        first = prepared.cases[0]
        with closing(make_environment(first, prepared.arguments[first.env], render=False)) as env:
            people.check(env)

        def show(far: EvalProgress) -> None:
            people.progress(f"{far.done} of {far.total} episodes; {_how_far(far)}")

        with closing(KeptEnvironment(people.opened)) as kept:
            return evaluate(prepared, output, replace(options, environment=kept), show)


def _how_far(progress: EvalProgress) -> str:
    failed = f", {progress.errors} errors" if progress.errors else ""
    return f"{progress.successes} of {progress.done} succeeded{failed}"


def _policy(group: Any) -> None:
    group.add_argument(
        "--checkpoint", type=flags.text, help="folder or Hugging Face id of a DreamZero checkpoint"
    )
    group.add_argument(
        "--steps", type=flags.text, metavar="all|N,N",
        help="of the training run that --checkpoint names: success at each of its checkpoints",
    )  # fmt: skip
    group.add_argument(
        "--policy", type=flags.text, help="instead: random, hold, expert, remote, or module:factory"
    )
    group.add_argument(
        "--server", type=flags.text, metavar="URL",
        help="of the policy 'remote', such as ws://gpu-machine:8000; see `dzrobot serve`",
    )  # fmt: skip
    add_key(group)
    group.add_argument(
        "--privileged", action="store_true",
        help="module:factory takes the environment and acts beside it, once per episode",
    )  # fmt: skip
