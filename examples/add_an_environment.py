"""Add your own environment: a robot, its observations, and when the task is done.

    python examples/add_an_environment.py
    dzrobot eval --env add_an_environment:Reach-v0 --policy add_an_environment:Reacher

Run the second command in this folder. ``record``, ``replay`` and ``collect`` take ``--env`` too.
Start from here with your own simulator: open it in ``reset``, not in ``__init__``, so that the
environment can be made, inspected and pickled anywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot import Embodiment, Part, Timing, View, run_episode
from dzrobot.envs import action_space, observation_space
from dzrobot.rollout import EpisodeRules

ARM = Embodiment(
    tag="two_joints",
    views=(View(key="video.top", feature="observation.images.top", resolution=(64, 64)),),
    state=(Part(key="state.joints", feature="observation.state", dim=2),),
    action=(Part(key="action.speeds", feature="action", dim=2),),
    tiles=(("video.top",),),
    prompt="{task}",
    timing=Timing(control_hz=10, action_horizon=8),
)
LINK = 0.5
"""Length of each link; the arm reaches 1."""

STEP = 0.15
"""Rotation of a joint by an action of 1, in radians."""

GOALS = 10
"""Number of initial states, each with its own goal."""


class Reach(gym.Env[dict[str, Any], np.ndarray]):
    """A planar arm with two joints moves its tip to a goal.

    ``state.joints`` are two angles in radians; an action is two speeds in [-1, 1].
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own)

    def __init__(self) -> None:
        # What dzrobot reads: the robot, its rate, and the number of initial states.
        self.embodiment = ARM
        self.control_hz = ARM.timing.control_hz
        self.init_states = GOALS
        self.observation_space = observation_space(ARM, {"state.joints": (-10.0, 10.0)})
        self.action_space = action_space(ARM)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start from the initial state that ``options`` names, or one drawn with ``seed``."""
        super().reset(seed=seed)
        named = (options or {}).get("init_state_id")
        self._start = int(self.np_random.integers(GOALS)) if named is None else named
        self._goal = np.array([0.3 + 0.2 * self._start, 1.2])
        self._joints = np.zeros(2)
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Turn both joints for one step."""
        self._joints = self._joints + STEP * np.clip(action, -1, 1)
        done = self._done()
        return self._observation(), float(done), done, False, self._info()

    def _tip(self, joints: NDArray[np.float64]) -> NDArray[np.float64]:
        angles = np.cumsum(joints)
        return LINK * np.array([np.cos(angles).sum(), np.sin(angles).sum()])

    def _done(self) -> bool:
        return bool(np.linalg.norm(self._tip(self._joints) - self._tip(self._goal)) < 0.05)

    def _observation(self) -> dict[str, Any]:
        image = np.zeros((64, 64, 3), np.uint8)
        for channel, joints in ((0, self._joints), (1, self._goal)):
            column, row = np.rint(32 + 30 * self._tip(joints)).astype(int)
            image[63 - row - 1 : 63 - row + 2, column - 1 : column + 2, channel] = 255
        return {
            "video.top": image,
            "state.joints": self._joints.astype(np.float32),
            "annotation.task": "bring the red tip to the green goal",
        }

    def _info(self) -> dict[str, Any]:
        return {
            "is_success": self._done(),
            "task": "bring the red tip to the green goal",
            "init_state_id": self._start,
            "reset_reason": "",
        }


class Reacher:
    """Find the goal in the image and turn the joints to it: a policy for this task only."""

    def __init__(self, embodiment: Embodiment) -> None:
        pass

    def reset(self, session: str = "default", *, episode: int | None = None) -> None:
        """Do nothing: there is no memory between steps."""

    def act(self, obs: Mapping[str, Any], *, session: str = "default") -> NDArray[np.float32]:
        """Return the speeds (2,) that move the tip closer, from the geometry of two links."""
        rows, columns = np.nonzero(obs["video.top"][..., 1])
        x, y = (columns.mean() - 32) / 30, (31 - rows.mean()) / 30
        far = min(np.hypot(x, y), 2 * LINK)
        bend = 2 * np.arccos(far / (2 * LINK))
        wanted = np.array([np.arctan2(y, x) - bend / 2, bend])
        gap = (wanted - obs["state.joints"] + np.pi) % (2 * np.pi) - np.pi
        speeds: NDArray[np.float32] = np.clip(gap / STEP, -1, 1).astype(np.float32)
        return speeds


make: Callable[..., Reach] = Reach
gym.register("Reach-v0", entry_point=make, max_episode_steps=60)


def main() -> None:
    """Run an episode from every initial state and print how it ended."""
    env = gym.make("Reach-v0")
    for start in range(GOALS):
        result = run_episode(env, Reacher(ARM), EpisodeRules(init_state_id=start))
        print(f"initial state {start}: {result.ended} after {result.steps} steps")
    env.close()


if __name__ == "__main__":
    main()
