"""Parts that name quantities of an arm: which embodiments an arm can be, and what they read."""

from dataclasses import replace

import numpy as np
import pytest

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Part
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import HOME, READY, FakeArm, FakeCamera
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import make_franka
from dzrobot.envs.franka.motion.action_spaces import _requested_pose
from dzrobot.envs.franka.safeguards.limits import RefusalError
from dzrobot.envs.panda.poses import pose_of, quaternion_of
from dzrobot.envs.panda.quantities import MEASURED, ArmLayout, Moment
from dzrobot.envs.panda.state import ActionConfig
from dzrobot.errors import ConfigError

PNP = load_embodiment("franka_pnp")


def with_parts(*names, **changes):
    """Return an embodiment whose state is these quantities, one part each."""
    parts = tuple(
        Part(key=f"state.{name}", feature=f"observation.{name}", dim=len(MEASURED[name].low))
        for name in names
    )
    return replace(PNP, tag="parts", state=parts, **changes)


class Turned:
    is_open, width_m, widest_m = False, 0.02, 0.08


def moment(origin=HOME):
    arm = FakeArm(pose_of((0.4, 0.1, 0.3), (np.pi, 0.0, 0.2)))
    arm.connect()
    arm.force_n = np.array([1.0, 2.0, 3.0])
    return Moment(arm.state(), Turned(), origin, ActionConfig())


def test_every_quantity_is_read_within_its_limits_and_by_its_own_name():
    robot = with_parts(*MEASURED)
    layout, read = ArmLayout.of(robot), ArmLayout.of(robot).read(moment())
    for name, one in MEASURED.items():
        values = read[f"state.{name}"]
        assert values.dtype == np.float32
        assert layout.state_limits[f"state.{name}"] == (one.low, one.high)
        assert (values >= np.array(one.low) - 1e-6).all(), name
        assert (values <= np.array(one.high) + 1e-6).all(), name
    np.testing.assert_allclose(read["state.position"], (0.4, 0.1, 0.3), atol=1e-6)
    np.testing.assert_allclose(read["state.joint_position"], READY, atol=1e-6)
    np.testing.assert_allclose(read["state.gripper_position"], 0.75)
    np.testing.assert_allclose(np.linalg.norm(read["state.quaternion"]), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.abs(read["state.euler"]), (np.pi, 0, 0.2), atol=1e-6)


def test_quantities_of_one_part_stand_one_after_another():
    state = (Part(key="state.all", feature="s", dim=4, quantities=("force", "gripper_width")),)
    read = ArmLayout.of(replace(PNP, state=state)).read(moment())
    np.testing.assert_allclose(read["state.all"], (1, 2, 3, 0.02), atol=1e-6)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(key="state.joint_positions", feature="s", dim=7), "Did you mean 'joint_position'"),
        (Part(key="state.force", feature="s", dim=6), "has 6 numbers, and force are 3"),
        (Part(key="state.x", feature="s", dim=3, quantities=("forces",)), "no arm measures"),
    ],
)
def test_a_part_that_no_arm_has_is_refused_by_name(part, message):
    with pytest.raises(ConfigError, match=message):
        ArmLayout.of(replace(PNP, state=(part,)))


def test_an_action_is_one_motion_and_one_gripper():
    step = Part(key="action.hand_step", feature="action", dim=6, start=0, hold="zero")
    grip = Part(key="action.gripper_position", feature="action", dim=1, start=6, hold="zero")
    layout = ArmLayout.of(replace(PNP, action=(grip, step)))
    assert (layout.motion_at, layout.gripper_at) == (slice(1, 7), 0)
    asked = np.array([0.6, *[0.0] * 6])
    assert layout.changes_gripper(asked, is_open=True, threshold=0.9)
    assert not layout.changes_gripper(asked, is_open=False, threshold=0.9)
    with pytest.raises(ConfigError, match="an arm takes one of"):
        ArmLayout.of(replace(PNP, action=(step,)))


def test_a_hand_is_told_where_state_and_action_have_one():
    assert ArmLayout.of(PNP).hand_motion(ActionConfig()).position == slice(4, 7)
    assert ArmLayout.of(with_parts("joint_position")).hand_motion(ActionConfig()) is None


TURNED = with_parts("joint_position", "quaternion", "gripper_position")
HERE = f"{__name__}:TURNED"


