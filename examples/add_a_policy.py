"""Add your own policy: two methods, any environment.

    python examples/add_a_policy.py
    dzrobot eval --env dzrobot/point-v0 --policy add_a_policy:Approach    # in this folder

Start from here with your own network: load it in ``__init__``, call it in ``_plan``. What belongs
to one episode belongs to its session, so that several episodes can run at once.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot import Embodiment, load_embodiment, run_episode
from dzrobot.rollout import EpisodeRules

CHUNK = 4
"""Number of actions in a plan."""


class Approach:
    """Move the point onto the mark, planning a chunk of actions at a time.

    Args:
        embodiment: The robot it controls; ``dzrobot eval`` passes the environment's.
    """

    def __init__(self, embodiment: Embodiment) -> None:
        self.embodiment = embodiment
        self._waiting: dict[str, deque[NDArray[np.float32]]] = {}
        """Session -> planned actions that have not been returned yet."""

    def reset(self, session: str = "default", *, episode: int | None = None) -> None:
        """Start an episode in ``session``; ``episode`` seeds random draws."""
        self._waiting[session] = deque()

    def end_all(self) -> None:
        """End all sessions."""
        self._waiting.clear()

    def act(self, obs: Mapping[str, Any], *, session: str = "default") -> NDArray[np.float32]:
        """Return the next action (7,) in [-1, 1]; plan again when none is left."""
        waiting = self._waiting[session]
        if not waiting:
            waiting.extend(self._plan(obs))
        return waiting.popleft()

    def _plan(self, obs: Mapping[str, Any]) -> NDArray[np.float32]:
        """Return a chunk of actions (CHUNK, 7); a real policy would call its network here."""
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
