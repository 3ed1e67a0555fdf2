"""Robots of a lab's own, from recordings to actions: relative joints, three views, two machines."""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_train_end_to_end import SCRIPT, launch

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.recording import EpisodeWriter
from dzrobot.training import write_tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"

LAB = '''
"""What a lab would write: DROID's robot in small images, and a simulator of it."""

import dataclasses

import gymnasium as gym
import numpy as np

from dzrobot import load_embodiment
from dzrobot.envs import observation_space

KNOWN = load_embodiment("oxe_droid")
ROBOT = dataclasses.replace(
    KNOWN,
    tag="lab_droid",
    views=tuple(
        dataclasses.replace(view, resolution=(36, 64), size=(32, 64)) for view in KNOWN.views
    ),
    timing=dataclasses.replace(KNOWN.timing, blocks=2),
)
HOME = np.array([0.3, -0.6, 0.1, -2.2, 0.2, 1.9, 0.8], np.float32)
WAY = np.array([0.9, 0.5, -0.4, 0.3, 0.2, -0.3, 0.1], np.float32)
STEPS = 60


class Lab(gym.Env):
    """Seven joints that go to where they are told, and a hand that has to close at the end."""

    metadata = {"render_modes": []}

    def __init__(self):
        self.embodiment, self.control_hz, self.init_states = ROBOT, 15.0, 6
        self.observation_space = observation_space(
            ROBOT, {"state.joint_position": (-4.0, 4.0), "state.gripper_position": (0.0, 1.0)}
        )
        self.action_space = gym.spaces.Box(-4.0, 4.0, (8,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(self.init_states))
        self.start = (options or {}).get("init_state_id", drawn)
        self.home = HOME + np.float32(0.05) * self.start
        self.joints, self.hand = self.home.copy(), np.zeros(1, np.float32)
        return self.seen(), self.info()

    def step(self, action):
        self.joints = self.joints + np.clip(action[:7] - self.joints, -0.05, 0.05)
        self.hand = np.asarray(action[7:], np.float32)
        info = self.info()
        return self.seen(), float(info["is_success"]), info["is_success"], False, info

    def seen(self):
        x = np.linspace(0, 6, 64) + 4 * self.joints[0]
        views = {
            view.key: np.tile(np.uint8(120 + 100 * np.sin(x + i))[None, :, None], (36, 1, 3))
            for i, view in enumerate(ROBOT.views)
        }
        return {**views, "state.joint_position": self.joints, "state.gripper_position": self.hand,
                "annotation.task": "Close the drawer"}

    def info(self):
        there = np.abs(self.joints - self.home - WAY).max() < 0.02 and self.hand[0] > 0.5
        return {"is_success": bool(there), "task": "Close the drawer",
                "init_state_id": self.start, "reset_reason": ""}


class Demonstrator:
    """Knows the way; made for every episode with the environment."""

    def __init__(self, env):
        self.env, self.count = env.unwrapped, 0

    def reset(self, session=None, *, episode=None):
        pass

    def act(self, obs, *, session="default"):
        self.count += 1
        joints = self.env.home + WAY * min(1.0, self.count / STEPS)
        return np.append(joints, float(self.count > STEPS + 3)).astype(np.float32)


gym.register("Lab-v0", entry_point=Lab, max_episode_steps=90)
'''
ENV = ("--env", "lab_arm:Lab-v0")
GRID = ("data.frame_grid=official_droid", "model.max_chunk_size=2")
DROPPED = "data.dropped_views=[video.exterior_image_1_left, video.exterior_image_2_left]"


@pytest.fixture
def lab(own_module):
    """Return a folder with the lab's module, which is the current one."""
    return own_module("lab_arm", LAB, "Lab-v0")


def typed(*words):
    assert main([str(word) for word in words]) == 0, words


def recipe(robot, *overrides):
    """Return what a run of this folder is started with."""
    return [
        "tiny_cpu", "model.model_path=start", f"model.embodiment_tag={robot}",
        "model.metadata_json_path=metadata.json", "data.train_data_paths=data",
        "runner.output_dir=run", "runner.own_rows=3", "logging.tensorboard=false",
        "logging.log_interval=1", *overrides,
    ]  # fmt: skip