def test_a_workcell_names_its_embodiment_and_the_environment_speaks_it():
    arm = FakeArm()
    config = FrankaConfig.model_validate({"embodiment": HERE, "reward": {"rule": "none"}})
    env = FrankaEnv(arm, [FakeCamera(key, arm) for key in PNP.video_keys], config, clock=arm.clock)
    observation, _ = env.reset()
    assert set(observation) == set(TURNED.observation_keys)
    assert env.observation_space.contains(observation)
    np.testing.assert_allclose(observation["state.joint_position"], READY, atol=1e-6)
    assert not env.step(np.zeros(7, np.float32))[3]
    env.close()


def at_pose(motion, dim):
    """Return an embodiment whose action names where the hand is to be."""
    state = ("position", "euler" if motion == "pose_euler" else "quaternion")
    held = Part(key="state.pose", feature="observation.pose", dim=dim, quantities=state)
    move = Part(key=f"action.{motion}", feature="action", dim=dim, start=0, hold="state.pose")
    grip = Part(key="action.gripper_position", feature="action", dim=1, start=dim, hold="zero")
    return replace(PNP, tag="posed", state=(held,), action=(move, grip), action_frame=None)


BY_EULER, BY_QUATERNION = at_pose("pose_euler", 6), at_pose("pose_quaternion", 7)


@pytest.mark.parametrize("name", [f"{__name__}:BY_EULER", f"{__name__}:BY_QUATERNION"])
def test_the_hand_goes_to_the_pose_that_an_action_names_and_no_faster_than_it_may(name):
    arm = FakeArm()
    config = FrankaConfig.model_validate({"embodiment": name, "reward": {"rule": "none"}})
    env = FrankaEnv(arm, [FakeCamera(key, arm) for key in PNP.video_keys], config, clock=arm.clock)
    observation, _ = env.reset()
    action = np.append(observation["state.pose"], 0.0).astype(np.float32)
    assert env.action_space.contains(action)
    action[:3] += (0.1, -0.05, 0.02)
    place, limits, said = observation["state.pose"][:3], config.limits, set()
    for _ in range(8):
        observation, *_, truncated, info = env.step(action)
        assert not truncated, info["abort_message"]
        moved = np.linalg.norm(observation["state.pose"][:3] - place)
        assert moved <= limits.speed_m_s * config.period_s + 1e-6
        place, said = observation["state.pose"][:3], said | set(info["limited"].split(","))
    np.testing.assert_allclose(observation["state.pose"][:3], action[:3], atol=1e-3)
    assert "speed" in said
    # The same again stays.
    env.step(action)
    np.testing.assert_allclose(arm.state().pose[:3, 3], action[:3], atol=1e-3)
    action[0] += 1.0
    *_, truncated, info = env.step(action)
    assert (truncated, info["abort"]) == (True, "invalid_action")
    assert "positions are in meters, from the base" in info["abort_message"]
    env.close()


def test_a_quaternion_that_is_no_rotation_and_zeros_that_are_no_rest_are_refused():
    with pytest.raises(RefusalError, match=r"of length 0\.00 is asked for; allowed is 1"):
        _requested_pose(np.array([0.4, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0]))
    named = _requested_pose(np.array([0.4, 0.0, 0.3, *quaternion_of(HOME[:3, :3])]))
    np.testing.assert_allclose(named[:3, :3], HOME[:3, :3], atol=1e-9)
    move, grip = BY_EULER.action
    with pytest.raises(ConfigError, match="zeros would not hold it there"):
        ArmLayout.of(replace(BY_EULER, action=(replace(move, hold="zero"), grip)))


def test_an_unknown_embodiment_or_view_is_refused_before_anything_opens():
    with pytest.raises(ConfigError, match="Did you mean 'franka_pnp'"):
        make_franka(embodiment="franka_pmp")
    with pytest.raises(ConfigError, match=r"video\.image, video\.wrist_image once"):
        make_franka(cameras=[{"key": "video.top", "serial": "1"}])


def test_the_rate_is_the_embodiments_unless_the_workcell_says_its_own():
    assert FrankaConfig().control_hz == FrankaConfig(embodiment="franka_pnp").control_hz == 10.0
    assert FrankaConfig(embodiment="oxe_droid").control_hz == 15.0
    assert FrankaConfig(embodiment="oxe_droid", control_hz=5.0).robot.timing.control_hz == 5.0


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((128, 128), (0, 40, 240, 280)),
        ((180, 320), (30, 0, 210, 320)),
        ((300, 100), (0, 120, 240, 200)),
    ],
)
def test_a_camera_keeps_the_largest_part_of_the_shape_of_its_view(size, box):
    camera = CameraConfig(key="video.image", serial="1", width=320, height=240)
    assert camera.box(size) == box
