"""Loads that the arm does not know, control given up, hands that lie, and lost packets."""

import contextlib
import re
import subprocess
import sys

import numpy as np
import pytest
from emulated import need_libraries
from fake_operator import FakeOperator

from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND, forward
from dzrobot.envs.franka.cameras.camera import DriverCamera
from dzrobot.envs.franka.diagnostics import clock_lines, stream_lines
from dzrobot.envs.franka.drivers.franky_library import version_hint
from dzrobot.envs.franka.drivers.gripper import MOVED_M, GripperDriver, GripperReport
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import HOME, FakeArm, FakeCamera, FakeGripper
from dzrobot.envs.franka.franka_config import FrankaConfig, GripperConfig, LimitsConfig
from dzrobot.envs.franka.make import connectable, load_workcell
from dzrobot.envs.franka.operator.operator import ArmPhase
from dzrobot.envs.franka.safeguards.self_collision import SelfCollision
from dzrobot.envs.franka.streaming import shared_controllers, stream_together
from dzrobot.envs.franka.workcells import Frame
from dzrobot.envs.panda.poses import pose_of
from dzrobot.envs.panda.state import GripperState, Mode
from dzrobot.errors import RobotError, StoppedError

STILL = np.zeros(7, np.float32)
CLOSE = np.array((0, 0, 0, 0, 0, 0, -1), np.float32)


