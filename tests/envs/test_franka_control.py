"""From actions to targets: what a zero action, a hold and a reset leave the arm with."""

import dataclasses
import itertools

import numpy as np
import pytest

from dzrobot.envs.franka.diagnostics import _mode, _states
from dzrobot.envs.franka.drivers.franky_library import FrankaHandDriver
from dzrobot.envs.franka.drivers.gripper import DrivenGripper, GripperReport
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import HOME, READY, FakeArm, FakeCamera
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import make_franka
from dzrobot.envs.franka.streaming import stream_together
from dzrobot.envs.franka.workcells import NoGripper
from dzrobot.envs.panda.poses import angle_between, pose_of
from dzrobot.envs.panda.state import Mode
from dzrobot.envs.panda.trajectories import PoseTrajectory
from dzrobot.errors import ConfigError, StoppedError

STILL = np.zeros(7, np.float32)
SAG = (0, 0, -0.006)


class Noting(FakeArm):
    """Notes how long each reference is to take, and each way home."""

    lasts: tuple = ()
    homes: tuple = ()

    def command(self, target, over_s=0.0):
        super().command(target, over_s)
        self.lasts = (*self.lasts, over_s)

    def home(self, joints, dynamics):
        super().home(joints, dynamics)
        self.homes = (*self.homes, tuple(joints))


def make(**values):
    arm = Noting()
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig.model_validate({"reward": {"rule": "none"}} | values)
    return FrankaEnv(arm, cameras, config, clock=arm.clock), arm


def sag(arm):
    """Let the hand hang a little below its target, as under a load that nobody told it of."""
    pose = arm.state().pose
    pose[:3, 3] = arm.moves[-1][:3, 3] + SAG
    arm.pose = pose


@pytest.mark.parametrize(("anchor", "sinks"), [("target", False), ("measured", True)])
def test_a_zero_action_holds_the_target_and_does_not_follow_the_arm_down(anchor, sinks):
    env, arm = make(action={"anchor": anchor})
    env.reset()
    for _ in range(20):
        sag(arm)
        assert not env.step(STILL)[3]
    sunk = HOME[2, 3] - arm.moves[-1][2, 3]
    assert sunk == pytest.approx(20 * 0.006 if sinks else 0.0, abs=1e-6)


def test_actions_add_up_whatever_the_arm_lags():
    env, arm = make(action={"frame": "base"})
    env.reset()
    for _ in range(5):
        sag(arm)
        env.step(np.array([0.5, 0, 0, 0, 0, 0, 0], np.float32))
    np.testing.assert_allclose(arm.moves[-1][:3, 3], HOME[:3, 3] + (5 * 0.015, 0, 0), atol=1e-6)


def test_a_blocked_arm_is_pressed_on_no_harder_than_a_step():
    env, arm = make(action={"frame": "base"})
    env.reset()
    arm.stuck = True
    for _ in range(20):
        env.step(np.array([1, 0, 0, 0, 0, 0, 0], np.float32))
    ahead = np.linalg.norm(arm.moves[-1][:3, 3] - arm.state().pose[:3, 3])
    assert ahead == pytest.approx(env.config.limits.step_m, abs=1e-6)


def test_a_silent_policy_leaves_a_hanging_arm_where_it_was_told_to_be():
    env, arm = make()
    env.reset()
    for _ in range(3):
        sag(arm)
        env._control.hold()
    np.testing.assert_allclose(arm.moves[-1], HOME, atol=1e-9)
    far = HOME.copy()
    far[0, 3] += 0.04
    arm.pose = far
    env._control.hold()
    np.testing.assert_allclose(arm.moves[-1], far, atol=1e-9)


def test_a_reference_takes_the_whole_period_and_a_hold_is_at_once():
    env, arm = make(control_hz=20.0)
    env.reset()
    env.step(np.array([1, 0, 0, 0, 0, 0, 0], np.float32))
    assert arm.lasts[-1] == pytest.approx(0.05)
    env._control.hold()
    assert arm.lasts[-1] == 0.0


def test_a_reference_moves_evenly_between_two_targets():
    goal = pose_of(HOME[:3, 3] + (0.03, 0, 0), (np.pi, 0, 0.1))
    way = PoseTrajectory(HOME, goal, began_s=5.0, lasts_s=0.1, before=np.zeros(6))
    poses = [way.at(5.0 + 0.01 * n)[0] for n in range(11)]
    np.testing.assert_allclose(np.diff([pose[0, 3] for pose in poses]), 0.003, atol=1e-12)
    turns = [angle_between(a, b) for a, b in itertools.pairwise(poses)]
    np.testing.assert_allclose(turns, 0.01, atol=1e-9)
    np.testing.assert_allclose(way.at(5.05)[1][:3], (0.3, 0, 0))
    np.testing.assert_allclose(way.at(5.2)[1], 0)
    np.testing.assert_allclose(way.at(5.2)[0], goal)


