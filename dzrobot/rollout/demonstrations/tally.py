"""A recording of a given number of successes, over as many runs as that takes.

What counts lies in the recording: its episodes with their facts, and the attempts that left none.
So a run that was stopped, or killed, continues where it was.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dzrobot.declared import Flag
from dzrobot.errors import DatasetError, StoppedError
from dzrobot.progress import TimeLeft
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.catalog import episode_facts
from dzrobot.recording.formats import LostAttempt
from dzrobot.recording.lists import lost_attempts, note_lost
from dzrobot.rollout.demonstrations.record import (
    DISCARDED,
    RecordedEnv,
    RecordedEpisode,
    record_episode,
)
from dzrobot.rollout.episode import Actor
from dzrobot.rollout.protocol import EpisodeRules


def most_attempts(episodes: int) -> int:
    """Return after how many attempts so many successes are not to be expected any more."""
    return 20 + 20 * episodes


@dataclass(frozen=True, kw_only=True)
class RecordingGoal:
    """When a recording is complete, and what it keeps."""

    episodes: Annotated[int | None, Flag(
        "successes to keep, those already in the folder among them (default: 1 where no "
        "--attempts are given)", least=1,
    )] = None  # fmt: skip
    """Successes to keep, those of earlier runs among them. None: `attempts` decides."""

    attempts: Annotated[int | None, Flag(
        "end after so many, whatever they come to; what is discarded does not count", least=1,
    )] = None  # fmt: skip
    """Attempts in all, whatever they come to; what is discarded does not count."""

    keep_failures: Annotated[bool, Flag(
        "keep failures too, with their reason; training leaves them out by default",
    )] = False  # fmt: skip
    """Whether failures are kept too, marked as such."""

    first_seed: Annotated[int, Flag(
        "of the first episode's start", name="seed", least=0, most=2**32 - 1,
    )] = 0  # fmt: skip
    """Seed of the first attempt's start; each takes the next one that no attempt had."""

    advice: str = "look at the reasons, or give --attempts N to end after so many"
    """What to do where hardly anything succeeds."""


@dataclass(frozen=True)
class Tally:
    """What came of all attempts so far."""

    kept: int
    """Episodes that are not marked as failures."""

    failures: int
    """Kept or not."""

    discarded: int
    seeds: set[int]
    """Seeds of attempts that are not made again; it grows with the recording."""

    @classmethod
    def of(cls, root: Path, episodes: int) -> "Tally":
        """Count what the recording in ``root`` with so many ``episodes`` says.

        Raises:
            DatasetError: A list of it cannot be read.
        """
        known, lost = episode_facts(root), lost_attempts(root)
        there = [known[number] for number in range(episodes) if number in known]
        failed = [one.seed for one in lost if one.outcome == "failure"]
        marked = sum(one.success is False for one in there)
        seeds = {one.seed for one in there if one.seed is not None} | set(failed)
        return cls(episodes - marked, marked + len(failed), len(lost) - len(failed), seeds)

    def after(self, done: RecordedEpisode, seed: int) -> "Tally":
        """Return the tally with one attempt more; it costs the same however many there were."""
        discarded = done.outcome.ended == DISCARDED
        success = done.kept and done.outcome.success
        if not discarded:
            self.seeds.add(seed)
        return Tally(
            self.kept + success,
            self.failures + (not success and not discarded),
            self.discarded + discarded,
            self.seeds,
        )

    @property
    def attempts(self) -> int:
        """Attempts that count."""
        return self.kept + self.failures

    def reaches(self, goal: RecordingGoal) -> bool:
        """Return whether ``goal`` is reached."""
        enough = goal.episodes is not None and self.kept >= goal.episodes
        return enough or (goal.attempts is not None and self.attempts >= goal.attempts)

    def shown(self, goal: RecordingGoal, left: TimeLeft) -> str:
        """Return how far the recording is, on one line."""
        if goal.episodes is not None:
            done, total, text = self.kept, goal.episodes, f"kept {self.kept} of {goal.episodes}"
        else:
            done, total = self.attempts, goal.attempts or 0
            text = f"attempts {done} of {total}, kept {self.kept}"
        time_left = left.estimate(done, max(done, total))
        return f"{text}, failures {self.failures}, discarded {self.discarded}, {time_left}"


def record_session(
    env: RecordedEnv,
    actor: Actor,
    goal: RecordingGoal,
    *,
    ready: Callable[[Tally], None] = lambda _: None,
    report: Callable[[RecordedEpisode, Tally], None] = lambda *_: None,
) -> Tally:
    """Record what ``actor`` does until ``goal`` is reached; see :func:`record_attempts`.

    Args:
        env: Says where it records to.
        actor: What acts.
        goal: What is wanted.
        ready: Called before every attempt.
        report: Called after every attempt, once it is on the disk.
    """

    def attempt(seed: int) -> RecordedEpisode:
        rules = EpisodeRules(seed=seed)
        return record_episode(env, actor, env.writer, rules, keep_all=goal.keep_failures)

    return record_attempts(env.writer, attempt, goal, ready=ready, report=report)


def record_attempts(
    writer: EpisodeWriter,
    attempt: Callable[[int], RecordedEpisode],
    goal: RecordingGoal,
    *,
    ready: Callable[[Tally], None] = lambda _: None,
    report: Callable[[RecordedEpisode, Tally], None] = lambda *_: None,
) -> Tally:
    """Record until ``goal`` is reached; run again after an interruption to continue.

    What a person discards is recorded again, from the same start.

    Args:
        writer: The dataset.
        attempt: Makes the attempt of a seed, and commits it to ``writer`` where it is kept.
        goal: What is wanted.
        ready: Called before every attempt.
        report: Called after every attempt, once it is on the disk.

    Raises:
        StoppedError: the arm was stopped; the episode under way is kept as its outcome says.
        DatasetError: hardly anything succeeds, or the disk is full; then the same call continues.
    """
    tally, next_seed = Tally.of(writer.root, writer.episodes), goal.first_seed
    for tried in itertools.count():
        if tally.reaches(goal):
            break
        if goal.attempts is None and tried >= most_attempts(goal.episodes or 0):
            raise DatasetError(
                f"{tried} attempts of this run gave {tally.kept} successes of {goal.episodes} "
                f"asked for: {goal.advice}"
            )
        ready(tally)
        seed = next_seed = next(n for n in itertools.count(next_seed) if n not in tally.seeds)
        done = attempt(seed)
        if not done.kept:
            note_lost(writer.root, _lost(done, seed))
        tally = tally.after(done, seed)
        report(done, tally)
        if done.outcome.stop:
            raise StoppedError(done.outcome.stop)
    return tally


def _lost(done: RecordedEpisode, seed: int) -> LostAttempt:
    if done.outcome.ended == DISCARDED:
        return LostAttempt(outcome="discarded", seed=seed)
    return LostAttempt(outcome="failure", seed=seed, reason=done.reason)
