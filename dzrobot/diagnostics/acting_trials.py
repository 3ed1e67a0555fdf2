"""A policy in the loop, from recorded starts, and what its statistics make of the states there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dzrobot.diagnostics.motion import Bench
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action, Policy, end_all
from dzrobot.rollout.episode import PolicyActor
from dzrobot.rollout.protocol import EpisodeRules


@dataclass(kw_only=True)
class _Counting(PolicyActor):
    """A policy whose plans are counted."""

    count: Callable[[], None]
    keys: Sequence[str]
    """Keys of the state, in the robot's order."""

    states: list[NDArray[np.float64]] = field(default_factory=list, init=False)
    """States (S,) that it was given."""

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the policy's action and its time."""
        # What a policy behind a server planned is not here, only that it did.
        plans = self.policy.plans_next(session=self.session)
        if self.keys:
            seen = [np.ravel(observation[key]) for key in self.keys]
            self.states.append(np.concatenate(seen).astype(np.float64))
        acted = super().act(observation)
        if plans:
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

    keys: Sequence[str] = ()
    """Keys of the robot's state, in its order."""

    clipped: list[float] = field(default_factory=list, init=False)
    """Share of state numbers beyond the policy's statistics, of every episode that says it."""

    reached: list[NDArray[np.float64]] = field(default_factory=list, init=False)
    """How far (S,) the robot was from its first state at most, of every episode."""

    def won(self, policy: Policy) -> int:
        """Return how many episodes ``policy`` succeeds in."""
        won = 0
        for number, start in enumerate(self.starts):
            actor = _Counting(policy=policy, noise_key=number, count=self.count, keys=self.keys)
            rules = EpisodeRules(seed=start.seed, init_state_id=start.number, max_steps=start.steps)
            outcome = self.bench.acted(actor, rules)
            won += outcome.success
            if actor.states:
                away = np.abs(np.stack(actor.states) - actor.states[0])
                self.reached.append(away.max(0))
            self.clipped += [] if outcome.clipped is None else [outcome.clipped]
        end_all(policy)
        return won