def test_a_reference_that_turns_round_changes_its_twist_gradually():
    goal = pose_of(HOME[:3, 3] + (0.03, 0, 0), (np.pi, 0, 0.1))
    there = PoseTrajectory(HOME, goal, began_s=0.0, lasts_s=0.1, before=np.zeros(6))
    back = PoseTrajectory(goal, HOME, began_s=0.1, lasts_s=0.1, before=there.at(0.1)[1])
    ways = [there] * 100 + [back] * 160
    twists = [way.at(0.001 * n)[1] for n, way in enumerate(ways)]
    change = np.abs(np.diff(twists, axis=0)).max(axis=0)
    # From 0.3 m/s to as much the other way within half of a step.
    assert 0.011 < change[0] <= 0.6 / 50 + 1e-9
    assert twists[-1][0] == 0.0
    assert back.is_over(0.2501)
    assert not back.is_over(0.2499)


def test_a_reset_brings_the_joints_home_and_only_where_they_are_not():
    env, arm = make()
    env.reset()
    assert arm.homes == ()
    arm.joints[0] += 0.1
    env.reset()
    assert arm.homes == (READY,)
    np.testing.assert_allclose(arm.state().joints, READY)


@pytest.mark.parametrize(
    ("speed_rad_s", "arrives"),
    # franky-sim's wrist reports 0.08 rad/s at rest, where it turns to and fro by 8e-5 rad.
    [(0.0, True), (0.1, False)],
)
def test_an_arm_is_home_once_its_joints_rest_whatever_speed_it_reports(speed_rad_s, arrives):
    env, arm = make(reset={"timeout_s": 5.0})
    env.reset()
    arm.joints[0] += 0.1
    went, report, signs = arm.home, arm.state, itertools.cycle((1, -1))

    def state():
        seen = report()
        turned = seen.joints + 4e-5 * next(signs) * np.eye(7)[6]
        turned[0] += speed_rad_s * arm.clock.now() % 0.04
        twist = np.array([0, 0, 0, 0, 0, 0.08])
        return dataclasses.replace(seen, joints=turned, twist=twist)

    def home(joints, dynamics):
        went(joints, dynamics)
        arm.state = state

    arm.home = home
    if arrives:
        env.reset()
    else:
        with pytest.raises(StoppedError, match="has not reached its start pose"):
            env.reset()


def test_without_a_posture_the_first_start_is_home():
    env, arm = make(reset={"joints": None})
    arm.joints[2] = 0.3
    env.reset()
    arm.joints[2] = 0.6
    env.reset()
    assert arm.homes == ((*READY[:2], 0.3, *READY[3:]),)


def test_a_stop_on_the_way_home_stops_the_planned_motion():
    env, arm = make()
    env.reset()
    arm.joints[0] += 0.1

    def interrupted(joints, dynamics):
        arm.start()
        env.operator_stop()

    arm.home = interrupted
    with pytest.raises(StoppedError, match="operator"):
        env.reset()
    assert not arm.state().controlled


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limits": {"force_n": 70.0}}, "collision_force_n"),
        ({"limits": {"torque_nm": 15.0}}, "last three"),
        ({"controller": {"collision_torque_nm": (20,) * 4 + (11,) * 3}}, "from the shoulder"),
        ({"reset": {"joints": (3.0, 0, 0, -2, 0, 2, 0)}}, "reset.joints"),
        ({"cameras": [{"key": "video.image", "serial": 218622276123}]}, "put it in quotes"),
        ({"load": {"mass_kg": 9.0, "center_m": (0, 0, 0)}}, "mass_kg"),
    ],
)
def test_thresholds_that_the_arm_would_reach_first_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        make_franka(**values)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_doctor_passes_an_idle_arm_alone_and_says_what_to_do_about_others(mode):
    arm = FakeArm()
    arm.connect()
    arm.mode = mode
    line = _mode(arm.state())
    assert line.verdict == ("ok" if mode is Mode.IDLE else "fail")
    assert "lamp" in line.found
    heard = stream_together((), arm, 0.05, arm.clock).arm
    assert [line.what for line in _states(heard, FrankaConfig())] == [
        "latency", "mode", "pose", "start",
    ]  # fmt: skip


def test_no_hand_takes_every_request_and_is_never_busy():
    hand = NoGripper()
    hand.connect()
    hand.request(opened=False)
    assert hand.state().is_open
    assert not hand.state().is_busy


class Published:
    """A hand's process that has published one state."""

    def __init__(self, state):
        self._state = state
        self.latest = self

    def get(self):
        return self._state.pack()

    def is_running(self):
        return True

    def notify(self, *words):
        pass


@pytest.mark.parametrize(
    ("width_m", "says", "holds"), [(0.04, True, True), (0.0, True, False), (0.04, False, False)]
)
def test_closed_fingers_with_nothing_between_them_hold_nothing(width_m, says, holds):
    gripper = DrivenGripper(FrankaHandDriver, lambda: "", FrankaConfig().gripper)
    gripper._driver = Published(GripperReport(1e12, 1, width_m, says, ""))
    gripper.request(opened=False)
    assert gripper.state().is_grasped is holds
