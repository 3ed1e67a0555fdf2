"""The real client libraries against the emulated workcell: drive, record, read back, replay."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest
from emulated import printer
from gymnasium.utils.env_checker import check_env

from dzrobot.cli import main
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.emulators.scenes import SERIALS
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.realsense import RealSenseCamera
from dzrobot.envs.franka.make import connectable, load_workcell
from dzrobot.errors import RobotError
from dzrobot.recording import EpisodeWriter
from dzrobot.rollout.demonstrations.record import RecordedEnv, ReplayActor, record_episode, replay
from dzrobot.rollout.protocol import EpisodeRules
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions

pytestmark = pytest.mark.robot

STEPS, HZ = 100, 10.0
KEYS = ("video.image", "video.wrist_image")


@pytest.fixture(scope="module")
def env(cell):
    values = {"reward": {"rule": "none"}, "reset": {"speed_m_s": 0.4}}
    env = connectable(cell, load_workcell("emulated:empty", values))
    yield env
    env.close()


@pytest.fixture
def say(request, capsys):
    return printer(request, capsys)


def wave():
    """Return a motion through the workspace that opens and closes the hand, (STEPS, 7)."""
    t = np.arange(STEPS) / HZ
    actions = np.zeros((STEPS, 7), np.float32)
    for column, (rate, size) in enumerate(
        [(2.0, 0.6), (1.5, 0.6), (1.0, 0.3), (0, 0), (0, 0), (1.2, 0.4)]
    ):
        actions[:, column] = size * np.sin(rate * t)
    actions[:, 6] = np.where(np.arange(STEPS) // 50 % 2, 1.0, -1.0)
    return actions


class Watched(gym.Wrapper):
    """Keeps every info."""

    def __init__(self, env):
        super().__init__(env)
        self.infos = []

    def step(self, action):
        result = self.env.step(action)
        self.infos.append(result[-1])
        return result


@pytest.fixture(scope="module")
def driven(env, tmp_path_factory):
    """Drive at 10 Hz while recording; return the folder, infos and what came of it."""
    folder = tmp_path_factory.mktemp("franka")
    robot = load_embodiment("franka_pnp")
    watched = Watched(env)
    with EpisodeWriter(folder, robot, fps=HZ, version="v2.1") as writer:
        done = record_episode(
            RecordedEnv(watched, writer), ReplayActor(wave(), robot), writer,
            EpisodeRules(seed=3, max_steps=STEPS), keep_all=True,
        )  # fmt: skip
    return folder, watched.infos, done


def test_steps_come_at_ten_hertz_and_each_sees_an_image_of_its_own(driven, say):
    _, infos, done = driven
    say(f"\n{done.frames} steps at {done.measured_hz:.2f} Hz, {done.late_steps} late")
    say(f"{'camera':<20} {'age p50':>9} {'p95':>9} {'largest':>9} {'new frames':>11}")
    for key in KEYS:
        ages = 1000 * np.array([info[f"frame_age_s.{key}"] for info in infos])
        fresh = np.diff([info[f"frame_time_s.{key}"] for info in infos]) > 0
        middle, high = np.percentile(ages, [50, 95])
        say(f"{key:<20} {middle:6.0f} ms {high:6.0f} ms {ages.max():6.0f} ms {fresh.mean():11.0%}")
        assert (ages >= 0).all()
        # A camera of 15 Hz beside steps of 10 Hz: every step sees an image of its own.
        assert fresh.all()
        assert ages.max() < 1000 / 15 + 1
    assert done.abort == ""
    assert (done.frames, done.late_steps) == (STEPS, 0)
    assert 0.9 * HZ < done.measured_hz < 1.005 * HZ
    rates = [info["success_rate"] for info in infos[20:]]
    say(f"control commands that arrived: {np.mean(rates):.3f}")
    assert min(rates) > 0.99
    # A step in which the hand changes is longer by the wait for its fingers.
    periods = np.diff([info["robot_time_s"] for info in infos])
    assert (periods > 0.098).all()
    assert np.median(periods) == pytest.approx(1 / HZ, abs=0.002)


def test_the_recording_is_read_by_the_trainers_reader(driven, tmp_path):
    folder, _infos, _ = driven
    robot = load_embodiment("franka_pnp")
    reader = DatasetReader(folder, robot, ReaderOptions(episodes="all"))
    window = reader.window(len(reader) // 2)
    assert {key for key in window if key.startswith("video.")} == set(KEYS)
    assert window["state.state"].shape[-1] == 19
    assert window["action.actions"].shape[-1] == 7
    recording = load_recording(folder, 0, robot)
    np.testing.assert_allclose(recording.actions, wave(), atol=1e-6)
    assert recording.start == 3
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    # LeRobot takes every column with "image" in its name for images.
    for name in ("video.camera", "video.wrist_camera", "state_time_s"):
        assert f"timestamp.{name}" in features


def test_the_recording_is_replayed(driven, env, say):
    folder, _, _ = driven
    robot = load_embodiment("franka_pnp")
    recording = load_recording(folder, 0, robot)
    outcome, states = replay(env, recording, robot)
    away = np.linalg.norm(states[:STEPS, 4:7] - recording.states[:, 4:7], axis=1)
    moved = np.ptp(recording.states[:, 4:7], axis=0).max()
    say(
        f"\nreplayed {outcome.steps} steps over {moved:.2f} m: {1000 * away.mean():.2f} mm away, "
        f"{1000 * away.max():.2f} mm at most"
    )
    assert outcome.steps == STEPS
    assert moved > 0.1
    assert away.max() < 0.01


def test_resets_return_to_the_start(env):
    observation, _ = env.reset(seed=1)
    again, info = env.reset(seed=1)
    place = env.arm.state().pose[:3, 3]
    np.testing.assert_allclose(place, env.config.reset.position, atol=0.012)
    assert np.abs(again["state.state"][4:10]).max() < 0.05
    assert observation.keys() == again.keys()
    assert info["init_state_id"] == 1


def test_a_change_of_the_gripper_delays_one_step_and_no_other(env):
    _, info = env.reset()
    times, changed = [info["robot_time_s"]], []
    for command, arrived in ((-1.0, lambda w: w < 0.03), (1.0, lambda w: w > 0.04)):
        changed.append(len(times) - 1)
        for _ in range(12):
            observation, *_, info = env.step(np.array([0] * 6 + [command], np.float32))
            times.append(info["robot_time_s"])
        assert arrived(float(observation["state.state"][0]))
    took = np.diff(times)
    np.testing.assert_allclose(np.delete(took, changed), 1 / HZ, atol=0.003)
    settle_s = env.config.gripper.settle_s
    assert (took[changed] > 0.2).all()
    assert (took[changed] < settle_s + 0.13).all()


@pytest.mark.long
def test_planned_motions_follow_too(cell, env):
    # The arm takes one client at a time.
    env.close()
    values = {"controller": {"kind": "motion"}, "reward": {"rule": "none"}}
    env = connectable(cell, load_workcell("emulated:empty", values))
    env.reset()
    for _ in range(30):
        observation, _, _, truncated, info = env.step(np.array([0.5] + [0] * 6, np.float32))
        assert not truncated, info["abort_message"]
        if observation["state.state"][4] > 0.02:
            break
    assert observation["state.state"][4] > 0.02
    env.close()


@pytest.mark.long
def test_check_env_passes_on_the_emulators(env):
    # It says that no two runs are alike, for sensors are noisy.
    env.spec = gym.spec("dzrobot/Franka-PnP-emulated-v0")
    # The skipped parts make two more workcells; they pass with fakes.
    check_env(env, skip_render_check=True, skip_close_check=True)


@pytest.mark.long
def test_a_missing_camera_is_named_beside_those_found(cell):
    cell.open()
    config = CameraConfig(key="video.image", serial="0")
    with pytest.raises(RobotError, match=f"no camera 0; found: {', '.join(SERIALS)}"):
        RealSenseCamera(config, cell.camera_settings).open()


@pytest.mark.parametrize(
    "name",
    ["dzrobot/lift-v0", "dzrobot/Franka-PnP-fake-v0", "dzrobot/Franka-PnP-emulated-v0"],
)
def test_one_script_runs_simulator_fakes_and_emulators(name, tmp_path):
    if "lift" in name:
        pytest.importorskip("robosuite", reason="needs the simulator")
    code = main(
        ["eval", "--env", name, "--policy", "random", "--episodes", "1", "--max-steps", "5",
         "--workers", "1", "--videos", "none", "--output", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["env"] == name
    assert record["steps"] == 5
    assert math.isfinite(record["wall_s"])
    assert set(record) >= {"success", "ended", "init_state_id", "action_sha256", "policy_ms"}
