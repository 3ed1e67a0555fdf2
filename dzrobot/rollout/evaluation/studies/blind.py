"""Real trials of several policies in turns, without the judge knowing which policy acts.

A number that is drawn once, and kept in the folder, decides which policy goes first from each start
and which folder is whose: an evaluation that was killed continues in the same order, and the order
of one evaluation reveals nothing about the next.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from dzrobot import files
from dzrobot.documents import read_json
from dzrobot.errors import ConfigError, ProtocolError, counted
from dzrobot.progress import waiting
from dzrobot.rng import numpy_generator
from dzrobot.rollout.arm.attended import OPERATOR_STOP, Attended, attended
from dzrobot.rollout.environment import KeptEnvironment, OperatorOptions, make_environment
from dzrobot.rollout.evaluation.comparison import (
    Results,
    check_same_conditions,
    compare,
    read_results,
)
from dzrobot.rollout.evaluation.evaluate import EvalProgress, EvaluationSession, evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, Opened, RunOptions, prepare
from dzrobot.rollout.evaluation.report import Score, summarize
from dzrobot.rollout.evaluation.studies.series import (
    Candidate,
    candidate_folders,
    read_candidates,
)
from dzrobot.rollout.evaluation.tables import (
    failures_line,
    print_card,
    print_comparison,
    scores_table,
)
from dzrobot.rollout.footage import photo_file
from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.rollout.records import LOCK_FILE, Record, RecordFile, locked, storing

BLIND_FILE = "blind.json"
SCENE_FOLDER = "scenes"
"""Photos of each start, as the first trial from it found it."""

_HIDDEN = "hidden-"
_KEY_BYTES = 16


class Draw(BaseModel):
    """What the order follows from; of names, it says only which policies there are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Drawn when the evaluation began."""

    policies: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    """In the order in which they were given."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One policy from one start."""

    policy: int
    """Which one, counted as they were given."""

    case: EpisodeSpec


@dataclass(frozen=True, kw_only=True)
class BlindEvaluation:
    """The folder of an evaluation whose operator does not know which policy acts."""

    folder: Path
    draw: Draw
    labels: tuple[str, ...]
    """Name of each policy's folder, once all trials are done."""

    @classmethod
    def at(cls, folder: Path, policies: Sequence[str], labels: Sequence[str]) -> Self:
        """Return the evaluation in ``folder``, begun if need be. The caller holds its lock.

        Raises:
            ProtocolError: the folder holds something else, or an evaluation of other policies.
        """
        path = folder / BLIND_FILE
        if path.exists():
            draw = read_json(path, Draw, ProtocolError)
            if draw.policies != tuple(policies):
                raise ProtocolError(
                    f"{folder} holds a blind evaluation of {', '.join(draw.policies)}, not of "
                    f"{', '.join(policies)}: name them as before, or use another --output"
                )
        else:
            if others := sorted(p.name for p in folder.iterdir() if p.name != LOCK_FILE):
                raise ProtocolError(
                    f"{folder} holds {others[0]}, and no {BLIND_FILE}: a blind evaluation begins "
                    "in an empty folder; use another --output"
                )
            draw = Draw(key=secrets.token_hex(_KEY_BYTES), policies=tuple(policies))
            with storing(folder):
                files.write_json(path, draw.model_dump())
        return cls(folder=folder, draw=draw, labels=tuple(labels))

    def trials(self, cases: Sequence[EpisodeSpec]) -> Iterator[Trial]:
        """Yield every trial: from each start all policies, in an order drawn for that start."""
        count = len(self.draw.policies)
        for case in cases:
            key = (self.draw.key, case.suite, case.task_id, case.episode)
            for policy in numpy_generator("blind order", *key).permutation(count):
                yield Trial(policy=int(policy), case=case)

    def place(self, policy: int) -> Path:
        """Return the results folder of a policy: under a drawn number until it is revealed."""
        named = self.folder / self.labels[policy]
        if named.exists():
            return named
        numbers = numpy_generator("blind folders", self.draw.key).permutation(len(self.labels))
        return self.folder / f"{_HIDDEN}{int(numbers[policy]) + 1}"

    def reveal(self) -> list[Path]:
        """Give every folder the name of its policy; return them. Killed half way, do it again."""
        for policy, label in enumerate(self.labels):
            place, named = self.place(policy), self.folder / label
            if place != named:
                with storing(self.folder):
                    place.rename(named)
                    files.flush(self.folder)
        return [self.folder / label for label in self.labels]

    def scene(self, case: EpisodeSpec) -> Path:
        """Return where the photo is by which later trials from this start are set up."""
        return self.folder / SCENE_FOLDER / f"{case.name}.png"


@dataclass(frozen=True, kw_only=True)
class _Blind:
    """A blind evaluation that is ready to run."""

    trials: BlindEvaluation
    candidates: tuple[Opened, ...]
    options: RunOptions

    @property
    def planned(self) -> list[Trial]:
        return list(self.trials.trials(self.candidates[0].plan.cases))

    def waiting(self) -> list[Trial]:
        """Return the trials without a result, in their order."""
        records = [
            RecordFile(self.trials.place(policy), own.plan.cases, writable=False)
            for policy, own in enumerate(self.candidates)
        ]
        return [t for t in self.planned if not records[t.policy].has_result(t.case.name)]


