"""Evaluations of the same episodes, one after the other.

They compare checkpoints of a training run, several policies, a policy with earlier results, or one
policy with and without perturbations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from dzrobot.errors import ConfigError
from dzrobot.files import write_json
from dzrobot.rollout.evaluation.comparison import (
    Decision,
    Results,
    check_same_conditions,
    compare,
    read_results,
)
from dzrobot.rollout.evaluation.evaluate import EvaluationSession
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions
from dzrobot.rollout.evaluation.report import (
    STEPS_FILE,
    SWEEP_FILE,
    Score,
    StepScore,
    Summary,
    Sweep,
    SweepScore,
)
from dzrobot.rollout.evaluation.tables import (
    logged_step,
    print_comparison,
    print_conclusion,
    scores_table,
)
from dzrobot.rollout.perturbation import GOAL, OWN_GOAL, Perturbation
from dzrobot.rollout.policy_spec import REMOTE, PolicySpec
from dzrobot.rollout.protocol import plan_episodes

SELECTED = "selected on these episodes"
"""What the score of a policy that was picked by its score has to be called."""

CONFIRMATION = "confirmation"
"""Folder of the run that measures the selected policy on other episodes."""

_SERVERS = ("ws://", "wss://", "zmq://")

UNPERTURBED = "unperturbed"
"""Folder of the episodes that the perturbed ones are compared with."""

GOALS_FILE = "goals.json"
"""What :func:`goal_scores` found, in the folder of a study of the axis ``goal``."""


class Candidate(NamedTuple):
    """One of several evaluations."""

    request: EvaluationRequest
    folder: Path
    """Folder of its results."""


def read_candidates(
    request: EvaluationRequest,
    names: Sequence[str],
    place: Callable[[str], Path],
    *,
    taken: Sequence[str] = (),
) -> dict[str, Candidate]:
    """Return what is evaluated, by the name that was given.

    Args:
        request: What all have in common.
        names: Checkpoints, policies, or addresses of servers.
        place: Returns the results folder of one, given a name for it.
        taken: Names that no folder may have.

    Raises:
        ConfigError: one is given twice, or cannot be one of several.
    """
    found: dict[str, Candidate] = {}
    for name, folder in zip(names, candidate_folders(names, taken), strict=True):
        if name in found:
            raise ConfigError(f"{name} is given twice; keep one")
        if name == REMOTE:
            raise ConfigError(f"{REMOTE} is one of several by its server's address: ws://HOST:PORT")
        is_server = name.startswith(_SERVERS)
        policy = replace(
            request.policy,
            name=REMOTE if is_server else name,
            server=name if is_server else None,
        )
        found[name] = Candidate(replace(request, policy=policy), place(folder))
    return found


def candidate_folders(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Return a folder for each policy: its last name, or all of it where two have the same.

    Args:
        names: As they were given.
        taken: Names that no folder may have.
    """
    labels = [PolicySpec(name=name).label for name in names]
    every = [*taken, *labels]
    return [
        label if every.count(label) == 1 and label else _whole(name)
        for name, label in zip(names, labels, strict=True)
    ]


def _whole(name: str) -> str:
    parts = Path(name).resolve().parts[1:] if PolicySpec(name=name).is_checkpoint else (name,)
    return PolicySpec(name="-".join(parts)).label