def losses():
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_robot_like_droids_from_demonstrations_to_success_by_step(lab, train_environment):
    """Joint actions relative to the state, three views, 15 Hz, the published walk, two ranks."""
    typed("collect", *ENV, "--policy", "lab_arm:Demonstrator", "--episodes", 3, "--output", "data",
          "--video")  # fmt: skip
    info = json.loads(Path("data/meta/info.json").read_text())
    assert info["fps"] == 15
    assert [f["dtype"] for f in info["features"].values()].count("video") == 3
    grid = ("--frame-grid", "official_droid", "--max-chunk-size", 2)
    typed("stats", "lab_arm:ROBOT", "--dataset", "data", "--output", "metadata.json", *grid)
    where = ("--embodiment", "lab_arm:ROBOT", "--dataset", "data", "--metadata", "metadata.json")
    typed("init", "start", *where, "--still-steps", 4, "--clip-steps", 3)
    robot = load_embodiment("lab_arm:ROBOT")
    ranges = json.loads(Path("metadata.json").read_text())["lab_droid"]["statistics"]["action"]
    # 24 steps of the way to the goal; the joints themselves go as far as 2.2 rad.
    assert max(map(abs, ranges["joint_position"]["q99"])) < 24 / 60
    run = recipe("lab_arm:ROBOT", *GRID, "runner.max_steps=4", "checkpoint.save_interval=2")
    launch(SCRIPT, train_environment, lab, *run, "data.view_dropout=0.5", DROPPED)
    assert [step for step, _ in losses()] == [1, 2, 3, 4]
    assert np.isfinite([loss for _, loss in losses()]).all()
    assert "processes 2 on cpu, strategy fsdp" in Path("run/train.log").read_text()

    typed("export", "run", "--step", 2)
    exports = {n: f"run/export/step_{n:08d}" for n in (2, 4)}
    results = ("--episodes", 2, "--max-steps", 26, "--workers", 0, "--videos", "none")
    typed("eval", *ENV, "--checkpoint", exports[2], *results, "--output", "results")
    card = json.loads(Path("results/card.json").read_text())
    assert (card["policy"]["embodiment"], card["policy"]["history"]) == ("lab_droid", "recent")
    rows = [json.loads(line) for line in Path("results/records.jsonl").read_text().splitlines()]
    assert [(row["steps"], row["error"]) for row in rows] == [(26, None)] * 2
    typed("eval", *ENV, "--checkpoint", "run", "--steps", "all", *results)
    steps = json.loads(Path("run/evaluations/Lab-v0/steps.json").read_text())
    assert [(row["step"], row["episodes"]) for row in steps] == [(2, 2), (4, 2)]
    same = Path("run/evaluations/Lab-v0/step_00000002/records.jsonl").read_text().splitlines()
    # The checkpoint of a step and its export act alike, to the bit.
    for one, other in zip(rows, map(json.loads, same), strict=True):
        assert one["action_sha256"] == other["action_sha256"]
    typed("plot", "run")
    assert Path("run/plots/success.png").read_bytes().startswith(b"\x89PNG")
    relative_to_where_the_joints_are(exports[4], robot)


def relative_to_where_the_joints_are(checkpoint, robot):
    """Joints beyond what was measured look alike to the network; its plan goes with them."""
    import lab_arm

    seen, _ = lab_arm.Lab().reset(seed=0)
    actions = []
    for shift in (3.0, 3.5):
        policy = DreamZeroPolicy.from_pretrained(checkpoint, embodiment=robot)
        joints = seen["state.joint_position"] + np.float32(shift)
        actions.append(policy.act({**seen, "state.joint_position": joints}))
    np.testing.assert_allclose(actions[1] - actions[0], [*[0.5] * 7, 0.0], atol=1e-5)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def example(monkeypatch):
    """Return the example's module, which lies on the import path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("add_an_embodiment")
    sys.modules.pop("add_an_embodiment")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_examples_robot_trains_on_two_machines(
    example, tmp_path, monkeypatch, train_environment
):
    """The UR5 of examples/add_an_embodiment.py, by the command that the guide has for two nodes."""
    monkeypatch.chdir(tmp_path)

    robot, length = example.UR5, 72
    with EpisodeWriter(tmp_path / "data", robot, fps=10) as writer:
        for seed in range(2):
            episode = example.record_episode(length, np.random.default_rng(seed))
            for i in range(length):
                row = {key: values[i] for key, values in episode.items()}
                action = {key: row.pop(key) for key in robot.action_keys}
                writer.add_frame({**row, robot.language: "Put the Red Cup on the Plate"}, action)
            writer.save_episode(success=True)
    name = "add_an_embodiment:UR5"
    typed("stats", name, "--dataset", "data", "--output", "metadata.json")
    write_tiny_checkpoint(tmp_path / "start", robot)
    run = recipe(name, "runner.max_steps=2", "runner.micro_batch_size=1",
                 "runner.global_batch_size=2")  # fmt: skip
    paths = os.pathsep.join([str(EXAMPLES), train_environment["PYTHONPATH"]])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", *SCRIPT, *run,
    ]  # fmt: skip
    machines = [
        subprocess.Popen(
            command, cwd=tmp_path, env={**train_environment, "PYTHONPATH": paths},
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        said = [machine.communicate(timeout=800)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "processes 2 on cpu" in Path("run/train.log").read_text()
    assert [step for step, _ in losses()] == [1, 2]
    policy = DreamZeroPolicy.from_pretrained("run/export/step_00000002", embodiment=robot)
    episode = example.record_episode(1, np.random.default_rng(5))
    seen = {key: episode[key][0] for key in (*robot.video_keys, *robot.state_keys)}
    action = policy.act({**seen, robot.language: "put the red cup on the plate"})
    assert action.shape == (7,)
    assert action[6] in (0.0, 1.0)
