"""An arm that is not ready: other modes, a hand that was not homed, a motion that is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fake_operator import FakeOperator

from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import HOME, FakeArm, FakeCamera, FakeClock, FakeGripper
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import connectable, load_workcell
from dzrobot.envs.franka.operator.operator import ArmPhase
from dzrobot.envs.franka.workcells import ControllerEndedError
from dzrobot.envs.panda.state import REMEDIES, Mode
from dzrobot.errors import RobotError, StoppedError

STILL = np.zeros(7, np.float32)


def make(arm, operator=None, **values):
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig.model_validate({"reward": {"rule": "none"}} | values)
    return FrankaEnv(arm, cameras, config, clock=arm.clock, operator=operator)


def displaced(kind=FakeArm, **arguments):
    """Return an arm whose hand and joints have some way to go to the start."""
    pose = HOME.copy()
    pose[0, 3] += 0.2
    arm = kind(pose, **arguments)
    arm.joints = arm.joints + 0.3
    return arm


@pytest.mark.parametrize("mode", [Mode.GUIDING, Mode.OTHER])
def test_an_arm_in_another_mode_is_left_alone_and_says_which_lamp_and_menu(mode):
    arm = displaced()
    arm.mode = mode
    env = make(arm)
    began = arm.clock.now()
    with pytest.raises(RobotError, match="lamp") as error:
        env.reset()
    assert REMEDIES[mode] in str(error.value)
    assert arm.moves == []
    assert arm.clock.now() - began < 1.0
    # Nothing has moved, so nobody has to look.
    arm.mode = Mode.IDLE
    env.reset()


@pytest.mark.parametrize("mode", [Mode.GUIDING, Mode.OTHER, Mode.USER_STOPPED, Mode.IDLE])
def test_a_controller_that_ended_says_what_the_arm_shows(mode):
    env = make(arm := FakeArm())
    env.reset()
    arm.stop()
    arm.mode = mode
    *_, truncated, info = env.step(STILL)
    assert truncated
    assert info["abort"] == ("user_stop" if mode is Mode.USER_STOPPED else "controller")
    if mode is not Mode.USER_STOPPED:
        assert REMEDIES[mode] in info["abort_message"]


class Refusing(FakeArm):
    """Does not move its joints: it says so, or its motion ends at once."""

    says = True

    def home(self, joints, dynamics):
        if self.says:
            raise ControllerEndedError("the arm refused to move its joints: no")
        self.start()
        self.stop()


@pytest.mark.parametrize("says", [True, False])
def test_a_way_home_that_is_refused_ends_the_reset_at_once(says):
    env = make(arm := displaced(Refusing))
    arm.says = says
    began = arm.clock.now()
    with pytest.raises(StoppedError, match="refused" if says else "stopped on its way"):
        env.reset()
    lifting_s = env.config.reset.lift_m / env.config.reset.speed_m_s
    assert arm.clock.now() - began < lifting_s + 0.5
    assert not arm.state().controlled


class Homeless(FakeGripper):
    """A hand that was never homed."""

    def __init__(self):
        super().__init__()
        self.homed, self.homings = False, 0

    def home(self):
        super().home()
        self.homings += 1


def homeless(operator=None, **values):
    arm = displaced()
    arm.gripper = Homeless()
    return make(arm, operator, **values), arm


def test_a_hand_is_homed_only_where_somebody_has_agreed():
    env, arm = homeless()
    with pytest.raises(RobotError, match="homing: true"):
        env.reset()
    assert (arm.gripper.homings, arm.moves) == (0, [])
    env, arm = homeless(gripper={"homing": True})
    env.reset()
    env.reset()
    assert arm.gripper.homings == 1


def test_an_operator_is_asked_before_the_fingers_move():
    class Asked(FakeOperator):
        def confirm(self, phase, question):
            super().confirm(phase, question)
            questions.append((phase, "fingers" in question, env.arm.gripper.homings))

    questions = []
    env, arm = homeless(Asked())
    env.reset()
    assert questions[:2] == [(ArmPhase.STAND_CLEAR, False, 0), (ArmPhase.STAND_CLEAR, True, 0)]
    assert arm.gripper.homings == 1
    env.close()
    operator = FakeOperator()
    operator.refuses = ArmPhase.STAND_CLEAR
    env, arm = homeless(operator)
    with pytest.raises(StoppedError):
        env.reset()
    assert (arm.gripper.homings, arm.gripper.requests) == (0, [])
    env.close()


class Slow(FakeGripper):
    """Fingers that take two seconds, or never arrive."""

    def __init__(self, clock, takes_s):
        super().__init__()
        self.clock, self.takes_s, self.asked_s = clock, takes_s, math.inf

    def request(self, *, opened):
        super().request(opened=opened)
        self.asked_s = self.clock.now()

    def state(self):
        self.busy = 0 <= self.clock.now() - self.asked_s < self.takes_s
        return super().state()


class Noting(FakeArm):
    """Notes when it was sent its first target."""

    first_s = None

    def command(self, target, over_s=0.0):
        super().command(target, over_s)
        self.first_s = self.first_s or self.clock.now()


def test_the_hand_is_open_before_the_arm_moves():
    arm = displaced(Noting, clock=FakeClock())
    arm.gripper = Slow(arm.clock, 2.0)
    env = make(arm)
    env.reset()
    assert arm.first_s - arm.gripper.asked_s >= 2.0


class Lossy(FakeArm):
    """Its connection loses commands."""

    rate = 1.0

    def state(self):
        return replace(super().state(), success_rate=self.rate)


def test_a_poor_connection_is_warned_of_once_an_episode_and_kept(caplog):
    env = make(arm := Lossy())
    env.reset()
    # The arm counts the last hundred commands: at the beginning they are not ours.
    arm.rate = 0.0
    env.step(STILL)
    arm.rate = 1.0
    for _ in range(10):
        env.step(STILL)
    assert "control commands" not in caplog.text
    arm.rate = 0.9
    for _ in range(3):
        *_, info = env.step(STILL)
    assert caplog.text.count("only 90 % of the control commands") == 1
    assert info["robot"]["success_rate"] == 0.9
    env.reset()
    arm.rate = 0.96
    for _ in range(10):
        *_, info = env.step(STILL)
    assert caplog.text.count("control commands") == 1
    assert info["robot"]["success_rate"] == 0.96


@pytest.fixture(scope="module")
def emulated():
    pytest.importorskip("franky", reason="needs franky-control (x86_64 Linux)")
    pytest.importorskip("pyrealsense2", reason="needs pyrealsense2 (x86_64 Linux)")
    cell = EmulatedWorkcell(rate=math.inf)
    values = {"reward": {"rule": "none"}, "reset": {"speed_m_s": 0.4}}
    env = connectable(cell, load_workcell("emulated:empty", values))
    yield env, cell
    env.close()


@pytest.mark.robot
def test_the_emulated_arm_refuses_its_way_home_at_once(emulated):
    env, cell = emulated
    env.reset()
    env.rest()
    cell.emulators.set(reject_moves=1)
    began = env.arm.state().robot_time_s
    with pytest.raises(ControllerEndedError, match="refused to move its joints"):
        env.arm.home(env.arm.state().joints + 0.2, 0.1)
    assert env.arm.state().robot_time_s - began < 2.0
    env.reset()


@pytest.mark.robot
def test_the_emulated_hand_is_homed_with_consent_alone(emulated):
    env, cell = emulated
    env.reset()
    env.rest()
    cell.emulators.set(homed=False)
    env.arm.gripper.close()
    with pytest.raises(RobotError, match="homing: true"):
        env.reset()
    operator = FakeOperator()
    env.attend(operator)
    env.reset()
    assert operator.shown.count(ArmPhase.STAND_CLEAR) == 2
    assert env.arm.gripper.state().width_m > 0.07
    env.attend(None)
