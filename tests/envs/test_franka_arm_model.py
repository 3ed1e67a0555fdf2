"""What the safety layer takes an arm for, against the manufacturer's model and a third library."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from emulated import need_libraries
from scripts import loaded

from dzrobot.envs.emulators.kinematics import ARMS, FR3, describe
from dzrobot.envs.emulators.robot_client import arm_urdf
from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND, forward, pose_and_jacobian
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.fake_devices import FakeArm
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.motion.controller import Control
from dzrobot.envs.franka.motion.reach import unreachable_part
from dzrobot.envs.franka.motion.start_path import plan_start_path
from dzrobot.envs.franka.safeguards.arm_check import (
    ArmMismatchError,
    ArmReport,
    check_arm,
    joint_limits_in,
)
from dzrobot.envs.panda.joint_targets import JOINT_LIMITS
from dzrobot.envs.panda.poses import angle_between, distance_between
from dzrobot.errors import RobotError

ROOT = Path(__file__).parents[2]
URDF = Path(__file__).with_name("fr3.urdf").read_text()
OLD_LOW = (-2.9007, -1.8361, -2.9007, -3.0770, -2.8763, 0.4398, -3.0508)
OLD_HIGH = (2.9007, 1.8361, 2.9007, -0.1169, 2.8763, 4.6216, 3.0508)
"""Limits that another arm has: until they were replaced, the defaults."""


def random_joints(count=50):
    low, high = (np.array(values) for values in JOINT_LIMITS["fr3"])
    return np.random.default_rng(0).uniform(low, high, (count, 7))


def turn(axis, angle):
    cosine, sine = math.cos(angle), math.sin(angle)
    first, second = [number for number in range(3) if number != axis]
    matrix = np.eye(4)
    matrix[first, first] = matrix[second, second] = cosine
    sign = -1.0 if axis == 1 else 1.0
    matrix[first, second], matrix[second, first] = -sign * sine, sign * sine
    return matrix


def flange_by_urdf(joints):
    """Return the pose of the flange, by walking the joints of the manufacturer's model."""
    pose, angles = np.eye(4), iter(joints)
    for joint in ElementTree.fromstring(URDF).iter("joint"):
        place = joint.find("origin")
        roll, pitch, yaw = (float(number) for number in place.get("rpy").split())
        step = turn(2, yaw) @ turn(1, pitch) @ turn(0, roll)
        step[:3, 3] = [float(number) for number in place.get("xyz").split()]
        pose = pose @ step
        if joint.get("type") == "revolute":
            assert joint.find("axis").get("xyz") == "0 0 1"
            pose = pose @ turn(2, next(angles))
    return pose


def test_forward_kinematics_are_the_manufacturers():
    for joints in random_joints():
        np.testing.assert_allclose(forward(joints, np.eye(4)), flange_by_urdf(joints), atol=1e-9)


def test_kinematics_and_jacobian_are_pinocchios():
    pinocchio = pytest.importorskip("pinocchio", reason="pip install -e '.[dev]' brings pin")
    model = pinocchio.buildModelFromXML(URDF)
    data, flange = model.createData(), model.getFrameId("link8")
    for joints in random_joints():
        pinocchio.framesForwardKinematics(model, data, joints)
        expected = data.oMf[flange].homogeneous
        jacobian = pinocchio.computeFrameJacobian(
            model, data, joints, flange, pinocchio.ReferenceFrame.LOCAL_WORLD_ALIGNED
        )
        ours, own_jacobian = pose_and_jacobian(joints, np.eye(4))
        np.testing.assert_allclose(ours, expected, atol=1e-9)
        np.testing.assert_allclose(own_jacobian, jacobian, atol=1e-9)


def test_an_emulated_arm_moves_as_the_manufacturers_does():
    for joints in random_joints():
        pose = FR3.forward(joints, np.eye(4))
        np.testing.assert_allclose(pose, flange_by_urdf(joints), atol=1e-9)


def test_default_limits_are_an_fr3s():
    low, high = joint_limits_in(URDF)
    for config in (FrankaConfig(), FrankaConfig.model_validate({"arm": "fr3"})):
        for ours, theirs, inwards in (
            (config.limits.joints_low, low, 1.0), (config.limits.joints_high, high, -1.0)
        ):  # fmt: skip
            inside = inwards * (np.array(ours) - theirs)
            assert (inside >= 0).all()
            assert (inside < 0.01).all()