class Loaded(FakeArm):
    """An arm that notes when it is given up, and hangs below its target under a load."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.calls: list[str] = []
        self.sag_m = 0.0

    def start(self, *arguments):
        if not super().state().controlled:
            self.calls.append("start")
        super().start(*arguments)

    def stop(self):
        if self.state().controlled:
            self.calls.append("stop")
        super().stop()

    def state(self):
        state = super().state()
        if state.controlled:
            state.pose[2, 3] -= self.sag_m
        return state


def make(arm, operator=None, **values):
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig.model_validate({"reward": {"rule": "none"}} | values)
    return FrankaEnv(arm, cameras, config, clock=arm.clock, operator=operator)


def away(kind=Loaded, height_m=HOME[2, 3]):
    """Return an arm whose hand is 0.1 m from its start."""
    return kind(pose_of((HOME[0, 3] + 0.1, 0, height_m), (np.pi, 0, 0)))


def down(newtons):
    """Return a force (3,) that points down, in the axes of a hand that points down."""
    return np.array([0, 0, newtons])


def test_one_controller_lives_over_reset_and_episode():
    env = make(arm := away())
    env.reset()
    env.step(STILL)
    env.reset()
    assert arm.calls == ["start"]


def test_control_is_given_up_once_for_each_question_that_lets_a_person_in():
    operator = FakeOperator()
    env = make(arm := away(), operator)
    env.reset()
    assert arm.calls == ["start", "stop", "start"]
    operator.pauses = True
    env.step(STILL)
    assert arm.calls[3:] == ["stop", "start"]


def test_nobody_is_let_in_while_the_hand_hangs_low_and_the_pause_says_why():
    operator = FakeOperator()
    env = make(arm := away(), operator)
    env.reset()
    arm.sag_m, operator.pauses, arm.force_n = 0.008, True, down(4.0)
    given_up = arm.calls.count("stop")
    assert not env.step(STILL)[3]
    assert operator.questions[-1].startswith("Not paused")
    assert "8.0 mm below" in operator.questions[-1]
    assert "0.41 kg" in operator.questions[-1]
    assert "Desk" in operator.questions[-1]
    assert arm.calls.count("stop") == given_up
    assert arm.state().controlled
    # Less than the workcell allows is a pause like any other.
    arm.sag_m, operator.pauses = 0.004, True
    env.step(STILL)
    assert operator.questions[-1].startswith("Paused")


def test_a_scene_is_not_set_beside_a_hand_that_hangs_low():
    operator = FakeOperator()
    env = make(arm := away(), operator)
    arm.sag_m = 0.008
    with pytest.raises(StoppedError, match=r"8\.0 mm below its target"):
        env.reset()
    assert ArmPhase.SCENE not in operator.shown
    assert arm.state().controlled


class Sinking(Loaded):
    """Sinks where control is given up and taken again."""

    def start(self, *arguments):
        super().start(*arguments)
        if self.calls.count("start") > 1:
            # It is followed down, and sinks as much again.
            self.sag_m = 0.015


def test_an_episode_does_not_begin_off_its_start_and_says_how_far():
    env = make(away(Sinking), FakeOperator())
    with pytest.raises(StoppedError, match=r"30 mm and 0\.00 rad from its start"):
        env.reset()
    env = make(arm := away())
    arm.sag_m = 0.004
    _, info = env.reset()
    assert info["robot"]["start_off_m"] == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("force", "torque", "said"),
    [
        (down(5.9), (0, 0, 0), "a load of about 0.6 kg that the arm does not know"),
        (down(3.5), (1.6, 0, 0), "a load of about 0.36 kg"),
        ((6.0, 0, 0), (0, 0, 0), "touches something"),
    ],
)
def test_a_load_that_the_arm_does_not_know_is_named_before_a_reset_moves(force, torque, said):
    env = make(arm := away())
    arm.force_n, arm.torque_nm = np.array(force), np.array(torque)
    with pytest.raises(RobotError, match=said) as error:
        env.reset()
    assert "nothing has moved" in str(error.value)
    assert arm.moves == []
    # No person has to look, as nothing has moved.
    arm.force_n, arm.torque_nm = np.zeros(3), np.zeros(3)
    env.reset()


def test_a_hand_that_is_pressed_onto_something_may_rise_from_it_and_no_more():
    env = make(arm := away())
    arm.force_n = down(-6.0)
    env.reset()
    assert arm.moves
    env = make(arm := away(), reset={"lift_m": 0.0})
    arm.force_n = down(-6.0)
    with pytest.raises(RobotError, match=r"nothing has moved: .* touches something"):
        env.reset()
    assert arm.moves == []


def test_a_small_load_is_warned_of(caplog):
    env = make(arm := away())
    arm.force_n = down(3.5)
    env.reset()
    assert "3.5 N and 0.00 Nm at the hand at rest: a load of about 0.36 kg" in caplog.text


class Tripping(Loaded):
    """An error is set as control is given up."""

    def stop(self):
        super().stop()
        if self.calls == ["start", "stop"]:
            self.trip("controller_torque_discontinuity")
            self.mode = Mode.IDLE


def test_an_error_that_giving_control_up_sets_is_cleared_before_the_arm_moves():
    operator = FakeOperator()
    env = make(arm := away(Tripping))
    env.reset()
    env.attend(operator)
    env.reset()
    assert arm.state().errors == ()


@pytest.mark.parametrize("mode", [Mode.IDLE, Mode.MOVE])
def test_an_error_is_named_before_the_mode(mode):
    arm = FakeArm()
    arm.connect()
    arm.trip("controller_torque_discontinuity")
    arm.mode = mode
    said = arm.state().description
    assert said.startswith("controller_torque_discontinuity, ")
    assert "another program" not in said


class Blocked(Loaded):
    """Does not move, and shows why once it is under control."""

    stuck = True
    shows: tuple = (0.0, None)

    def start(self, *arguments):
        super().start(*arguments)
        force, joint = self.shows
        self.force_n = down(force)
        if joint is not None:
            self.joints[joint] = FrankaConfig().limits.joints_low[joint] + 0.015


@pytest.mark.parametrize(
    ("force", "joint", "said"),
    [
        (0.0, None, "is something in its way?"),
        (4.0, None, "a load of about 0.41 kg"),
        (-30.0, None, "touches something"),
        (0.0, 5, "joint 6 is 0.015 rad from its limit"),
    ],
)
def test_a_start_that_is_not_reached_names_its_cause(force, joint, said):
    env = make(arm := away(Blocked), reset={"timeout_s": 3.0, "joints": None})
    arm.stuck, arm.shows = True, (force, joint)
    with pytest.raises(StoppedError) as error:
        env.reset()
    assert said in str(error.value)
    assert ("in its way" in str(error.value)) is (said == "is something in its way?")


class Holding(FakeGripper):
    """A hand that notes how high it was when it was asked to open."""

    arm: FakeArm
    opened_at_m: tuple = ()
    holds = False

    def state(self):
        state = super().state()
        return GripperState(state.width_m, state.is_open, False, 0.0, "", self.holds)

    def request(self, *, opened):
        super().request(opened=opened)
        self.opened_at_m = (*self.opened_at_m, float(self.arm.state().pose[2, 3]))


@pytest.mark.parametrize(
    ("height_m", "holds", "values", "rises"),
    [
        (0.02, False, {}, True),
        (0.02, True, {}, False),
        (0.02, False, {"reset": {"open_above_m": 0.0}}, False),
        (0.2, False, {}, False),
    ],
)
def test_an_empty_hand_near_the_table_rises_before_it_opens(height_m, holds, values, rises):
    arm = away(height_m=height_m)
    arm.gripper = hand = Holding()
    hand.arm, hand.holds = arm, holds
    env = make(arm, **values)
    env.reset()
    lift_m = env.config.reset.lift_m if rises else 0.0
    assert hand.opened_at_m[0] == pytest.approx(height_m + lift_m, abs=0.011)


class FailedError(Exception):
    """A command that the hand has failed."""


class Fingers(GripperDriver):
    """A hand of a test's own: it closes to a width, and says what it likes."""

    WIDEST_M = 0.08
    MISSING_HINT = LOST_HINT = ""
    errors = (FailedError,)

    def __init__(self, width_m, closes_to_m):
        super().__init__("", GripperConfig(), self)
        self.width_m, self.closes_to_m = width_m, closes_to_m
        self.reports = []

    def put(self, data):
        self.reports.append(GripperReport.unpack(data))

    def translate(self, error):
        return RobotError(str(error))

    def close(self):
        pass

    def _connect(self):
        pass

    def _home(self):
        pass

    def _is_homed(self):
        return True

    @property
    def _open_m(self):
        return 0.08

    def _begin(self, opened):
        self.width_m = 0.08 if opened else min(self.width_m, self.closes_to_m)

    def _has_ended(self):
        return True

    def _read(self):
        # The hand says that it holds whatever is between its fingers, and nothing too.
        return self.width_m, True

    def _refusals(self):
        return (FailedError,)

    def ask(self, opened):
        self.request(len(self.reports) + 1, opened)
        for _ in range(10):
            self.tick()
        return self.reports[-1]


