"""No sequence of actions, NaNs, jumps or stale frames moves a target out of its limits."""

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import HOME, READY, FakeArm, FakeCamera
from dzrobot.envs.franka.franka_config import FrankaConfig, LimitsConfig
from dzrobot.envs.franka.safeguards.limits import (
    COLLISIONS,
    RECOVERABLE,
    Abort,
    CommandTimeout,
    RefusalError,
    SlewLimits,
    Workspace,
    check_contact,
    check_first_target,
    check_fresh,
    check_joints,
    check_shape,
    classify,
    on_silence,
)
from dzrobot.envs.panda.poses import (
    angle_between,
    euler_of,
    pose_of,
    rotation_about,
    rotation_of,
    rotation_vector,
    towards,
)
from dzrobot.envs.panda.quantities import wants_change
from dzrobot.errors import SafetyError

LIMITS = LimitsConfig()
SOME = settings(max_examples=100, deadline=None, derandomize=True)
MANY = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
ANGLE = st.floats(-np.pi, np.pi)
NUMBER = st.one_of(
    st.floats(-1, 1), st.floats(-1e6, 1e6), st.sampled_from([np.nan, np.inf, -np.inf, 0.0])
)
ACTION = st.lists(NUMBER, min_size=7, max_size=7)
USUAL = st.lists(st.floats(-1, 1), min_size=7, max_size=7)

EVENT = st.one_of(
    st.tuples(st.just("act"), st.one_of(USUAL, ACTION)),
    st.tuples(st.just("act"), USUAL),
    st.tuples(st.just("jump"), st.lists(st.floats(-0.4, 0.4), min_size=6, max_size=6)),
    st.tuples(st.just("freeze state"), st.none()),
    st.tuples(st.just("freeze camera"), st.none()),
    st.tuples(st.just("stick"), st.none()),
    st.tuples(st.just("push"), st.floats(0, 100)),
    st.tuples(st.just("bend"), st.tuples(st.integers(0, 6), st.floats(-5, 5))),
    st.tuples(st.just("reflex"), st.sampled_from(sorted(RECOVERABLE | COLLISIONS))),
    st.tuples(st.just("wait"), st.floats(0, 100)),
    st.tuples(st.just("disconnect"), st.none()),
)
CONFIG = st.builds(
    lambda frame, anchor, hz, slow: FrankaConfig(
        control_hz=hz,
        action={"frame": frame, "anchor": anchor, "translation_m": 0.2, "rotation_rad": 1.0},
        slow_first_steps=slow, reward={"rule": "none"},
    ),
    st.sampled_from(["ee", "base", "ee_adjoint"]), st.sampled_from(["target", "measured"]),
    st.sampled_from([5.0, 10.0, 30.0]),
    st.integers(0, 3),
)  # fmt: skip


def make(config):
    arm = FakeArm()
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    return FrankaEnv(arm, cameras, config, clock=arm.clock), arm, cameras


def disturb(event, value, arm, cameras):
    match event:
        case "jump":
            pose = arm.state().pose
            moved = pose_of(pose[:3, 3] + value[:3], (0, 0, 0))
            moved[:3, :3] = rotation_of(value[3:]) @ pose[:3, :3]
            arm.put(moved)
        case "freeze state":
            arm.state()
            arm.frozen = True
        case "freeze camera":
            cameras[0].latest()
            cameras[0].frozen = True
        case "stick":
            arm.stuck = not arm.stuck
        case "push":
            arm.force_n = np.array([value, 0.0, 0.0])
        case "bend":
            arm.joints[value[0]] = value[1]
        case "reflex":
            arm.trip(value)
        case "wait":
            arm.clock.sleep_until(arm.clock.now() + value)
        case "disconnect":
            arm.disconnect()


def restore(arm):
    arm.put(HOME)
    arm.stuck = False
    arm.force_n = np.zeros(3)
    arm.joints = np.array(READY)


def assert_is_pose(value):
    """Raise unless ``value`` is a finite (4, 4) pose with a proper rotation."""
    rotation = value[:3, :3]
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-4)
    assert np.linalg.det(rotation) > 0
    np.testing.assert_allclose(value[3], (0, 0, 0, 1), atol=1e-8)


def assert_is_one_step(before, target, config):
    """Raise unless ``target`` is as near to the target before as one call may move it."""
    reach = SlewLimits.of(config)
    meters = np.linalg.norm(target[:3, 3] - before[:3, 3])
    if config.action.anchor == "target":
        assert meters <= config.limits.speed_m_s * config.period_s + 1e-6
    assert meters <= reach.call_m + 1e-6
    assert angle_between(before, target) <= reach.call_rad + 1e-6


@pytest.mark.parametrize("examples", [70, pytest.param(200, marks=pytest.mark.long)])
def test_no_sequence_of_events_moves_a_target_out_of_bounds(examples):
    events = st.lists(EVENT, min_size=1, max_size=25)
    settings(MANY, max_examples=examples)(given(CONFIG, events)(move_within_bounds))()


