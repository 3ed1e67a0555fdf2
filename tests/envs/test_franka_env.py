"""The Franka environment on fakes: no library, no hardware, no waiting."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from fake_operator import FakeOperator
from gymnasium.utils.env_checker import check_env

import dzrobot  # noqa: F401
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.drivers.dry_run import DryRunArm
from dzrobot.envs.franka.drivers.franky_library import version_hint
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import HOME, FakeArm, FakeCamera, FakeClock, FakeGripper
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import make_franka
from dzrobot.envs.franka.operator.console import OperatorConsole
from dzrobot.envs.franka.operator.keyboard import Keyboard
from dzrobot.envs.franka.operator.operator import OperatorVerdict
from dzrobot.envs.franka.safeguards.lock_and_stop import ArmLock
from dzrobot.envs.franka.sensing import fit
from dzrobot.envs.franka.workcells import RateLimiter
from dzrobot.envs.panda.poses import pose_of
from dzrobot.errors import ConfigError, RobotError, StoppedError
from dzrobot.rollout.arm.teleoperation import KeyboardActor
from dzrobot.rollout.evaluation.planning import EvaluationRequest, prepare
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec

STILL = np.zeros(7, np.float32)


def act(*numbers):
    action = np.zeros(7, np.float32)
    action[: len(numbers)] = numbers
    return action


def make(operator=None, **values):
    values = {"reward": {"rule": "none"}} | values
    arm = FakeArm()
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig.model_validate(values)
    return FrankaEnv(arm, cameras, config, clock=arm.clock, operator=operator), arm, cameras


def test_check_env_passes():
    check_env(gym.make("Franka-PnP-v0", workcell="fake", render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize(
    "name", ["Franka-PnP-v0", "dzrobot/Franka-PnP-v0", "dzrobot:Franka-PnP-v0"]
)
def test_every_name_constructs_with_nothing_else(name):
    env = gym.make(name)
    assert env.spec.nondeterministic
    with pytest.raises(RobotError, match=r"address=.*workcell='cell.yaml'.*workcell='emulated'"):
        env.reset()
    env.close()
    env.close()


def test_constructing_needs_no_robot_library_and_no_torch():
    script = (
        "import sys; sys.modules.update(franky=None, pyrealsense2=None, torch=None);"
        "import gymnasium as gym, dzrobot; env = gym.make('Franka-PnP-v0', workcell='fake');"
        "env.reset(); env.step(env.action_space.sample()); env.close(); gym.make('Franka-PnP-v0')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_the_library_the_error_names_the_extra():
    script = (
        "import sys; sys.modules.update(franky=None);"
        "import gymnasium as gym, dzrobot; from dzrobot.errors import MissingDependencyError\n"
        "box = {'workspace_low': (0.2, -0.3, 0.02), 'workspace_high': (0.7, 0.3, 0.6)}\n"
        "start, rule = {'position': (0.4, 0, 0.4)}, {'rule': 'none'}\n"
        "taught = dict(limits=box, reset=start, reward=rule, gripper={'preset': 'gentle'})\n"
        "taught['task'] = 'wave'\n"
        "env = gym.make('Franka-PnP-v0', address='127.0.0.1', unattended=True, **taught)\n"
        "try: env.reset()\n"
        "except MissingDependencyError as error: assert '.[franka]' in str(error)\n"
        "else: raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_nothing_moves_before_the_first_reset():
    env, arm, _ = make()
    env.close()
    assert arm.moves == []
    with pytest.raises(gym.error.ResetNeeded):
        env.step(STILL)


def test_observation_has_the_keys_and_sizes_of_the_embodiment():
    env, _, _ = make()
    observation, _ = env.reset()
    robot = load_embodiment("franka_pnp")
    assert set(observation) == set(robot.observation_keys)
    assert observation["video.image"].shape == (128, 128, 3)
    assert observation["state.state"].shape == (robot.state_dim,)
    assert env.action_space.shape == (robot.action_dim,)


def test_state_is_gripper_force_pose_torque_velocity():
    env, arm, _ = make(action={"frame": "ee"})
    env.reset()
    arm.force_n, arm.torque_nm = np.array([1.0, 2, 3]), np.array([3.0, 4, 5])
    observation, *_ = env.step(act(1, 0, 0, 0, 0, 0.5))
    state = observation["state.state"]
    np.testing.assert_allclose(state[0], 0.08, atol=1e-6)
    np.testing.assert_allclose(state[1:4], (1, 2, 3))
    # The hand points down: its x axis is the base's, its y and z axes are turned.
    np.testing.assert_allclose(state[4:7], (0.03, 0, 0), atol=1e-6)
    np.testing.assert_allclose(state[7:10], (0, 0, 0.05), atol=1e-6)
    np.testing.assert_allclose(state[10:13], (3, 4, 5))
    assert state[13] == pytest.approx(0.3, rel=1e-2)


@pytest.mark.parametrize(
    ("frame", "moved"), [("ee", (0.01, -0.02, -0.03)), ("base", (0.01, 0.02, 0.03))]
)
def test_translation_follows_the_axes_asked_for(frame, moved):
    env, arm, _ = make(action={"frame": frame})
    env.reset()
    env.step(act(1 / 3, 2 / 3, 1))
    np.testing.assert_allclose(arm.moves[-1][:3, 3] - HOME[:3, 3], moved, atol=1e-6)


def test_the_adjoint_adds_position_times_translation_to_the_rotation():
    env, arm, _ = make()
    assert env.embodiment.action_frame == "ee_adjoint"
    env.reset()
    env.step(act(0, 0.5))
    # p = (0.307, 0, 0.487), v = (0, -0.5, 0): p x v = (0.243, 0, -0.153), times 0.1 rad.
    turned = arm.moves[-1][:3, :3] @ HOME[:3, :3].T
    np.testing.assert_allclose(
        turned, pose_of((0, 0, 0), (0.02435, 0, -0.01535))[:3, :3], atol=1e-4
    )


def test_every_step_has_the_same_info_keys():
    env, arm, _ = make()
    _, info = env.reset()
    *_, stepped = env.step(STILL)
    arm.trip("joint_reflex")
    *_, aborted = env.step(STILL)
    assert info.keys() == stepped.keys() == aborted.keys()
    needed = {"is_success", "task", "init_state_id", "reset_reason", "abort", "late_steps"}
    assert needed <= info.keys()
    assert aborted["abort"] == aborted["reset_reason"] == "collision"


def test_a_seed_names_a_start_and_fixes_the_next():
    env, _, _ = make(reset={"noise_xy_m": 0.01, "noise_yaw_rad": 0.2})
    first = [env.reset(seed=7)[1]["target"], env.reset()[1]["target"]]
    again = [env.reset(seed=7)[1]["target"], env.reset()[1]["target"]]
    np.testing.assert_allclose(first, again, atol=1e-9)
    assert not np.allclose(first[0], first[1])
    assert env.reset(options={"init_state_id": 7})[1]["init_state_id"] == 7


def test_success_by_pose_terminates_after_the_hold():
    env, _, _ = make(reward={"rule": "pose", "position": (0.3369, 0, 0.4869), "hold_steps": 2})
    env.reset()
    results = [env.step(act(1)), env.step(STILL)]
    assert [result[1:4] for result in results] == [(0.0, False, False), (1.0, True, False)]
    assert results[1][4]["is_success"]
    assert results[1][4]["reset_reason"] == "success"


def test_success_may_leave_the_episode_running():
    env, _, _ = make(
        reward={"rule": "pose", "position": (0.3069, 0, 0.4869)}, stop_on_success=False
    )
    env.reset()
    _, reward, terminated, _, info = env.step(STILL)
    assert (reward, terminated, info["is_success"], info["reset_reason"]) == (1.0, False, True, "")


def always(observation, state):
    assert observation["state.state"].shape == (19,)
    return True


def test_success_by_callback(monkeypatch):
    monkeypatch.setitem(sys.modules, "franka_callbacks", sys.modules[__name__])
    env, _, _ = make(reward={"rule": "callback", "callback": "franka_callbacks:always"})
    env.reset()
    assert env.step(STILL)[2]


@pytest.mark.parametrize(
    ("said", "reward"), [(OperatorVerdict.SUCCESS, 1.0), (OperatorVerdict.FAILURE, 0.0)]
)
def test_an_operator_decides(said, reward):
    operator = FakeOperator()
    env, _, _ = make(operator, reward={"rule": "operator"})
    env.reset()
    assert env.step(STILL)[2] is False
    operator.said = said
    _, got, terminated, _, info = env.step(STILL)
    assert (got, terminated, info["reset_reason"]) == (reward, True, said.value)


def test_keys_are_verdicts_stops_and_actions():
    keyboard = Keyboard()
    operator, driver = OperatorConsole(keyboard=keyboard), KeyboardActor(keyboard, pace=0.5)
    keyboard.press("wwaG xc g")
    action, _ = driver.act({})
    np.testing.assert_allclose(action, (0.5, 0.5, 0, 0, 0, 0, -1))
    assert operator.verdict() is OperatorVerdict.SUCCESS
    assert operator.wants_stop()
    assert driver.wants_end()
    assert not driver.wants_end()


def test_an_operators_stop_latches():
    env, arm, _ = make()
    env.reset()
    env.operator_stop()
    *_, truncated, info = env.step(act(1))
    assert truncated
    assert info["abort"] == "operator_stop"
    held = arm.moves[-1]
    with pytest.raises(StoppedError, match=r"operator_stop.*acknowledge"):
        env.reset()
    np.testing.assert_array_equal(arm.moves[-1], held)
    env.acknowledge()
    env.reset()
    assert not env.step(STILL)[3]


def test_after_an_abort_only_an_acknowledged_reset_helps():
    env, _, _ = make()
    env.reset()
    assert env.step(np.full(7, np.nan))[3]
    with pytest.raises(gym.error.ResetNeeded, match="invalid_action"):
        env.step(STILL)
    with pytest.raises(StoppedError, match="invalid_action"):
        env.reset()
    env.acknowledge()
    env.reset()
    assert not env.step(STILL)[3]


def test_a_dead_controller_is_noticed_in_the_same_step():
    env, arm, _ = make()
    env.reset()
    arm.stop()
    *_, truncated, info = env.step(STILL)
    assert truncated
    assert info["abort"] == "controller"


def test_harmless_errors_are_recovered_from_slower_and_not_for_ever():
    env, arm, _ = make(limits={"recoveries": 2})
    env.reset()
    moved = []
    for _ in range(2):
        before = arm.state().pose
        env.step(act(1))
        moved.append(np.linalg.norm(arm.state().pose[:3, 3] - before[:3, 3]))
        arm.trip("communication_constraints_violation")
        *_, info = env.step(act(1))
        assert info["limited"] == "recovered"
    assert moved[1] == pytest.approx(moved[0] / 2)
    arm.trip("communication_constraints_violation")
    *_, truncated, info = env.step(act(1))
    assert truncated
    assert info["abort"] == "reflex"


def test_the_gripper_is_asked_once_per_change():
    env, arm, _ = make()
    env.reset()
    arm.gripper.requests.clear()
    for value in (0.2, -0.4, -0.6, -1, -1, 0.4, 0.6, 1, 0):
        env.step(act(0, 0, 0, 0, 0, 0, value))
    assert arm.gripper.requests == [False, True]


class SlowGripper(FakeGripper):
    """Fingers that take ``takes_s``."""

    def __init__(self, clock, takes_s):
        super().__init__()
        self._clock, self._takes_s, self._done_s = clock, takes_s, 0.0
        self.asked_s = []

    def request(self, *, opened):
        super().request(opened=opened)
        self.asked_s.append(self._clock.now())
        self._done_s = self._clock.now() + self._takes_s

    def state(self):
        self.busy = self._clock.now() < self._done_s
        return super().state()


class TimedArm(FakeArm):
    """Notes when it is sent targets."""

    moved_s = ()

    def command(self, target, over_s=0.0):
        super().command(target, over_s)
        self.moved_s = (*self.moved_s, self.clock.now())


def with_slow_fingers(takes_s, **values):
    arm = TimedArm()
    arm.gripper = SlowGripper(arm.clock, takes_s)
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig.model_validate({"reward": {"rule": "none"}} | values)
    env = FrankaEnv(arm, cameras, config, clock=arm.clock)
    env.reset()
    while arm.gripper.state().is_busy:
        env.step(STILL)
    env.step(STILL)
    return env, arm


@pytest.mark.parametrize(("takes_s", "waits_s"), [(0.0, 0.0), (0.3, 0.3), (2.0, 0.6)])
def test_the_fingers_go_first_and_the_arm_waits_for_them_but_not_for_ever(takes_s, waits_s):
    env, arm = with_slow_fingers(takes_s)
    sent, began = len(arm.moved_s), arm.clock.now()
    *_, truncated, info = env.step(act(1, 0, 0, 0, 0, 0, -1))
    assert not truncated
    assert arm.gripper.asked_s[-1] == pytest.approx(began)
    (moved_s,) = arm.moved_s[sent:]
    assert moved_s - began == pytest.approx(waits_s, abs=0.021)
    assert arm.clock.now() - moved_s == pytest.approx(0.1)
    assert info["late_steps"] == 0
    began = arm.clock.now()
    env.step(act(1, 0, 0, 0, 0, 0, -1))
    assert arm.clock.now() - began == pytest.approx(0.1)


def test_a_stop_is_obeyed_while_the_arm_waits_for_the_fingers():
    env, arm = with_slow_fingers(2.0)
    pose = arm.state().pose
    original = arm.gripper.request
    arm.gripper.request = lambda *, opened: (original(opened=opened), env.operator_stop())
    *_, truncated, info = env.step(act(1, 0, 0, 0, 0, 0, -1))
    assert (truncated, info["abort"]) == (True, "operator_stop")
    np.testing.assert_allclose(arm.moves[-1], pose, atol=1e-9)


def test_the_gripper_has_a_published_and_a_gentle_preset():
    published, gentle = (
        FrankaConfig.model_validate({"gripper": given}).gripper
        for given in ({}, {"preset": "gentle", "force_n": 20.0})
    )
    assert (published.speed_m_s, published.force_n, published.open_width_m) == (0.3, 130.0, 0.09)
    assert (gentle.speed_m_s, gentle.force_n, gentle.open_width_m) == (0.1, 20.0, 0.08)


def test_a_policy_of_another_frame_is_refused_before_anything_moves(monkeypatch):
    monkeypatch.setitem(sys.modules, "franka_callbacks", sys.modules[__name__])
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env="dzrobot/Franka-PnP-fake-v0", episodes=1,
        arguments={"action": {"frame": "base"}},
    )  # fmt: skip
    policy = PolicySpec(name="franka_callbacks:always")
    with pytest.raises(ConfigError, match=r"'base'.*'ee_adjoint'.*action.frame"):
        prepare(EvaluationRequest(spec=spec, policy=policy))


def test_a_fault_of_the_gripper_ends_the_episode():
    env, arm, _ = make()
    env.reset()
    arm.gripper.fault = "the gripper failed"
    assert env.step(STILL)[4]["abort"] == "gripper"
    env.acknowledge()
    env.reset()
    assert not env.step(STILL)[3]


def test_a_lost_arm_is_named_though_its_hand_is_missed_first():
    env, arm, _ = make()
    env.reset()
    arm.frozen, arm.gripper.fault = True, "the gripper went away"
    began, sent = arm.clock.now(), len(arm.moves)
    info = env.step(act(0, 0, 0, 0, 0, 0, -1))[4]
    assert (info["abort"], "the arm's state" in info["abort_message"]) == ("stale_state", True)
    assert arm.clock.now() - began < env.config.limits.state_age_s + 0.05
    np.testing.assert_allclose(arm.moves[sent], arm.state().pose)


def test_silence_holds_then_gives_control_up():
    env, arm, _ = make()
    env.reset()
    env.step(act(1))
    arm.clock.sleep_until(arm.clock.now() + 1.0)
    env._control.check_silence()
    np.testing.assert_allclose(arm.moves[-1], arm.state().pose)
    assert arm.state().controlled
    arm.clock.sleep_until(arm.clock.now() + 100.0)
    env._control.check_silence()
    assert not arm.state().controlled
    assert env.step(STILL)[4]["abort"] == "watchdog"


def test_silence_is_named_though_the_arm_that_comes_to_rest_sends_no_state():
    env, arm, _ = make()
    env.reset()
    env.step(act(1))
    arm.frozen = True
    arm.clock.sleep_until(arm.clock.now() + 100.0)
    assert env.step(STILL)[4]["abort"] == "watchdog"


def test_the_first_steps_may_be_slow():
    env, arm, _ = make(slow_first_steps=2, slow_pace=0.5)
    env.reset()
    steps = []
    for _ in range(3):
        before = arm.state().pose
        env.step(act(1))
        steps.append(float(np.linalg.norm(arm.state().pose[:3, 3] - before[:3, 3])))
    np.testing.assert_allclose(steps, (0.015, 0.015, 0.03), atol=1e-9)


def test_a_dry_run_reads_and_never_moves():
    arm = FakeArm()
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig(reward={"rule": "none"})
    env = FrankaEnv(DryRunArm(arm), cameras, config, clock=arm.clock)
    env.reset()
    _, _, _, truncated, info = env.step(act(1, 0, 0, 0, 0, 0, -1))
    assert not truncated
    np.testing.assert_allclose(info["target"][:3, 3] - HOME[:3, 3], (0.03, 0, 0), atol=1e-9)
    assert arm.moves == []
    assert arm.gripper.requests == []


def test_one_program_moves_one_arm(tmp_path):
    first, second = (ArmLock("172.16.0.2", str(tmp_path)) for _ in range(2))
    first.acquire()
    first.acquire()
    with pytest.raises(RobotError, match=r"in use by process \d+"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_late_steps_are_counted_and_not_caught_up():
    clock = FakeClock()
    pace = RateLimiter(clock, 0.1)
    pace.wait()
    clock.sleep_until(clock.now() + 0.35)
    pace.wait()
    late = clock.now()
    assert pace.late_steps == 1
    assert pace.overrun_s == pytest.approx(0.25)
    pace.wait()
    assert clock.now() - late == pytest.approx(0.1)
    assert pace.late_steps == 1


def test_images_are_cropped_to_the_square_and_copied():
    config = CameraConfig(key="video.image", serial="1")
    image = np.zeros((480, 640, 3), np.uint8)
    image[:, 80:560] = (200, 10, 20)
    fitted = fit(image, config, (128, 128))
    assert fitted.shape == (128, 128, 3)
    assert (fitted == (200, 10, 20)).all()
    assert not np.shares_memory(fitted, image)


def test_a_workcell_is_a_file_and_values_replace_its_own(tmp_path):
    path = tmp_path / "cell.yaml"
    path.write_text(
        "address: 172.16.0.2\ntask: stack the cups\nreset: {position: [0.4, 0, 0.4]}\n"
        "limits: {speed_m_s: 0.2, force_n: 20, workspace_low: [0.3, -0.3, 0.02], "
        "workspace_high: [0.7, 0.3, 0.6]}\nreward: {rule: none}\ngripper: {preset: gentle}\n"
        "cameras:\n- {key: video.image, serial: '1'}\n- {key: video.wrist_image, serial: '2'}\n"
    )
    config = make_franka(workcell=str(path), limits={"force_n": 15.0}).config
    assert (config.limits.speed_m_s, config.limits.force_n) == (0.2, 15.0)
    assert config.task == "stack the cups"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adress": "1"}, "address"),
        ({"limits": {"speed_m_s": 0}}, "limits.speed_m_s"),
        ({"reset": {"speed_m_s": 0.9}}, "reset.speed_m_s.*0.85"),
        ({"reset": {"turn_rad_s": 1.3}}, "reset.turn_rad_s.*1.25"),
        ({"reset": {"joint_dynamics": 0.2}}, "reset.joint_dynamics.*0.13"),
        ({"limits": {"workspace_low": (0.4, 0, 0)}}, "reset.position"),
        ({"limits": {"step_m": 0.2}}, "call"),
        ({"cameras": [{"key": "video.image", "serial": "1"}]}, "video.wrist_image"),
        ({"workcell": "emulatd"}, "emulated"),
        ({"reward": {"rule": "callback"}}, "module:function"),
        ({"cameras": [{"key": "video.image", "serial": "1", "crop": [0, 0, 999, 1]}]}, "crop"),
    ],
)
def test_wrong_values_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        make_franka(**values)


def test_another_version_names_the_line_to_install():
    hint = version_hint("libfranka: Incompatible library version (server version: 9, library: 10)")
    assert "by-robot-server-version/9/" in hint


def test_an_arm_too_far_away_is_not_moved():
    env, arm, _ = make()
    far = HOME.copy()
    far[0, 3] -= 1.0
    arm.put(far)
    with pytest.raises(RobotError, match="by hand"):
        env.reset()
    assert arm.moves == []


def test_an_arm_that_is_held_does_not_arrive():
    env, arm, _ = make(reset={"timeout_s": 2.0})
    away = HOME.copy()
    away[0, 3] += 0.2
    arm.put(away)
    arm.stuck = True
    with pytest.raises(StoppedError, match="in its way"):
        env.reset()
    assert max(np.linalg.norm(move[:3, 3] - away[:3, 3]) for move in arm.moves) <= 0.08
    np.testing.assert_allclose(arm.moves[-1], away, atol=1e-9)


def test_reset_moves_no_faster_than_it_may():
    env, arm, _ = make()
    away = HOME.copy()
    away[:3, 3] += (0.2, 0.1, -0.2)
    arm.put(away)
    env.reset()
    steps = np.diff([move[:3, 3] for move in arm.moves], axis=0)
    assert np.linalg.norm(steps, axis=1).max() <= 0.15 * 0.1 + 1e-9
    np.testing.assert_allclose(arm.state().pose, HOME, atol=1e-9)
