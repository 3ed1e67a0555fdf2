"""DROID's arm through the real drivers: joint targets on the emulated arm, three cameras, 15 Hz."""

import gymnasium as gym
import numpy as np
import pytest
from emulated import need_libraries, need_scene

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.emulators.dynamics import inverse_inertia
from dzrobot.envs.emulators.kinematics import FR3
from dzrobot.envs.expert import expert_for
from dzrobot.envs.franka.arm_model import pose_and_jacobian
from dzrobot.envs.franka.make import make_franka
from dzrobot.envs.mujoco.lift_scene import COULOMB
from dzrobot.errors import StoppedError

pytestmark = pytest.mark.robot

DROID = load_embodiment("oxe_droid")
LIMITS = {"tilt": (1.0, 1.0, 1.5), "self_collision_m": 0.0}
# What the wall clock of a busy machine makes late is no matter here.
LATE = {"frame_age_s": 5.0, "state_age_s": 2.0, "hold_after_s": 2.0}


@pytest.fixture(scope="module")
def env():
    need_libraries()
    env = make_franka(
        workcell="emulated:empty", embodiment="oxe_droid", limits=LIMITS | LATE,
        reward={"rule": "none"},
    )  # fmt: skip
    yield env
    env.close()


DROID_STIFFNESS = np.diag([40.0, 30, 50, 25, 35, 25, 10]), np.diag([400.0] * 3 + [15.0] * 3)
"""Of DROID's arms: of the joints (Nm/rad), and of the hand (N/m, Nm/rad)."""


def stiffness(env):
    """Return what the joints resist with where the arm is, (7, 7), Nm/rad."""
    state = env.arm.state()
    jacobian = pose_and_jacobian(state.joints, state.flange_to_ee)[1]
    joints, hand = DROID_STIFFNESS
    return joints + jacobian.T @ hand @ jacobian


def rests_at(env, observation, goal):
    """Return whether joints are as near to ``goal`` as dry friction lets a spring bring them."""
    away = observation["state.joint_position"] - goal
    now = FR3.posture(env.arm.state().joints, FR3.flange_to_hand)
    inverse = inverse_inertia(FR3.link_mass, now, 0.0)
    stuck = 1.05 * inverse.diagonal() * COULOMB
    return bool((np.abs(inverse @ stiffness(env) @ away) <= stuck).all())


def to(joints, gripper=0.0):
    return np.array([*joints, gripper], np.float32)


def test_joints_go_where_they_are_asked_within_limits_and_rest_there(env):
    observation, info = env.reset(seed=0)
    assert {key: observation[key].shape for key in DROID.video_keys} == dict.fromkeys(
        DROID.video_keys, (180, 320, 3)
    )
    start, seen = observation["state.joint_position"].astype(float), []
    goal = np.add(start, (0.2, -0.1, -0.1, 0.2, 0.1, -0.1, 0.3))
    began = info["robot_time_s"]
    for _ in range(25):
        observation, *_, truncated, info = env.step(to(goal))
        assert not truncated, info["abort_message"]
        seen.append(env.arm.state().joint_speeds)
    assert info["robot_time_s"] - began == pytest.approx(25 / 15, abs=0.03)
    assert rests_at(env, observation, goal)
    speeds = np.abs(seen).max(axis=0)
    limits = env.config.limits
    assert (speeds <= 1.15 * np.array(limits.joint_speed_rad_s)).all()
    changes = np.abs(np.diff(seen, axis=0)).max() / env.config.period_s
    assert changes <= 1.5 * limits.joint_acceleration_rad_s2
    assert np.abs(seen[-1]).max() < 5e-3


def emulators(env):
    return env._sensors._arm._arm._workcell.emulators


