"""The evaluations of one command: one after the other, on this machine or on a Ray cluster."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dzrobot.errors import ConfigError, counted
from dzrobot.process import terminable, world_size
from dzrobot.progress import progress_bar
from dzrobot.rollout.environment import OperatorOptions, make_environment
from dzrobot.rollout.evaluation.card import card_digest, read_card
from dzrobot.rollout.evaluation.evaluate import (
    EvalProgress,
    Opened,
    RunOptions,
    evaluate,
    open_plan,
)
from dzrobot.rollout.evaluation.planning import EvaluationRequest, plan
from dzrobot.rollout.evaluation.report import Summary
from dzrobot.rollout.evaluation.tables import logged_numbers, print_card, title
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.workers import KeptEnvironment

if TYPE_CHECKING:
    from dzrobot.cluster import Cluster, ClusterOptions

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
    """Title of its table."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSession:
    """Runs evaluations: where, how, and who watches; none of this changes a result."""

    console: Console
    options: RunOptions = field(default_factory=RunOptions)
    workers_given: bool = True
    """Whether the number of workers was chosen; otherwise an arm takes none."""

    output: Path | None = None
    """Results folder, or the parent of several. None: below results/, by the card."""

    operator: OperatorOptions = field(default_factory=OperatorOptions)
    """How the operator of an arm is involved."""

    ray: "ClusterOptions | None" = None
    """Where the episodes run, beyond this process; None: nowhere."""

    cluster: "Cluster | None" = None
    """The same, once it is connected."""

    project: str | None = None
    """Project of the experiment logger; None: nothing is logged."""

    logger: Logger = unlogged

    def parent(self, what: str) -> Path:
        """Return the folder of several results.

        Args:
            what: Writes them, for the message.

        Raises:
            ConfigError: none was chosen.
        """
        if self.output is None:
            raise ConfigError(
                f"{what} writes several folders: choose their parent with --output DIR"
            )
        return self.output

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def run(
        self,
        request: EvaluationRequest,
        output: Path | None = None,
        *,
        is_tracked: bool = True,
        ending: Callable[[RunOptions, Mapping[str, Any]], RunOptions] = lambda options, _: options,
    ) -> Finished:
        """Run one evaluation, and return what it found.

        Args:
            request: What is evaluated.
            output: Results folder; None: the session's.
            is_tracked: Whether it gets a run of its own in the experiment logger.
            ending: Given how the evaluation is run, and its card, returns how it is run with the
                rule that ends it.
        """
        opened, options = self._opened(request)
        for line in opened.plan.notes:
            self.say(line)
        folder = (
            output
            or self.output
            or Path("results")
            / (
                f"{opened.plan.request.spec.label}-{opened.plan.found.spec.label}-"
                f"{card_digest(opened.card)}"
            )
        )
        if opened.plan.moves_an_arm and not self.workers_given:
            options = replace(options, workers=0)
        options = ending(options, opened.card)
        print_card(self.console, opened.card, folder)
        with self.logger(self.project if is_tracked else None, folder, opened.card) as log:
            run = self._run_on_arm if opened.plan.moves_an_arm else _run_in_simulation
            summary = run(opened, folder, options)
            log(summary.total.episodes, logged_numbers(summary))
        if round_trips := opened.ready.round_trips():
            self.say(round_trips)
        return Finished(summary=summary, folder=folder, title=title(read_card(folder)))

    def _opened(self, request: EvaluationRequest) -> tuple[Opened, RunOptions]:
        """Return the evaluation, its policy loaded here or by actors, and how it is run."""
        if self.cluster is None:
            return open_plan(plan(request)), self.options
        from dzrobot.rollout.evaluation.actors import ActorGroup

        group = ActorGroup(self.cluster, request, self.options)
        return group.opened, replace(self.options, engine=group.engine)

    def _run_on_arm(self, opened: Opened, output: Path, options: RunOptions) -> Summary:
        from dzrobot.rollout.arm.attended import attended

        log = self.operator.log or output / "operator.jsonl"
        with attended(replace(self.operator, title="dzrobot eval", log=log)) as people:
            first = opened.plan.cases[0]
            arguments = opened.plan.arguments[first.env]
            with closing(make_environment(first, arguments, render=False)) as env:
                people.attend(env)

            def show(far: EvalProgress) -> None:
                people.progress(f"{far.done} of {counted(far.total, 'episode')}; {_progress(far)}")

            with closing(KeptEnvironment(people.opened)) as kept:
                return evaluate(opened, output, replace(options, environment=kept), show)


def run_session(
    session: EvaluationSession, policy: PolicySpec, direct: Callable[[EvaluationSession], int]
) -> int:
    """Run the evaluations of one command, and return the exit code.

    Args:
        session: How they are run.
        policy: Whose devices an actor on a cluster occupies.
        direct: Runs the evaluations and prints their results.

    Raises:
        ConfigError: torchrun has started several processes.
    """
    if world_size() > 1:
        raise ConfigError(
            f"torchrun has started {world_size()} processes, and Ray runs an evaluation on many "
            "GPUs and machines: dzrobot eval ... --ray (one command; see docs/guides/evaluate.md)"
        )
    if session.ray is None:
        return direct(session)
    from dzrobot.cluster import connected
    from dzrobot.rollout.evaluation.actors import needs_of

    with connected(session.ray, needs_of(policy, session.options.workers)) as cluster:
        return direct(replace(session, cluster=cluster))


def _run_in_simulation(opened: Opened, output: Path, options: RunOptions) -> Summary:
    with progress_bar("episodes") as advance, terminable():
        return evaluate(
            opened, output, options, lambda far: advance(far.done, far.total, _progress(far))
        )


def _progress(progress: EvalProgress) -> str:
    failed = f", {progress.errors} errors" if progress.errors else ""
    return f"{progress.successes} of {progress.done} succeeded{failed}"
