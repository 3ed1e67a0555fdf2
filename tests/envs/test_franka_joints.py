"""Targets of the joints: no sequence of actions takes them, or the hand, out of their limits."""

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.driver_process import DisconnectedError
from dzrobot.envs.emulators.kinematics import ARMS, describe
from dzrobot.envs.emulators.scenes import SECOND_EXTERIOR, SERIALS
from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND, forward, pose_and_jacobian
from dzrobot.envs.franka.drivers.dry_run import DryRunArm
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import READY, FakeArm, FakeCamera
from dzrobot.envs.franka.franka_config import DROID_HOME, FrankaConfig, LimitsConfig
from dzrobot.envs.franka.make import load_workcell
from dzrobot.envs.franka.motion.action_spaces import CartesianSpace, JointSpace, joint_box
from dzrobot.envs.franka.motion.reach import solve_joints
from dzrobot.envs.franka.safeguards.limits import RefusalError, Workspace
from dzrobot.envs.franka.safeguards.self_collision import collision_of
from dzrobot.envs.franka.workcells import Space
from dzrobot.envs.panda.poses import angle_between, distance_between
from dzrobot.envs.panda.trajectories import JointTrajectory
from dzrobot.errors import (
    ConfigError,
    MissingDependencyError,
    RobotError,
    SafetyError,
    StoppedError,
)

DROID = load_embodiment("oxe_droid")
WIDE = {"tilt": (1.0, 1.0, 1.5), "self_collision_m": 0.0}
USUAL = {"joints": READY, "euler": (np.pi, 0.0, 0.0)}
"""Where the fake arm begins, which is not DROID's home."""

CONFIG = FrankaConfig.model_validate({"embodiment": "oxe_droid", "limits": WIDE, "reset": USUAL})
LIMITS = CONFIG.limits
LOW, HIGH = joint_box(CONFIG)
PERIOD = CONFIG.period_s
READY_Q = np.array(READY)
BRAKING = LIMITS.joint_acceleration_rad_s2
SOME = settings(max_examples=15, deadline=None, derandomize=True)
HAND = FLANGE_TO_HAND


def make(limits=WIDE, drive=lambda arm: arm, arm=None, **values):
    arm = arm or FakeArm()
    config = FrankaConfig.model_validate(
        {"embodiment": "oxe_droid", "reward": {"rule": "none"}, "limits": limits, "reset": USUAL}
        | values
    )
    cameras = [FakeCamera(key, arm) for key in config.robot.video_keys]
    return FrankaEnv(drive(arm), cameras, config, clock=arm.clock), arm


def to(joints, gripper=0.0):
    return np.array([*joints, gripper], np.float32)


def moving():
    """Return an environment, its arm that moves at some speed, and where to."""
    env, arm = make()
    env.reset()
    goal = READY_Q + 0.3
    for _ in range(4):
        env.step(to(goal))
    return env, arm, goal


def state_at(joints):
    arm = FakeArm(forward(np.array(joints), HAND))
    arm.joints = np.array(joints, np.float64)
    arm.connect()
    return arm.state()


def walk(asked, config=CONFIG, start=READY):
    """Yield target, speeds and what cut them, of an arm that follows exactly."""
    space, last = JointSpace(config), np.array(start)
    space.prepare()
    space.begin(state_at(last))
    for goal in asked:
        limited = space.limit(np.array(goal), state_at(last), last, 1.0)
        last = limited.target
        yield last, limited.speeds, limited.by


JOINTS = st.tuples(
    *(st.floats(low, high) for low, high in zip(LIMITS.joints_low, LIMITS.joints_high, strict=True))
)


