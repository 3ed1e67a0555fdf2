"""LIBERO behind this API is LIBERO: the same images, states and successes, to the bit."""

import gymnasium as gym
import numpy as np
import pytest

from dzrobot.envs.libero.assets import import_libero
from dzrobot.envs.libero.libero_env import LiberoEnv
from dzrobot.envs.libero.simulated import arm_state
from dzrobot.envs.libero.suites import load_init_states, load_task

pytestmark = pytest.mark.libero

ACTIONS = np.random.default_rng(0).uniform(-1, 1, (3, 7)).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize(
    ("suite", "task_id"),
    [
        *(("libero_spatial", 2), ("libero_object", 7), ("libero_goal", 5)),
        *(("libero_10", 3), ("libero_90", 41)),
    ],
)
def test_equals_the_original_with_its_customary_loop(libero_assets, suite, task_id):
    env = LiberoEnv(suite=suite, task_id=task_id)
    ours = [env.reset(seed=54)[0], *(env.step(action)[0] for action in ACTIONS)]
    task = load_task(suite, task_id)
    env.close()

    bare = import_libero().OffScreenRenderEnv(
        bddl_file_name=str(task.bddl), camera_heights=256, camera_widths=256
    )
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(gym.utils.seeding.np_random(54)[0].integers(2**32))  # noqa: NPY002
    bare.env.reset()
    np.random.set_state(before)  # noqa: NPY002
    bare.set_init_state(load_init_states(task.init_states)[4])
    for _ in range(10):
        raw, *_ = bare.step([0] * 6 + [-1])
    theirs = [raw, *(bare.step(action)[0] for action in ACTIONS)]
    bare.env.sim._render_context_offscreen.con.free()
    bare.env.sim._render_context_offscreen.gl_ctx.free()
    bare.close()

    for one, other in zip(ours, theirs, strict=True):
        turned = {
            "video.image": other["agentview_image"][::-1, ::-1],
            "video.wrist_image": other["robot0_eye_in_hand_image"][::-1, ::-1],
            "state.state": arm_state(other),
        }
        for key, value in turned.items():
            np.testing.assert_array_equal(one[key], value, err_msg=key)


@pytest.mark.long
def test_fixtures_move_with_the_seed_and_objects_with_the_start(libero_assets):
    env = LiberoEnv(suite="libero_goal", task_id=0, cameras=False, settle_steps=0)

    def places(**how):
        env.reset(**how)
        sim = env.simulation.env.sim
        cabinet = sim.model.body_pos[sim.model.body_name2id("wooden_cabinet_1_main")].copy()
        bowl = sim.data.body_xpos[sim.model.body_name2id("akita_black_bowl_1_main")].copy()
        return cabinet, bowl

    first, other_seed = places(seed=1), places(seed=51)
    other_start = places(seed=1, options={"init_state_id": 2})
    env.close()
    assert not np.array_equal(first[0], other_seed[0])
    np.testing.assert_array_equal(first[1], other_seed[1])
    np.testing.assert_array_equal(first[0], other_start[0])
    assert not np.array_equal(first[1], other_start[1])


@pytest.mark.parametrize(
    "suite", ["libero_goal", pytest.param("libero_object", marks=pytest.mark.long)]
)
def test_every_suite_opens(libero_assets, suite):
    env = LiberoEnv(suite=suite, task_id=9, cameras=False, settle_steps=0)
    _, info = env.reset(seed=0)
    observation, reward, terminated, truncated, _ = env.step(np.zeros(7, np.float32))
    assert env.observation_space.contains(observation)
    assert (info["is_success"], reward, terminated, truncated) == (False, 0.0, False, False)
    env.close()
