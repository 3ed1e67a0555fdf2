"""Evaluations compared pair by pair: with earlier results, or with unperturbed episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from dzrobot.rollout.evaluation.report import Score
from dzrobot.rollout.evaluation.tables import print_comparison, print_conclusion, scores_table
from dzrobot.rollout.perturbation import GOAL, OWN_GOAL, Perturbation

UNPERTURBED = "unperturbed"
"""Folder of the episodes that the perturbed ones are compared with."""

GOALS_FILE = "goals.json"
"""What :func:`goal_scores` found, in the folder of a study of the axis ``goal``."""


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