@SOME
@given(st.lists(JOINTS, min_size=1, max_size=12))
def test_whatever_is_asked_targets_keep_box_speed_acceleration_and_workspace(goals):
    asked = [goal for goal in goals for _ in range(5)]
    before, place = np.zeros(7), READY_Q
    workspace = Workspace(CONFIG)
    for target, speeds, _ in walk(asked):
        assert (target >= LOW - 1e-9).all()
        assert (target <= HIGH + 1e-9).all()
        assert (np.abs(speeds) <= np.array(LIMITS.joint_speed_rad_s) + 1e-9).all()
        assert (np.abs(speeds - before) <= BRAKING * PERIOD + 1e-9).all()
        np.testing.assert_allclose(target, place + (before + speeds) / 2 * PERIOD, atol=1e-9)
        assert workspace.excess(forward(target, HAND)) <= 1e-6
        before, place = speeds, target


@SOME
@given(st.lists(JOINTS, min_size=1, max_size=4))
def test_the_hand_is_no_faster_than_it_may_be(goals):
    asked = [goal for goal in goals for _ in range(8)]
    place = READY_Q
    for target, speeds, _ in walk(asked):
        twist = pose_and_jacobian(place, HAND)[1] @ speeds
        # What speed the joints had before is taken from them no faster than they may brake.
        assert np.linalg.norm(twist[:3]) <= 1.1 * LIMITS.speed_m_s
        place = target


class Coasting(FakeArm):
    """Comes to rest only after a while; notes how fast each reference of the hand is moved."""

    def __init__(self):
        super().__init__()
        self.asked = []
        """Meters and radians per second of every reference that is moved within some time."""

    def command(self, target, over_s=0.0, speeds=None):
        before = self._target
        super().command(target, over_s, speeds)
        if over_s > 0 and self.space is Space.CARTESIAN:
            ways = distance_between(before, target), angle_between(before, target)
            self.asked.append(np.array(ways) / over_s)

    def stop(self):
        super().stop()
        if self.space is not Space.CARTESIAN:
            self.joints = self.joints + 0.3 * self._joint_speeds
            self.pose = forward(self.joints, self._hand)


@SOME
@given(
    st.lists(JOINTS, min_size=1, max_size=3), st.integers(1, 6), st.floats(0.1, 0.85),
    st.floats(0.3, 1.25),
)  # fmt: skip
def test_a_reset_of_an_arm_that_still_moves_asks_for_no_more_speed_than_it_may(
    goals, steps, speed, turn
):
    arm = Coasting()
    reset = USUAL | {"speed_m_s": speed, "turn_rad_s": turn, "timeout_s": 60.0}
    env, _ = make(arm=arm, reset=reset)
    env.reset()
    for goal in goals:
        for _ in range(steps):
            *_, truncated, _ = env.step(to(goal))
            if truncated:
                env.acknowledge()
                env.reset()
    arm.asked.clear()
    env.reset()
    assert (np.max(arm.asked, axis=0) <= np.array([speed, turn]) * (1 + 1e-6)).all()


@pytest.mark.parametrize("arm", ARMS)
def test_no_posture_lets_the_joints_of_a_reset_turn_the_hand_until_the_arm_stops(arm):
    described = describe(arm)
    fastest = 0.13 * described.joint_velocity
    signs = np.array(np.meshgrid(*[[-1, 1]] * 7)).reshape(7, -1)
    random = np.random.default_rng(0)
    for _ in range(300):
        joints = random.uniform(described.joint_low, described.joint_high)
        twists = pose_and_jacobian(joints, HAND)[1] @ (fastest[:, None] * signs)
        assert np.linalg.norm(twists[:3], axis=0).max() < described.cartesian_velocity[0]
        assert np.linalg.norm(twists[3:], axis=0).max() < described.cartesian_velocity[1]


def test_a_goal_is_reached_and_not_overrun():
    goal = np.add(READY, (0.3, -0.1, 0.2, 0.1, -0.3, 0.2, 0.4))
    targets = np.array([target for target, *_ in walk([goal] * 25)])
    np.testing.assert_allclose(targets[-1], goal, atol=1e-6)
    way = np.sign(goal - READY) * np.diff(targets, axis=0)
    assert way.min() >= -1e-9