@pytest.mark.parametrize(
    ("width_m", "closes_to_m", "moved"),
    [
        (0.08, 0.08, False),
        # Nobody can tell it from a hand that does not move.
        (0.08, 0.079, False),
        (0.08, 0.08 - MOVED_M - 1e-4, True),
        (0.0795, 0.0795, False),
        (0.08, 0.0, True),
        (0.04, 0.04, True),
    ],
)
def test_a_close_that_moved_no_finger_of_an_open_hand_is_no_grasp(width_m, closes_to_m, moved):
    hand = Fingers(width_m, closes_to_m)
    hand.open()
    report = hand.ask(opened=False)
    assert report.is_grasped is moved
    assert ("the hand did not move" in report.fault) is not moved
    assert ("Desk" in report.fault) is not moved


def test_a_second_close_on_something_held_changes_nothing():
    hand = Fingers(0.08, 0.05)
    hand.open()
    first = hand.ask(opened=False)
    second = hand.ask(opened=False)
    assert (first.width_m, first.is_grasped, first.fault) == (0.05, True, "")
    assert (second.width_m, second.is_grasped, second.fault) == (0.05, True, "")


def test_a_hand_that_holds_something_wide_when_it_is_connected_is_closed():
    opened, _ = Fingers(0.06, 0.06).open()
    assert not opened


@pytest.mark.parametrize(("server", "has"), [(2, False), (3, True), (10, True), (11, False)])
def test_a_wheel_is_named_only_for_servers_that_have_one(server, has):
    said = version_hint(f"Incompatible library version (server version: {server}, library: 9).")
    assert ("pip install" in said) is has
    assert has or "system image" in said


