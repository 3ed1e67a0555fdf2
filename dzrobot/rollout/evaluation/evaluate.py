"""An evaluation from beginning to end, and all evaluations of one command, here or on a cluster.

Interrupted at any point, it resumes where it stopped.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dzrobot.declared import at_the_door
from dzrobot.errors import ConfigError, counted
from dzrobot.process import terminable, world_size
from dzrobot.progress import progress_bar, waiting
from dzrobot.rollout.environment import (
    FIRST_USE,
    KeptEnvironment,
    OperatorOptions,
    make_environment,
)
from dzrobot.rollout.evaluation.card import (
    CARD_FILE,
    card_digest,
    keep_card,
    own_code,
    read_card,
    read_cases,
    refuse_other_code,
    refuse_unlike,
    tasks_by_axis,
    unlike_beside,
    with_code_of,
)
from dzrobot.rollout.evaluation.planning import (
    EvaluationPlan,
    EvaluationRequest,
    Exclusion,
    Opened,
    RunOptions,
    open_plan,
    plan,
    refuse_excluded,
)
from dzrobot.rollout.evaluation.report import Summary, summarize, write_summary
from dzrobot.rollout.evaluation.tables import logged_numbers, print_card, title
from dzrobot.rollout.evaluation.workers import pool_opener
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.policy_use import read_uses
from dzrobot.rollout.protocol import EpisodeSpec, shard_of
from dzrobot.rollout.queue import LocalQueue
from dzrobot.rollout.records import Record, RecordFile, locked, remove_unfinished

if TYPE_CHECKING:
    from dzrobot.cluster import Cluster, ClusterOptions


@dataclass(frozen=True, kw_only=True)
class EvalProgress:
    """How far a run is."""

    record: Record | None
    """What was finished last."""

    done: int
    """Episodes of this part with a result, earlier runs included."""

    total: int
    """Episodes of this part."""

    successes: int
    """Successes of the episodes that are done."""

    errors: int
    """Episodes that ended in an exception."""


@at_the_door
def evaluate(
    opened: Opened,
    output: Path | str,
    options: RunOptions | None = None,
    report: Callable[[EvalProgress], None] = lambda _: None,
) -> Summary:
    """Run what has no result yet, and return the summary of all that is in ``output``.

    Args:
        opened: What is evaluated.
        output: Results folder: card.json, cases.jsonl, records.jsonl, summary.json, videos/,
            predictions/, errors/. A folder that holds part of the same evaluation is resumed.
        options: How it is run.
        report: Called at the start and after every episode.

    Raises:
        ProtocolError: ``output`` holds results of another protocol, or another run writes there.
        StoppedError: an arm was stopped; what was finished before is kept.
    """
    options, output = options or RunOptions(), Path(output)
    with closing(run(opened, output, options)) as progress:
        # From here on, the folder is this evaluation's.
        report(next(progress))
        try:
            for far in progress:
                report(far)
        finally:
            progress.close()
            summary = conclude(output, options.shard)
    return summary


_ON_AN_ARM: tuple[Exclusion, ...] = (
    (
        lambda options: options.engine is not None,
        "one arm takes one process, beside it: leave --ray out",
    ),
    (
        lambda options: options.workers > 1,
        "one arm takes one process: leave --workers out",
    ),
)


def run(opened: Opened, output: Path, options: RunOptions) -> Generator[EvalProgress, None, None]:
    """Run what has no result yet; yield how far it is, at the start and after every episode.

    Args:
        opened: What is evaluated.
        output: Results folder; its records are complete whenever this yields.
        options: How it is run.

    Raises:
        ProtocolError: ``output`` holds results of another protocol, or another run writes there.
    """
    refuse_excluded(_ON_AN_ARM if opened.plan.moves_an_arm else (), options)
    opener = options.engine or pool_opener(opened, options)
    part = shard_of(opened.plan.cases, *options.shard)
    with locked(output):
        keep_card(output, opened.card, opened.plan.cases, allow_other_code=options.allow_other_code)
        records = RecordFile(output, opened.plan.cases)
        # Damage is found now, and not when all has been run.
        read_uses(output)
        waiting = [
            case
            for case in part
            if not records.has_result(case.name)
            and (options.only is None or case.name in options.only)
        ]
        if options.enough(records.records):
            waiting = []
        tally, errors = _Tally(part, records, own_code(opened.card).name), 0
        yield tally.progress(None)
        try:
            with opener(output) as engine:
                for record in engine.run(LocalQueue(waiting)):
                    far = tally.add(record)
                    errors += record.error is not None
                    yield far
                    if options.enough(records.records) or errors >= options.max_errors:
                        break
        finally:
            remove_unfinished(output)


def conclude(output: Path, shard: tuple[int, int] = (0, 1)) -> Summary:
    """Return the summary of what is in a results folder, and keep it there.

    Args:
        output: Of a run that is finished or not, or of merged ones.
        shard: Which part of the evaluation counts, and of how many.

    Raises:
        ProtocolError: the folder holds no evaluation, or a damaged one.
    """
    card, cases = read_card(output), read_cases(output)
    records = RecordFile(output, cases, writable=False).records
    summary = summarize(
        records.values(), shard_of(cases, *shard), read_uses(output), tasks_by_axis(card)
    )
    write_summary(output, summary, card)
    return summary


def merge(output: Path, parts: Sequence[Path], *, allow_other_code: bool = False) -> Summary:
    """Put the shards of one evaluation together in ``output``, and return the summary of all.

    Videos stay where they are; the merged records point to them.

    Args:
        output: Folder of the whole; created.
        parts: Folders of the shards.
        allow_other_code: Whether they may be of different code; the card then lists all.

    Raises:
        ConfigError: there are no parts.
        ProtocolError: the parts are not of one evaluation, or contradict each other.
    """
    if not parts:
        raise ConfigError("nothing to merge: name the folders of the shards")
    card = read_card(parts[0])
    for part in parts[1:]:
        other = read_card(part)
        refuse_unlike(card, other, str(parts[0]), f"in {part}")
        if not allow_other_code:
            advice = "Give --allow-other-code to mix them: the card then lists all."
            refuse_other_code(card, other, str(parts[0]), f"in {part}", advice)
        card = with_code_of(card, other)
    cases = read_cases(parts[0])
    shards = [RecordFile(part, cases, writable=False) for part in parts]
    with locked(output):
        keep_card(output, card, cases, allow_other_code=allow_other_code)
        merged = RecordFile(output, cases)
        for part, shard in zip(parts, shards, strict=True):
            _merge_one(merged, shard, part, output)
        return conclude(output)


class _Tally:
    """Counts what the records say of a part; a record more costs the same however many there are.

    Args:
        part: The cases that count.
        records: Those so far; :meth:`add` adds to them.
        code: Name of the code that runs the rest.
    """

    def __init__(self, part: Sequence[EpisodeSpec], records: RecordFile, code: str) -> None:
        self._records, self._total, self._code = records, len(part), code
        there = [r for case in part if (r := records.records.get(case.name)) is not None]
        self._failed = {record.case for record in there if record.error is not None}
        self._done = len(there) - len(self._failed)
        self._successes = sum(bool(record.success) for record in there)

    def add(self, record: Record) -> EvalProgress:
        """Keep the record of a case of the part that has no result; return how far the run is."""
        self._records.add(replace(record, code=self._code))
        self._failed.discard(record.case)
        if record.error is None:
            self._done += 1
            self._successes += bool(record.success)
        else:
            self._failed.add(record.case)
        return self.progress(record)

    def progress(self, record: Record | None) -> EvalProgress:
        """Return how far the run is; ``record`` was finished last."""
        return EvalProgress(
            record=record,
            done=self._done,
            total=self._total,
            successes=self._successes,
            errors=len(self._failed),
        )


def _merge_one(merged: RecordFile, shard: RecordFile, folder: Path, output: Path) -> None:
    for name, record in shard.records.items():
        known = merged.records.get(name)
        if known is not None and known.error is None and record.error is not None:
            continue
        video = record.video
        if video is not None:
            video = os.path.relpath(folder / video, output)
        if known is None or known.error is not None or known.result() != record.result():
            merged.add(replace(record, video=video))


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
        # Of several evaluations, the study says how they differ.
        begins = output is None and not (folder / CARD_FILE).exists()
        if begins and (note := unlike_beside(folder, opened.card)):
            self.say(note)
        with self.logger(self.project if is_tracked else None, folder, opened.card) as log:
            run = self._run_on_arm if opened.plan.moves_an_arm else _run_in_simulation
            summary = run(opened, folder, options)
            log(summary.total.episodes, logged_numbers(summary))
        if opened.policy is not None and (report := opened.policy.report()):
            self.say(report)
        return Finished(summary=summary, folder=folder, title=title(read_card(folder)))

    def _opened(self, request: EvaluationRequest) -> tuple[Opened, RunOptions]:
        """Return the evaluation, its policy loaded here or by actors, and how it is run."""
        if self.cluster is None:
            with waiting("looking at the environment and the policy"):
                planned = plan(request)
            self._note(planned)
            with waiting("loading the policy"):
                return open_plan(planned), self.options
        from dzrobot.rollout.evaluation.actors import ActorGroup

        with waiting("starting the actors, which load the policy"):
            group = ActorGroup(self.cluster, request, self.options)
        self._note(group.opened.plan)
        return group.opened, replace(self.options, engine=group.engine)

    def _note(self, planned: EvaluationPlan) -> None:
        for line in planned.notes:
            self.say(line)

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
    with progress_bar("episodes", hint=FIRST_USE) as advance, terminable():
        return evaluate(
            opened, output, options, lambda far: advance(far.done, far.total, _progress(far))
        )


def _progress(progress: EvalProgress) -> str:
    failed = f", {counted(progress.errors, 'error')}" if progress.errors else ""
    return f"{progress.successes} of {progress.done} succeeded{failed}"
