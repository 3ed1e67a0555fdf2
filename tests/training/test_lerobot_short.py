"""A dataset that LeRobot 0.4.4 wrote: v3.0, AV1, 10 fps, 6 episodes of 17 rows, foreign names.

Two views of unlike size; shorter than a sample of the usual grid. Every command says so, takes the
grid that fits, and the whole road from the folder to a report is walked.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train_end_to_end import SCRIPT, launch

from dzrobot.cli import main
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import ConfigError

DATASET = Path(__file__).parent / "lerobot_arm"
ARM = '''
import gymnasium as gym
import numpy as np

from dzrobot.embodiments.spec import Embodiment, Part, View
from dzrobot.embodiments.templates import TWO_VIEWS, side_by_side
from dzrobot.embodiments.timing import Timing
from dzrobot.envs import observation_space

ARM = Embodiment(
    tag="my_arm",
    views=(
        View(key="video.front", feature="observation.images.front", resolution=(120, 160),
             size=(64, 64)),
        View(key="video.side", feature="observation.images.side", resolution=(96, 128),
             size=(64, 64)),
    ),
    state=(
        Part(key="state.joints", feature="observation.state", dim=5, start=0),
        Part(key="state.gripper", feature="observation.state", dim=1, start=5),
    ),
    action=(
        Part(key="action.joints", feature="action", dim=5, start=0),
        Part(key="action.gripper", feature="action", dim=1, start=5),
    ),
    tiles=side_by_side("video.front", "video.side"),
    prompt=TWO_VIEWS,
    timing=Timing(control_hz=10, action_horizon=8),
)


class Bench(gym.Env):
    """Joints that go where they are told."""

    metadata = {"render_modes": []}

    def __init__(self):
        self.embodiment, self.control_hz, self.init_states = ARM, 10.0, 2
        self.observation_space = observation_space(
            ARM, {"state.joints": (-9.0, 9.0), "state.gripper": (-9.0, 9.0)}
        )
        self.action_space = gym.spaces.Box(-9.0, 9.0, (6,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = np.zeros(6, np.float32)
        return self.seen(), self.info()

    def step(self, action):
        self.at = np.clip(action, -9, 9).astype(np.float32)
        return self.seen(), 0.0, False, False, self.info()

    def seen(self):
        return {
            "video.front": np.full((120, 160, 3), 90, np.uint8),
            "video.side": np.full((96, 128, 3), 150, np.uint8),
            "state.joints": self.at[:5], "state.gripper": self.at[5:],
            "annotation.task": "push the block",
        }

    def info(self):
        return {"is_success": False, "task": "push the block", "init_state_id": 0,
                "reset_reason": ""}


gym.register("Bench-v0", entry_point=Bench, max_episode_steps=6)
'''
ROBOT = "my_arm:ARM"


@pytest.fixture
def bench(own_module):
    """Return the current folder, with the arm's module in it."""
    return own_module("my_arm", ARM, "Bench-v0")


def typed(*words):
    return main([str(word) for word in words])


def test_it_is_lerobots_and_short():
    info = json.loads((DATASET / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"]) == ("v3.0", 10)
    assert (info["total_episodes"], info["total_frames"]) == (6, 6 * 17)
    assert not (DATASET / "meta/recording.json").exists()
    videos = {name: f["info"] for name, f in info["features"].items() if f["dtype"] == "video"}
    assert {one["video.codec"] for one in videos.values()} == {"av1"}
    assert len({one["video.height"] for one in videos.values()}) == 2


def test_every_command_says_what_fits_and_takes_it(bench, capsys):
    """The advice names a flag of the command at hand; with it, the command goes on."""
    assert typed("inspect-data", DATASET, "--embodiment", ROBOT) == 1
    said = capsys.readouterr().out
    assert "episodes 6, usable 0" in said
    assert "a sample of 4 blocks of 8 actions needs 33 rows of an episode" in said
    (advice,) = re.findall(r"FAULT .*take (--max-chunk-size \d)", said)
    assert typed("stats", ROBOT, "--dataset", DATASET, "--output", "refused.json") == 2
    assert advice in capsys.readouterr().err
    for grid in (advice.split(), ["--action-horizon", "4"], ["--pad-tail"]):
        assert typed("inspect-data", DATASET, "--embodiment", ROBOT, *grid) == 0
        assert "first frame   video.side  (96, 128, 3)" in capsys.readouterr().out
        output = f"{grid[0].strip('-')}.json"
        assert typed("stats", ROBOT, "--dataset", DATASET, "--output", output, *grid) == 0
    where = ("--embodiment", ROBOT, "--dataset", DATASET, "--metadata", "pad-tail.json")
    capsys.readouterr()
    assert typed("init", "start", *where) == 2
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize("horizon", range(1, 17))
def test_frames_follow_from_every_horizon_that_has_them(horizon):
    if horizon < 4:
        with pytest.raises(ConfigError, match="give at least 4"):
            Timing(control_hz=10, action_horizon=horizon)
        return
    timing = Timing(control_hz=10, action_horizon=horizon, blocks=1)
    assert len(timing.frame_offsets) == (8 if horizon >= 8 else 4)
    assert len(set(timing.frame_offsets)) == len(timing.frame_offsets)
    assert timing.frame_offsets[-1] + timing.frame_offsets[1] == horizon


@pytest.mark.lerobot
@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    "DZROBOT_LEROBOT" not in os.environ, reason="takes a quarter of an hour: run `make lerobot`"
)
def test_the_whole_road(bench, train_environment):
    """Inspect, stats, init, two ranks, kill, resume, export, evaluation, plot, report."""
    grid = ("--max-chunk-size", 2)
    assert typed("inspect-data", DATASET, "--embodiment", ROBOT, *grid) == 0
    assert typed("stats", ROBOT, "--dataset", DATASET, "--output", "m.json", *grid) == 0
    where = ("--embodiment", ROBOT, "--dataset", DATASET, "--metadata", "m.json", *grid)
    assert typed("init", "start", *where, "--still-steps", 4, "--clip-steps", 3) == 0
    run = [
        "tiny_cpu", "model.model_path=start", f"model.embodiment_tag={ROBOT}",
        "model.metadata_json_path=m.json", f"data.train_data_paths={DATASET}",
        "model.max_chunk_size=2", "runner.output_dir=run", "runner.max_steps=4",
        "checkpoint.save_interval=2", "logging.tensorboard=false", "logging.log_interval=1",
    ]  # fmt: skip
    killed_after_a_checkpoint(run, bench, train_environment)
    launch(SCRIPT, train_environment, bench, *run, "runner.resume_dir=auto")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3, 4}
    assert typed("export", "run", "--step", 2) == 0
    words = ("--env", "my_arm:Bench-v0", "--checkpoint", "run/export/step_00000004")
    few = ("--episodes", 2, "--max-steps", 3, "--workers", 0, "--output", "results")
    assert typed("eval", *words, *few) == 0
    assert typed("plot", "run") == 0
    assert typed("report", "results") == 0
    assert Path("results/report/report.html").stat().st_size > 1000


def killed_after_a_checkpoint(run, folder, environment):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *SCRIPT, *run,
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    ) as process:
        while not Path("run/checkpoints/step_00000002").exists():
            assert process.poll() is None, "it ended before its first checkpoint"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
