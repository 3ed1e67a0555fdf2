"""Lift: what success, its reward and the end of an episode mean; environments in parallel."""

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401

pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")

STILL = np.zeros(7, np.float32)
DRAFT = {"resolution": 32, "quality": "draft", "settle_steps": 1}


def raise_cube(env):
    sim = env.unwrapped.simulation.env.sim
    place = sim.data.get_joint_qpos("cube_joint0").copy()
    sim.data.set_joint_qpos("cube_joint0", np.array([*place[:2], 1.2, *place[3:]]))


@pytest.mark.parametrize("stop", [True, False])
def test_success_ends_the_episode_unless_asked_not_to(stop):
    env = gym.make("dzrobot/lift-v0", cameras=False, stop_on_success=stop)
    env.reset(seed=0)
    assert env.step(STILL)[1:3] == (0.0, False)
    raise_cube(env)
    _, reward, terminated, truncated, info = env.step(STILL)
    assert (reward, terminated, truncated, info["is_success"]) == (1.0, stop, False, True)
    assert info["reset_reason"] == ("success" if stop else "")
    # The physics continue, and the goal is judged again: the cube has fallen back.
    for _ in range(12):
        _, reward, terminated, truncated, info = env.step(STILL)
    assert (reward, terminated, info["is_success"], info["reset_reason"]) == (0.0, False, False, "")
    env.close()


def test_every_seed_is_a_start_of_its_own():
    env = gym.make("dzrobot/lift-v0", cameras=False, settle_steps=0)
    states = []
    for how in ({"seed": 0}, {"seed": 1}, {"seed": 50}, {"options": {"init_state_id": 1}}):
        env.reset(**how)
        states.append(env.unwrapped.simulation.env.sim.get_state().flatten())
    env.close()
    assert len({state.tobytes() for state in states[:3]}) == 3
    np.testing.assert_array_equal(states[3], states[1])


def make_lift():
    return gym.make("dzrobot:dzrobot/lift-v0", **DRAFT)


@pytest.mark.long
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_see_what_a_single_environment_sees(context):
    single = make_lift()
    alone = [(single.reset(seed=seed)[0], single.step(STILL)) for seed in (8, 9)]
    single.close()
    # Not through shared memory: Gymnasium reads text from there once, before there is any.
    workers = gym.vector.AsyncVectorEnv([make_lift] * 2, context=context, shared_memory=False)
    observations, infos = workers.reset(seed=[8, 9])
    assert list(infos["init_state_id"]) == [8, 9]
    steps = workers.step(np.stack([STILL, STILL]))
    workers.close()
    for index, (first, step) in enumerate(alone):
        for key, value in first.items():
            np.testing.assert_array_equal(observations[key][index], value)
            np.testing.assert_array_equal(steps[0][key][index], step[0][key])
    assert list(steps[4]["is_success"]) == [False, False]
