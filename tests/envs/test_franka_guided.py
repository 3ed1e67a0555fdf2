"""An arm that a person guides by hand: it yields while they hold the deadman, within its limits."""

from contextlib import closing

import numpy as np
import pytest
from emulated import need_libraries, printer

from dzrobot.cli import main
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.franka_config import ControllerConfig, LimitsConfig
from dzrobot.envs.franka.make import connectable, load_workcell, make_franka
from dzrobot.envs.franka.safeguards.limits import Workspace
from dzrobot.envs.franka.workcells import Space
from dzrobot.envs.teleop.device import DeviceLostError, TeleopReading
from dzrobot.envs.teleop.devices import load_device
from dzrobot.errors import ConfigError
from dzrobot.recording.catalog import episode_facts
from dzrobot.rollout.arm.teleoperation import Teleoperator

HELD, LET_GO = TeleopReading(active=True), TeleopReading(active=False)
TURNING = np.array([0.2, 0.1, 0.0, 0.1, 0.0, 0.0, -0.3])


class Grip:
    """A person's deadman and gripper button; let go at the first look, as an episode wants."""

    gives, has_deadman = "guidance", True

    def __init__(self):
        self.now = HELD
        self.looks = 0

    def check(self):
        pass

    open = close = check

    def read(self):
        self.looks += 1
        if self.now is None:
            raise DeviceLostError("the cable is out")
        return LET_GO if self.looks == 1 else self.now


class Guided:
    """An arm in an episode that a person guides."""

    def __init__(self, env):
        self.env, self.grip = env, Grip()
        self.person = Teleoperator(self.grip, env)
        self.seen, self.info = env.reset(seed=0)
        self.person.begin(env)
        self.step()

    @property
    def arm(self):
        return self.env.unwrapped.arm

    def step(self):
        """Return the action that was asked, and that which is recorded."""
        asked, _ = self.person.act(self.seen)
        self.seen, _, _, _, self.info = self.env.step(asked)
        return asked, self.info["executed_action"]


@pytest.fixture(params=["franka_pnp", "oxe_droid"])
def guided(request):
    rates = {"reward": {"rule": "none"}, "embodiment": request.param}
    with closing(make_franka(workcell="fake", **rates)) as env:
        yield Guided(env)


@pytest.fixture
def droid():
    with closing(make_franka(workcell="fake", embodiment="oxe_droid")) as env:
        yield Guided(env)


def test_it_yields_only_while_the_deadman_is_held(guided):
    arm, still = guided.arm, guided.arm.joints.copy()
    arm.guidance = TURNING
    assert arm.space is Space.GUIDED
    np.testing.assert_array_equal(arm.joints, still)
    for _ in range(3):
        guided.step()
        assert (arm.compliant, guided.info["limited"]) == (True, "")
    assert np.abs(arm.joints - still).max() > 0.03
    guided.grip.now = LET_GO
    guided.step()
    let_go = arm.joints.copy()
    for _ in range(3):
        guided.step()
        assert not arm.compliant
    np.testing.assert_allclose(arm.joints, let_go, atol=1e-9)
    # A target that was kept from before would pull it back.
    assert np.abs(let_go - still).max() > 0.03


def test_what_is_recorded_leads_where_the_person_led(guided):
    guided.arm.guidance = TURNING
    asked, shown = zip(*(guided.step() for _ in range(6)), strict=True)
    assert {action[-1] for action in asked} == {action[-1] for action in shown}
    end, config = guided.arm.state().pose, guided.env.unwrapped.config
    if guided.env.unwrapped.layout.motion == "joint_position":
        np.testing.assert_allclose(shown[-1][:7], guided.arm.joints, atol=1e-6)
    # Another arm that is sent these actions ends where the person ended.
    with closing(make_franka(workcell="fake", **config.model_dump(include={"embodiment"}),
                             reward={"rule": "none"})) as again:  # fmt: skip
        again.reset(seed=0)
        rest = shown[-1] if config.embodiment == "oxe_droid" else np.eye(7, dtype=np.float32)[6]
        for action in (*shown, *[rest] * 6):
            again.step(action)
        reached = again.unwrapped.arm.state().pose
    np.testing.assert_allclose(reached[:3, 3], end[:3, 3], atol=0.003)