def test_a_joint_that_the_arm_does_not_have_is_refused_and_nothing_is_sent():
    env, arm = make()
    env.reset()
    sent = len(arm.moves)
    *_, truncated, info = env.step(to(np.zeros(7)))
    assert truncated
    assert info["abort"] == "invalid_action"
    assert "joint 6 is asked for 0.000 rad" in info["abort_message"]
    # It holds; nothing else was sent.
    for move in arm.moves[sent:]:
        np.testing.assert_allclose(move, READY, atol=1e-6)
    env.close()


def test_a_goal_near_a_limit_is_cut_to_the_box():
    near, inside = READY_Q.copy(), READY_Q.copy()
    near[6], inside[6] = LIMITS.joints_high[6] - 0.01, HIGH[6]
    ((_, _, by),) = walk([near])
    assert "joints" in by
    ((_, _, by),) = walk([inside])
    assert "joints" not in by


def test_joints_go_where_they_are_asked_and_the_same_action_holds():
    env, arm = make()
    observation, info = env.reset()
    np.testing.assert_allclose(info["target"], READY, atol=1e-6)
    goal = READY_Q + 0.15
    for _ in range(15):
        observation, *_, truncated, info = env.step(to(goal))
        assert not truncated, info["abort_message"]
    np.testing.assert_allclose(observation["state.joint_position"], goal, atol=1e-4)
    sent = len(arm.moves)
    env.step(to(goal))
    np.testing.assert_allclose(arm.moves[sent:], [goal], atol=1e-6)
    env.close()


def test_other_shapes_are_no_actions():
    env, _ = make()
    env.reset()
    with pytest.raises(SafetyError, match="8 numbers: 7 joint_position, 1 gripper_position"):
        env.step(np.zeros(7))


def test_the_gripper_closes_above_a_half_and_the_joints_rest_meanwhile():
    env, arm, goal = moving()
    sent = len(arm.moves)
    env.step(to(goal, gripper=0.6))
    assert arm.gripper.requests[-1] is False
    moved = np.diff(arm.moves[sent - 1 : sent + 1], axis=0)[0]
    speed = np.array(LIMITS.joint_speed_rad_s).max()
    assert 0 < np.abs(moved).max() <= speed**2 / (2 * BRAKING) + speed * PERIOD
    assert env.step(to(goal, gripper=0.4))[0]["state.gripper_position"] == 0.0
    assert arm.gripper.requests[-1] is True


def test_a_stop_brakes_within_the_acceleration_and_holds_until_a_person_ends_it():
    env, arm, goal = moving()
    speeds, last = env._control._space._speeds.copy(), arm.moves[-1]
    assert np.abs(speeds).max() > 0.5
    env.operator_stop()
    stopped = arm.moves[-1]
    assert (np.abs(stopped - last) <= np.abs(speeds) * (np.abs(speeds) / BRAKING + PERIOD)).all()
    sent = len(arm.moves)
    *_, truncated, info = env.step(to(goal))
    assert truncated
    assert info["abort"] == "operator_stop"
    with pytest.raises(StoppedError):
        env.reset()
    for move in arm.moves[sent:]:
        np.testing.assert_allclose(move, stopped, atol=1e-9)
    env.acknowledge()
    env.reset()
    env.close()


def test_a_blocked_arm_is_pressed_on_no_harder_than_a_step():
    env, arm = make()
    env.reset()
    arm.stuck = True
    goal = np.add(READY, (1.0, 0, 0, 0, 0, 0, 0))
    for _ in range(30):
        *_, truncated, info = env.step(to(goal))
        assert not truncated
    assert "step" in info["limited"]
    ahead = np.abs(arm.moves[-1] - READY).max()
    assert ahead == pytest.approx(LIMITS.joint_step_rad, abs=1e-6)