@pytest.mark.parametrize(
    "wrench", [(10.0, 0, 0, 0, 0, 0), (0, 10.0, 0, 0, 0, 0), (0, 0, -10.0, 0, 0, 0)]
)
def test_a_pushed_arm_yields_as_one_of_droid_does(env, wrench):
    observation, _ = env.reset(seed=0)
    start = observation["state.joint_position"].astype(float)
    emulators(env).set(friction=0.0)
    state = env.arm.state()
    jacobian = pose_and_jacobian(state.joints, state.flange_to_ee)[1]
    yields = np.linalg.solve(stiffness(env), jacobian.T @ wrench)
    emulators(env).call("push", *wrench, 2.0)
    for _ in range(27):
        observation, *_, truncated, info = env.step(to(start))
        assert not truncated, info["abort_message"]
    pushed = observation["state.joint_position"] - start
    emulators(env).set(friction=1.0)
    np.testing.assert_allclose(pushed, yields, atol=0.1 * np.abs(yields).max())


def test_a_step_that_closes_the_hand_lasts_one_period(env):
    observation, _ = env.reset(seed=0)
    joints = observation["state.joint_position"]
    began = env.arm.state().robot_time_s
    for steps, told in enumerate((1.0, 1.0, 0.0, 1.0), start=1):
        *_, info = env.step(to(joints, told))
        assert env.arm.state().robot_time_s - began == pytest.approx(steps / 15, abs=0.02)
    assert (info["paused_s"], info["late_steps"]) == (0.0, 0)


def test_its_arm_begins_at_droids_home_and_acts_on_frames_of_a_stream_of_30_hz(env):
    observation, _ = env.reset(seed=0)
    home = [0, -np.pi / 5, 0, -4 * np.pi / 5, 0, 3 * np.pi / 5, 0]
    np.testing.assert_allclose(observation["state.joint_position"], home, atol=0.02)
    joints = observation["state.joint_position"]
    for _ in range(15):
        *_, info = env.step(to(joints))
        assert max(info[f"frame_age_s.{key}"] for key in DROID.video_keys) < 1 / 30 + 0.001


def test_the_gripper_closes_and_opens_by_its_position(env):
    observation, _ = env.reset(seed=0)
    joints = observation["state.joint_position"]
    assert observation["state.gripper_position"] == pytest.approx(0.0, abs=0.02)
    for told in (1.0, 0.0):
        for _ in range(6):
            observation, *_ = env.step(to(joints, told))
        assert observation["state.gripper_position"] == pytest.approx(told, abs=0.02)


def test_a_joint_that_the_arm_does_not_have_is_refused_and_it_holds(env):
    observation, _ = env.reset(seed=0)
    start = observation["state.joint_position"]
    observation, *_, truncated, info = env.step(to(np.zeros(7)))
    assert truncated
    assert info["abort"] == "invalid_action"
    np.testing.assert_allclose(env.arm.state().joints, start, atol=3e-3)
    env.acknowledge()


def test_a_stop_in_motion_brakes_and_holds_until_a_person_ends_it(env):
    observation, _ = env.reset(seed=0)
    goal = observation["state.joint_position"] + 0.3
    for _ in range(5):
        env.step(to(goal))
    assert np.abs(env.arm.state().joint_speeds).max() > 0.3
    env.operator_stop()
    clock = env._clock
    # A spring as soft as DROID's swings for some time once its target rests.
    clock.sleep_until(clock.now() + 0.9)
    resting = env.arm.state()
    assert np.abs(resting.joint_speeds).max() < 0.02
    assert env.step(to(goal))[3]
    clock.sleep_until(clock.now() + 0.3)
    np.testing.assert_allclose(env.arm.state().joints, resting.joints, atol=3e-3)
    assert np.abs(resting.joints - goal).max() > 0.05
    with pytest.raises(StoppedError):
        env.reset()
    env.acknowledge()
    env.reset(seed=0)


def test_a_harmless_reflex_is_recovered_from_and_slows_the_joints(env):
    observation, _ = env.reset(seed=0)
    start = observation["state.joint_position"].astype(float)
    env.step(to(start))
    emulators(env).call("trip", "communication_constraints_violation")
    for _ in range(30):
        observation, *_, truncated, info = env.step(to(start + 0.1))
        assert not truncated, info["abort_message"]
    assert info["recoveries"] == 1
    assert rests_at(env, observation, start + 0.1)


