"""Two or more evaluations of the same episodes, compared episode by episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dzrobot.declared import at_the_door
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.rollout.evaluation.card import (
    Codes,
    codes_of,
    may_differ,
    other_code,
    read_card,
    read_cases,
    refuse_unlike,
)
from dzrobot.rollout.evaluation.significance import (
    PairCounts,
    PairedEvidence,
    adjusted_interval,
    count_pairs,
    e_value,
    first_decision,
    holm,
    mcnemar_p,
    paired_interval,
)
from dzrobot.rollout.perturbation import PERTURBATION
from dzrobot.rollout.protocol import EpisodeSpec
from dzrobot.rollout.records import Record, RecordFile

EXECUTION = "execution"
"""Field of a card that says how plans are executed that take time."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What one evaluation found."""

    folder: Path
    """Where they lie."""

    card: Mapping[str, Any]
    """The conditions that they depend on."""

    cases: tuple[EpisodeSpec, ...]
    """Planned episodes, in the order of the evaluation."""

    records: Mapping[str, Record]
    """What became of them by their name, errors included."""

    @cached_property
    def finished(self) -> Mapping[str, Record]:
        """Episodes with a result by their name, in the order of the evaluation."""
        return {
            case.name: record
            for case in self.cases
            if (record := self.records.get(case.name)) is not None and record.error is None
        }

    @property
    def name(self) -> str:
        """Folder, for tables."""
        return str(self.folder)

    @property
    def codes(self) -> Mapping[str, Codes]:
        """Code that it was made by, by who ran it; several where results of them are mixed."""
        return codes_of(self.card)

    @property
    def video(self) -> str:
        """What the policy, or its server, computed of the video; but for ``full`` no prediction."""
        policy = self.card["policy"]
        served = policy.get("server")
        return str((served if isinstance(served, Mapping) else policy).get("video", "full"))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A second evaluation against a first one."""

    first: Results
    """The base."""

    second: Results
    """What is compared with it."""

    total: PairCounts
    """Counts of the pairs, over all tasks."""

    tasks: Mapping[tuple[str, int], PairCounts]
    """By suite and task."""

    first_only: tuple[str, ...]
    """Episodes that only the first solved."""

    second_only: tuple[str, ...]
    """Episodes that only the second solved."""

    low: float
    """Lower end of the 95 % interval; see ``high``."""

    high: float
    """95 % bootstrap interval of the difference in success rate, pairs drawn within tasks."""

    adjusted: tuple[float, float]
    """The same after Bonett and Price, for few disagreements."""

    p: float
    """Exact McNemar test."""

    p_holm: float
    """The same, adjusted for the number of comparisons."""

    e: float
    """Evidence that may be looked at after every episode; 20 decides at the 5 % level."""

    decided_after: int | None
    """Pairs after which ``e`` first reached 20, in the order of the evaluation."""

    @property
    def code(self) -> str:
        """Whether both were made by one code: ``same``, ``other``, or ``mixed`` within a run."""
        runs = (self.first, self.second)
        if any(len(codes) > 1 for run in runs for codes in run.codes.values()):
            return "mixed"
        cards = [run.card for run in runs]
        return "other" if other_code(*cards) or other_code(*reversed(cards)) else "same"

    def numbers(self) -> dict[str, object]:
        """Return the numbers of the comparison, as JSON has them."""
        total = self.total
        return {
            "first": self.first.name,
            "second": self.second.name,
            "code": self.code,
            "pairs": total.episodes,
            "both": total.both,
            "first_only": list(self.first_only),
            "second_only": list(self.second_only),
            "difference": total.difference,
            "bootstrap_95": [self.low, self.high],
            "adjusted_95": list(self.adjusted),
            "p_mcnemar": self.p,
            "p_holm": self.p_holm,
            "e": self.e,
            "decided_after": self.decided_after,
        }


@at_the_door
def read_results(folder: Path | str) -> Results:
    """Return what is in the results folder.

    Raises:
        ProtocolError: it holds no evaluation, or a damaged one.
    """
    folder = Path(folder)
    card, cases = read_card(folder), read_cases(folder)
    records = RecordFile(folder, cases, writable=False).records
    return Results(folder=folder, card=card, cases=cases, records=records)


def compare(
    runs: Sequence[Results],
    seed: int = 0,
    *,
    any_execution: bool = False,
    any_perturbation: bool = False,
) -> tuple[Comparison, ...]:
    """Return every later run compared with the first one, on the episodes that both finished.

    Args:
        runs: Two or more.
        seed: Of the bootstrap's draws.
        any_execution: Whether execution and latency may differ, as where they are compared.
        any_perturbation: Whether the perturbation may.

    Raises:
        ConfigError: fewer than two runs.
        ProtocolError: the runs are not of the same episodes under the same protocol, or share no
            finished episode.
    """
    if len(runs) < 2:
        raise ConfigError("give two or more results folders to compare")
    first, *others = runs
    allowed = {EXECUTION: any_execution, PERTURBATION: any_perturbation}
    left_out = may_differ(*(name for name, wanted in allowed.items() if wanted))
    for other in others:
        check_same_conditions(first, other.card, f"in {other.name}", left_out)
    found = {other.name: _comparison(first, other, seed) for other in others}
    if len(found) < 2:
        return tuple(found.values())
    adjusted = holm({name: one.p for name, one in found.items()})
    return tuple(replace(one, p_holm=adjusted[name]) for name, one in found.items())


def check_same_conditions(
    first: Results, card: Mapping[str, Any], where: str, left_out: Sequence[str] = may_differ()
) -> None:
    """Check that an evaluation has the conditions of ``first``.

    Args:
        first: What it is to be compared with.
        card: Of the evaluation.
        where: It is, for the message.
        left_out: Fields that may differ.

    Raises:
        ProtocolError: with one line per difference.
    """
    one, two = _conditions(first.card, left_out), _conditions(card, left_out)
    refuse_unlike(one, two, first.name, where, "Evaluate both under the same protocol.")


class Decision:
    """Says whether an evaluation differs from a base; asked again, it looks at new pairs alone.

    Pairs count in the order of the evaluation, and only as far as none is missing: which episodes
    are done first depends on how they end, and would tilt the evidence.

    Args:
        first: The base, finished or not.
    """

    def __init__(self, first: Results) -> None:
        self._pairs = [
            (case.name, bool(first.finished[case.name].success))
            for case in first.cases
            if case.name in first.finished
        ]
        self._seen = 0
        self._evidence = PairedEvidence()

    def after(self, records: Mapping[str, Record]) -> int | None:
        """Return after how many pairs the e-value reached 20; None if it has not.

        Args:
            records: Of the other evaluation so far, by case; those of earlier calls among them.
        """
        while self._seen < len(self._pairs):
            name, base = self._pairs[self._seen]
            own = records.get(name)
            if own is None or own.error is not None:
                break
            self._evidence.add(base, bool(own.success))
            self._seen += 1
        return self._evidence.decided_after


def _comparison(first: Results, second: Results, seed: int) -> Comparison:
    names = [name for name in first.finished if name in second.finished]
    if not names:
        raise ProtocolError(
            f"{first.name} and {second.name} share no finished episode; run them first"
        )
    one, two = _outcomes(first, names), _outcomes(second, names)
    total = count_pairs(one, two)
    tasks = _by_task(first, second, names)
    p = mcnemar_p(total.first_only, total.second_only)
    low, high = paired_interval(list(tasks.values()), seed)
    return Comparison(
        first=first,
        second=second,
        total=total,
        tasks=tasks,
        first_only=tuple(n for n, a, b in zip(names, one, two, strict=True) if a and not b),
        second_only=tuple(n for n, a, b in zip(names, one, two, strict=True) if b and not a),
        low=low,
        high=high,
        adjusted=adjusted_interval(total),
        p=p,
        p_holm=p,
        e=e_value(total.first_only, total.second_only),
        decided_after=first_decision(one, two),
    )


def _by_task(
    first: Results, second: Results, names: Sequence[str]
) -> dict[tuple[str, int], PairCounts]:
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        record = first.finished[name]
        groups.setdefault((record.suite, record.task_id), []).append(name)
    return {
        task: count_pairs(_outcomes(first, own), _outcomes(second, own))
        for task, own in groups.items()
    }


def _outcomes(results: Results, names: Sequence[str]) -> list[bool]:
    return [bool(results.finished[name].success) for name in names]


def _conditions(card: Mapping[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in card.items() if name not in left_out}