def evaluate_blind(
    session: EvaluationSession, request: EvaluationRequest, names: Sequence[str]
) -> int:
    """Run the trials that have no result, reveal who was who, and return the exit code.

    Args:
        session: Says where the results go, and how they are run.
        request: What all have in common.
        names: Of the policies.

    Raises:
        ConfigError: no output folder, no terminal to ask at, or no arm is moved.
        ProtocolError: the folder holds something else, or the policies are not evaluated alike.
        StoppedError: the arm was stopped; what was finished before is kept.
    """
    if len(names) < 2:
        raise ConfigError("--blind compares: name two or more policies")
    if session.cluster is not None or session.options.shard != (0, 1):
        raise ConfigError("one arm takes one process: leave out --ray and --shard")
    console, output = session.console, session.parent("--blind")
    prepared = _opened(session, read_candidates(request, names, lambda folder: output / folder))
    print_card(console, prepared[0].card, output)
    with locked(output):
        folder = BlindEvaluation.at(output, names, candidate_folders(names))
        options = replace(session.options, workers=0)
        blind = _Blind(trials=folder, candidates=prepared, options=options)
        if blind.waiting():
            _run(session.operator, blind)
        if left := len(blind.waiting()):
            console.print(
                f"{left} of {len(blind.planned)} trials have no result yet; the names stay hidden "
                "until all have one. The same command continues.",
                soft_wrap=True,
            )
            return 1
        _conclude(console, names, folder.reveal())
    return 0


def _opened(session: EvaluationSession, candidates: dict[str, Candidate]) -> tuple[Opened, ...]:
    """Load every policy; check that an arm is moved, and that all are evaluated alike."""
    with waiting("loading the policies"):
        found = tuple(prepare(one.request) for one in candidates.values())
    for line in dict.fromkeys(line for one in found for line in one.plan.notes):
        session.say(line)
    first, *others = found
    if not first.plan.moves_an_arm:
        raise ConfigError(
            "--blind is for an arm, beside which a person judges; simulators judge by themselves: "
            "use `dzrobot sweep`"
        )
    name, *rest = candidates
    base = Results(folder=Path(name), card=first.card, cases=first.plan.cases, records={})
    for other, own in zip(rest, others, strict=True):
        check_same_conditions(base, own.card, f"of {other}")
        if own.plan.arguments != first.plan.arguments:
            raise ConfigError(
                f"{name} and {other} need the environment made differently: "
                f"{first.plan.arguments} and {own.plan.arguments}; evaluate them apart"
            )
    return found


def _run(operator: OperatorOptions, blind: _Blind) -> None:
    first = blind.candidates[0].plan
    case = first.cases[0]
    log = operator.log or blind.trials.folder / "operator.jsonl"
    asked = replace(operator, title="dzrobot eval --blind", log=log, asks_after_stop=True)
    with attended(asked) as people:
        if people.console is None:
            raise ConfigError(
                "--blind needs the person who judges: standard input and output are not a "
                "terminal. Run this in one"
            )
        with closing(make_environment(case, first.arguments[case.env], render=False)) as env:
            people.attend(env)
        with closing(KeptEnvironment(people.opened)) as kept:
            options = replace(blind.options, environment=kept)
            _run_trials(replace(blind, options=options), people, blind.options.max_errors)


def _run_trials(blind: _Blind, people: Attended, max_errors: int) -> None:
    """Run what has no result; after ``max_errors`` trials that ended in an exception, give up."""
    planned, waiting = blind.planned, blind.waiting()
    errors = 0
    for trial in waiting:
        scene = blind.trials.scene(trial.case)
        number = planned.index(trial) + 1
        people.progress(f"trial {number} of {len(planned)}, start {trial.case.name}")
        people.show_scene(scene if scene.exists() else None)
        record = _run_trial(blind, trial)
        if record is None or record.error is not None:
            errors += 1
            if errors >= max_errors:
                return
        elif not scene.exists():
            _keep_scene(photo_file(blind.trials.place(trial.policy), trial.case.name), scene)


def _run_trial(blind: _Blind, trial: Trial) -> Record | None:
    """Run one trial; return its record."""
    records: list[Record] = []

    def keep(far: EvalProgress) -> None:
        if far.record is not None:
            records.append(far.record)

    evaluate(
        blind.candidates[trial.policy],
        blind.trials.place(trial.policy),
        replace(blind.options, only=frozenset({trial.case.name})),
        keep,
    )
    return records[-1] if records else None


def is_stopped(record: Record) -> bool:
    """Return whether the operator stopped an episode."""
    return (record.robot or {}).get("abort") == OPERATOR_STOP


def _keep_scene(photo: Path, scene: Path) -> None:
    if photo.is_file():
        scene.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(scene, photo.read_bytes())


def _conclude(console: Console, names: Sequence[str], folders: Sequence[Path]) -> None:
    runs = [read_results(folder) for folder in folders]
    scores = {
        name: Score.of(summarize(run.records.values(), run.cases))
        for name, run in zip(names, runs, strict=True)
    }
    console.print(scores_table("success", "policy", scores))
    for name, run in zip(names, runs, strict=True):
        if failed := failures_line(summarize(run.records.values(), run.cases)):
            console.print(f"{name} failed: {failed}", markup=False, soft_wrap=True)
        stopped = [one for one in run.finished.values() if is_stopped(one)]
        if stopped:
            console.print(
                f"{name}: {counted(len(stopped), 'trial')} of these the operator stopped, and said "
                "that it counts",
                markup=False, soft_wrap=True,
            )  # fmt: skip
    print_comparison(console, compare(runs))
    for name, folder in zip(names, folders, strict=True):
        console.print(f"{name}: {folder}", markup=False, soft_wrap=True)
    pair = " ".join(map(str, folders[:2]))
    console.print(f"`dzrobot report {pair}` shows two of them", markup=False, soft_wrap=True)