def test_it_is_stiff_where_the_workspace_ends_and_yields_within(droid):
    env, arm = droid.env.unwrapped, droid.arm
    box = Workspace(env.config)
    arm.guidance = np.array([0.6, 0, 0, 0, 0, 0, 0])
    said = []
    for _ in range(60):
        droid.step()
        said.append(droid.info["limited"])
        # Never farther out than a hand at this speed is after one period.
        assert box.excess(arm.state().pose) < 0.03
    assert "workspace" in said
    assert said[:5] == [""] * 5
    arm.guidance = -arm.guidance
    droid.step()
    assert [droid.step() and droid.info["limited"] for _ in range(5)] == [""] * 5


def test_a_hand_that_is_too_fast_is_braked(droid):
    droid.step()
    droid.arm.guidance = np.array([0, 0, 0, 0, 0, 0, 1.5])
    droid.step()
    before = droid.arm.joints.copy()
    droid.step()
    assert droid.info["limited"] == "speed"
    np.testing.assert_array_equal(droid.arm.joints, before)


def test_joints_near_their_limits_are_stiff():
    limits = LimitsConfig()
    nearest = 0.8
    high = (*limits.joints_high[:6], nearest)
    with closing(
        make_franka(workcell="fake", embodiment="oxe_droid", limits={"joints_high": high})
    ) as env:
        guided = Guided(env)
        guided.arm.guidance = np.array([0, 0, 0, 0, 0, 0, 0.9])
        said = [guided.step() and guided.info["limited"] for _ in range(40)]
        assert guided.info["abort"] == ""
        assert {"", "joints"} == set(said)
        stiff_at = nearest - limits.joint_room_rad
        assert stiff_at - 0.07 < guided.arm.joints[6] < nearest - 0.03


@pytest.mark.parametrize("how", ["stop", "lost", "silence"])
def test_it_does_not_yield_after_a_stop_a_lost_device_or_silence(droid, how):
    droid.arm.guidance = TURNING
    droid.step()
    assert droid.arm.compliant
    if how == "stop":
        droid.env.unwrapped.operator_stop()
    elif how == "lost":
        droid.grip.now = None
        droid.step()
        assert "cable" in str(droid.person.lost)
    else:
        droid.arm.clock.sleep_until(droid.arm.clock.now() + 0.6)
        droid.env.unwrapped._control.check_silence()
    assert not droid.arm.compliant
    before = droid.arm.joints.copy()
    droid.arm.clock.sleep_until(droid.arm.clock.now() + 0.4)
    droid.arm.state()
    np.testing.assert_array_equal(droid.arm.joints, before)


def test_it_is_stiff_while_the_fingers_move(droid):
    droid.arm.guidance = TURNING
    droid.step()
    yielded = []
    droid.arm.gripper.request = lambda opened: yielded.append(droid.arm.compliant)
    droid.grip.now = TeleopReading(active=True, presses=1)
    assert droid.step()[1][7] == 1
    assert yielded == [False]


def test_contact_ends_the_episode_stiff(droid):
    droid.arm.guidance = TURNING
    droid.step()
    droid.arm.force_n = np.array([60.0, 0, 0])
    asked, _ = droid.person.act(droid.seen)
    *_, info = droid.env.step(asked)
    assert info["abort"] == "force"
    assert not droid.arm.compliant


