"""The whole road on emulated hardware: real drivers, physics, rendered images, success."""

import numpy as np
import pytest
from emulated import need_libraries, need_scene, printer

from dzrobot.envs.expert import expert_for
from dzrobot.envs.franka.make import make_franka
from dzrobot.errors import StoppedError

pytestmark = pytest.mark.robot

BELOW_THE_TABLE = {"workspace_low": (0.35, -0.25, -0.18)}
_LATE = {"frame_age_s": 5.0, "state_age_s": 2.0, "hold_after_s": 2.0}


@pytest.fixture(scope="module")
def env():
    need_libraries()
    need_scene()
    env = make_franka(workcell="emulated", limits=BELOW_THE_TABLE | _LATE)
    yield env
    env.close()


@pytest.fixture
def say(request, capsys):
    return printer(request, capsys)


def number(gripper=0.0, up=0.0):
    """Return an action that moves the hand, which points down, along its own axis."""
    action = np.zeros(7, np.float32)
    action[2], action[6] = -up, gripper
    return action


def is_red(image):
    red, green, blue = (image[..., channel].astype(int) for channel in range(3))
    return (red > 90) & (red > 2 * green) & (red > 2 * blue)


def test_a_zero_action_holds_and_both_cameras_see_the_cube(env):
    observation, info = env.reset(seed=0)
    assert info["task"] == "lift the red cube"
    before = env.arm.state().pose
    for _ in range(5):
        observation, reward, *_, info = env.step(number())
    after = env.arm.state().pose
    assert np.linalg.norm(after[:3, 3] - before[:3, 3]) < 0.002
    assert (reward, info["is_success"], info["abort"]) == (0.0, False, "")
    for key in ("video.image", "video.wrist_image"):
        assert is_red(observation[key]).sum() > 20, key


def test_fingers_closed_on_air_are_no_success(env):
    env.reset(seed=1)
    for _ in range(3):
        observation, reward, terminated, *_, info = env.step(number(gripper=-1.0))
    assert observation["state.state"][0] < 0.002
    assert (reward, terminated, info["is_grasped"]) == (0.0, False, False)


def test_an_expert_grasps_and_lifts_the_cube_through_the_drivers(env, say):
    observation, info = env.reset(seed=2)
    began, expert = info["robot_time_s"], expert_for(env)
    for _ in range(120):
        observation, reward, terminated, truncated, info = env.step(expert.act(observation))
        if terminated or truncated:
            break
    say(f"\nlifted after {info['robot_time_s'] - began:.1f} s of the arm's time")
    assert (reward, terminated, info["abort_message"]) == (1.0, True, "")
    assert info["is_success"]
    assert info["is_grasped"]
    cube = env.scene.object()
    assert observation["state.state"][0] == pytest.approx(2 * cube.half.min(), abs=0.004)


def test_a_reset_lets_go_of_the_cube_and_puts_it_where_the_start_has_it(env):
    observation, info = env.reset(options={"init_state_id": 7})
    first = env.scene.object()
    assert observation["state.state"][0] == pytest.approx(0.08, abs=0.001)
    assert not info["is_success"]
    env.reset(options={"init_state_id": 8})
    other = env.scene.object()
    assert np.linalg.norm(other.pose[:3, 3] - first.pose[:3, 3]) > 0.002
    env.reset(options={"init_state_id": 7})
    again = env.scene.object()
    np.testing.assert_allclose(again.pose[:2, 3], first.pose[:2, 3], atol=5e-4)
    np.testing.assert_array_equal(again.half, first.half)


def test_pushing_into_the_table_ends_the_episode_and_a_person_has_to_look(env):
    env.reset(seed=3)
    steps = [number(up=-0.5)] * 60
    for action in steps:
        _, reward, _, truncated, info = env.step(action)
        if truncated:
            break
    assert info["abort"] in ("collision", "force")
    assert reward == 0.0
    with pytest.raises(StoppedError):
        env.reset()
    env.acknowledge()
    env.reset(seed=3)


@pytest.mark.parametrize("name", ["milk", "butter"])
def test_an_expert_lifts_objects_of_libero_tall_and_flat(libero_assets, name):
    need_libraries()
    need_scene()
    env = make_franka(workcell=f"emulated:{name}", limits=_LATE)
    observation, info = env.reset(seed=1)
    assert info["task"] == f"lift the {name}"
    expert = expert_for(env)
    for _ in range(150):
        observation, *_, terminated, truncated, info = env.step(expert.act(observation))
        if terminated or truncated:
            break
    env.close()
    assert (info["is_success"], info["abort_message"]) == (True, "")