class Lossy(FakeArm):
    """Some of its commands are lost."""

    rate = 1.0

    def state(self):
        state = super().state()
        object.__setattr__(state, "success_rate", self.rate)
        return state


@pytest.mark.parametrize(("rate", "values", "fault"), [
    (0.79, {}, True), (0.81, {}, False), (0.79, {"controller": {"fault_success_rate": 0.0}}, False),
])  # fmt: skip
def test_an_episode_whose_packets_are_lost_is_no_result(rate, values, fault):
    env = make(arm := Lossy(), **values)
    env.reset()
    for step in range(20):
        # A poor moment is not a poor episode.
        arm.rate = 0.5 if step == 8 else rate
        *_, truncated, info = env.step(STILL)
        if truncated:
            break
    assert info["robot"]["success_rate"] == 0.5
    assert (info["abort"] == "packet_loss") is fault
    assert bool(info["fault"]) is fault
    assert truncated is fault


BOX = {"name": "the camera", "low": (0.05, -0.05, 0.02), "high": (0.15, 0.05, 0.06)}
BAR = {"name": "the bar", "low": (0.04, 0, 0.04), "high": (0.25, 0, 0.04), "radius_m": 0.01}


@pytest.mark.parametrize("mount", [BOX, BAR])
def test_what_is_mounted_on_the_hand_keeps_away_from_links_and_obstacles(mount):
    pytest.importorskip("mujoco")
    pytest.importorskip("robosuite")
    joints = np.array(FrankaConfig().reset.joints)
    x_m = (forward(joints, FLANGE_TO_HAND) @ [*np.add(mount["low"], mount["high"]) / 2, 1])[0]
    hand = forward(joints, FLANGE_TO_HAND)[:3, 3]
    # The hand points down: what stands out along its x stands out along that of the base.
    assert x_m > hand[0] + 0.05
    near_m = hand[0] + mount["high"][0] + 0.005
    wall = {"name": "wall", "low": (near_m, -0.5, 0.0), "high": (near_m + 0.2, 0.5, 1.0)}
    limits = {"obstacles": [wall]}
    bare = SelfCollision(LimitsConfig.model_validate(limits))
    carries = SelfCollision(LimitsConfig.model_validate(limits | {"mounts": [mount]}))
    assert bare.deficits_m(joints) == (0.0, 0.0)
    own, obstacle = carries.deficits_m(joints)
    assert own == 0.0
    assert obstacle == pytest.approx(0.015 + mount.get("radius_m", 0.0), abs=1e-3)
    assert carries.nearest(joints) == f"{mount['name']} and wall"
    joints[5] = 3.9
    assert carries.deficits_m(joints)[0] >= bare.deficits_m(joints)[0]


def test_a_mount_needs_the_distance_that_it_keeps():
    with pytest.raises(ValueError, match="self_collision_m"):
        FrankaConfig.model_validate({"limits": {"mounts": [BOX], "self_collision_m": 0.0}})


class Stream(FakeCamera):
    """Sends a frame a period of its stream by a clock of its own; some never come."""

    skew, loses, silent = 1.0, 0, False

    def open(self):
        if self.silent:
            raise RobotError("it is there but sends no frame")
        self.sent = self.number = -1
        self.began_s = self._arm.clock.now()

    def latest(self):
        now_s = self._arm.clock.now()
        due = int((now_s - self.began_s) * self.skew * self.config.fps + 1e-6)
        if due > self.sent:
            self.sent = due
            if not due or not self.loses or due % self.loses:
                self.number += 1
                stamp_s = due / self.config.fps
                self.frame = Frame(np.zeros((2, 2, 3), np.uint8), self.number, 0, now_s, stamp_s)
        return self.frame


def streamed(**changes):
    arm = FakeArm()
    arm.connect()
    cameras = [Stream(key, arm) for key in ("video.image", "video.wrist_image")]
    for name, value in changes.items():
        setattr(cameras[1], name, value)
    heard = stream_together(cameras, arm, 10.0, arm.clock)
    lines = [*stream_lines(heard, FrankaConfig().robot, None), *clock_lines(heard)]
    return {line.what: (line.verdict, line.found) for line in lines}


