"""The light environment keeps the contract that rollouts rely on."""

import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import dzrobot  # noqa: F401
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ModalityError, SimulatorError


def toward_mark(observation):
    state = observation["state.state"]
    return np.array([*np.clip((state[3:5] - state[:2]) * 10, -1, 1), 0, 0, 0, 0, 1], np.float32)


@pytest.fixture(params=range(3))
def env(request):
    return gym.make("dzrobot/point-v0", task_id=request.param, render_mode="rgb_array")


def test_passes_gymnasium_without_a_warning(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def test_has_the_keys_and_dimensions_of_libero(env):
    embodiment = load_embodiment("libero_sim")
    observation, info = env.reset(seed=3)
    assert set(observation) == set(embodiment.observation_keys) == set(env.observation_space.spaces)
    assert observation["state.state"].shape == (embodiment.state_dim,)
    assert env.action_space.shape == (embodiment.action_dim,)
    assert info == {
        "is_success": False,
        "task": observation["annotation.task"],
        "init_state_id": 3,
        "reset_reason": "",
        "failure_class": "never reached",
    }


def test_moving_to_the_mark_succeeds_and_standing_still_times_out(env):
    observation, info = env.reset(seed=3)
    keys = set(info)
    for _ in range(40):
        observation, reward, terminated, truncated, info = env.step(toward_mark(observation))
        assert set(info) == keys
        if terminated:
            break
    assert (reward, info["is_success"], info["reset_reason"]) == (1.0, True, "success")
    env.reset()
    for _ in range(60):
        _, _, terminated, truncated, info = env.step(np.zeros(7, np.float32))
    assert (terminated, truncated, info["is_success"]) == (False, True, False)


def test_starts_follow_the_seed_the_option_and_each_other(env):
    visited = [env.reset()[1]["init_state_id"] for _ in range(3)]
    visited += [env.reset(seed=107)[1]["init_state_id"], env.reset()[1]["init_state_id"]]
    visited += [
        env.reset(options={"init_state_id": 49})[1]["init_state_id"],
        env.reset()[1]["init_state_id"],
    ]
    assert visited == [0, 1, 2, 7, 8, 49, 0]
    for options, words in (
        ({"init_state_id": 50}, "0 to 49"),
        ({"init_state": 1}, "init_state_id"),
    ):
        with pytest.raises(ModalityError, match=words):
            env.reset(options=options)


def test_faults_are_raised_and_copies_behave_alike():
    env = gym.make("dzrobot/point-v0", crash_at=2).unwrapped
    copy = pickle.loads(pickle.dumps(env))
    for one in (env, copy):
        one.reset(seed=0)
        one.step(np.zeros(7, np.float32))
        with pytest.raises(SimulatorError, match="step 2"):
            one.step(np.zeros(7, np.float32))
    with pytest.raises(ModalityError, match="7 finite numbers"):
        env.step(np.full(7, np.nan, np.float32))
