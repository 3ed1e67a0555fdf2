"""Another package's environment under the keys of a robot."""

import json
from dataclasses import replace
from typing import get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs import ActionConversion, AdaptedEnv, ImageConversion
from dzrobot.errors import ConfigError, ModalityError
from dzrobot.rollout.environment import facts_of

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
    assert (info["init_state_id"], info["reset_reason"], info["weather"]) == (0, "", "dry")
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
        (
            {**LAYOUT, "state.state": "robot/place[2:4]"},
            {},
            r"place\[2:4\] is not a part of .*\(3,\)",
        ),
        ({**LAYOUT, "state.state": "robot/place[3:]"}, {}, r"place\[3:\] is not a part of"),
        ({**LAYOUT, "state.state": "told[0:1]"}, {}, r"told\[0:1\] is not a part of told.*Text"),
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


class Batched(gym.Env):
    """A vector of one environment, as ManiSkill's are: tensors with a leading axis of one."""

    def __init__(self):
        image = spaces.Box(0, 255, (1, 48, 64, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "sensor_data": spaces.Dict({"front": image, "hand": image}),
                "qpos": spaces.Box(-4, 4, (1, 9)),
            }
        )
        self.action_space = spaces.Box(-2, 2, (1, 12), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert not options
        self.taken, self.seed = [], seed
        return self.seen(), {"elapsed": torch.tensor([0])}

    def step(self, action):
        assert action.shape == (1, 12)
        self.taken.append(action[0])
        done = torch.tensor([len(self.taken) == 2])
        info = {"success": done, "elapsed": torch.tensor([len(self.taken)])}
        return self.seen(), torch.tensor([0.5]), done, torch.tensor([False]), info

    def seen(self):
        front = torch.arange(48, dtype=torch.uint8).reshape(1, 48, 1, 1).expand(1, 48, 64, 3)
        place = torch.full((1, 9), 0.25 + (self.seed or 0) / 8)
        return {"sensor_data": {"front": front, "hand": front}, "qpos": place}


ACTIONS = ActionConversion(
    source=[0, 1, 2, 3, 4, 5, 6, *[None] * 5],
    scale=[*[0.5] * 6, -2, *[1.0] * 5],
    offset=[*[0.0] * 7, 0.1, 0.2, 0.3, 0.4, -1],
)


def batched(**named):
    layout = {
        "video.image": "sensor_data/front",
        "video.wrist_image": "sensor_data/hand",
        "state.state": "qpos[0:8]",
    }
    given = {"images": ImageConversion(resize=True, flip="upside_down"), "actions": ACTIONS}
    given |= {"batched": True, "starts": 20, "task": "lift", "success": "success"}
    return AdaptedEnv(Batched(), ROBOT, layout, **{**given, **named})


def test_a_batched_environment_with_other_images_and_actions_is_the_robots():
    env = batched()
    seen, info = env.reset(options={"init_state_id": 3})
    assert env._env.seed == info["init_state_id"] == 3
    assert info["elapsed"] == 0
    assert seen["state.state"].tolist() == [0.625] * 8
    # Upside down, and every pixel the mean of two rows.
    assert seen["video.image"][:, 0, 0].tolist() == list(range(47, 0, -2))
    assert seen["video.image"] in env.observation_space["video.image"]
    assert env.action_space == spaces.Box(*np.float32([[-4] * 6 + [-1], [4] * 6 + [1]]))
    action = np.arange(1, 8, dtype=np.float32)
    *_, reward, terminated, truncated, info = env.step(action)
    expected = [0.5, 1, 1.5, 2, 2.5, 3, -14, 0.1, 0.2, 0.3, 0.4, -1]
    np.testing.assert_allclose(env._env.taken[0], expected)
    assert (reward, terminated, truncated) == (0.5, False, False)
    assert (info["is_success"], info["init_state_id"]) == (False, 3)
    assert env.step(action)[2] is True
    with pytest.raises(ModalityError, match="init_state_id=20 does not exist"):
        env.reset(options={"init_state_id": 20})


def test_seeds_number_its_starts():
    env = batched(starts=5)
    assert facts_of(env).init_states == 5
    assert [env.reset(seed=s)[1]["init_state_id"] for s in (0, 4, 7)] == [0, 4, 2]
    assert env.reset()[1]["init_state_id"] == 3


def test_an_attribute_hand_that_is_no_hand_motion_says_nothing():
    """It is a common name: an environment keeps the state of its gripper under it, for example."""
    env = batched(starts=5)
    env.unwrapped.hand = np.zeros(1)
    assert facts_of(env).hand is None


def test_gymnasium_finds_nothing_wrong_with_it():
    check_env(batched(images=ImageConversion(resize=True)), skip_render_check=True)


@pytest.mark.parametrize("flip", get_args(ImageConversion.__annotations__["flip"]))
def test_images_are_turned(flip):
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    expected = {"none": image, "upside_down": image[::-1], "mirrored": image[:, ::-1],
                "turned": np.rot90(image, 2)}  # fmt: skip
    assert (ImageConversion(flip=flip).apply(image, (2, 2)) == expected[flip]).all()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"images": ImageConversion()}, r"is there;.*resize it with images=ImageConversion"),
        ({"actions": None}, r"takes actions \(12,\), the robot has \(7,\): say with actions="),
        ({"actions": ActionConversion(source=range(7))}, r"source names 7 numbers.*\(12,\)"),
        ({"actions": replace(ACTIONS, source=[0, *[None] * 11])}, r"\[1, 2, 3, 4, 5, 6\] go no"),
        ({"actions": replace(ACTIONS, source=[7, *range(7), *[None] * 4])}, r"0 to 6, not \[7\]"),
        ({"actions": replace(ACTIONS, scale=0)}, "scale is 0; write None"),
        ({"actions": replace(ACTIONS, offset=[1, 2])}, r"offset has the shape \(2,\)"),
    ],
)
def test_conversions_that_do_not_fit_are_refused(named, said):
    with pytest.raises(ConfigError, match=said):
        batched(**named)


def test_an_environment_that_is_no_batch_is_refused():
    with pytest.raises(ConfigError, match=r"batched=True: .* has no leading axis of one"):
        adapted(batched=True)


def test_a_number_of_the_robot_may_go_nowhere():
    actions = replace(ACTIONS, source=[*range(6), *[None] * 6], unused=[6])
    assert batched(actions=actions).action_space.high[6] == np.inf