def test_a_silent_policy_leaves_the_joints_at_rest_and_may_go_on():
    env, arm, goal = moving()
    arm.clock.sleep_until(arm.clock.now() + 3 * PERIOD)
    before = np.array(arm.moves[-1])
    env.step(to(goal))
    # It goes on from where the joints have braked to, at a speed of zero.
    assert np.abs(env._control._space._speeds).max() <= BRAKING * PERIOD + 1e-9
    assert (arm.moves[-1] > before).all()


def test_the_hands_workspace_ends_a_way_of_the_joints():
    low = {"workspace_low": (0.25, -0.35, 0.35)}
    env, arm = make(limits=WIDE | low)
    env.reset()
    goal = np.add(READY, (0, 0.8, 0, 0, 0, 0, 0))
    said = set()
    for _ in range(25):
        *_, truncated, info = env.step(to(goal))
        assert not truncated, info["abort_message"]
        said |= set(info["limited"].split(","))
        assert forward(arm.moves[-1], HAND)[2, 3] >= 0.35 - 1e-9
    assert "workspace" in said
    assert forward(arm.moves[-1], HAND)[2, 3] < 0.40


def test_links_keep_apart():
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    from dzrobot.envs.franka.safeguards.self_collision import SelfCollision

    near = SelfCollision(LimitsConfig(self_collision_m=0.02))
    assert near.deficits_m(READY_Q) == (0.0, 0.0)
    folded = np.array([0.0, -1.7, 0.0, -3.0, 0.0, 0.6, 0.8])
    assert near.deficits_m(folded)[0] > 0.0
    config = CONFIG.model_copy(
        update={"limits": LIMITS.model_copy(update={
            "self_collision_m": 0.02, "workspace_low": (-1.0, -1.0, -1.0),
            "workspace_high": (1.5, 1.5, 1.5), "tilt": (1.57, 1.57, 1.57)})}
    )  # fmt: skip
    steps = list(walk([folded] * 40, config))
    assert all(near.deficits_m(target)[0] == 0.0 for target, *_ in steps[::4])
    assert {name for *_, by in steps for name in by} & {"self_collision", "workspace", "path"}


SHELF = {"name": "shelf", "low": (0.05, -0.6, 0.30), "high": (0.45, -0.2, 0.60)}
"""Beside the hand of the ready posture."""

BESIDE = WIDE | {"workspace_low": (0.0, -0.7, 0.0), "obstacles": [SHELF]}


def gap_m(joints):
    """Return how far the hand's grasp point is from the shelf (m)."""
    place = forward(np.array(joints), HAND)[:3, 3]
    outside = np.maximum(np.subtract(SHELF["low"], place), np.subtract(place, SHELF["high"]))
    return float(np.linalg.norm(np.maximum(outside, 0.0)))


def test_links_enter_no_obstacle_where_joints_are_commanded():
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    aside = READY_Q - 0.9 * np.eye(7)[0]
    droid, free = (
        FrankaConfig.model_validate(
            {"embodiment": "oxe_droid", "reset": USUAL, "limits": BESIDE | changed}
        )
        for changed in ({}, {"obstacles": []})
    )
    assert min(gap_m(target) for target, *_ in walk([aside] * 15, free)) == 0.0
    steps = list(walk([aside] * 15, droid))
    # The fingers and the hand are nearer than the point between them.
    assert min(gap_m(target) for target, *_ in steps) > droid.limits.obstacle_m
    assert {"path", "obstacle"} & set(steps[-1][-1])
    assert gap_m(steps[-1][0]) < gap_m(READY_Q), "it comes as near as it may"


