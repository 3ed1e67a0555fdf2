"""Noise on what is done while the clean action is recorded; devices that take the environment."""

import gymnasium as gym
import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.commands import record as command
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.teleop.devices import load_device
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.recording.catalog import episode_facts
from dzrobot.rollout.demonstrations.record import NoisyActions

WANTED = np.array([0.1, 0, 0, 0, 0, 0, 1], np.float32)
CELL = """
address: 172.16.0.2
task: stack the cups
cameras:
- {key: video.image, serial: '1'}
- {key: video.wrist_image, serial: '2'}
reset: {position: [0.4, 0.0, 0.4]}
gripper: {preset: gentle}
limits: {workspace_low: [0.3, -0.3, 0.02], workspace_high: [0.6, 0.3, 0.6]}
reward: {rule: operator}
"""


class Steady:
    """Named by ``--policy``: always the same action."""

    def __init__(self, robot):
        pass

    def reset(self, session=None, *, episode=None):
        pass

    def act(self, obs, *, session="default"):
        return WANTED


class Still:
    """A device that takes what it steers."""

    gives, has_deadman = "motion", True

    def __init__(self, env):
        self.env = env

    def check(self):
        pass


def record(folder, *words):
    few = ["--attempts", "1", "--keep-failures", "--max-steps", "12", "--output", str(folder)]
    return main(["record", "--workcell", "fake", "--policy", f"{__name__}:Steady", *few, *words])


def positions(folder):
    recording = load_recording(folder, 0, load_embodiment("franka_pnp"))
    np.testing.assert_array_equal(recording.actions, np.tile(WANTED, (12, 1)))
    return recording.states[:, 2:5]


def test_the_clean_action_is_recorded_and_a_noisy_one_done(tmp_path):
    for name, noise in (("clean", "0"), ("noisy", "0.3"), ("again", "0.3")):
        assert record(tmp_path / name, "--noise", noise) == 0
    clean, noisy, again = (positions(tmp_path / name) for name in ("clean", "noisy", "again"))
    assert np.abs(noisy - clean).max() > 1e-3
    for name, noise in (("clean", None), ("noisy", 0.3)):
        (facts,) = episode_facts(tmp_path / name).values()
        assert facts.model_extra.get("noise") == noise
    # What was done is kept beside it, where it is another action.
    robot = load_embodiment("franka_pnp")
    assert load_recording(tmp_path / "clean", 0, robot).executed is None
    recording = load_recording(tmp_path / "noisy", 0, robot)
    done = recording.executed
    assert np.abs(done[:, :6] - WANTED[:6]).std() > 0.05
    np.testing.assert_array_equal(done[:, 6], WANTED[6])
    np.testing.assert_array_equal(recording.to_repeat.actions, done)
    # Keyed by the seed of the start.
    np.testing.assert_array_equal(noisy, again)
    assert record(tmp_path / "other", "--noise", "0.3", "--seed", "7") == 0
    assert np.abs(positions(tmp_path / "other") - noisy).max() > 1e-3


def test_noise_is_for_policies_and_not_for_real_arms(tmp_path, capsys):
    output = ["--output", str(tmp_path / "set"), "--noise", "0.1"]
    assert main(["record", "--workcell", "fake", "--keyboard", *output]) == 2
    assert "give --policy" in capsys.readouterr().err
    cell = tmp_path / "cell.yaml"
    cell.write_text(CELL)
    words = ["--workcell", str(cell), "--policy", "random", "--full-speed"]
    assert main(["record", *words, *output]) == 2
    assert "--noise 0.1 moves a real arm" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_draws_begin_anew_with_the_seed_of_a_reset():
    class Room(gym.Env):
        action_space = gym.spaces.Box(-1.0, 1.0, (7,), np.float32)

        def reset(self, *, seed=None, options=None):
            return None, {}

    env = NoisyActions(Room(), 0.1)
    draws = []
    for seed in (3, 3, 4, None):
        env.reset(seed=seed)
        draws.append(env.action(np.zeros(7, np.float32)).tolist())
    assert draws[0] == draws[1]
    assert draws[0] != draws[2] != draws[3]
    # The gripper's number is left alone.
    assert {row[6] for row in draws} == {0.0}


def test_an_own_device_may_take_what_it_steers():
    place = object()
    device = load_device(f"{__name__}:Still", env=place)
    assert device.env is place
    with pytest.raises(ConfigError, match="takes the environment that it steers, and there"):
        load_device(f"{__name__}:Still")


def test_a_noisy_recording_goes_on_without_noise(tmp_path):
    folder, robot = tmp_path / "mixed", load_embodiment("franka_pnp")
    assert record(folder, "--noise", "0.3") == 0
    assert record(folder, "--noise", "0", "--attempts", "2") == 0
    noisy, clean = (load_recording(folder, number, robot) for number in (0, 1))
    assert not np.array_equal(noisy.executed, noisy.actions)
    np.testing.assert_array_equal(clean.executed, clean.actions)


def test_episodes_are_to_be_long_enough_for_the_robot_of_the_policy(tmp_path, monkeypatch):
    """Lift records as `libero_sim`, whose samples are longer than those of the bundled policy."""
    planned = []
    monkeypatch.setattr(command, "record", lambda run, say: planned.append(run))
    words = ["--env", "dzrobot/lift-v0", "--env-arg", "cameras=false", "--attempts", "1"]
    for policy in (["--policy", str(default_checkpoint())], ["--policy", "hold"]):
        assert main(["record", *words, *policy, "--output", str(tmp_path / "set")]) == 1
    assert [run.whose for run in planned] == ["libero_mini", "libero_sim"]
    assert planned[0].sample.rows_needed < planned[1].sample.rows_needed
