"""Simulators of other packages, for a Python that has them; none of it needs dzrobot.

``python foreign_simulators.py make_aloha 3`` prints a digest of every step of one episode.
"""

import hashlib
import sys

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SIZE = 84
STEPS = 12


class RobosuiteLift(gym.Env):
    """Lift of robosuite 1.5, whose version excludes the 1.4 that LIBERO needs."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self):
        self._open(0)
        low, high = self._sim.action_spec
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
        image = spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "front": image,
                "hand": image,
                "place": spaces.Box(-np.inf, np.inf, (3,)),
                "turn": spaces.Box(-1, 1, (4,)),
                "fingers": spaces.Box(-1, 1, (2,)),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            # It draws from the seed that it was made with.
            self._sim.close()
            self._open(seed)
        return self._seen(self._sim.reset()), {}

    def step(self, action):
        raw, reward, _, _ = self._sim.step(action)
        lifted = bool(self._sim._check_success())
        return self._seen(raw), float(reward), False, False, {"lifted": lifted}

    def render(self):
        return self._sim.sim.render(SIZE, SIZE, camera_name="frontview")[::-1]

    def _open(self, seed):
        import robosuite

        self._sim = robosuite.make(
            "Lift", robots="Panda", has_renderer=False, use_camera_obs=True, ignore_done=True,
            camera_names=["agentview", "robot0_eye_in_hand"], camera_heights=SIZE,
            camera_widths=SIZE, control_freq=20, seed=seed,
            # The arm's own noise follows no seed (robosuite 1.5.2, robots/robot.py, line 246).
            initialization_noise=None,
        )  # fmt: skip

    def _seen(self, raw):
        images = {"front": "agentview_image", "hand": "robot0_eye_in_hand_image"}
        numbers = {
            "place": "robot0_eef_pos",
            "turn": "robot0_eef_quat",
            "fingers": "robot0_gripper_qpos",
        }
        return {
            **{key: np.ascontiguousarray(raw[name][::-1]) for key, name in images.items()},
            **{key: raw[name].astype(np.float32) for key, name in numbers.items()},
        }


def make_robosuite():
    return RobosuiteLift()


def make_aloha():
    import gym_aloha  # noqa: F401 (registers it)

    name = "gym_aloha/AlohaTransferCube-v0"
    return gym.make(name, obs_type="pixels_agent_pos", disable_env_checker=True)


def make_pusht():
    import gym_pusht  # noqa: F401

    return gym.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos", disable_env_checker=True)


def digests(env, seed):
    """Return a digest of what ``env`` returns at a reset and at every step."""
    env.action_space.seed(seed)
    found = [_digest(env.reset(seed=seed)[0])]
    for _ in range(STEPS):
        observation, reward, *_ = env.step(env.action_space.sample())
        found.append(_digest([observation, float(reward)]))
    return found


def _digest(value):
    digest = hashlib.sha256()

    def add(part):
        if isinstance(part, dict):
            for key in sorted(part):
                digest.update(key.encode())
                add(part[key])
        elif isinstance(part, list):
            for inner in part:
                add(inner)
        elif isinstance(part, np.ndarray):
            digest.update(f"{part.dtype} {part.shape}".encode() + part.tobytes())
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.stdout.write("\n".join(digests(globals()[sys.argv[1]](), int(sys.argv[2]))))
