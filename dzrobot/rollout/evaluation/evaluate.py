"""An evaluation from beginning to end; interrupted at any point, it resumes where it stopped."""

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dzrobot.code_identity import package_code
from dzrobot.errors import ConfigError
from dzrobot.rollout.evaluation.card import (
    keep_card,
    own_code,
    read_card,
    read_cases,
    refuse_other_code,
    refuse_unlike,
    tasks_by_axis,
    with_code_of,
)
from dzrobot.rollout.evaluation.planning import (
    EvaluationPlan,
    EvaluationRequest,
    Exclusion,
    plan,
    refuse_excluded,
)
from dzrobot.rollout.evaluation.report import Summary, summarize, write_summary
from dzrobot.rollout.footage import Wanted
from dzrobot.rollout.policy_spec import LoadedPolicy, load_policy
from dzrobot.rollout.policy_use import measured, read_uses
from dzrobot.rollout.protocol import EpisodeSpec, shard_of
from dzrobot.rollout.queue import EpisodeEngine, LocalQueue
from dzrobot.rollout.records import Record, RecordFile, locked, remove_unfinished
from dzrobot.rollout.workers import Acting, KeptEnvironment, RolloutSettings, WorkerPool

if TYPE_CHECKING:
    pass

PREDICTED_EPISODES = 100
"""Most episodes of which predictions are kept by default."""

OpenEngine = Callable[[Path], AbstractContextManager[EpisodeEngine]]
"""Opens what runs the episodes of an evaluation; takes the results folder."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is run; none of this changes a result."""

    workers: int = 1
    """Processes that step environments; 0: everything in this process."""

    videos: Wanted = "all"
    """Which episodes a video is kept of."""

    predictions: bool | None = None
    """Whether what the policy predicts is kept for the report. None: where it predicts, of at most
    `PREDICTED_EPISODES` episodes."""

    shard: tuple[int, int] = (0, 1)
    """Which part of the run this is, and of how many."""

    batch_window_s: float = 0.0
    """Where the evaluation is batched: longest time that an episode whose plan is due waits for
    others to share its call."""

    max_errors: int = 10
    """Episodes that may end in an exception before this run gives up."""

    enough: Callable[[Mapping[str, Record]], bool] = lambda _: False
    """Asked with all records by case before the first episode and after each: whether the rest
    need not be run."""

    environment: KeptEnvironment | None = None
    """Opens the environments of this process, and keeps the last one open when the run is over.
    None: it is closed."""

    only: frozenset[str] | None = None
    """Names of the cases that are run now, where not all are."""

    variables: Sequence[Mapping[str, str]] = ()
    """Environment variables of the ``workers``, in turn: where each one draws, say."""

    engine: OpenEngine | None = None
    """What runs the episodes. None: ``workers`` of this process."""

    allow_other_code: bool = False
    """Whether a folder may be resumed whose results are of other code; its card lists both."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"workers={self.workers}: give 0 or more")
        if not 0 <= self.batch_window_s < math.inf:
            raise ConfigError(f"batch_window_s={self.batch_window_s}: give 0 or more, in seconds")


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


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An evaluation that is ready to run."""

    plan: EvaluationPlan
    """What is run."""

    ready: LoadedPolicy
    """The policy, loaded; none of :meth:`elsewhere`."""

    card: Mapping[str, Any] = field(repr=False)
    """The plan written down: all that the results depend on."""

    def elsewhere(self) -> Self:
        """Return this for another process: without what only this one can use."""
        found = replace(self.plan.found, checkpoint=None)
        ready = replace(self.ready, policy=None, round_trips=str)
        return replace(self, plan=replace(self.plan, found=found), ready=ready)