@pytest.mark.long
def test_links_enter_no_obstacle_where_the_hand_is_commanded():
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    space = CartesianSpace(
        FrankaConfig.model_validate({"limits": BESIDE, "action": {"frame": "base"}})
    )
    space.prepare()
    joints = READY_Q
    space.begin(state_at(joints))
    last, said = forward(joints, HAND), set()
    for _ in range(12):
        limited = space.limit(np.array([0, -1.0, 0, 0, 0, 0]), state_at(joints), last, 1.0)
        last, said = limited.target, said | set(limited.by)
        joints = solve_joints(joints, last, HAND)
        assert gap_m(joints) > 0.02
    assert "obstacle" in said
    # Back out is always allowed.
    away = space.limit(np.array([0, 1.0, 0, 0, 0, 0]), state_at(joints), last, 1.0)
    assert away.target[1, 3] > last[1, 3]


def turned(angle):
    """Return the ready posture, turned about the base."""
    return READY_Q + angle * np.eye(7)[0]


def put(arm, joints):
    arm.joints = joints
    arm.put(forward(joints, HAND))


@pytest.mark.parametrize("embodiment", ["oxe_droid", "franka_pnp"])
def test_a_reset_looks_at_its_way_before_anything_moves(embodiment):
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    env, arm = make(limits=BESIDE, embodiment=embodiment)
    # From behind the shelf the way home leads through it.
    put(arm, turned(-2.3))
    assert gap_m(turned(-2.3)) > 0.1
    with pytest.raises(RobotError, match=r"nothing has moved: .*to reset\.joints.*obstacles"):
        env.reset()
    assert arm.moves == []
    # From the other side it does not.
    put(arm, turned(0.9))
    env.reset()
    np.testing.assert_allclose(arm.joints, READY_Q, atol=0.02)


def test_a_reset_may_leave_an_obstacle_that_is_too_near():
    pytest.importorskip("robosuite", reason="no simulator: pip install -e '.[libero]'")
    env, arm = make(limits=BESIDE)
    near = next(turned(-a) for a in np.arange(0.1, 0.9, 0.02) if gap_m(turned(-a)) < 0.08)
    assert collision_of(env.config.limits, links=False).deficits_m(near)[1] > 0
    put(arm, near)
    env.reset()
    np.testing.assert_allclose(arm.joints, READY_Q, atol=0.02)


def test_an_obstacle_has_a_size():
    with pytest.raises(ConfigError, match=r"shelf: low=.* must lie below high"):
        load_workcell(None, {"limits": {"obstacles": [SHELF | {"high": SHELF["low"]}]}})


def test_without_a_simulator_it_has_to_be_said_that_links_are_not_looked_at(monkeypatch):
    from dzrobot.envs.franka.safeguards import self_collision

    def missing():
        raise MissingDependencyError("mujoco is not installed: pip install -e '.[libero]'.")

    monkeypatch.setattr(self_collision, "load_mujoco", missing)
    env, arm = make(limits={"tilt": (1.0, 1.0, 1.5)})
    with pytest.raises(MissingDependencyError, match=r"limits: \{self_collision_m: 0\}"):
        env.reset()
    assert arm.moves == []
    with pytest.raises(DisconnectedError):
        arm.state()


def test_a_planned_motion_does_not_follow_joint_targets():
    with pytest.raises(ConfigError, match=r"controller.kind='motion'.*set it to impedance"):
        make(controller={"kind": "motion"})


def test_a_dry_run_computes_every_target_and_sends_none():
    env, arm = make(drive=DryRunArm)
    env.reset()
    goal = READY_Q + 0.1
    for _ in range(12):
        observation, *_, truncated, info = env.step(to(goal))
        assert not truncated, info["abort_message"]
    assert arm.moves == []
    np.testing.assert_allclose(observation["state.joint_position"], goal, atol=1e-4)


def test_an_arm_that_does_not_follow_ends_the_episode():
    space = JointSpace(CONFIG)
    space.begin(state_at(READY))
    with pytest.raises(RefusalError, match=r"joint 3 is 0\.50 rad from its last target"):
        space.limit(READY_Q, state_at(READY), READY + 0.5 * np.eye(7)[2], 1.0)


