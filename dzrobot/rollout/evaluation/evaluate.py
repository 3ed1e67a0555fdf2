"""An evaluation from beginning to end; interrupted at any point, it resumes where it stopped."""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dzrobot.code_identity import CODE, code_with, package_code
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.rollout.environment import check_fits, environment_arguments, look_at, modules_of
from dzrobot.rollout.evaluation.card import (
    build_card,
    keep_card,
    own_code,
    read_card,
    read_cases,
    refuse_other_code,
    refuse_unlike,
    tasks_by_axis,
    with_code_of,
)
from dzrobot.rollout.evaluation.report import Summary, summarize, write_summary
from dzrobot.rollout.facts import EnvironmentFacts
from dzrobot.rollout.footage import Wanted
from dzrobot.rollout.perturbation import PERTURBATION, Ablation, Perturbation
from dzrobot.rollout.policy_spec import LoadedPolicy, PolicySpec, load_policy, resolve_policy
from dzrobot.rollout.protocol import EpisodeSpec, EvalSpec, plan_episodes, shard_of
from dzrobot.rollout.queue import EpisodeEngine, LocalQueue
from dzrobot.rollout.records import (
    Record,
    RecordFile,
    locked,
    measured,
    read_uses,
    remove_unfinished,
)
from dzrobot.rollout.workers import Acting, KeptEnvironment, MakeActor, RolloutSettings, WorkerPool

if TYPE_CHECKING:
    from dzrobot.rollout.asynchronous.execution import ExecutionOptions, Schedule

PREDICTED_EPISODES = 100
"""Most episodes of which predictions are kept by default."""

OpenEngine = Callable[[Path], AbstractContextManager[EpisodeEngine]]
"""Opens what runs the episodes of an evaluation; takes the results folder."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated; with the versions installed, it fixes the results."""

    spec: EvalSpec
    """Which episodes, by which rules."""

    policy: PolicySpec
    """Which policy."""

    ablation: Ablation = "none"
    """What is done to the images that the policy sees, to show that it looks."""

    perturbation: Perturbation | None = None
    """What makes the episodes harder than the protocol's. None: nothing."""

    batched: bool = False
    """Whether the policy acts for several episodes in one call; the last bits then vary."""

    execution: "ExecutionOptions | None" = None
    """How plans are executed that take time to make. None: time stands still meanwhile."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is run; none of this changes a result."""

    workers: int = 1
    """Processes that step environments; 0: everything in this process."""

    videos: Wanted = "all"
    """Of which episodes a video is kept."""

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
    """Of those done."""

    errors: int
    """Episodes that ended in an exception."""


@dataclass(frozen=True, kw_only=True)
class PreparedEvaluation:
    """An evaluation that is ready to run: everything was found and fits."""

    evaluation: Evaluation
    """What was asked for."""

    cases: tuple[EpisodeSpec, ...]
    """Every episode, in order."""

    arguments: Mapping[str, Mapping[str, Any]]
    """Keyword arguments beyond the task, by environment."""

    facts: Mapping[str, EnvironmentFacts]
    """What the environments say of themselves, by name."""

    ready: LoadedPolicy
    """The policy, loaded."""

    card: Mapping[str, Any] = field(repr=False)
    """All that the results depend on."""

    schedule: "Schedule | None" = None
    """How plans are executed, where time passes while they are made."""

    @property
    def moves_an_arm(self) -> bool:
        """Whether an environment drives an arm, real or emulated."""
        return any(facts.moves_an_arm for facts in self.facts.values())


def prepare(evaluation: Evaluation) -> PreparedEvaluation:
    """Find and load all that ``evaluation`` names.

    Raises:
        DzrobotError: something is unknown, missing, or does not fit together.
        ConfigError: it is batched, and the policy takes one episode at a time.
    """
    # Hashed before anything is loaded, which takes long enough for files to change.
    package_code()
    spec = evaluation.spec
    cases = plan_episodes(spec)
    names = list(dict.fromkeys(case.env for case in cases))
    protocol = spec.protocol
    first = look_at(names[0], cases[0], spec.arguments)
    found = resolve_policy(evaluation.policy, first.robot, exact=first.moves_an_arm)
    robot, options = found.robot, evaluation.policy.options
    settled = replace(
        options,
        history=options.history or protocol.history or robot.history,
        noise=options.noise or protocol.noise,
        noise_slots=options.noise_slots or protocol.slots,
    )
    timed = _schedule(evaluation, first, robot)
    if timed is not None:
        settled = replace(settled, execute=timed.execute)
    policy = replace(evaluation.policy, options=settled)
    spec = _changes_named(spec, options, robot, timed, evaluation.perturbation)
    arguments = {
        name: environment_arguments(name, protocol, robot, spec.arguments) for name in names
    }
    needed = robot.observation_keys if policy.looks else ()
    # A user's own policy may read images of any size.
    sized = policy.is_checkpoint
    facts = _check_spaces(cases, arguments, robot, needed=needed, sized=sized)
    ready = load_policy(replace(found, spec=policy))
    if timed is not None:
        from dzrobot.rollout.asynchronous.engine import check_policy

        check_policy(ready.policy, timed)
    if evaluation.batched and not (ready.policy is not None and ready.policy.can.batches):
        raise ConfigError(
            f"--batch gives several episodes to a policy in one call, and {policy.label} takes one "
            "at a time (it has no act_batch): leave --batch out"
        )
    behavior = {**ready.card, "embodiment": robot.tag, "ablation": evaluation.ablation}
    if evaluation.batched:
        behavior["batched"] = True
    card = build_card(spec, cases, behavior, arguments, facts)
    if evaluation.perturbation is not None:
        for name, own in facts.items():
            evaluation.perturbation.check(name, own.perturbations)
        card[PERTURBATION] = evaluation.perturbation.card()
    if timed is not None:
        card["execution"] = timed.card()
    card[CODE] = [code_with(_modules(evaluation, names, ready)).plain()]
    return PreparedEvaluation(
        evaluation=evaluation,
        cases=cases,
        arguments=arguments,
        facts=facts,
        ready=ready,
        card=card,
        schedule=timed,
    )