def test_cameras_are_streamed_together_and_what_each_loses_is_counted():
    said = streamed()
    assert [verdict for verdict, _ in said.values()] == ["ok"] * 3
    assert "0 lost" in said["video.wrist_image"][1]
    said = streamed(loses=10)
    assert said["video.image"][0] == "ok"
    verdict, found = said["video.wrist_image"]
    assert verdict == "warn"
    assert int(found.split(" lost")[0].split()[-1]) in (14, 15)
    assert streamed(silent=True)["video.wrist_image"] == ("fail", "it is there but sends no frame")


def test_clocks_that_drift_apart_are_named():
    verdict, found = streamed(skew=1.02)["clocks"]
    assert verdict == "warn"
    gained = re.search(r"video\.wrist_image \+(\d+) ms", found)
    assert 190 <= int(gained[1]) <= 210
    assert "the arm +0 ms" in found.replace("-0 ms", "+0 ms")


def test_cameras_that_share_a_usb_controller_are_named():
    root = "/sys/devices/pci0000:00/0000:00:14.0/usb2/2-"
    other = "/sys/devices/pci0000:00/0000:00:1c.4/0000:05:00.0/usb4/4-1/video4linux/video2"
    ports = {"left": f"{root}1/video4linux/video0", "wrist": f"{root}2:1.0", "right": other}
    assert list(shared_controllers(ports)) == [("0000:00:14.0", ("left", "wrist"))]
    assert list(shared_controllers({"left": other, "wrist": "", "right": ""})) == []


class Silent:
    """A camera's process whose stream sends nothing before its device was restarted."""

    def __init__(self, restarts):
        self.restarts, self.calls, self.sent = restarts, [], 0
        self.latest = self

    def call(self, method, *words, timeout_s):
        self.calls.append(method)
        if method == "restart_device":
            self.sent += self.restarts
            return self.restarts
        return ""

    def count(self):
        self.sent += bool(self.sent)
        return self.sent

    def killed_on_error(self):
        return contextlib.nullcontext()

    def kill(self):
        pass


class Restarted(DriverCamera):
    """A camera on such a process."""

    def _start(self, memory):
        return self.process, 0.0


@pytest.mark.parametrize("restarts", [True, False])
def test_a_camera_that_sends_nothing_is_restarted_once_and_then_named(restarts, caplog):
    camera = Restarted(FakeCamera("video.image", FakeArm()).config, patience=0.005)
    camera.process = Silent(restarts)
    if restarts:
        camera.open()
        assert "was restarted" in caplog.text
    else:
        with pytest.raises(RobotError, match="sends no frame"):
            camera.open()
    assert camera.process.calls.count("restart_device") == 1


class Short(FakeArm):
    """Its hand stops a little below wherever it is to rise to."""

    def command(self, target, over_s=0.0, speeds=None):
        if target[2, 3] > HOME[2, 3] + 1e-6:
            target = target.copy()
            target[2, 3] -= 0.015
        super().command(target, over_s, speeds)


def test_a_hand_that_rises_a_little_less_than_it_was_to_goes_on_to_its_start():
    arm = away(Short)
    make(arm).reset()
    np.testing.assert_allclose(arm.state().pose, HOME, atol=1e-9)


@pytest.fixture(scope="module")
def emulated(cell):
    need_libraries()
    values = {
        "reward": {"rule": "none"}, "reset": {"speed_m_s": 0.5}, "limits": {"frozen_image_s": 0},
    }  # fmt: skip
    env = connectable(cell, load_workcell("emulated:empty", values))
    env.reset()
    yield env
    cell.emulators.set(payload_kg=0.0, object_width_m=None, homed=True, packet_loss=0.0)
    env.close()


def height_mm(env):
    return 1000 * float(env.arm.state().pose[2, 3] - env.config.reset.position[2])


