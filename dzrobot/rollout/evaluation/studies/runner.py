"""The evaluations of one command, run one after the other and printed as they go."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dzrobot.documents import parse_json
from dzrobot.errors import ProtocolError
from dzrobot.process import terminable, world_size
from dzrobot.progress import progress_bar
from dzrobot.rollout.environment import make_environment
from dzrobot.rollout.evaluation.card import card_digest
from dzrobot.rollout.evaluation.evaluate import (
    EvalProgress,
    PreparedEvaluation,
    RunOptions,
    assist,
    evaluate,
    prepare,
)
from dzrobot.rollout.evaluation.report import Summary, logged_numbers, print_card, title
from dzrobot.rollout.evaluation.studies.variants import EvaluationRequest, ResolvedRequest, Variant
from dzrobot.rollout.workers import KeptEnvironment

if TYPE_CHECKING:
    from dzrobot.rollout.evaluation.ranks import Ranks
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
    """Runs the evaluations of one command, in this process or in all that torchrun started."""

    request: EvaluationRequest
    console: Console
    ranks: "Ranks | None" = None
    """The processes that run every evaluation together; None: this one alone."""

    logger: Logger = unlogged

    def run(self, variant: Variant | None = None, baseline: "Baseline | None" = None) -> Finished:
        """Run one evaluation, and return what it found.

        Args:
            variant: What it has of its own; None: nothing.
            baseline: Earlier results that it is compared with.
        """
        variant = variant or Variant()
        if self.ranks is not None:
            self.ranks.call(variant.model_dump_json())
        request = self.request.varied(variant)
        resolved = request.resolved()
        for line in resolved.notes:
            self.console.print(line, soft_wrap=True, markup=False)
        prepared, output, options = _prepared(request, resolved, self.ranks)
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


def in_all_processes(
    request: EvaluationRequest,
    direct: Callable[[EvaluationSession], int],
    logger: Logger = unlogged,
) -> int:
    """Run evaluations in every process that torchrun started, and return the exit code.

    Args:
        request: What the command line asks for, the same in every process.
        direct: Called in the main process; runs the evaluations and prints their results.
        logger: Experiment logger of the main process.
    """
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    if world_size() <= 1:
        return direct(EvaluationSession(request=request, console=console, logger=logger))
    from dzrobot.rollout.evaluation.ranks import join

    with join() as ranks:
        if ranks.is_main:
            return direct(
                EvaluationSession(request=request, console=console, ranks=ranks, logger=logger)
            )
        for job in ranks.jobs():
            variant = parse_json(job.encode(), Variant, "what is evaluated next", ProtocolError)
            own = request.varied(variant)
            prepared, output, options = _prepared(own, own.resolved(), ranks)
            with terminable():
                assist(prepared, output, options)
    return 0


def _prepared(
    request: EvaluationRequest, resolved: ResolvedRequest, ranks: "Ranks | None"
) -> tuple[PreparedEvaluation, Path, RunOptions]:
    """Load all that the evaluation needs; return it, the results folder and how it is run."""
    prepared = prepare(resolved.evaluation)
    options = replace(request.options, ranks=ranks)
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