def evaluate(
    prepared: PreparedEvaluation,
    output: Path,
    options: RunOptions | None = None,
    report: Callable[[EvalProgress], None] = lambda _: None,
) -> Summary:
    """Run what has no result yet, and return the summary of all that is in ``output``.

    Args:
        prepared: What is evaluated.
        output: Results folder: card.json, cases.jsonl, records.jsonl, summary.json, videos/,
            predictions/, errors/. A folder that holds part of the same evaluation is resumed.
        options: How it is run.
        report: Called at the start and after every episode.

    Raises:
        ProtocolError: ``output`` holds results of another protocol, or another run writes there.
        StoppedError: an arm was stopped; what was finished before is kept.
    """
    options = _for_arms(options or RunOptions(), prepared)
    opened = options.engine or pool_opener(prepared, options)
    part = shard_of(prepared.cases, *options.shard)
    with locked(output):
        card = keep_card(
            output, prepared.card, prepared.cases, allow_other_code=options.allow_other_code
        )
        records = RecordFile(output, prepared.cases)
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
        tally = _Tally(part, records, own_code(prepared.card).name)
        report(tally.progress(None))
        errors = 0

        def keep(record: Record) -> bool:
            nonlocal errors
            report(tally.add(record))
            errors += record.error is not None
            return options.enough(records.records) or errors >= options.max_errors

        try:
            with opened(output) as engine:
                for record in engine.run(LocalQueue(waiting)):
                    if keep(record):
                        break
        finally:
            remove_unfinished(output)
            axes = tasks_by_axis(prepared.card)
            summary = summarize(records.records.values(), part, read_uses(output), axes)
            write_summary(output, summary, card)
    return summary


def pool_opener(prepared: PreparedEvaluation, options: RunOptions) -> OpenEngine:
    """Return what opens the workers of this process.

    Raises:
        ConfigError: predictions are asked for, and there are none.
    """
    predicts = _predicts(prepared, options)

    @contextmanager
    def opened(folder: Path) -> Iterator[WorkerPool]:
        settings = _settings(prepared, folder, options)
        acting = _acting(prepared, options, folder if predicts else None)
        with (
            measured(acting.policy, _traced_device(prepared), folder),
            WorkerPool(settings, acting, options.workers, environment=options.environment) as pool,
        ):
            yield pool

    return opened


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
        card = keep_card(output, card, cases, allow_other_code=allow_other_code)
        merged = RecordFile(output, cases)
        for part, shard in zip(parts, shards, strict=True):
            _merge_one(merged, shard, part, output)
        summary = summarize(merged.records.values(), cases, axes=tasks_by_axis(card))
        write_summary(output, summary, card)
    return summary


def _modules(evaluation: Evaluation, names: Sequence[str], ready: LoadedPolicy) -> Iterator[str]:
    """Yield the modules that a user has named: of the environments, the robot and the policy."""
    for name in names:
        yield from modules_of(name)
    for reference in (evaluation.policy.name, evaluation.policy.embodiment or ""):
        yield reference.partition(":")[0]
    yield type(ready.policy).__module__


def _settings(prepared: PreparedEvaluation, output: Path, options: RunOptions) -> RolloutSettings:
    return RolloutSettings(
        folder=output,
        arguments=prepared.arguments,
        stop_at_success=prepared.evaluation.spec.protocol.stop_at_success,
        privileged=prepared.evaluation.policy.in_worker,
        ablation=prepared.evaluation.ablation,
        perturbation=prepared.evaluation.perturbation,
        videos=options.videos,
        code=package_code().content,
        photos=prepared.moves_an_arm,
        variables=options.variables,
    )


