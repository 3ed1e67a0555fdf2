"""Whether the video that a policy predicts goes along with its success, in each run and in all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dzrobot.rollout.evaluation.comparison import Results
from dzrobot.rollout.evaluation.significance import RankCorrelation, rank_correlation
from dzrobot.rollout.pages.content import Scores

QUALITIES = {
    "psnr": "PSNR, dB",
    "gain": "PSNR above a copy of the last frame, dB",
    "moving_psnr": "PSNR of moving pixels, dB",
    "moving_gain": "PSNR of moving pixels above a copy's, dB",
    "latent_gain": "latent error below a copy's",
}
"""What is looked at of an episode's predicted video, higher is better; means over its plans.

The last is ``copy_latent_error - latent_error``, see
:func:`~dzrobot.rollout.predictions.latent_errors`: only of policies that encode images.
"""


@dataclass(frozen=True, kw_only=True)
class ScoredRun:
    """A run whose predicted videos were scored."""

    name: str
    """For the table."""

    results: Results

    scores: Mapping[str, Scores]
    """Means over the plans of an episode, by case; empty where no predicted frame was seen."""

    def values(self) -> dict[str, dict[str, float]]:
        """Return what is known of each finished episode of what `QUALITIES` names."""
        found = {case: self.scores.get(case) for case in self.results.finished}
        return {case: _qualities(scores) for case, scores in found.items() if scores}


@dataclass(frozen=True, kw_only=True)
class Along:
    """One quality of the episodes that succeeded, and of those that did not."""

    of_successes: float | None
    """Mean; None without any."""

    of_failures: float | None
    """Mean; None without any."""

    correlation: RankCorrelation | None
    """With success; None where there is too little to tell."""


@dataclass(frozen=True, kw_only=True)
class QualityRow:
    """One run, or all of them together."""

    name: str
    episodes: int
    successes: int
    along: Mapping[str, Along]
    """By the names of `QUALITIES`."""


def _qualities(scores: Scores) -> dict[str, float]:
    found = {"psnr": scores["psnr"], "gain": scores["psnr"] - scores["copy_psnr"]}
    if "moving_psnr" in scores:
        found["moving_psnr"] = scores["moving_psnr"]
        found["moving_gain"] = scores["moving_psnr"] - scores["copy_moving_psnr"]
    if "latent_error" in scores:
        found["latent_gain"] = scores["copy_latent_error"] - scores["latent_error"]
    return found


def quality_rows(runs: Sequence[ScoredRun]) -> list[QualityRow]:
    """Return how far predicted video goes along with success, in each run and in all together.

    All together are the starts that every run has finished with scores.

    Raises:
        MissingDependencyError: scipy is not installed.
    """
    known = [run.values() for run in runs]
    rows = [
        _row(run.name, [run], [values], list(values))
        for run, values in zip(runs, known, strict=True)
    ]
    if len(runs) > 1:
        shared = [case for case in known[0] if all(case in values for values in known)]
        rows.append(_row("all, same starts", runs, known, shared))
    return rows


def _row(
    name: str,
    runs: Sequence[ScoredRun],
    known: Sequence[Mapping[str, Mapping[str, float]]],
    cases: Sequence[str],
) -> QualityRow:
    won = _won(runs, cases)
    along = {quality: _along(runs, known, cases, quality) for quality in QUALITIES}
    return QualityRow(
        name=name, episodes=len(runs) * len(cases), successes=sum(map(sum, won)), along=along
    )


def _along(
    runs: Sequence[ScoredRun],
    known: Sequence[Mapping[str, Mapping[str, float]]],
    cases: Sequence[str],
    quality: str,
) -> Along:
    """Look at one quality, on the cases of which every run knows it."""
    cases = [case for case in cases if all(quality in values[case] for values in known)]
    values = [[of[case][quality] for case in cases] for of in known]
    won = _won(runs, cases)
    numbers, outcomes = np.array(values, np.float64), np.array(won, bool)
    return Along(
        of_successes=_mean(numbers[outcomes].tolist()),
        of_failures=_mean(numbers[~outcomes].tolist()),
        correlation=rank_correlation(values, won),
    )


def _won(runs: Sequence[ScoredRun], cases: Sequence[str]) -> list[list[bool]]:
    return [[bool(run.results.finished[case].success) for case in cases] for run in runs]


def _mean(numbers: Sequence[float]) -> float | None:
    return float(np.mean(numbers)) if numbers else None