def test_a_reference_of_the_joints_has_no_steps_and_brakes_where_nothing_follows():
    before, after = np.full(7, 0.3), np.full(7, 0.6)
    start = np.zeros(7)
    goal = start + (before + after) / 2 * 0.1
    way = JointTrajectory(start, goal, 5.0, 0.1, before, after, 5.0)
    times = 5.0 + np.arange(0, 300) / 1000
    places, speeds = (np.array(values) for values in zip(*map(way.at, times), strict=True))
    np.testing.assert_allclose(speeds[:100, 0], 0.3 + 3.0 * (times[:100] - 5.0), atol=1e-9)
    np.testing.assert_allclose(places[100], goal, atol=1e-9)
    assert np.abs(np.diff(speeds, axis=0)).max() <= 0.005 + 1e-9
    np.testing.assert_allclose(places[-1], goal + 0.6**2 / 10, atol=1e-9)
    assert way.is_over(5.23)
    assert not way.is_over(5.21)
    np.testing.assert_allclose(np.diff(places[:, 0]), speeds[:-1, 0] / 1000, atol=1e-5)


def test_the_registered_id_is_droids_arm_and_a_workcell_may_not_say_otherwise(tmp_path):
    for name in ("Franka-DROID-v0", "dzrobot/Franka-DROID-v0"):
        env = gym.make(name, workcell="fake")
        assert (env.unwrapped.embodiment.tag, env.unwrapped.control_hz) == ("oxe_droid", 15.0)
        assert env.spec.max_episode_steps == 24 * 15
        env.close()
    cell = tmp_path / "cell.yaml"
    cell.write_text("embodiment: franka_pnp\n")
    with pytest.raises(ConfigError, match="says embodiment: franka_pnp, and oxe_droid was asked"):
        gym.make("Franka-DROID-v0", workcell=str(cell))
    cell.write_text("embodiment: oxe_droid\n")
    for name in ("Franka-DROID-v0", "Franka-PnP-v0"):
        assert gym.make(name, workcell=str(cell)).unwrapped.embodiment.tag == "oxe_droid"


def test_built_in_workcells_without_a_simulator_say_that_links_are_not_looked_at():
    for workcell, margin in (("fake", 0.0), ("emulated:empty", 0.0), ("emulated", 0.02)):
        config = load_workcell(workcell, {"embodiment": "oxe_droid"})
        assert config.limits.self_collision_m == margin
    serials = [camera.serial for camera in config.cameras]
    assert serials == [SERIALS[0], SECOND_EXTERIOR, SERIALS[1]]
    fake = load_workcell("fake")
    assert fake == FrankaConfig(task=fake.task)


def test_gymnasiums_checker_passes():
    check_env(gym.make("Franka-DROID-v0", workcell="fake", render_mode="rgb_array").unwrapped)


def nod(observation):
    """Ask the joints to be a little farther than they are."""
    return to(observation["state.joint_position"] + 0.05)


def test_joint_targets_are_recorded_and_repeated_and_hold_holds(tmp_path, capsys):
    data, there = str(tmp_path / "set"), ("--env", "dzrobot/Franka-DROID-fake-v0", "--unattended")
    record = ["record", *there, "--attempts", "1", "--keep-failures"]
    asked = ("--call", f"{__name__}:nod", "--max-steps", "12", "--output", data)
    assert main([*record, *asked]) == 0
    capsys.readouterr()
    assert main(["replay", data, *there]) == 0
    said = capsys.readouterr().out
    assert "state.joint_position: largest difference 0.0000" in said
    still = str(tmp_path / "still")
    assert main([*record, "--policy", "hold", "--max-steps", "5", "--output", still]) == 0
    table = pq.read_table(next((tmp_path / "still").rglob("*.parquet"))).to_pydict()
    # As in the columns of DROID, the gripper comes first.
    actions = np.array(table["action"])[:, 1:]
    np.testing.assert_allclose(actions, np.tile(DROID_HOME, (5, 1)), atol=1e-6)