def open_plan(planned: EvaluationPlan) -> Opened:
    """Load the policy of a plan.

    Args:
        planned: What :func:`~dzrobot.rollout.evaluation.planning.plan` found.

    Raises:
        CheckpointError: the policy cannot be loaded.
        ConfigError: it cannot act as is asked for.
    """
    ready = load_policy(planned.found)
    if planned.schedule is not None:
        from dzrobot.rollout.asynchronous.engine import check_policy

        check_policy(ready.policy, planned.schedule)
    if planned.request.batched and not (ready.policy is not None and ready.policy.can.batches):
        raise ConfigError(
            "--batch gives several episodes to a policy in one call, and "
            f"{planned.found.spec.label} takes one at a time (it has no act_batch): leave --batch "
            "out"
        )
    return Opened(plan=planned, ready=ready, card=planned.card(ready))


def prepare(request: EvaluationRequest) -> Opened:
    """Find, check and load all that is evaluated.

    Args:
        request: What is asked for.

    Raises:
        DzrobotError: something is unknown, missing, or does not fit together.
    """
    return open_plan(plan(request))


def evaluate(
    opened: Opened,
    output: Path,
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
    options = options or RunOptions()
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


def pool_opener(opened: Opened, options: RunOptions) -> OpenEngine:
    """Return what opens the workers of this process.

    Raises:
        ConfigError: predictions are asked for, and there are none.
    """
    plan, policy = opened.plan, opened.ready.policy
    request, predicts = plan.request, _predicts(opened, options)
    engines = None
    if plan.schedule is not None:
        from dzrobot.rollout.asynchronous.engine import Engines

        hands = {name: facts.hand_position for name, facts in plan.facts.items()}
        engines = Engines(plan.schedule, request.spec.seed, hands).actor
    # Beside an arm, nothing waits for a trace of kernels.
    device = None if plan.moves_an_arm else opened.ready.card.get("device")

    @contextmanager
    def pool(folder: Path) -> Iterator[WorkerPool]:
        settings = RolloutSettings(
            folder=folder,
            arguments=plan.arguments,
            stop_at_success=request.spec.protocol.stop_at_success,
            privileged=request.policy.in_worker,
            ablation=request.ablation,
            perturbation=request.perturbation,
            videos=options.videos,
            code=package_code().content,
            photos=plan.moves_an_arm,
            variables=options.variables,
        )
        acting = Acting(
            policy=policy,
            batched=request.batched,
            window_s=options.batch_window_s,
            engines=engines,
            predictions=folder if predicts else None,
        )
        # One process holds the stop, the keyboard and the lock of an arm.
        count = 0 if plan.moves_an_arm else options.workers
        with (
            measured(policy, device, folder),
            WorkerPool(settings, acting, count, environment=options.environment) as workers,
        ):
            yield workers

    return pool


def _predicts(opened: Opened, options: RunOptions) -> bool:
    """Return whether predictions are kept.

    Raises:
        ConfigError: they are asked for, and there are none.
    """
    why = next((text for excludes, text in _UNPREDICTED if excludes(opened)), None)
    if why is None:
        few = len(opened.plan.cases) <= PREDICTED_EPISODES
        return few if options.predictions is None else options.predictions
    if options.predictions:
        raise ConfigError(f"--predictions on: {why(opened)}; leave it out")
    return False


def _video(opened: Opened) -> str:
    return str(opened.ready.card.get("video", "full"))


_UNPREDICTED: tuple[tuple[Callable[[Opened], bool], Callable[[Opened], str]], ...] = (
    (
        lambda opened: _video(opened) != "full",
        lambda opened: f"with --video {_video(opened)} the policy predicts no video",
    ),
    (
        lambda opened: opened.ready.policy is None or not opened.ready.policy.can.predicts,
        lambda _: "the policy predicts no video that could be kept",
    ),
    (
        lambda opened: opened.plan.request.batched,
        lambda _: "with --batch no episode is asked for its own plan",
    ),
    (
        lambda opened: opened.plan.moves_an_arm,
        lambda _: "an arm is not to wait until a video is decoded",
    ),
    (
        lambda opened: opened.plan.schedule is not None,
        lambda _: "with --execution or --latency plans overlap",
    ),
)
"""When there are no predictions, and why."""


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