def evaluate_steps(
    session: EvaluationSession, request: EvaluationRequest, steps: Mapping[int, Path]
) -> int:
    """Evaluate training checkpoints on the same episodes; return the exit code.

    The table is printed, and kept in the results folder.

    Args:
        session: Runs the evaluations.
        request: What they have in common; its policy is the folder of the training run.
        steps: Checkpoint of each training step.
    """
    run = Path(request.policy.name)
    whole = session.output or run / "evaluations" / request.spec.label
    candidates = {
        f"step {step}": Candidate(
            replace(request, policy=replace(request.policy, name=str(path))),
            whole / f"step_{step:08d}",
        )
        for step, path in steps.items()
    }
    scores: list[StepScore] = []
    complete = True
    with session.logger(session.project, whole, {"checkpoint": request.policy.name}) as log:
        evaluated = _evaluated(session, candidates, is_tracked=False)
        for step, summary in zip(steps, evaluated, strict=True):
            score = StepScore.of(summary, step=step)
            scores.append(score)
            complete = complete and summary.complete
            write_json(whole / STEPS_FILE, [score.model_dump() for score in scores])
            log(score.step, logged_step(score))
    title = f"success by training step, {SELECTED}"
    console = session.console
    console.print(scores_table(title, "step", {str(score.step): score for score in scores}))
    console.print(
        f"A checkpoint picked by this table has a score {SELECTED}: too high for it. Measure it "
        f"once more on others, as `dzrobot sweep` does. Results in {whole}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0 if complete else 1


def evaluate_sweep(
    session: EvaluationSession, candidates: Mapping[str, Candidate], confirmed: int | None
) -> int:
    """Evaluate policies on the same episodes, and the best of them on others; return the exit code.

    Args:
        session: Runs the evaluations.
        candidates: Evaluation of each policy, by name.
        confirmed: Episodes per task of the confirmation. None: as many as in the sweep; 0: there
            is none.

    Raises:
        ConfigError: no output folder.
        ProtocolError: the protocol has no other episodes; raised before hours of work.
    """
    console, output = session.console, session.parent("a sweep")
    for one in candidates.values() if confirmed != 0 else ():
        plan_episodes(_confirmation(one.request, confirmed).spec)
    scores: list[SweepScore] = []
    complete = True
    for name, summary in zip(candidates, _evaluated(session, candidates), strict=True):
        scores.append(SweepScore.of(summary, policy=name))
        complete = complete and summary.complete
        _write(output, scores, None)
    if not complete:
        console.print(scores_table("success", "policy", {s.policy: s for s in scores}))
        console.print("nothing is selected yet: the same command runs what has no result")
        return 1
    best = max(scores, key=lambda score: score.successes)
    scores = [score.model_copy(update={"selected": score is best}) for score in scores]
    _print_selection(console, scores, best)
    _write(output, scores, None)
    if confirmed == 0:
        return 0
    console.print(f"{CONFIRMATION}: {best.policy}, on other episodes", markup=False)
    own = _confirmation(candidates[best.policy].request, confirmed)
    done = session.run(own, output / CONFIRMATION)
    _write(output, scores, SweepScore.of(done.summary, policy=best.policy))
    return print_conclusion(console, done.summary, done.folder, done.title)


def _confirmation(request: EvaluationRequest, wanted: int | None) -> EvaluationRequest:
    """Return the same on the episodes that follow those of the sweep."""
    spec = request.spec
    swept = spec.protocol.episodes if spec.episodes is None else spec.episodes
    episodes, first = swept if wanted is None else wanted, spec.first_episode + swept
    return replace(request, spec=replace(spec, episodes=episodes, first_episode=first))


def _evaluated(
    session: EvaluationSession, candidates: Mapping[str, Candidate], *, is_tracked: bool = True
) -> Iterator[Summary]:
    """Evaluate one after the other; yield what was found of each."""
    for name, one in candidates.items():
        session.say(name)
        yield session.run(one.request, one.folder, is_tracked=is_tracked).summary


def _print_selection(console: Console, scores: Sequence[SweepScore], best: SweepScore) -> None:
    title = f"success; {best.policy} is {SELECTED}"
    marked = {f"{s.policy} *" if s.selected else s.policy: s for s in scores}
    console.print(scores_table(title, "policy", marked))
    if tied := [s.policy for s in scores if s.successes == best.successes and not s.selected]:
        console.print(f"as good, but named later: {', '.join(tied)}", markup=False, soft_wrap=True)


def _write(output: Path, scores: Sequence[SweepScore], confirmed: SweepScore | None) -> None:
    sweep = Sweep(scores=tuple(scores), confirmation=confirmed)
    write_json(output / SWEEP_FILE, sweep.model_dump())


@dataclass(frozen=True)
class Baseline:
    """Earlier results that an evaluation is compared with."""

    results: Results
    stop_early: bool

    def options(self, options: RunOptions, card: Mapping[str, Any]) -> RunOptions:
        """Return ``options`` with the rule that ends the run.

        Raises:
            ProtocolError: the evaluation of ``card`` is under other conditions.
        """
        check_same_conditions(self.results, card, "now")
        if not self.stop_early:
            return options
        decision = Decision(self.results)
        return replace(options, enough=lambda records: decision.after(records) is not None)

    def decided(self, own: Results) -> bool:
        """Return whether the run ended because enough was known."""
        return self.stop_early and Decision(self.results).after(own.records) is not None

    def print(self, console: Console, own: Results) -> None:
        """Print the comparison, where there is anything to compare."""
        if not any(name in own.finished for name in self.results.finished):
            return
        print_comparison(console, compare([self.results, own]))
        if not self.stop_early:
            return
        pairs = Decision(self.results).after(own.records)
        verdict = "not decided" if pairs is None else f"decided after {pairs} pairs"
        console.print(
            f"{verdict} of {len(self.results.cases)}, at the 5 % level however often one looks "
            "(e-value of 20). A rate from a run that ended early leans to the side that won; the "
            "verdict does not.",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def evaluate_against(
    session: EvaluationSession, request: EvaluationRequest, base: Path, *, stop_early: bool
) -> tuple[int, Path]:
    """Evaluate, and compare with the earlier results in ``base``; return exit code and folder.

    Args:
        session: Runs the evaluation.
        request: What is evaluated.
        base: Results of the same episodes.
        stop_early: Whether the run ends once the difference is decided.

    Raises:
        ProtocolError: there are no results in ``base``, or under other conditions.
    """
    baseline = Baseline(read_results(base), stop_early)
    done = session.run(request, ending=baseline.options)
    own = read_results(done.folder)
    code = print_conclusion(
        session.console, done.summary, done.folder, done.title, enough=baseline.decided(own)
    )
    baseline.print(session.console, own)
    return code, done.folder


def evaluate_perturbed(
    session: EvaluationSession, request: EvaluationRequest, axes: Sequence[str]
) -> int:
    """Evaluate the same episodes unperturbed and perturbed; print the pairs; return the exit code.

    Args:
        session: Runs the evaluations.
        request: What they have in common.
        axes: Perturbations, each as ``AXIS`` or ``AXIS:LEVEL``.

    Raises:
        ConfigError: a perturbation is unknown or given twice, or there is no output folder.
    """
    perturbations = [Perturbation.read(text) for text in axes]
    if len(set(perturbations)) < len(perturbations):
        raise ConfigError("--perturb names one axis and level twice; keep one")
    output, console = session.parent("--perturb"), session.console
    folders, complete = [], True
    for perturbation in (None, *perturbations):
        text = None if perturbation is None else perturbation.text
        name = UNPERTURBED if text is None else text.replace(":", "-")
        console.print(name, markup=False)
        done = session.run(replace(request, perturbation=perturbation), output / name)
        folders.append(done.folder)
        complete = complete and done.summary.complete
    runs = [read_results(folder) for folder in folders]
    print_comparison(console, compare(runs, any_perturbation=True))
    if any(perturbation.axis == GOAL for perturbation in perturbations):
        goals = goal_scores(dict(zip((None, *perturbations), runs, strict=True)))
        write_json(output / GOALS_FILE, {name: one.model_dump() for name, one in goals.items()})
        console.print(scores_table("goals asked for, and goals of the same starts that were not",
                                   "goal", goals))  # fmt: skip
    console.print(f"results in {output}", markup=False, soft_wrap=True)
    return 0 if complete else 1


def goal_scores(runs: Mapping[Perturbation | None, Results]) -> dict[str, Score]:
    """Return how often the asked goal held, and where another was asked for, the task's own.

    A policy that reads its instruction reaches the asked goal either way. One that does not reaches
    the task's own whatever was asked.

    Args:
        runs: By what was perturbed; None: nothing.
    """
    found = {}
    for perturbation, results in runs.items():
        if perturbation is not None and perturbation.axis != GOAL:
            continue
        done = list(results.finished.values())
        name = UNPERTURBED if perturbation is None else perturbation.text
        asked = sum(bool(record.success) for record in done)
        found[f"{name}: asked"] = Score(successes=asked, episodes=len(done))
        if perturbation is not None:
            own = sum(bool((record.robot or {}).get(OWN_GOAL)) for record in done)
            found[f"{name}: the task's own"] = Score(successes=own, episodes=len(done))
    return found
