"""The observations that other libraries take."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import dzrobot  # noqa: F401
from dzrobot.envs.adapted import PlainKeys
from dzrobot.errors import ConfigError


def plain(**options):
    return PlainKeys(gym.make("dzrobot/point-v0", resolution=36, **options))


def test_plain_keys_are_the_same_numbers_without_dots_and_texts():
    env, other = plain(), gym.make("dzrobot/point-v0", resolution=36)
    seen, wanted = env.reset(seed=3)[0], other.reset(seed=3)[0]
    assert set(seen) == {"video_image", "video_wrist_image", "state_state"}
    assert seen in env.observation_space
    for key, value in seen.items():
        np.testing.assert_array_equal(value, wanted[key.replace("_", ".", 1)])
    check_env(env, skip_render_check=True)
    assert gym.make(env.spec).observation_space == env.observation_space


def test_plain_keys_refuse_what_they_cannot_name():
    with pytest.raises(ConfigError, match="takes observations in a Dict"):
        PlainKeys(gym.wrappers.FlattenObservation(plain()))
    env = gym.make("dzrobot/point-v0")
    box = env.observation_space["state.state"]
    env.unwrapped.observation_space = gym.spaces.Dict({"a.b": box, "a_b": box})
    with pytest.raises(ConfigError, match=r"two of the keys a.b, a_b"):
        PlainKeys(env.unwrapped)


@pytest.mark.parametrize("algorithm", ["PPO", "SAC"])
@pytest.mark.parametrize("name", ["dzrobot/point-v0", "dzrobot/lift-v0"])
def test_stable_baselines_learns_on_it(name, algorithm):
    """With the real library; it is no dependency."""
    sb3 = pytest.importorskip("stable_baselines3", reason="pip install stable-baselines3")
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    options = {"resolution": 36}
    if "lift" in name:
        pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
        options |= {"quality": "draft", "settle_steps": 1}
    env = PlainKeys(gym.make(name, **options))
    checker.check_env(env)
    sizes = {"n_steps": 8, "batch_size": 8} if algorithm == "PPO" else {"buffer_size": 50}
    if algorithm == "SAC":
        sizes |= {"learning_starts": 8, "batch_size": 8}
    model = getattr(sb3, algorithm)("MultiInputPolicy", env, **sizes)
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(16)
    pairs = zip(before, model.policy.parameters(), strict=True)
    assert any((old != new).any() for old, new in pairs)
    env.close()
