"""A Robotiq 2F-85 through its driver, over a pseudo-terminal that speaks its Modbus."""

import time

import numpy as np
import pytest

pytest.importorskip("pyrobotiqgripper", reason="needs the extra `robotiq`")

from robotiq_peer import CLOSED_AT, OPEN_AT, RobotiqPeer

from dzrobot.envs.franka.diagnostics import _gripper
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.drivers.gripper import SILENT_S
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import FakeArm, FakeCamera
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.workcells import RealWorkcell
from dzrobot.errors import ConfigError, RobotError

PATIENCE_S = 20.0
"""How long (wall) a busy machine may take; nothing is measured by it."""


def configured(port, **values):
    gripper = {"kind": "robotiq", "device": port} | values
    return FrankaConfig.model_validate(
        {"embodiment": "oxe_droid", "gripper": gripper, "reward": {"rule": "none"}}
    )


def hand(port, **values):
    return FrankyArm(RealWorkcell("172.16.0.2"), configured(port, **values)).gripper


def until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def peer():
    with RobotiqPeer() as one:
        yield one


@pytest.fixture
def gripper(peer):
    one = hand(peer.port)
    one.connect()
    yield one
    one.close()


def test_it_closes_and_opens_and_says_how_wide_it_is(peer, gripper):
    assert gripper.state().width_m == pytest.approx(0.085)
    for opened, width in ((False, 0.0), (True, 0.085)):
        gripper.request(opened=opened)
        assert gripper.state().is_busy
        until(lambda: not gripper.state().is_busy)
        state = gripper.state()
        assert (state.width_m, state.is_open) == (pytest.approx(width), opened)
        assert not state.is_grasped
        assert state.fault == ""
    assert [place for place, *_ in peer.commands] == [255, 0]


def test_what_its_fingers_meet_is_held_and_its_width_measured(peer, gripper):
    peer.object_at = (OPEN_AT + CLOSED_AT) // 2
    gripper.request(opened=False)
    until(lambda: not gripper.state().is_busy)
    state = gripper.state()
    assert state.is_grasped
    assert state.width_m == pytest.approx(0.0425, abs=4e-4)


def test_speed_and_force_are_those_of_the_workcell_within_its_reach(peer):
    gripper = hand(peer.port, speed_m_s=0.085, force_n=300.0, open_width_m=0.0425)
    gripper.connect()
    gripper.request(opened=False)
    until(lambda: not gripper.state().is_busy)
    gripper.request(opened=True)
    until(lambda: not gripper.state().is_busy)
    gripper.close()
    half = pytest.approx(128, abs=1)
    assert peer.commands == [(255, half, 255), (half, half, 255)]


def test_one_that_was_not_activated_moves_when_it_is_homed_and_not_before():
    with RobotiqPeer(activated=False) as peer:
        gripper = hand(peer.port)
        gripper.connect()
        state = gripper.state()
        assert not state.is_homed
        assert "activated" in _gripper(state, configured(peer.port)).found
        assert peer.activation == 0
        gripper.home()
        assert (peer.activation, gripper.state().is_homed) == (3, True)
        gripper.request(opened=False)
        until(lambda: not gripper.state().is_busy)
        gripper.close()
    assert [place for place, *_ in peer.commands] == [255]


def test_a_major_fault_is_a_fault_and_the_next_activation_clears_it(peer, gripper):
    peer.fault = 0x0E  # overcurrent
    until(lambda: gripper.state().fault != "")
    assert "current" in gripper.state().fault.lower()
    gripper.connect()
    assert not gripper.state().is_homed
    gripper.home()
    assert (peer.fault, gripper.state().fault) == (0, "")
    gripper.request(opened=False)
    until(lambda: not gripper.state().is_busy)
    assert gripper.state().width_m == pytest.approx(0.0)


def test_one_that_falls_silent_is_a_fault_and_comes_back(peer, gripper):
    peer.silent = True
    began = time.monotonic()
    until(lambda: gripper.state().fault != "")
    assert time.monotonic() - began < SILENT_S + 5.0
    peer.silent = False
    gripper.connect()
    assert gripper.state().fault == ""


def test_a_port_without_a_gripper_is_refused_with_what_to_look_at(tmp_path):
    with pytest.raises(RobotError, match=r"nothing-there.*24 V.*dialout.*kind: none"):
        hand(str(tmp_path / "nothing-there")).connect()


@pytest.mark.parametrize(
    ("values", "says"),
    [({"kind": "robotiq"}, "device"), ({"kind": "franka", "device": "/dev/ttyUSB0"}, "device"),
     ({"kind": "robotik"}, "robotiq")],
)  # fmt: skip
def test_a_kind_and_its_device_go_together(values, says):
    with pytest.raises((ConfigError, ValueError), match=says):
        FrankaConfig.model_validate({"gripper": values})


def test_an_episode_closes_it_without_holding_up_the_arm(peer, gripper):
    """Its fingers need twenty looks, and the arm's clock here is none of theirs."""
    peer.step = 12
    arm = FakeArm()
    arm.gripper = gripper
    config = configured(peer.port)
    env = FrankaEnv(
        arm, [FakeCamera(key, arm) for key in config.robot.video_keys], config, clock=arm.clock
    )
    observation, _ = env.reset()
    joints = observation["state.joint_position"]
    assert observation["state.gripper_position"] == pytest.approx(0.0)
    began = arm.clock.now()
    *_, truncated, info = env.step(np.array([*joints, 1.0], np.float32))
    assert not truncated, info["abort_message"]
    assert arm.clock.now() - began == pytest.approx(1 / 15)
    until(lambda: not gripper.state().is_busy)
    observation, *_ = env.step(np.array([*joints, 1.0], np.float32))
    assert observation["state.gripper_position"] == pytest.approx(1.0)