def test_what_cannot_yield_is_refused_before_anything_opens(tmp_path, capsys):
    record = ["record", "--teleop", f"{__name__}:Grip", "--output", str(tmp_path / "set")]
    assert main([*record, "--env", "dzrobot/lift-v0"]) == 2
    assert "no arm that a hand could guide" in capsys.readouterr().err
    assert main([*record, "--workcell", "fake", "--policy", "hold"]) == 2
    assert "spacemouse or gamepad" in capsys.readouterr().err
    assert main([*record, "--workcell", "fake", "--env-arg", "controller={kind: motion}"]) == 2
    assert "set it to impedance" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()
    with pytest.raises(ConfigError, match="guided_friction_nm"):
        make_franka(workcell="fake", controller={"guided_friction_nm": (2.0,) * 7})


class Leading(Grip):
    """Named by ``--teleop``: somebody who turns the joints of a fake arm."""

    def __init__(self, env):
        super().__init__()
        env.unwrapped.arm.guidance = TURNING


@pytest.mark.parametrize("tag", ["franka_pnp", "oxe_droid"])
def test_what_is_shown_is_recorded(tag, tmp_path):
    words = ["--workcell", "fake", "--teleop", f"{__name__}:Leading", "--env-arg"]
    words += [f"embodiment={tag}", "--attempts", "1", "--keep-failures", "--max-steps", "6"]
    assert main(["record", *words, "--output", str(tmp_path / "set")]) == 0
    recording = load_recording(tmp_path / "set", 0, load_embodiment(tag))
    (facts,) = episode_facts(tmp_path / "set").values()
    assert facts.model_extra["teleop"].endswith("Leading")
    if tag == "oxe_droid":
        np.testing.assert_allclose(recording.actions[:-1, :7], recording.states[1:, :7], atol=1e-6)
    else:
        led = np.abs(recording.actions[1:, :6]).max(1)
        assert ((led > 0.01) & (led <= 1)).all()


def test_the_settings_of_the_hand(capsys):
    device = load_device("hand", ["deadman=rightshoulder", "gripper=x"])
    assert (device.gives, device.has_deadman) == ("guidance", True)
    with pytest.raises(ConfigError, match="give each its own button"):
        load_device("hand", ["deadman=a"])


WIDE = {"limits": {"tilt": (1.0, 1.0, 1.5)}}
PUSH_N, PUSH_S = 2.0, 1.5


@pytest.mark.robot
def test_the_real_driver_yields_to_a_push(request, capsys):
    need_libraries()
    say, moved = printer(request, capsys), {}
    for name, grip, friction in (
        ("stiff", LET_GO, 0.0), ("guided", HELD, 0.0), ("with friction made up for", HELD, 1.0)
    ):  # fmt: skip
        default = ControllerConfig().guided_friction_nm
        controller = {"guided_friction_nm": [friction * one for one in default]}
        config = load_workcell("emulated:empty", {"controller": controller} | WIDE)
        cell = EmulatedWorkcell(scene="empty")
        with closing(connectable(cell, config)) as env:
            guided = Guided(env)
            guided.grip.now = grip
            guided.step()
            began = guided.arm.state().pose[:3, 3]
            cell.emulators.call("push", 0.0, PUSH_N, 0.0, 0.0, 0.0, 0.0, PUSH_S)
            shown = [guided.step()[1] for _ in range(15)]
            guided.grip.now = LET_GO
            for _ in range(4):
                guided.step()
            let_go = guided.arm.state().pose[:3, 3]
            for _ in range(5):
                guided.step()
            state = guided.arm.state()
        assert guided.info["abort_message"] == ""
        moved[name] = np.linalg.norm(let_go - began)
        assert np.linalg.norm(state.pose[:3, 3] - let_go) < 0.002
        # Along the way that the person led.
        assert np.abs(np.array(shown)[:, :6]).max() <= 1.0
        say(f"\n{PUSH_N} N for {PUSH_S} s, {name}: {1000 * moved[name]:.0f} mm")
    assert moved["stiff"] < 0.01
    assert moved["guided"] > 4 * moved["stiff"]
    assert moved["with friction made up for"] > 1.1 * moved["guided"]
