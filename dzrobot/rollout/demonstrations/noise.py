"""Noise on what is done, so that demonstrations also show the way back from where it leads."""

from typing import Any

import gymnasium as gym
import numpy as np

from dzrobot.rng import seed_sequence

NOISY_NUMBERS = 6
"""Of an action: those that move the hand; the gripper's are left alone."""


class NoisyActions(gym.ActionWrapper[Any, Any, Any]):
    """Adds noise to the first six numbers of every action, keyed by the seed of the reset.

    What is done stays within the action space.

    Args:
        env: Where it is done.
        noise: Standard deviation, in the units of the actions.
    """

    def __init__(self, env: gym.Env[Any, Any], noise: float) -> None:
        super().__init__(env)
        self._noise = noise
        self._draws = _draws(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed, the draws go on."""
        if seed is not None:
            self._draws = _draws(seed)
        return self.env.reset(seed=seed, options=options)

    def action(self, action: np.ndarray) -> np.ndarray:
        """Return what is done in the place of ``action``."""
        drawn = self._draws.normal(0.0, self._noise, NOISY_NUMBERS).astype(np.float32)
        executed: np.ndarray = action.copy()
        executed[:NOISY_NUMBERS] += drawn[: len(executed)]
        if isinstance(self.action_space, gym.spaces.Box):
            executed = executed.clip(self.action_space.low, self.action_space.high)
        return executed


def _draws(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed_sequence("nois", seed))
