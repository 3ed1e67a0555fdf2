"""The scripted expert solves what it claims to, also when it is disturbed."""

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401
from dzrobot.envs.expert import Expert
from dzrobot.envs.libero.task_scene import Boxes, Grasp, choose_grasp, half_turn
from dzrobot.errors import SimulatorError


def boxes(*items):
    """Upright boxes, each (center, half edges)."""
    centers, halves = (np.array(part, float).reshape(-1, 3) for part in zip(*items, strict=True))
    return Boxes(center=centers, axes=np.tile(np.eye(3), (len(items), 1, 1)), half=halves)


NOTHING = Boxes(center=np.zeros((0, 3)), axes=np.zeros((0, 3, 3)), half=np.zeros((0, 3)))


def test_boxes_measure_distance_and_height():
    shape = boxes(([0, 0, 0], [0.1, 0.2, 0.3]), ([1, 0, 0], [0.1, 0.1, 0.5]))
    assert shape.corners.shape == (16, 3)
    assert shape.distance(np.array([[0.05, 0, 0]])) == 0
    assert shape.distance(np.array([[0.5, 0, 0], [0.4, 0, 0]])) == pytest.approx(0.3)
    start, end = np.array([0.0, 0, 1]), np.array([1.0, 0, 1])
    assert shape.top_between(start, end, margin=0.01) == pytest.approx(0.5)
    assert shape.top_between(start, np.array([0.5, 0, 1]), margin=0.01) == pytest.approx(0.3)
    assert NOTHING.distance(np.zeros((1, 3))) == np.inf


def test_a_box_is_held_across_its_narrow_side_and_a_bowl_by_its_rim():
    brick = boxes(([0, 0, 0.05], [0.1, 0.02, 0.05]))
    grasp = choose_grasp(brick, np.zeros(3), NOTHING, 0.0, [])
    assert abs(half_turn(grasp.yaw - np.pi / 2)) < 0.2
    np.testing.assert_allclose(grasp.offset, [0, 0, 0.07], atol=0.01)

    angles = np.deg2rad(np.arange(0, 360, 20))
    wall = [([0.06 * np.cos(a), 0.06 * np.sin(a), 0.03], [0.004, 0.004, 0.03]) for a in angles]
    bowl = boxes(*wall)
    post = boxes(([0.09, 0, 0.05], [0.02, 0.02, 0.05]))
    for obstacles in (NOTHING, post):
        grasp = choose_grasp(bowl, np.zeros(3), obstacles, 0.0, [])
        assert np.linalg.norm(grasp.offset[:2]) == pytest.approx(0.06, abs=0.006)
        assert abs(half_turn(grasp.yaw - np.arctan2(grasp.offset[1], grasp.offset[0]))) < 1e-6
    assert grasp.offset[0] < 0.03, "away from the post"
    another = choose_grasp(bowl, np.zeros(3), post, 0.0, [grasp])
    assert np.linalg.norm(another.offset - grasp.offset) > 0.015
    assert choose_grasp(
        boxes(([0, 0, 0], [0.01, 0.01, 0.01])), np.zeros(3), NOTHING, 0, [Grasp(np.zeros(3), 0)]
    )


def solve(env, seed, disturb=None):
    """Return the steps to success, or None."""
    env.reset(seed=seed)
    expert = Expert(env)
    for step in range(1, 400):
        action = expert.act({}, session="only")
        assert action.shape == (7,)
        assert action.dtype == np.float32
        assert np.abs(action).max() <= 1
        _, _, terminated, truncated, info = env.step(action)
        if disturb:
            disturb(env, step)
        if terminated or truncated:
            return step if info["is_success"] else None
    return None


def test_lifts_the_cube_from_any_start_and_again_when_it_is_taken_away():
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    env = gym.make("dzrobot/lift-v0", cameras=False)
    steps = [solve(env, seed) for seed in range(4)]
    assert None not in steps
    assert max(steps) < 60

    def take_away(env, step):
        sim = env.unwrapped.simulation.env.sim
        if step == steps[0] - 3:
            sim.data.set_joint_qpos("cube_joint0", np.array([0.05, 0.05, 0.83, 1, 0, 0, 0]))

    again = solve(env, 0, take_away)
    env.close()
    assert again is not None
    assert again > steps[0]


@pytest.mark.long
@pytest.mark.libero
@pytest.mark.parametrize(("suite", "task_id"), [("object", 0), ("spatial", 2)])
def test_solves_libero(libero_assets, suite, task_id):
    env = gym.make(f"dzrobot/libero_{suite}-v0", task_id=task_id, cameras=False)
    steps = [solve(env, seed) for seed in (0, 1)]
    env.close()
    assert None not in steps


@pytest.mark.libero
def test_refuses_a_task_it_does_not_know(libero_assets):
    env = gym.make("dzrobot/libero_goal-v0", task_id=0, cameras=False, settle_steps=0)
    env.reset(seed=0)
    with pytest.raises(SimulatorError, match="libero_object and libero_spatial"):
        Expert(env).act({})
    env.close()
    with pytest.raises(SimulatorError, match="dzrobot/lift-v0"):
        Expert(gym.make("dzrobot/point-v0"))
