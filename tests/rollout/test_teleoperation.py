"""What a device says becomes actions, and nothing moves unasked."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.libero.simulated import ArmEnv
from dzrobot.envs.teleop.device import DeviceLostError, TeleopReading
from dzrobot.envs.teleop.devices import DEVICES, Guarded
from dzrobot.errors import ConfigError
from dzrobot.rollout.arm.teleoperation import (
    FAR_RAD,
    FASTEST_M_S,
    LEAD_RAD,
    NEAR_RAD,
    Teleoperator,
)
from dzrobot.rollout.environment import made_environment

REST = TeleopReading(active=False, motion=(0.0,) * 6)
PUSH = TeleopReading(active=True, motion=(0.5, 0.0, 0.0, 0.0, 0.0, 0.0))


class Scripted:
    """A device that says one thing after another, and is lost after that.

    Args:
        readings: What it says.
    """

    has_deadman = True

    def __init__(self, *readings, gives="motion"):
        self.gives = gives
        self.readings = list(readings)
        self.is_open = False

    def check(self):
        pass

    def open(self):
        self.is_open = True

    def read(self):
        if not self.readings:
            raise DeviceLostError("the cable is out")
        return self.readings.pop(0)

    def close(self):
        self.is_open = False


@pytest.fixture
def hand():
    env = made_environment("dzrobot/Franka-PnP-fake-v0", {"action": {"frame": "base"}})
    with closing(env):
        yield env


@pytest.fixture
def arm():
    env = made_environment("dzrobot/Franka-DROID-v0", {"workcell": "fake"})
    with closing(env):
        yield env


def driven(env, *readings, gives="motion", steps=None):
    """Return the actions that come of readings, each carried out, after a look without a hand."""
    person = Teleoperator(Scripted(replace(readings[0], active=False), *readings, gives=gives), env)
    seen, _ = env.reset(seed=0)
    person.begin(env)
    person.act(seen)
    actions = []
    for _ in range(steps or len(readings)):
        actions.append(person.act(seen)[0])
        seen = env.step(actions[-1])[0]
    return np.array(actions), person


def test_nothing_moves_unless_the_deadman_is_held(hand):
    pushed = replace(PUSH, active=False, closed=True, presses=1)
    actions, _ = driven(hand, pushed, PUSH, pushed, PUSH)
    np.testing.assert_allclose(actions[:, 0], (0, 0.5, 0, 0.5))
    # Not the gripper either: a button that was pressed meanwhile asked for nothing.
    np.testing.assert_allclose(actions[:, 6], 1)


def test_a_deadman_that_is_still_held_is_let_go_first(hand, caplog):
    person = Teleoperator(Scripted(PUSH, PUSH, REST, PUSH, PUSH, PUSH, REST, PUSH), hand)
    seen, _ = hand.reset(seed=0)
    person.begin(hand)
    assert [person.act(seen)[0][0] for _ in range(4)] == [0, 0, 0, 0.5]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "let it go once" in said
    # Held on into the next episode.
    person.begin(hand)
    assert [person.act(seen)[0][0] for _ in range(4)] == [0, 0, 0, 0.5]


def test_what_has_no_deadman_steers_a_simulator_at_once():
    device = Scripted(PUSH)
    device.has_deadman = False
    env = made_environment("dzrobot/point-v0", {})
    with closing(env):
        env.unwrapped.hand = ArmEnv.hand
        seen, _ = env.reset(seed=0)
        assert Teleoperator(device, env).wanted(seen, None)[0] == 0.5


def test_a_button_toggles_the_gripper_and_letting_go_keeps_it(hand):
    actions, _ = driven(
        hand, PUSH, replace(PUSH, presses=1), replace(PUSH, presses=1), replace(REST, presses=2),
        replace(PUSH, presses=2), replace(PUSH, presses=5),
    )  # fmt: skip
    np.testing.assert_allclose(actions[:, 6], (1, -1, -1, -1, -1, 1))


def test_a_trigger_decides_once_it_has_stood_where_the_gripper_is(hand, caplog):
    pulled, open_ = replace(PUSH, closed=True), replace(PUSH, closed=False)
    # Pulled as it takes over, it closes nothing; opened and pulled again, it does.
    actions, _ = driven(hand, pulled, pulled, open_, pulled, open_, pulled)
    np.testing.assert_allclose(actions[:, 6], (1, 1, 1, -1, 1, -1))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the trigger is closed and the gripper open, which stays so" in said
    # Let go with the gripper closed, and taken again with an open trigger: nothing is dropped.
    rest = replace(open_, active=False)
    actions, _ = driven(hand, open_, pulled, rest, open_, open_, pulled, open_)
    np.testing.assert_allclose(actions[:, 6], (1, -1, -1, -1, -1, -1, 1))


def test_a_trigger_drops_nothing_that_a_policy_holds(hand):
    person = Teleoperator(Scripted(REST, *[replace(PUSH, closed=False)] * 2), hand)
    seen, _ = hand.reset(seed=0)
    holding = np.array([0.1, 0, 0, 0, 0, 0, -1], np.float32)
    assert person.wanted(seen, holding) is None
    assert [person.wanted(seen, holding)[6] for _ in range(2)] == [-1, -1]


def test_a_person_who_takes_over_leaves_the_gripper_as_it_was(hand):
    person = Teleoperator(Scripted(REST, PUSH, PUSH), hand)
    seen, _ = hand.reset(seed=0)
    closing_action = np.array([0.1, 0, 0, 0, 0, 0, -1], np.float32)
    assert person.wanted(seen, closing_action) is None
    assert person.wanted(seen, closing_action)[6] == -1
    assert Teleoperator(Scripted(REST), hand).wanted(seen, closing_action) is None


@pytest.mark.parametrize("frame", ["base", "ee", "ee_adjoint"])
def test_a_push_forward_moves_the_hand_forward_whatever_the_axes_of_actions(frame):
    env = made_environment("dzrobot/Franka-PnP-fake-v0", {"action": {"frame": frame}})
    reading = replace(PUSH, motion=(0.3, 0.0, -0.1, 0.0, 0.0, 0.2))
    with closing(env):
        env.reset(seed=0)
        before = env.unwrapped.last_target.copy()
        driven(env, *[reading] * 5)
        after = env.unwrapped.last_target
        config = env.unwrapped.config.action
    moved = (after - before)[:3, 3]
    np.testing.assert_allclose(
        moved, 5 * config.translation_m * np.array([0.3, 0, -0.1]), atol=1e-6
    )
    turned = after[:3, :3] @ before[:3, :3].T
    assert np.arctan2(turned[1, 0], turned[0, 0]) == pytest.approx(5 * 0.2 * config.rotation_rad)


def offset(env, away):
    """Return a leader's reading whose fourth joint is ``away`` (rad) from the arm's start."""
    values = list(env.unwrapped.config.reset.joints)
    values[3] += away
    return TeleopReading(active=True, joints=tuple(values), closed=False)


def test_an_arm_follows_no_leader_that_stands_elsewhere(arm, caplog):
    far, near = offset(arm, 1.5 * NEAR_RAD), offset(arm, 0.5 * NEAR_RAD)
    actions, _ = driven(arm, far, far, near, far, gives="joints")
    start = np.array(arm.unwrapped.config.reset.joints)
    np.testing.assert_allclose(actions[:2, :7], [start, start], atol=0.01)
    np.testing.assert_allclose(actions[2, :7], near.joints, atol=1e-6)
    # Once it follows, the limits of the arm decide how fast.
    np.testing.assert_allclose(actions[3, :7], far.joints, atol=1e-6)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "joint 4 of the leader is 0.30 rad from the arm's" in said


def test_an_arm_that_is_let_go_stays_where_it_is_and_not_where_it_was_to_go(arm):
    near, far = offset(arm, 0.0), offset(arm, 0.7)
    actions, _ = driven(arm, near, far, replace(far, active=False), steps=3, gives="joints")
    assert actions[1, 3] == pytest.approx(far.joints[3])
    assert abs(actions[2, 3] - near.joints[3]) < 0.3


def test_a_push_moves_the_hand_of_an_arm_that_takes_joint_angles(arm):
    person = Teleoperator(Scripted(REST, *[PUSH] * 15), arm)
    seen, _ = arm.reset(seed=0)
    person.begin(arm)
    person.act(seen)
    before = arm.unwrapped.arm.state().pose
    for _ in range(15):
        action, _ = person.act(seen)
        seen = arm.step(action)[0]
    moved = arm.unwrapped.arm.state().pose[:3, 3] - before[:3, 3]
    # A second at half of the speed; joints lag a little behind, and brake.
    assert 0.6 < moved[0] / (0.5 * FASTEST_M_S) < 1.1
    np.testing.assert_allclose(moved[1:], 0, atol=0.01)


def test_joints_that_are_held_back_are_not_asked_for_more_and_more(arm):
    person = Teleoperator(Scripted(REST, *[PUSH] * 60), arm)
    seen, _ = arm.reset(seed=0)
    person.begin(arm)
    person.act(seen)
    actions = [person.act(seen)[0] for _ in range(60)]
    away = np.abs(actions[-1][:7] - seen["state.joint_position"]).max()
    assert away == pytest.approx(LEAD_RAD)


def test_a_leader_that_runs_away_is_not_followed(arm, caplog):
    near, gone = offset(arm, 0.0), offset(arm, 1.1 * FAR_RAD)
    actions, _ = driven(arm, near, gone, near, gives="joints")
    np.testing.assert_allclose(actions[:, 3], near.joints[3], atol=0.01)
    assert "joint 4 of the leader is 0.88 rad" in caplog.text


def test_a_leader_may_be_turned_farther_than_the_arm(arm):
    actions, _ = driven(arm, offset(arm, 0.0), offset(arm, -0.7), gives="joints")
    assert actions[1, 3] == arm.action_space.low[3]


def test_what_does_not_fit_is_refused_before_anything_is_opened(hand, arm):
    unknown = made_environment("dzrobot/Franka-DROID-v0", {"workcell": "fake"})
    unknown.unwrapped.layout = None
    with pytest.raises(ConfigError, match="nothing says how actions of 'oxe_droid' move a hand"):
        Teleoperator(Scripted(), unknown)
    with pytest.raises(ConfigError, match="a leader arm shows joint angles"):
        Teleoperator(Scripted(gives="joints"), hand)
    device = Scripted()
    device.has_deadman = False
    with pytest.raises(ConfigError, match="while a button is held"):
        Teleoperator(device, hand)
    assert not device.is_open


def lost_soon():
    """A device that is lost after four steps; named by ``--teleop``."""
    return Scripted(*[PUSH] * 4)


def ended_soon():
    return Scripted(*[PUSH] * 3, *[replace(PUSH, ends=True)] * 9)


def record(tmp_path, *words):
    folder = str(tmp_path / "set")
    return main(["record", "--workcell", "fake", "--output", folder, "--max-steps", "9", *words])


def test_a_lost_device_holds_the_arm_and_keeps_what_was_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    assert record(tmp_path, "--policy", "hold", "--attempts", "1", "--keep-failures") == 0
    words = ["--teleop", f"{__name__}:lost_soon", "--episodes", "3", "--keep-failures"]
    assert record(tmp_path, *words) == 2
    said = capsys.readouterr()
    assert "the cable is out" in said.err
    facts = (tmp_path / "set/meta/recording_facts.jsonl").read_text().splitlines()
    assert [json.loads(line)["ended"] for line in facts] == ["time limit", "device lost"]
    robot = load_embodiment("franka_pnp")
    actions = load_recording(tmp_path / "set", 1, robot).actions
    assert len(actions) == 5
    np.testing.assert_array_equal(actions[4], (0, 0, 0, 0, 0, 0, 1))


def test_a_button_of_the_device_ends_the_episode(tmp_path, capsys):
    assert record(tmp_path, "--teleop", f"{__name__}:ended_soon", "--attempts", "1") == 0
    assert "4 frames, ended by key, not kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--teleop", "joystick"], "unknown device 'joystick'"),
        (["--teleop", "leader"], "port: is needed"),
        (["--teleop", "gamepad", "--teleop-arg", "gripper=leftshoulder"], "its own button"),
        (["--teleop", "spacemouse", "--teleop-arg", "axes=[x,y,w,x,x,x]"], "axes names 'w'"),
        (["--teleop", "spacemouse", "--teleop-arg", "deadman=null"], "while a button is held"),
        (["--teleop", f"{__name__}:lost_soon", "--teleop-arg", "gain=1"], "its own"),
        (["--policy", "hold", "--teleop-arg", "gain=1"], "name the device by --teleop"),
    ],
)  # fmt: skip
def test_a_device_that_cannot_steer_is_refused_before_anything_moves(words, said, tmp_path, capsys):
    assert record(tmp_path, *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("device", ["spacemouse", "gamepad"])
def test_a_missing_library_names_its_extra(device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dzrobot.importing.find_spec", lambda name: None)
    assert record(tmp_path, "--teleop", device) == 2
    assert "pip install -e '.[teleop]'" in capsys.readouterr().err


def test_a_leader_arm_has_a_deadman_of_one_kind():
    given = {
        "port": "/dev/ttyUSB0", "signs": (1,) * 7, "offsets_rad": (0.0,) * 7,
        "gripper_open_rad": 0.0, "gripper_closed_rad": 1.0,
    }  # fmt: skip
    kind = DEVICES["leader"]

    def has_deadman(**more):
        return kind.make(kind.settings.model_validate(given | more)).has_deadman

    assert not has_deadman()
    assert has_deadman(deadman_id=9, deadman_held_rad=1.0)
    assert has_deadman(deadman_button="a")
    with pytest.raises(ValueError, match="choose one of them"):
        has_deadman(deadman_button="a", deadman_id=9, deadman_held_rad=1.0)


def test_a_button_in_the_other_hand_guards_a_leader():
    leader = Scripted(*[TeleopReading(active=True, joints=(0.1,) * 7)] * 2, gives="joints")
    guard = Scripted(replace(REST, ends=True), PUSH)
    both = Guarded(leader, guard)
    both.open()
    first, second = both.read(), both.read()
    assert (first.active, first.ends, second.active, second.ends) == (False, True, True, False)
    assert second.joints == (0.1,) * 7
    both.close()
    assert (leader.is_open, guard.is_open) == (False, False)