def test_a_panda_has_other_limits_and_single_ones_replace_them():
    config = FrankaConfig.model_validate({"arm": "fer", "limits": {"joints_high": OLD_HIGH}})
    assert config.limits.joints_low == JOINT_LIMITS["fer"][0]
    assert config.limits.joints_high == OLD_HIGH
    assert FrankaConfig.model_validate({"arm": "fer"}).limits.joints_high[5] == 3.7525


@pytest.mark.parametrize("kind", ["fr3", "fer"])
def test_emulated_arms_report_the_limits_of_their_kind(kind):
    assert set(ARMS) == set(JOINT_LIMITS)
    low, high = joint_limits_in(arm_urdf(describe(kind)))
    np.testing.assert_array_equal(low, JOINT_LIMITS[kind][0])
    np.testing.assert_array_equal(high, JOINT_LIMITS[kind][1])


def report(**changes):
    found = ArmReport("fr3", joint_limits_in(URDF), np.eye(4), 0.73, 0.0)
    return replace(found, **changes)


def state():
    arm = FakeArm()
    arm.connect()
    found = arm.state()
    return replace(found, pose=forward(found.joints, found.flange_to_ee))


def wide(**changes):
    limits = {"joints_low": OLD_LOW, "joints_high": OLD_HIGH}
    return FrankaConfig.model_validate({"limits": limits, **changes})


def test_a_workcell_that_claims_more_than_the_arm_has_is_refused():
    check_arm(report(), state(), FrankaConfig())
    says = (
        r"claims more.*joint 1 workcell -2\.9007 to 2\.9007, the arm \(fr3\) -2\.7501 to "
        r"2\.7501 rad.*joint 6"
    )
    with pytest.raises(ArmMismatchError, match=says) as refused:
        check_arm(report(), state(), wide())
    assert "joint 3" not in str(refused.value)


def test_an_arm_that_cannot_say_its_limits_must_be_named():
    silent = report(kind="", joint_limits=None)
    with pytest.raises(ArmMismatchError, match=r"`arm: fer`"):
        check_arm(silent, state(), FrankaConfig())
    check_arm(silent, state(), FrankaConfig.model_validate({"arm": "fer"}))


@pytest.mark.parametrize(("meters", "degrees"), [(0.0011, 0.0), (0.0, 0.25)])
def test_an_arm_that_is_not_where_it_is_computed_to_be_is_refused(meters, degrees):
    here = state()
    pose = here.pose @ turn(0, math.radians(degrees))
    pose[2, 3] += meters
    with pytest.raises(ArmMismatchError, match=f"{1000 * meters:.1f} mm and {degrees:.2f} degrees"):
        check_arm(report(), replace(here, pose=pose), FrankaConfig())


def test_an_end_effector_that_was_not_taken_is_refused():
    config = FrankaConfig.model_validate({"end_effector": {"position": [0.0, 0.0, 0.05]}})
    with pytest.raises(ArmMismatchError, match=r"its end effector is 50\.0 mm"):
        check_arm(report(), state(), config)


@pytest.mark.parametrize(
    ("urdf", "says"),
    [("none", "not a URDF"), ("<robot name='x'/>", "0 revolute"),
     (URDF.replace('lower="-2.750100"', 'lower="x"'), "7 revolute")],
)  # fmt: skip
def test_a_model_that_cannot_be_read_is_said_so(urdf, says):
    with pytest.raises(RobotError, match=says):
        joint_limits_in(urdf)


@pytest.mark.robot
def test_a_connected_arm_is_checked(tmp_path):
    need_libraries()
    values = yaml.safe_load(ARMS["fr3"].read_text())
    values["origins"][2][1] = -0.321
    longer = tmp_path / "longer.yaml"
    longer.write_text(yaml.safe_dump(values))
    for kind, config, says in (
        ("fer", FrankaConfig(), r"the arm \(fer\) -0\.0175 to 3\.7525 rad"),
        (str(longer), FrankaConfig(), r"5\.0 mm and 0\.00 degrees"),
    ):
        cell = EmulatedWorkcell(rate=math.inf, scene="empty", arm=kind)
        arm, _, _ = cell.keep_time(FrankyArm(cell, config), [])
        try:
            with pytest.raises(ArmMismatchError, match=says):
                arm.connect()
        finally:
            arm.close()
    cell = EmulatedWorkcell(rate=math.inf, scene="empty", arm="fer")
    arm, _, _ = cell.keep_time(
        FrankyArm(cell, fer := FrankaConfig.model_validate({"arm": "fer"})), []
    )
    try:
        arm.connect()
        np.testing.assert_array_equal(arm._arm.about().joint_limits[1], fer.limits.joints_high)
    finally:
        arm.close()