def move_within_bounds(config, events):
    env, arm, cameras = make(config)
    workspace, reach = Workspace(config), SlewLimits.of(config)
    spring = config.controller
    env.reset()
    for event, value in events:
        if event != "act":
            if env._episode.abort is Abort.NONE and arm.is_connected:
                disturb(event, value, arm, cameras)
            continue
        sent, before = len(arm.moves), arm.moves[-1]
        # Limits hold against what the arm reports; how old that may be is a limit of its own.
        said = arm.state() if arm.is_connected else None
        at = (arm.pose if said is None else said.pose).copy()
        try:
            _, _, _, truncated, info = env.step(np.array(value))
        except gym.error.ResetNeeded:
            restore(arm)
            env.acknowledge()
            env.reset()
            continue
        if truncated or info["recoveries"]:
            # Holding where the arm is asks for no motion, wherever that is.
            continue
        assert np.isfinite(value).all()
        assert said is not None
        assert np.linalg.norm(said.force_n) <= config.limits.force_n
        room = np.minimum(said.joints - config.limits.joints_low,
                          np.array(config.limits.joints_high) - said.joints)  # fmt: skip
        assert room.min() > config.limits.joint_margin_rad
        for target in arm.moves[sent:]:
            assert_is_pose(target)
            assert workspace.contains(target, slack=1e-6)
            inside = workspace.clip(at)
            meters = np.linalg.norm(target[:3, 3] - inside[:3, 3])
            lag = np.linalg.norm(before[:3, 3] - inside[:3, 3])
            assert meters <= max(reach.step_m, lag) + 1e-6
            # What the spring may press with: it answers no more than its clip on each axis.
            stretch = np.minimum(np.abs(target[:3, 3] - inside[:3, 3]), spring.error_clip_m)
            pressed = spring.translational_stiffness * np.linalg.norm(stretch)
            assert pressed <= spring.translational_stiffness * max(reach.step_m, lag) + 1e-3
            if np.allclose(target, inside, atol=1e-6):
                # Held where the arm is, as after a silence: no motion is asked for, and the next
                # target begins there.
                before = target
            assert_is_one_step(before, target, config)
    env.close()


@MANY
@given(
    st.lists(st.floats(-3, 3), min_size=6, max_size=6),
    st.lists(st.floats(-1, 1), min_size=6, max_size=6),
    st.lists(st.floats(-1, 1), min_size=6, max_size=6),
)
def test_any_desired_pose_becomes_a_target_within_all_limits(desired, measured, last):
    config = FrankaConfig()
    workspace, reach = Workspace(config), SlewLimits.of(config)
    low = np.concatenate([config.limits.workspace_low, -np.array(config.limits.tilt)])
    high = np.concatenate([config.limits.workspace_high, np.array(config.limits.tilt)])
    here = workspace.pose(low + (np.array(measured) + 1) / 2 * (high - low))
    offset = np.concatenate([0.05 * np.array(last[:3]), 0.09 * np.array(last[3:])])
    before = workspace.pose(np.clip(workspace.coordinates(here) + offset, low, high))
    wanted = pose_of(desired[:3], desired[3:])
    limited = workspace.limit(wanted, here, before)
    assert workspace.contains(limited.target)
    assert np.linalg.norm(limited.target[:3, 3] - before[:3, 3]) <= reach.call_m + 1e-9
    assert angle_between(before, limited.target) <= reach.call_rad + 1e-6
    if "hold" not in limited.by:
        assert np.linalg.norm(limited.target[:3, 3] - here[:3, 3]) <= reach.step_m + 1e-9
        assert angle_between(here, limited.target) <= reach.step_rad + 1e-6


def test_a_hand_that_points_down_does_not_wrap():
    workspace = Workspace(FrankaConfig())
    for roll in (np.pi - 0.05, -np.pi + 0.05, np.pi, -np.pi):
        pose = pose_of(HOME[:3, 3], (roll, 0.02, 0.1))
        assert angle_between(workspace.clip(pose), pose) < 1e-6


def test_within_the_limits_nothing_is_cut():
    workspace = Workspace(FrankaConfig())
    wanted = HOME.copy()
    wanted[:3, 3] += (0.02, 0.02, 0.02)
    limited = workspace.limit(wanted, HOME, HOME)
    np.testing.assert_allclose(limited.target, wanted, atol=1e-12)
    assert limited.by == ()


@pytest.mark.parametrize(
    ("offset", "abort"), [((0, 0, 0.5), Abort.OUTSIDE), ((0.15, 0, 0), Abort.NOT_FOLLOWING)]
)
def test_an_arm_that_is_elsewhere_is_refused(offset, abort):
    workspace = Workspace(FrankaConfig())
    measured = HOME.copy()
    measured[:3, 3] += offset
    with pytest.raises(RefusalError) as refused:
        workspace.limit(measured, measured, HOME)
    assert refused.value.abort is abort


