"""A policy in the loop, from recorded starts, and what its statistics make of the states there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dzrobot.diagnostics.input_variants import Floats
from dzrobot.diagnostics.motion import Bench
from dzrobot.modality.stats import Statistics
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action, Policy, end_all
from dzrobot.rollout.episode import PolicyActor
from dzrobot.rollout.policy_spec import ResolvedPolicy
from dzrobot.rollout.protocol import EpisodeRules

BEYOND = 0.1
"""Share of the statistics' width beyond which a state number counts as outside."""


class ClippedStates:
    """Counts state numbers that a policy's statistics clip.

    Args:
        found: Whose statistics; one without a checkpoint has none.
    """

    def __init__(self, found: ResolvedPolicy) -> None:
        self._outside = self._all = 0
        self._keys = found.robot.state_keys
        self._low: Floats | None = None
        self._high: Floats | None = None
        if found.checkpoint is not None:
            bounds = Statistics.from_metadata(found.checkpoint.metadata_file, found.robot).bounds
            self._low, self._high = (
                np.concatenate([np.ravel(one) for one in values])
                for values in zip(
                    *((bounds[k].low, bounds[k].high) for k in self._keys), strict=True
                )
            )

    @property
    def share(self) -> float | None:
        """Return the share of the numbers that lie outside; None: there are no statistics."""
        return self._outside / self._all if self._all else None

    def see(self, observation: Observation) -> None:
        """Count the numbers of one observation."""
        if self._low is None or self._high is None:
            return
        state = np.concatenate([np.asarray(observation[key]) for key in self._keys])
        beyond = BEYOND * (self._high - self._low)
        self._outside += int(((state < self._low - beyond) | (state > self._high + beyond)).sum())
        self._all += len(state)


@dataclass(kw_only=True)
class _Counting(PolicyActor):
    """A policy whose plans and states are counted."""

    clipped: ClippedStates | None
    count: Callable[[], None]

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the policy's action and its time."""
        if self.clipped is not None:
            self.clipped.see(observation)
        before = len(self.plan_ms)
        acted = super().act(observation)
        if len(self.plan_ms) > before:
            self.count()
        return acted


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where an episode begins, and when it is over."""

    seed: int
    number: int | None = None
    steps: int | None = None


@dataclass(kw_only=True)
class Trials:
    """Episodes of a policy in an environment."""

    bench: Bench
    starts: Sequence[Start]
    count: Callable[[], None]
    """Called for every plan."""

    def won(self, policy: Policy, clipped: ClippedStates | None = None) -> int:
        """Return how many episodes ``policy`` succeeds in; ``clipped`` counts its states."""
        won = 0
        for number, start in enumerate(self.starts):
            actor = _Counting(policy=policy, noise_key=number, clipped=clipped, count=self.count)
            rules = EpisodeRules(seed=start.seed, init_state_id=start.number, max_steps=start.steps)
            won += self.bench.acted(actor, rules).success
        end_all(policy)
        return won
