"""A policy that acts, and a person who takes over while they hold a button (DAgger).

Whose action each row holds stands in the recording, so training can learn from what the person did
where the policy had gone wrong.
"""

import time
from typing import Any

import gymnasium as gym

from dzrobot.envs.teleop.device import DeviceLostError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action
from dzrobot.rollout.demonstrations.teleoperation import Teleoperator
from dzrobot.rollout.episode import Actor


class WatchedPolicy:
    """A policy under a person's hand, as an actor.

    While the person holds the deadman, their action is carried out and the policy is not asked.
    When they let go, the policy begins anew from what it sees then: its plan was made for a place
    where the robot no longer is.

    Args:
        policy: Acts.
        person: Takes over.
    """

    def __init__(self, policy: Actor, person: Teleoperator) -> None:
        self.person = person
        """Takes over."""

        self.intervened = False
        """Whether the newest action is the person's."""

        self._policy = policy
        self._env: gym.Env[Any, Any] | None = None
        self._last: Action | None = None

    def begin(self, env: gym.Env[Any, Any]) -> None:
        """Start a new episode; the policy acts first."""
        self._env, self._last, self.intervened = env, None, False
        self.person.begin(env)
        self._policy.begin(env)

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the person's action while they steer, the policy's otherwise, and its time."""
        self.person.keep_time()
        began, before = time.perf_counter(), self.intervened
        try:
            wanted = self.person.wanted(observation, self._last)
        except DeviceLostError as error:
            # The episode is over after this step, and nothing moves in it.
            self.person.lost = error
            wanted = self.person.stopped(observation, self._last)
        self.intervened = wanted is not None and self.person.lost is None
        if wanted is None:
            if before:
                assert self._env is not None, "begun"
                self._policy.begin(self._env)
            wanted, _ = self._policy.act(observation)
        self._last = wanted
        return wanted, 1000 * (time.perf_counter() - began)