@SOME
@given(st.floats(allow_nan=True), st.floats(allow_nan=True))
def test_stale_or_unknown_ages_are_refused(state_age, frame_age):
    fresh = state_age <= LIMITS.state_age_s and frame_age <= LIMITS.frame_age_s
    if fresh:
        check_fresh(state_age, [frame_age], LIMITS)
    else:
        with pytest.raises(RefusalError):
            check_fresh(state_age, [frame_age], LIMITS)


@SOME
@given(st.floats(0, 100), st.floats(0, 30))
def test_contact_above_the_soft_limit_is_refused(force, torque):
    arguments = (np.array([0, force, 0]), np.array([torque, 0, 0]), LIMITS)
    if force <= LIMITS.force_n and torque <= LIMITS.torque_nm:
        check_contact(*arguments)
    else:
        with pytest.raises(RefusalError, match="Nm"):
            check_contact(*arguments)


def test_contact_that_cannot_be_read_is_refused():
    with pytest.raises(RefusalError):
        check_contact(np.full(3, np.nan), np.zeros(3), LIMITS)


@SOME
@given(st.integers(0, 6), st.floats(-6, 6))
def test_a_joint_near_its_limit_is_refused(joint, angle):
    joints = np.array(READY)
    joints[joint] = angle
    margin = LIMITS.joint_margin_rad
    if LIMITS.joints_low[joint] + margin < angle < LIMITS.joints_high[joint] - margin:
        check_joints(joints, LIMITS)
    else:
        with pytest.raises(RefusalError, match=f"joint {joint + 1} is"):
            check_joints(joints, LIMITS)


def test_a_first_target_far_from_the_arm_is_refused():
    far = HOME.copy()
    far[0, 3] += 0.05
    with pytest.raises(RefusalError, match="first target"):
        check_first_target(far, HOME, LIMITS)
    check_first_target(HOME, HOME, LIMITS)


@pytest.mark.parametrize("action", [np.zeros(6), np.zeros((1, 7)), 1.0, None, "up", [[1] * 7]])
def test_other_shapes_are_no_actions(action):
    with pytest.raises(SafetyError, match="7 numbers"):
        check_shape(action, 7, "an action is 7 numbers")


def test_errors_are_recovered_from_only_when_all_are_allowed():
    assert all(classify({name}) is Abort.NONE for name in RECOVERABLE)
    assert all(classify(RECOVERABLE | {name}) is Abort.COLLISION for name in COLLISIONS)
    assert classify({"joint_position_limits_violation"}) is Abort.REFLEX
    assert classify(set()) is Abort.REFLEX
    assert not COLLISIONS & RECOVERABLE


@SOME
@given(st.floats(0, 200))
def test_silence_first_holds_then_stops(seconds):
    expected = (
        CommandTimeout.STOP if seconds >= LIMITS.stop_after_s
        else CommandTimeout.HOLD if seconds >= LIMITS.hold_after_s else CommandTimeout.NONE
    )  # fmt: skip
    assert on_silence(seconds, LIMITS) is expected


@SOME
@given(st.floats(-1, 1), st.booleans())
def test_the_gripper_changes_only_beyond_the_threshold(value, is_open):
    changes = wants_change(value, is_open=is_open, threshold=0.5)
    assert changes == (value <= -0.5 if is_open else value >= 0.5)


@SOME
@given(ANGLE, st.floats(-1.5, 1.5), ANGLE)
def test_euler_angles_and_rotation_vectors_return(roll, pitch, yaw):
    rotation = rotation_of((roll, pitch, yaw))
    np.testing.assert_allclose(rotation_of(euler_of(rotation)), rotation, atol=1e-9)
    np.testing.assert_allclose(rotation_about(rotation_vector(rotation)), rotation, atol=1e-9)


def test_straight_up_and_down_keep_their_rotation():
    for pitch in (np.pi / 2, -np.pi / 2):
        rotation = rotation_of((0.3, pitch, 0.7))
        np.testing.assert_allclose(rotation_of(euler_of(rotation)), rotation, atol=1e-6)


@SOME
@given(st.lists(st.floats(-1, 1), min_size=6, max_size=6), st.floats(0.01, 0.5))
def test_a_way_is_walked_in_limited_steps(place, meters):
    goal = pose_of(place[:3], place[3:])
    pose = np.eye(4)
    for _ in range(400):
        step = towards(pose, goal, meters=meters, radians=0.3)
        assert np.linalg.norm(step[:3, 3] - pose[:3, 3]) <= meters + 1e-9
        assert angle_between(pose, step) <= 0.3 + 1e-9
        pose = step
    np.testing.assert_allclose(pose, goal, atol=1e-9)
