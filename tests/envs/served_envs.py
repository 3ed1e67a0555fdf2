"""Environments that the tests serve: each is made in a process of the server."""

import os
import signal
import time
from enum import Enum

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Color(str, Enum):  # noqa: UP042 (as older packages write it)
    RED = "red"


class Odd(gym.Env):
    """Spaces, values and faults that ours do not have."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple([spaces.Discrete(5, start=2), spaces.MultiBinary(3)]),
            "many": spaces.MultiDiscrete([3, 4]),
            "word": spaces.Text(8),
            "place": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
        }
    )
    action_space = spaces.Discrete(6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {"options": options, "color": Color.RED, "odd": object()}

    def step(self, action):
        if action == 11:
            raise ValueError("a fault of its own")
        if action == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 13:
            time.sleep(60)
        return self._seen(), np.float32(0.5), np.bool_(False), action == 4, {"got": action}

    def _seen(self):
        draw = self.np_random
        return {
            "pair": (np.int64(draw.integers(2, 7)), draw.integers(0, 2, 3, np.int8)),
            "many": draw.integers(0, 3, 2),
            "word": "abc",
            "place": draw.normal(size=(2, 2)),
        }


def make_odd():
    return Odd()


def make_unsendable():
    env = Odd()
    env.observation_space = spaces.Sequence(spaces.Discrete(2))
    return env


class Straight:
    """Moves the point of ``dzrobot/point-v0`` onto its mark."""

    def __init__(self, embodiment):
        self.embodiment = embodiment

    def reset(self, session=None, *, episode=None):
        pass

    def act(self, obs, *, session="default"):
        state = obs["state.state"]
        move = np.clip(4 * (state[3:5] - state[:2]), -1, 1)
        return np.array([*move, 0, 0, 0, 0, -1], np.float32)