@pytest.fixture(scope="module")
def lift():
    need_libraries()
    need_scene()
    env = gym.make("Franka-DROID-v0", workcell="emulated", limits=LATE)
    yield env
    env.close()


def test_it_begins_as_its_simulated_twin_and_sees_the_same(lift):
    twin = gym.make("dzrobot/droid-lift-v0")
    try:
        simulated, _ = twin.reset(seed=3)
    finally:
        twin.close()
    observation, _ = lift.reset(seed=3)
    joints = "state.joint_position"
    np.testing.assert_allclose(observation[joints], simulated[joints], atol=5e-3)
    hand = "state.gripper_position"
    np.testing.assert_allclose(observation[hand], simulated[hand], atol=5e-3)
    for key in DROID.video_keys:
        # The cube lies elsewhere. Images that were cut from 4:3 differed by 20 and more.
        assert np.abs(observation[key].astype(int) - simulated[key]).mean() < 10, key


def test_an_expert_lifts_the_cube_by_joint_targets(lift):
    observation, info = lift.reset(seed=2)
    assert info["task"] == "lift the red cube"
    views = [observation[key].astype(int) for key in DROID.video_keys]
    assert all(view.std() > 10 for view in views)
    assert min(np.abs(views[0] - views[1]).mean(), np.abs(views[0] - views[2]).mean()) > 10
    expert = expert_for(lift)
    for _ in range(90):
        observation, reward, terminated, truncated, info = lift.step(expert.act(observation))
        if terminated or truncated:
            break
    assert (reward, terminated, info["abort_message"]) == (1.0, True, "")
    assert info["is_grasped"]
    assert 0.2 < observation["state.gripper_position"][0] < 0.8


def demonstrations(env):
    """Return joints, targets, closing and length of three episodes of the expert."""
    joints, targets, closed = [], [], []
    for seed in range(3):
        seen, _ = env.reset(seed=seed)
        expert, rows, ended = expert_for(env), [], False
        while not ended:
            action = expert.act(seen)
            rows.append((seen["state.joint_position"], action))
            seen, _, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        assert info["is_success"]
        joints.append(np.array([row[0] for row in rows], float))
        targets.append(np.array([row[1][:7] for row in rows], float))
        closed.append(int(np.argmax([row[1][7] > 0.5 for row in rows])))
    return joints, targets, closed


def taught(joints, targets, closed):
    """Return how targets relate to joints: the row that is nearest to them, and their lead."""
    pairs = list(zip(targets, joints, strict=True))
    away = [
        np.concatenate([(a[: len(a) - k] - q[k:]) ** 2 for a, q in pairs]).mean() for k in range(10)
    ]
    lead = np.mean([np.abs(a - q).max(axis=1).mean() for a, q in pairs])
    return int(np.argmin(away)), lead, np.mean([len(q) for q in joints]), np.mean(closed)


@pytest.mark.long
def test_the_simulated_twin_teaches_what_the_arm_does(lift):
    twin = gym.make("dzrobot/droid-lift-v0", cameras=False)
    try:
        simulated = taught(*demonstrations(twin))
    finally:
        twin.close()
    driven = taught(*demonstrations(lift))
    assert simulated[0] == driven[0]
    np.testing.assert_allclose(simulated[1], driven[1], rtol=0.2)
    np.testing.assert_allclose(simulated[2:], driven[2:], rtol=0.15)


@pytest.mark.long
def test_demonstrations_are_recorded_and_repeated_in_joint_space(tmp_path, capsys):
    need_libraries()
    need_scene()
    data, there = str(tmp_path / "set"), ("--env", "dzrobot/Franka-DROID-emulated-v0")
    recorded = ("--policy", "expert", "--max-steps", "90", "--unattended", "--output", data)
    assert main(["record", *there, *recorded]) == 0
    assert main(["replay", data, "--episode", "0", *there, "--unattended"]) == 0
    said = capsys.readouterr().out
    assert "ended by success" in said
