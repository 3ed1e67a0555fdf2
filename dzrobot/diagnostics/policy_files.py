"""What checkpoint, data and environment say, before anything is asked of the policy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dzrobot.diagnostics.motion import RecordedStart
from dzrobot.diagnostics.own_rows import Recording
from dzrobot.documents import shorten
from dzrobot.modality.input_variants import Floats
from dzrobot.modality.stats import BEYOND, Statistics
from dzrobot.policies.dreamzero.options import ActingOptions
from dzrobot.recording.catalog import RATE_TOLERANCE
from dzrobot.rollout.environment import EnvironmentFacts
from dzrobot.rollout.policy_spec import ResolvedPolicy

STILL = 0.05
"""Deviations of a state number within which a robot stands still."""

_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Said:
    """One thing that is said."""

    what: str
    found: str
    differs: bool | None
    """None: it is only shown."""

    cause: str = ""
    """Why the policy fails, where this alone is certain; empty: it is not."""

    change: str = ""
    """What to do about ``cause``."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """A policy, and what lies around it."""

    found: ResolvedPolicy
    recording: Recording | None
    facts: EnvironmentFacts
    episodes: Sequence[RecordedStart]
    most_steps: int | None
    """Steps after which an episode is over; None: it is not known."""

    def said(self) -> Iterator[Said]:
        """Yield what can be compared."""
        if self.recording is not None:
            yield from self._instructions(self.recording)
            yield self._rate("rate of the data", self.recording.reader.catalog.fps)
            yield self._idle(self.recording)
        if self.facts.control_hz is not None:
            yield self._rate("rate", self.facts.control_hz)
        yield from self._length()
        if self.found.checkpoint is not None:
            given, usual = self.found.acting, usually(self.found)
            for name, mine, theirs in (
                ("execute", given.execute, usual.execute),
                ("history", given.history, usual.history),
            ):
                words = f"{mine}, and {theirs} unless something is said"
                yield Said(what=name, found=words, differs=mine != theirs)

    def _instructions(self, recording: Recording) -> Iterator[Said]:
        recorded, task = set(recording.reader.catalog.tasks.values()), self.facts.task
        if task is not None:
            known = task in recorded
            words = f"{task!r} is {'' if known else 'not '}among the recorded ones"
            yield Said(what="instruction", found=words, differs=not known)
        if trained := self.trained_on:
            known = bool(recorded & set(trained))
            words = f"{'among' if known else 'none of the recorded ones is among'} those that the "
            words += f"policy was trained on, such as {listed(trained)}"
            yield Said(what="trained instructions", found=words, differs=not known)

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Return the instructions in the passport; empty: it has none, or does not list all."""
        checkpoint, tag = self.found.checkpoint, self.found.robot.tag
        trained = {} if checkpoint is None else checkpoint.passport.embodiments
        inputs = trained[tag].inputs if tag in trained else None
        if inputs is None or inputs.tasks > len(inputs.instructions):
            return ()
        return inputs.instructions

    def _rate(self, what: str, there: float) -> Said:
        own = self.found.robot.timing.control_hz
        words = f"{there:g} per second, the policy's robot has {own:g}"
        return Said(what=what, found=words, differs=abs(there - own) > RATE_TOLERANCE * own)

    def _idle(self, recording: Recording) -> Said:
        rows, plan = idle_rows(recording), self.found.robot.timing.action_horizon
        words = f"the robot stands still in the first {rows} rows of an episode (median)"
        return Said(what="idle rows", found=words, differs=rows >= plan)

    def _length(self) -> Iterator[Said]:
        won = [one.recording for one in self.episodes if one.recording.success is not False]
        if self.most_steps is None or not won:
            return
        lengths = sorted(len(one.actions) for one in won)
        words = f"at most {self.most_steps} steps, recorded ones have {lengths[0]} to {lengths[-1]}"
        short = self.most_steps < lengths[0]
        yield Said(
            what="episode length", found=words, differs=self.most_steps < lengths[-1],
            cause="episodes are too short for the task" if short else "",
            change="allow more (--max-steps of `dzrobot eval`, or the environment's own limit)",
        )  # fmt: skip


def usually(found: ResolvedPolicy) -> ActingOptions:
    """Return how a checkpoint's policy acts where nothing is said of rows and history."""
    return replace(found, spec=replace(found.spec, execute=None, history=None)).acting


def passport_faults(found: ResolvedPolicy) -> Iterator[str]:
    """Yield which files beside the weights are not those that the passport names."""
    from dzrobot.policies.dreamzero.checkpoints.passport import differences, passport_for

    checkpoint, robot = found.checkpoint, found.robot
    if checkpoint is None:
        return
    statistics = Statistics.from_metadata(checkpoint.metadata_file, robot)
    wanted = replace(
        passport_for(robot, statistics, checkpoint.config), lora_alpha=checkpoint.lora_alpha
    )
    for what, held, other in differences(checkpoint.passport, wanted):
        yield f"{what}: trained with {str(held)[:12]}, now {str(other)[:12]}"


def idle_rows(recording: Recording) -> int:
    """Return in how many first rows of an episode the robot stands still: the median."""
    deviation = np.maximum(recording.every_state.std(0), 1e-6)
    counts = []
    for ordinal in recording.ordinals:
        states = recording.states(ordinal)
        moved = (np.abs(states - states[0]) / deviation).max(1) > STILL
        # What moves it is done in the row before.
        counts.append(max(int(np.argmax(moved)) - 1, 0) if moved.any() else len(states))
    return int(np.median(counts))


def adapter_words(found: ResolvedPolicy) -> str:
    """Return what the files say of an adapter; empty: they hold no network of this package."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        return ""
    from dzrobot.policies.dreamzero.checkpoints.names import is_adapter

    names = [name for name in checkpoint.weights.tensors if is_adapter(name)]
    if not names:
        return "its files hold no adapter"
    # A layer's second matrix is zero before the first step of training.
    ends = [name for name in names if name.rpartition(".lora_")[2].startswith("B")]
    zero = all(not bool(values.any()) for _, values in checkpoint.weights.stream(ends))
    return "its adapter is zero: it was never trained" if zero else "its adapter is not zero"


def answers_as(card: Mapping[str, Any]) -> str:
    """Return what a policy server says that it serves; empty: nothing."""
    served = card.get("server")
    if not isinstance(served, Mapping):
        return ""
    names = [str(served[key]) for key in ("checkpoint", "policy") if served.get(key)]
    return shorten(names[0]) if names else ""


def listed(texts: Sequence[str]) -> str:
    """Return the first of some texts for a sentence."""
    return ", ".join(shorten(text) for text in texts[:_NAMES])


def state_bounds(found: ResolvedPolicy) -> tuple[Floats, Floats] | None:
    """Return the bounds (S,) of the policy's statistics of states; None: it has none here."""
    if found.checkpoint is None or not found.robot.state:
        return None
    held = Statistics.from_metadata(found.checkpoint.metadata_file, found.robot).bounds
    low, high = (
        np.concatenate([np.atleast_1d(np.asarray(one, np.float64)) for one in bounds])
        for bounds in (
            [held[key].low for key in found.robot.state_keys],
            [held[key].high for key in found.robot.state_keys],
        )
    )
    return low, high


def share_outside(found: ResolvedPolicy, states: Floats) -> float | None:
    """Return which share of recorded states (N, S) lies clearly beyond the policy's statistics.

    None: it has none here.
    """
    bounds = state_bounds(found)
    if bounds is None:
        return None
    low, high = bounds
    room = BEYOND * (high - low)
    varies = high > low
    return float(((states < low - room) | (states > high + room))[:, varies].mean())
