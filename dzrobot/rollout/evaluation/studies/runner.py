"""The evaluations of one command, run one after the other and printed as they go."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dzrobot.errors import ConfigError
from dzrobot.process import terminable, world_size
from dzrobot.progress import progress_bar
from dzrobot.rollout.environment import make_environment
from dzrobot.rollout.evaluation.card import card_digest
from dzrobot.rollout.evaluation.evaluate import (
    EvalProgress,
    PreparedEvaluation,
    RunOptions,
    evaluate,
    prepare,
)
from dzrobot.rollout.evaluation.report import Summary, logged_numbers, print_card, title
from dzrobot.rollout.evaluation.studies.variants import EvaluationRequest, ResolvedRequest, Variant
from dzrobot.rollout.workers import KeptEnvironment

if TYPE_CHECKING:
    from dzrobot.cluster import Cluster
    from dzrobot.rollout.evaluation.studies.comparisons import Baseline

Log = Callable[[int, Mapping[str, float | int | None]], None]
"""Takes a step and its numbers."""

Logger = Callable[[str | None, Path, Mapping[str, Any]], AbstractContextManager[Log]]
"""Opens an experiment logger: project (None: nothing is logged), folder of results, settings."""


@contextmanager
def unlogged(project: str | None, folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a logger that drops everything."""
    yield lambda _, __: None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One evaluation that was run."""

    summary: Summary
    folder: Path
    title: str
    """Of its table."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSession:
    """Runs the evaluations of one command, on this machine or on a Ray cluster."""

    request: EvaluationRequest
    console: Console
    cluster: "Cluster | None" = None
    """Where the episodes run; None: in this process and its workers."""

    logger: Logger = unlogged

    def run(self, variant: Variant | None = None, baseline: "Baseline | None" = None) -> Finished:
        """Run one evaluation, and return what it found.

        Args:
            variant: What it has of its own; None: nothing.
            baseline: Earlier results that it is compared with.
        """
        variant = variant or Variant()
        request = self.request.varied(variant)
        resolved = request.resolved()
        for line in resolved.notes:
            self.console.print(line, soft_wrap=True, markup=False)
        prepared, output, options = _prepared(request, resolved, self.cluster)
        if baseline is not None:
            options = baseline.options(options, prepared.card)
        print_card(self.console, prepared.card, output)
        with self.logger(request.project, output, prepared.card) as log:
            if prepared.moves_an_arm:
                summary = _run_on_arm(request, prepared, output, options)
            else:
                summary = _run_in_simulation(prepared, output, options)
            log(summary.total.episodes, logged_numbers(summary))
        if round_trips := prepared.ready.round_trips():
            self.console.print(round_trips, soft_wrap=True, markup=False)
        return Finished(summary=summary, folder=output, title=title(prepared.card))


def run_session(
    request: EvaluationRequest,
    direct: Callable[[EvaluationSession], int],
    logger: Logger = unlogged,
) -> int:
    """Run the evaluations of one command, and return the exit code.

    Args:
        request: What the command line asks for.
        direct: Runs the evaluations and prints their results.
        logger: Experiment logger.

    Raises:
        ConfigError: torchrun has started several processes.
    """
    if world_size() > 1:
        raise ConfigError(
            f"torchrun has started {world_size()} processes, and Ray runs an evaluation on many "
            "GPUs and machines: dzrobot eval ... --ray (one command; see docs/guides/evaluate.md)"
        )
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    session = EvaluationSession(request=request, console=console, logger=logger)
    if request.ray is None:
        return direct(session)
    from dzrobot.cluster import connected
    from dzrobot.rollout.evaluation.actors import needs_of

    needs = needs_of(request.settings, request.options.workers)
    with connected(request.ray, needs) as cluster:
        return direct(replace(session, cluster=cluster))


def _prepared(
    request: EvaluationRequest, resolved: ResolvedRequest, cluster: "Cluster | None"
) -> tuple[PreparedEvaluation, Path, RunOptions]:
    """Load all that the evaluation needs; return it, the results folder and how it is run."""
    options = request.options
    if cluster is None:
        prepared = prepare(resolved.evaluation)
    else:
        from dzrobot.rollout.evaluation.actors import ActorGroup

        group = ActorGroup(cluster, resolved.evaluation, options)
        prepared, options = group.prepared, replace(options, engine=group.opened)
    if prepared.moves_an_arm and not request.workers_given:
        options = replace(options, workers=0)
    output = request.output or Path("results") / (
        f"{resolved.label}-{resolved.evaluation.policy.label}-{card_digest(prepared.card)}"
    )
    return prepared, output, options


def _run_in_simulation(prepared: PreparedEvaluation, output: Path, options: RunOptions) -> Summary:
    with progress_bar("episodes") as advance, terminable():
        return evaluate(
            prepared, output, options, lambda far: advance(far.done, far.total, _progress(far))
        )


def _run_on_arm(
    request: EvaluationRequest, prepared: PreparedEvaluation, output: Path, options: RunOptions
) -> Summary:
    from dzrobot.rollout.arm.attended import attended

    operator = replace(
        request.operator,
        title="dzrobot eval",
        log=request.operator.log or output / "operator.jsonl",
    )
    with attended(operator) as people:
        first = prepared.cases[0]
        with closing(make_environment(first, prepared.arguments[first.env], render=False)) as env:
            people.attend(env)

        def show(far: EvalProgress) -> None:
            people.progress(f"{far.done} of {far.total} episodes; {_progress(far)}")

        with closing(KeptEnvironment(people.opened)) as kept:
            return evaluate(prepared, output, replace(options, environment=kept), show)


def _progress(progress: EvalProgress) -> str:
    failed = f", {progress.errors} errors" if progress.errors else ""
    return f"{progress.successes} of {progress.done} succeeded{failed}"
