"""``dzrobot eval --blind``: real trials of several policies, in turns, names hidden."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dzrobot.commands.candidates import candidate_folders, read_candidates, scores_table
from dzrobot.commands.compare import show_comparison
from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import looked_after
from dzrobot.commands.options.evaluation import read_evaluation
from dzrobot.commands.results import say_what_it_is
from dzrobot.commands.variants import Variant
from dzrobot.errors import ConfigError
from dzrobot.files import write_bytes
from dzrobot.rollout.arm.attended import Attended
from dzrobot.rollout.environment import make_environment
from dzrobot.rollout.evaluation.blind import BlindEvaluation, Trial
from dzrobot.rollout.evaluation.comparison import (
    Results,
    check_same_conditions,
    compare,
    read_results,
)
from dzrobot.rollout.evaluation.evaluate import (
    EvalProgress,
    PreparedEvaluation,
    RunOptions,
    evaluate,
    prepare,
)
from dzrobot.rollout.evaluation.report import Score, summarize
from dzrobot.rollout.footage import photo_file
from dzrobot.rollout.records import Record, RecordFile, locked
from dzrobot.rollout.workers import KeptEnvironment

_UNFIT = {
    "checkpoint": "it names the policies itself",
    "policy": "it names the policies itself",
    "server": "it takes the addresses of servers itself: --blind ws://A:8000 ws://B:8000",
    "steps": "it compares policies by itself",
    "perturb": "it compares policies by itself",
    "against": "it compares policies by itself",
    "stop_early": "it compares policies by itself",
    "unattended": "a person judges",
    "workers": "one arm takes one process",
    "wandb": "a page would show the names; send the folders there afterwards",
}
"""Flags that do not go together with it, and why."""


def add_blind(group: Any) -> None:
    """Declare ``--blind``."""
    group.add_argument(
        "--blind", type=flags.text, nargs="+", metavar="POLICY",
        help="arm: several policies (checkpoints, module:factory, ws:// addresses of servers) from "
        "the same starts, in a drawn order that the operator is not told before all trials are "
        "done; all are loaded at once",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Blind:
    """A blind evaluation that is ready to run."""

    trials: BlindEvaluation
    candidates: tuple[PreparedEvaluation, ...]
    options: RunOptions

    @property
    def planned(self) -> list[Trial]:
        return list(self.trials.trials(self.candidates[0].cases))

    def waiting(self) -> list[Trial]:
        """Return the trials without a result, in their order."""
        records = [
            RecordFile(self.trials.place(policy), own.cases, writable=False)
            for policy, own in enumerate(self.candidates)
        ]
        return [t for t in self.planned if not records[t.policy].has_result(t.case.name)]


def evaluate_blind(console: Console, arguments: argparse.Namespace, options: RunOptions) -> int:
    """Run the trials that have no result, reveal who was who, and return the exit code.

    Args:
        console: Where to.
        arguments: Those of `dzrobot eval`.
        options: How it is run.

    Raises:
        ConfigError: the flags do not fit, nobody is at a terminal, or no arm is moved.
        ProtocolError: the folder holds something else, or the policies are not evaluated alike.
        StoppedError: the arm was stopped; what was finished before is kept.
    """
    names: list[str] = arguments.blind
    _check(arguments, options)
    candidates = read_candidates(names, lambda folder: arguments.output / folder)
    prepared = _prepared(console, arguments, candidates)
    say_what_it_is(console, prepared[0].card, arguments.output)
    with locked(arguments.output):
        folder = BlindEvaluation.at(arguments.output, names, candidate_folders(names))
        blind = _Blind(trials=folder, candidates=prepared, options=options)
        if blind.waiting():
            _run(arguments, blind)
        if left := len(blind.waiting()):
            console.print(
                f"{left} of {len(blind.planned)} trials have no result yet; the names stay hidden "
                "until all have one. The same command goes on.",
                soft_wrap=True,
            )
            return 1
        _conclude(console, names, folder.reveal())
    return 0


def _check(arguments: argparse.Namespace, options: RunOptions) -> None:
    if len(arguments.blind) < 2:
        raise ConfigError("--blind compares: name two or more policies")
    for name, why in _UNFIT.items():
        if getattr(arguments, name) not in (None, False, []):
            raise ConfigError(f"--blind without --{name.replace('_', '-')}: {why}")
    if options.ranks is not None or options.shard != (0, 1):
        raise ConfigError("one arm takes one process: leave out torchrun and --shard")
    if arguments.output is None:
        raise ConfigError("--blind writes several folders: say below which with --output DIR")


def _prepared(
    console: Console, arguments: argparse.Namespace, candidates: dict[str, Variant]
) -> tuple[PreparedEvaluation, ...]:
    """Load every policy; check that an arm is moved, and that all are evaluated alike."""
    asked = [read_evaluation(own.applied(arguments)) for own in candidates.values()]
    for line in dict.fromkeys(line for one in asked for line in one.greeting):
        console.print(line, soft_wrap=True, markup=False)
    found = tuple(prepare(one.evaluation) for one in asked)
    first, *others = found
    if not first.moves_an_arm:
        raise ConfigError(
            "--blind is for an arm, beside which a person judges; simulators judge by themselves: "
            "use `dzrobot sweep`"
        )
    name, *rest = candidates
    base = Results(folder=Path(name), card=first.card, cases=first.cases, records={})
    for other, own in zip(rest, others, strict=True):
        check_same_conditions(base, own.card, f"of {other}")
        if own.arguments != first.arguments:
            raise ConfigError(
                f"{name} and {other} need the environment made differently: {first.arguments} and "
                f"{own.arguments}; evaluate them apart"
            )
    return found


def _run(arguments: argparse.Namespace, blind: _Blind) -> None:
    first = blind.candidates[0]
    case = first.cases[0]
    with looked_after(
        arguments, "dzrobot eval --blind", blind.trials.folder / "operator.jsonl"
    ) as people:
        if people.console is None:
            raise ConfigError(
                "--blind needs the person who judges: standard input and output are no terminal. "
                "Run this in one"
            )
        with closing(make_environment(case, first.arguments[case.env], render=False)) as env:
            people.check(env)
        with closing(KeptEnvironment(people.opened)) as kept:
            options = replace(blind.options, environment=kept)
            _run_trials(replace(blind, options=options), people, arguments.max_errors)


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


def _keep_scene(photo: Path, scene: Path) -> None:
    if photo.is_file():
        scene.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(scene, photo.read_bytes())


def _conclude(console: Console, names: Sequence[str], folders: Sequence[Path]) -> None:
    runs = [read_results(folder) for folder in folders]
    scores = {
        name: Score.of(summarize(run.records.values(), run.cases))
        for name, run in zip(names, runs, strict=True)
    }
    console.print(scores_table("success", "policy", scores))
    show_comparison(console, compare(runs))
    for name, folder in zip(names, folders, strict=True):
        console.print(f"{name}: {folder}", markup=False, soft_wrap=True)
    pair = " ".join(map(str, folders[:2]))
    console.print(f"`dzrobot report {pair}` shows two of them", markup=False, soft_wrap=True)
