"""Add your own policy: one method, any environment.

    python examples/add_a_policy.py
    dzrobot eval --env dzrobot/point-v0 --policy add_a_policy:Approach    # in this folder

Start from here with your own network: load it in ``__init__``, call it in ``plan``. What belongs
to one episode belongs to its session, so that several episodes can run at once; this policy
remembers nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot import Embodiment, Policy, load_embodiment, run_episode
from dzrobot.policies import Ask, Plan
from dzrobot.rollout import EpisodeRules

CHUNK = 4
"""Number of actions in a plan."""


class Approach(Policy):
    """Move the point onto the mark, planning a chunk of actions at a time.

    Args:
        embodiment: The robot it controls; ``dzrobot eval`` passes the environment's.
    """

    def __init__(self, embodiment: Embodiment) -> None:
        self.embodiment: Embodiment = embodiment

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return a plan for each question; a real policy would call its network here, once."""
        return [Plan.of(self._chunk(ask.observation)) for ask in asks]

    def _chunk(self, obs: Mapping[str, Any]) -> NDArray[np.float32]:
        """Return a chunk of actions (CHUNK, 7) in [-1, 1]."""
        point, mark = obs["state.state"][0:2], obs["state.state"][3:5]
        actions = np.zeros((CHUNK, self.embodiment.action_dim), np.float32)
        # An action of 1 moves the point by 0.1.
        actions[:, :2] = np.clip((mark - point) / (0.1 * CHUNK), -1, 1)
        return actions


def main() -> None:
    """Run three episodes and print how they ended."""
    policy = Approach(load_embodiment("libero_sim"))
    env = gym.make("dzrobot/point-v0")
    for seed in range(3):
        result = run_episode(env, policy, EpisodeRules(seed=seed))
        print(f"{result.task}: {result.ended} after {result.steps} steps")
    env.close()


if __name__ == "__main__":
    main()