@pytest.fixture(scope="module")
def benchmark():
    with loaded(ROOT / "benchmarks/franka_reset.py") as module:
        yield module


EDGE = np.array([0.567, -0.324, 0.654])
"""From here a hand that points down cannot rise."""


def test_resets_arrive_from_all_over_the_workspace(benchmark):
    kinds = benchmark.experiment(16, seed=3)
    assert sum(kind.results["failed"] for kind in kinds.values()) == 0
    assert sum(kind.results["arrived"] for kind in kinds.values()) == 16
    assert "end of reach" in kinds


def at_the_edge(benchmark, config):
    """Return joints (7,) as far towards ``EDGE`` as they go, the hand as at the start."""
    goal = config.reset.pose
    goal[:3, 3] = EDGE
    home, margin = np.array(config.reset.joints), config.limits.joint_margin_rad
    box = benchmark.JointBox(
        np.array(config.limits.joints_low) + margin, np.array(config.limits.joints_high) - margin,
        home,
    )  # fmt: skip
    joints = home
    for share in np.linspace(0.0, 1.0, 60):
        found = benchmark.solve_within(
            joints, benchmark.between(config.reset.pose, goal, share), FLANGE_TO_HAND, box
        )
        if found is None:
            break
        joints = found
    return joints


def test_a_lift_that_cannot_be_reached_is_left_out(benchmark):
    config = FrankaConfig()
    joints = at_the_edge(benchmark, config)
    here = replace(state(), joints=joints, pose=forward(joints, FLANGE_TO_HAND))
    assert distance_between(here.pose, config.reset.pose) > 0.3
    path = plan_start_path(here, np.array(config.reset.joints), config.reset.pose, config)
    assert path.lifted[2, 3] < here.pose[2, 3] + config.reset.lift_m - 0.01
    assert angle_between(path.lifted, here.pose) < 1e-9
    result, seconds, _ = benchmark.reset_from(joints, config, 0)
    assert result == "arrived"
    assert seconds < 15.0


def test_a_lift_with_a_joint_at_its_limit_is_left_out(benchmark):
    joints = np.array([1.06, -0.19, -1.785, -3.022, -1.045, 2.99, 0.883])
    result, seconds, _ = benchmark.reset_from(joints, FrankaConfig(), 20)
    assert result == "arrived"
    assert seconds < 15.0


def test_a_start_out_of_reach_is_refused_before_anything_moves(benchmark):
    limits = {"workspace_high": [0.9, 0.35, 0.7]}
    reset = {"position": [0.85, 0.0, 0.6], "reach_m": 1.5}
    controller = {"collision_torque_nm": [80.0] * 4 + [11.0] * 3}
    config = FrankaConfig.model_validate(
        {"limits": limits, "reset": reset, "controller": controller}
    )
    clock = benchmark.FakeClock()
    home = np.array(config.reset.joints)
    arm = benchmark.KinematicArm(home, clock, home)
    with pytest.raises(RobotError, match=r"^out of reach: .*Nothing has moved"):
        Control(arm, config, clock).travel(config.reset.start_pose(0))
    assert not arm.moved


def test_what_cannot_be_reached_of_a_workspace_is_named():
    low, high = (0.35, -0.2, 0.05), (0.55, 0.2, 0.4)
    near = {"limits": {"workspace_low": low, "workspace_high": high},
            "reset": {"position": (0.45, 0.0, 0.3)}}  # fmt: skip
    assert unreachable_part(FrankaConfig.model_validate(near), FLANGE_TO_HAND) is None
    part = unreachable_part(FrankaConfig(), FLANGE_TO_HAND)
    assert 0.02 < part.share < 0.4
    assert part.high[2] == pytest.approx(0.70)
    assert "% of the workspace is out of reach" in str(part)
