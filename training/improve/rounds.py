"""What came of a round: whether its policy is kept, and when there are no more rounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from dzrobot.recording.catalog import episode_facts
from dzrobot.rollout.evaluation.comparison import Comparison
from dzrobot.rollout.evaluation.report import Score
from dzrobot.training.improve.improve_settings import ImproveSettings

LEVEL = 0.05
"""Probability of keeping a policy in any of the rounds although none is better."""

FEW_TAKEOVERS = 0.05
"""Takeovers per episode below which a policy hardly needs help any more."""

IN_VAIN = 2
"""Rounds in a row without a policy that was kept, after which there are no more."""

Rate = Annotated[float, Field(ge=-1, le=1)]


class Recorded(BaseModel):
    """What was recorded in a round, of the policy that was kept until then."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    episodes: int
    alone: int
    """Successes without help."""

    takeovers: int
    robot_s: float
    """Seconds that the robot ran."""

    person_s: float
    """Seconds of them in which a person, or the expert in their place, steered."""

    @classmethod
    def of(cls, dataset: Path) -> Self:
        """Return what the marks of a recording say.

        Raises:
            DatasetError: they cannot be read.
        """
        known = list(episode_facts(dataset).values())
        return cls(
            episodes=len(known),
            alone=sum(one.success is True and not one.interventions for one in known),
            takeovers=sum(len(one.takeovers) for one in known),
            robot_s=sum(one.robot_s or 0.0 for one in known),
            person_s=sum(one.person_s or 0.0 for one in known),
        )

    @property
    def takeovers_per_episode(self) -> float:
        """Return how often help was needed."""
        return self.takeovers / self.episodes if self.episodes else 0.0


class Paired(BaseModel):
    """The policy of a round against the one that was kept, from the same starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    before: Score
    after: Score
    lost: int
    """Starts from which only the kept one succeeded."""

    won: int
    """Starts from which only the new one did."""

    low: Rate
    """Lower end of the 95 % interval of the difference (Bonett and Price); see ``high``."""

    high: Rate
    p: float
    """Exact McNemar test, for one look."""

    e: float
    """Evidence that may be looked at at any time."""

    @classmethod
    def of(cls, name: str, found: Comparison) -> Self:
        """Return what the comparison of the new policy with the kept one says."""
        total = found.total
        return cls(
            name=name,
            before=Score(successes=total.both + total.first_only, episodes=total.episodes),
            after=Score(successes=total.both + total.second_only, episodes=total.episodes),
            lost=total.first_only, won=total.second_only, low=found.adjusted[0],
            high=found.adjusted[1], p=found.p, e=found.e,
        )  # fmt: skip

    @property
    def difference(self) -> float:
        """Return the success rate of the new policy less that of the kept one."""
        return (self.won - self.lost) / self.after.episodes

    @property
    def points(self) -> str:
        """Return difference and interval in percentage points, for people."""
        return (
            f"{100 * self.difference:+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f})"
        )


class Round(BaseModel):
    """A round that is decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    step: int
    """Training step that was chosen."""

    kept: bool
    why: str
    """Why it was kept or refused, for people."""

    recorded: Recorded
    test: Paired
    p: float
    """p value of the test, corrected for the number of rounds."""

    forgotten: tuple[Paired, ...]
    """What was looked at besides the test."""

    @property
    def points_per_person_minute(self) -> float | None:
        """Return percentage points gained for a minute of help; None where there was none."""
        minutes = self.recorded.person_s / 60
        return 100 * self.test.difference / minutes if minutes else None


def decided(
    number: int, step: int, recorded: Recorded, pairs: Sequence[Paired], settings: ImproveSettings
) -> Round:
    """Return whether the policy of a round is kept in the place of the one before.

    It is where it is better on the test starts at the level of 5 % over all rounds, and what it may
    have lost elsewhere is within the margin.

    Args:
        number: Of the round.
        step: Training step that was chosen.
        recorded: What it learned from.
        pairs: Comparisons with the one before: on the test starts, then on what may be forgotten.
        settings: Of the improvement.
    """
    test, *others = pairs
    p = min(1.0, test.p * settings.rounds)
    better = test.won > test.lost and p <= LEVEL
    margin = settings.margin / 100
    lost = [one for one in others if one.low < -margin]
    said = f"{test.points} on the test starts, p {p:.2g} corrected for {settings.rounds} rounds"
    if not better:
        why = f"not shown to be better: {said}"
    elif lost:
        shown = "; ".join(f"{one.name}: {one.points}" for one in lost)
        why = f"better ({said}), but it may have lost more than {settings.margin:g} points: {shown}"
    else:
        why = f"better: {said}"
        why += "; nothing was looked at that may be forgotten" if not others else ""
    return Round(
        number=number, step=step, kept=better and not lost, why=why, recorded=recorded, test=test,
        p=p, forgotten=tuple(others),
    )  # fmt: skip


def why_over(rounds: Mapping[int, Round], settings: ImproveSettings) -> str:
    """Return why there are no more rounds, for people; empty: there is another.

    Args:
        rounds: Those that are decided, by their number.
        settings: Of the improvement.
    """
    done = [rounds[number] for number in sorted(rounds)]
    if not done:
        return ""
    last = done[-1].recorded
    if len(done) >= IN_VAIN and not any(one.kept for one in done[-IN_VAIN:]):
        return f"{IN_VAIN} rounds in a row gave no policy that is shown to be better"
    if settings.is_helped and last.takeovers_per_episode < FEW_TAKEOVERS:
        return (
            f"the policy was helped {last.takeovers} times in {last.episodes} episodes, less than "
            f"once in {round(1 / FEW_TAKEOVERS)}"
        )
    if len(done) >= settings.rounds:
        return f"{settings.rounds} rounds are done, and p values are corrected for so many"
    return ""
