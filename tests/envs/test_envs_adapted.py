"""Another package's environment under the keys of a robot."""

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs import AdaptedEnv
from dzrobot.errors import ConfigError, ModalityError

ROBOT = load_embodiment("libero_sim").at_resolution(24, 32)
"""Eight numbers of state, seven of action."""

LAYOUT = {
    "video.image": "cameras/front",
    "video.wrist_image": "cameras/hand",
    "state.state": ("robot/place", "robot/turn", "fingers"),
}
IMAGE = spaces.Box(0, 255, (24, 32, 3), np.uint8)


class Foreign(gym.Env):
    """As another package may have written it: nested keys, float64, success under its own name."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {
                "cameras": spaces.Dict({"front": IMAGE, "hand": IMAGE}),
                "robot": spaces.Dict(
                    {"place": spaces.Box(-1, 1, (3,)), "turn": spaces.Box(-4, 4, (3,))}
                ),
                "fingers": spaces.Box(0, 1, (2,)),
                "told": spaces.Text(40),
            }
        )
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.seen(), {"init_state_id": seed, "weather": "dry"}

    def step(self, action):
        self.count += 1
        return self.seen(), 0.0, False, False, {"success": self.count == 3, "own": 5}

    def seen(self):
        images = {
            "front": np.full((24, 32, 3), 9, np.uint8),
            "hand": np.zeros((24, 32, 3), np.uint8),
        }
        arm = {"place": np.array([0.1, 0.2, 0.3]), "turn": np.array([1.0, 2.0, 3.0])}
        return {"cameras": images, "robot": arm, "fingers": np.array([0.5, self.count]),
                "told": "lift it"}  # fmt: skip


def adapted(layout=LAYOUT, robot=ROBOT, **named):
    return AdaptedEnv(Foreign(), robot, layout, **{"task": "lift", "success": "success", **named})


def test_its_observations_are_the_robots():
    env = adapted()
    seen, info = env.reset(seed=0)
    assert set(seen) == set(ROBOT.observation_keys) == set(env.observation_space.spaces)
    assert env.observation_space["state.state"].low.tolist() == [*[-1] * 3, *[-4] * 3, 0, 0]
    assert seen["video.image"].mean() == 9
    assert seen["state.state"].dtype == np.float32
    np.testing.assert_allclose(seen["state.state"], [0.1, 0.2, 0.3, 1, 2, 3, 0.5, 0])
    assert info["task"] == seen["annotation.task"] == "lift"
    assert (info["init_state_id"], info["reset_reason"], info["weather"]) == (0, None, "dry")
    *_, info = env.step(np.zeros(7, np.float32))
    assert (info["is_success"], info["own"], info["init_state_id"]) == (False, 5, None)
    told = adapted({**LAYOUT, "annotation.task": "told"}, task=None)
    assert told.reset()[1]["task"] == "lift it"


def test_parts_of_a_vector_are_named_by_their_places():
    parts = ("robot/turn[1:]", "robot/place[:3]", "fingers[0:1]", "robot/turn[0:1]", "fingers[1:2]")
    env = adapted({**LAYOUT, "state.state": parts})
    space = env.observation_space["state.state"]
    assert space.low.tolist() == [-4, -4, -1, -1, -1, 0, -4, 0]
    seen = env.reset()[0]["state.state"]
    np.testing.assert_allclose(seen, [2, 3, 0.1, 0.2, 0.3, 0.5, 1, 0])
    assert seen in space


def test_it_is_evaluated(tmp_path, capsys):
    gym.register("Foreign-v0", entry_point=adapted, max_episode_steps=5)
    try:
        words = ["eval", "--env", "Foreign-v0", "--policy", "hold", "--episodes", "2"]
        words += ["--workers", "0", "--videos", "none", "--output", str(tmp_path / "results")]
        assert main(words) == 0, capsys.readouterr()
    finally:
        del gym.registry["Foreign-v0"]
    lines = (tmp_path / "results/records.jsonl").read_text().splitlines()
    assert [(row["success"], row["steps"]) for row in map(json.loads, lines)] == [(True, 3)] * 2


def without(key):
    return {name: value for name, value in LAYOUT.items() if name != key}


@pytest.mark.parametrize(
    ("layout", "named", "said"),
    [
        (without("video.image"), {}, "says nothing of video.image"),
        ({**LAYOUT, "state.stat": "fingers"}, {}, "Did you mean 'state.state'"),
        ({**LAYOUT, "video.image": "cameras/frond"}, {}, "Did you mean 'cameras/front'"),
        ({**LAYOUT, "state.state": "fingers"}, {}, "fingers are 2 numbers, the robot's 8"),
        ({**LAYOUT, "state.state": "robot/place[2:4]"}, {}, r"place\[2:4\] is no part of .*\(3,\)"),
        ({**LAYOUT, "state.state": "robot/place[3:]"}, {}, r"place\[3:\] is no part of"),
        ({**LAYOUT, "state.state": "told[0:1]"}, {}, r"told\[0:1\] is no part of told.*Text"),
        ({**LAYOUT, "state.state": "robot/plase[0:1]"}, {}, "Did you mean 'robot/place'"),
        (LAYOUT, {"task": None}, "give either task or"),
        (LAYOUT, {"robot": load_embodiment("libero_sim")}, r"one image \(256, 256, 3\)"),
        (LAYOUT, {"robot": load_embodiment("oxe_droid")}, r"the robot has \(8,\)"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, named, said):
    with pytest.raises(ConfigError, match=said):
        adapted(layout, **named)


def test_nothing_is_taken_for_success():
    env = adapted(success="is_success")
    env.reset()
    with pytest.raises(ModalityError, match="no 'is_success', only own, success"):
        env.step(np.zeros(7, np.float32))