def _acting(prepared: PreparedEvaluation, options: RunOptions, predictions: Path | None) -> Acting:
    return Acting(
        policy=prepared.ready.policy,
        batched=prepared.evaluation.batched,
        window_s=options.batch_window_s,
        engines=_engines(prepared),
        predictions=predictions,
    )


def _traced_device(prepared: PreparedEvaluation) -> str | None:
    """Return the kind of device whose kernels are traced; beside an arm, nobody waits for that."""
    return None if prepared.moves_an_arm else prepared.ready.card.get("device")


def _predicts(prepared: PreparedEvaluation, options: RunOptions) -> bool:
    """Return whether predictions are kept.

    Raises:
        ConfigError: they are asked for, and there are none.
    """
    why = None
    policy = prepared.ready.policy
    if (video := prepared.ready.card.get("video", "full")) != "full":
        why = f"with --video {video} the policy predicts no video"
    elif policy is None or not policy.can.predicts:
        why = "the policy predicts no video that could be kept"
    elif prepared.evaluation.batched:
        why = "with --batch no episode is asked for its own plan"
    elif prepared.moves_an_arm:
        why = "an arm is not to wait until a video is decoded"
    elif prepared.schedule is not None:
        why = "with --execution or --latency plans overlap"
    if options.predictions and why:
        raise ConfigError(f"--predictions on: {why}; leave it out")
    if options.predictions is None:
        return why is None and len(prepared.cases) <= PREDICTED_EPISODES
    return options.predictions


def _engines(prepared: PreparedEvaluation) -> MakeActor | None:
    if prepared.schedule is None:
        return None
    from dzrobot.rollout.asynchronous.engine import Engines

    hands = {name: facts.hand_position for name, facts in prepared.facts.items()}
    return Engines(prepared.schedule, prepared.evaluation.spec.seed, hands).actor


def _schedule(
    evaluation: Evaluation, facts: EnvironmentFacts, robot: Embodiment
) -> "Schedule | None":
    """Return how plans are executed; None where time stands still while they are made."""
    options, execute = evaluation.execution, evaluation.policy.options.execute
    if options is None:
        return None
    from dzrobot.rollout.asynchronous.execution import ZERO, schedule

    if evaluation.batched:
        raise ConfigError(
            "--batch acts for several episodes in one call, whose plans are then due together: "
            "leave out --batch, or --execution and --latency"
        )
    if facts.moves_an_arm:
        if options.latency is not None:
            raise ConfigError(
                "an arm moves in real time: leave --latency out; it is for simulators"
            )
        if options.execution == "sync":
            return None
    elif options.latency is None:
        options = replace(options, latency=ZERO)
    return schedule(options, robot, facts.control_hz, execute)


def _for_arms(options: RunOptions, prepared: PreparedEvaluation) -> RunOptions:
    """Return the options as an arm takes them: it is driven from this process alone.

    A stop, the keyboard and the lock on the arm are then in one place.
    """
    if not prepared.moves_an_arm:
        return options
    if options.engine is not None:
        raise ConfigError("one arm takes one process, beside it: leave --ray out")
    if options.workers > 1:
        raise ConfigError(
            f"workers={options.workers}: one arm takes one process; leave --workers out"
        )
    return replace(options, workers=0)


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


def _changes_named(
    spec: EvalSpec,
    options: PolicyOptions,
    robot: Embodiment,
    timed: "Schedule | None",
    perturbation: Perturbation | None,
) -> EvalSpec:
    """Return the spec, which also says what else departs from the protocol."""
    protocol, changes = spec.protocol, []
    history = protocol.history or robot.history
    if options.history not in (None, history):
        changes.append(f"history {options.history}, not {history}")
    if options.noise not in (None, protocol.noise):
        changes.append(f"noise {options.noise}, not {protocol.noise}")
    if timed is not None:
        latency = timed.options.latency
        taken = "real time" if latency is None else f"latency {latency.text}"
        changes.append(f"execution {timed.options.execution} every {timed.execute} steps, {taken}")
    if perturbation is not None:
        changes.append(f"perturbation {perturbation.text}")
    return replace(spec, policy_changes=tuple(changes))


def _check_spaces(
    cases: Sequence[EpisodeSpec],
    arguments: Mapping[str, Mapping[str, Any]],
    robot: Embodiment,
    *,
    needed: Sequence[str],
    sized: bool,
) -> dict[str, EnvironmentFacts]:
    """Make one environment of each kind: wrong arguments are found before anything is loaded.

    Args:
        cases: What will run.
        arguments: Of each environment.
        robot: Says how many numbers an action has.
        needed: Observation keys that the policy reads.
        sized: Whether it reads images of the robot's size alone.
    """
    return {
        name: look_at(
            name,
            next(group),
            arguments[name],
            lambda env, name=name: check_fits(  # type: ignore[misc]
                name, env, robot, needed=needed, sized=sized
            ),
        )
        for name, group in itertools.groupby(cases, key=lambda case: case.env)
    }


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