@pytest.mark.robot
def test_a_load_that_nobody_told_of_sinks_no_farther_than_the_spring_gives(cell, emulated):
    env, operator = emulated, FakeOperator()
    env.reset()
    cell.emulators.set(payload_kg=0.3)
    env.reset()
    # 3 N on a spring of 500 N/m are 6 mm; given up once, it was 20 mm.
    assert -7.0 < height_mm(env) < -3.0
    cell.emulators.set(payload_kg=0.2)
    for _ in range(5):
        env.step(STILL)
    before = height_mm(env)
    env.attend(operator)
    operator.pauses = True
    assert not env.step(STILL)[3]
    assert operator.questions[-1].startswith("Paused")
    assert height_mm(env) == pytest.approx(before, abs=1.0)
    env.rest()
    assert height_mm(env) == pytest.approx(before, abs=1.5)
    assert env.arm.state().errors == ()
    env.attend(None, unattended=True)
    cell.emulators.set(payload_kg=1.0)
    with pytest.raises(RobotError, match=r"nothing has moved.* kg that the arm does not know"):
        env.reset()
    cell.emulators.set(payload_kg=0.0)
    env.reset()


def beside(joint, low):
    """Return how the joints of the start are with one of them 15 mrad from a limit."""

    def joints_of(config):
        limits, joints = config.limits, list(config.reset.joints)
        joints[joint] = (
            limits.joints_low[joint] + 0.015 if low else limits.joints_high[joint] - 0.015
        )
        return joints

    return joints_of


@pytest.mark.robot
@pytest.mark.parametrize(
    ("joints_of", "refused"),
    [
        (beside(5, low=True), ""),
        (beside(3, low=True), ""),
        # The hand lies beside the base.
        (
            beside(1, low=False),
            "nothing has moved: on the way to the start .*the base and the fingers",
        ),
        # The elbow is far from home: drawn there hard, it drives joint 4 into its limit.
        (lambda config: (-2.38, -0.82, 2.54, -2.92, 1.23, 3.62, -0.56), ""),
    ],
    ids=["joint 6", "joint 4", "joint 2", "elbow"],
)
def test_a_start_beside_a_limit_arrives_or_is_refused_by_name(cell, emulated, joints_of, refused):
    env = emulated
    env.acknowledge()
    env.rest()
    cell.emulators.call("guide", *joints_of(env.config))
    cell.clock.sleep_until(cell.clock.now() + 0.05)
    if refused:
        with pytest.raises(RobotError, match=refused):
            env.reset()
        cell.emulators.call("guide", *env.config.reset.joints)
        cell.clock.sleep_until(cell.clock.now() + 0.05)
    env.reset()
    assert env.arm.state().errors == ()


@pytest.mark.robot
def test_an_emulated_hand_that_lies_is_told_apart(cell, emulated):
    env = emulated
    env.reset()
    cell.emulators.set(object_width_m=0.0795)
    assert "the hand did not move" in close(env)
    cell.emulators.set(object_width_m=None)
    env.acknowledge()
    env.reset()
    cell.emulators.set(homed=False)
    assert "lost its homing" in close(env)
    cell.emulators.set(homed=True)
    env.acknowledge()
    env.reset()


_OTHER_PROGRAM = """
import sys
from dzrobot.envs.franka.drivers.franky_library import library
hand = library().Gripper(sys.argv[1])
print("connected", flush=True)
hand.move_async(0.02, 0.05)
sys.stdin.read()
"""


@pytest.mark.robot
def test_a_hand_that_another_program_takes_is_no_blocked_finger(cell, emulated):
    env = emulated
    env.acknowledge()
    env.reset()
    words = [sys.executable, "-c", _OTHER_PROGRAM, str(cell.address)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "connected\n"
        said = close(env, steps=100)
        other.stdin.close()
    assert "Has another program taken the hand? End it" in said
    assert ".." not in said
    env.acknowledge()
    env.reset()
    assert not env.arm.state().errors


def close(env, steps=8):
    """Ask for a closed hand; return how the episode was cut short."""
    for _ in range(steps):
        *_, truncated, info = env.step(CLOSE)
        if truncated:
            break
    assert info["abort"] == "gripper"
    assert not info["is_grasped"]
    return info["abort_message"]
