"""Robots of a lab's own, from recordings to actions: relative joints, three views, two machines."""

import dataclasses
import importlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_worlds import images
from serving_peers import serving
from test_data_draft import walk
from test_train_end_to_end import SCRIPT, launch

from dzrobot import Embodiment, Part, Timing, View
from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import UnknownNameError
from dzrobot.policies import RemotePolicy
from dzrobot.policies.base import blank
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.dreamzero.tiny import TinyOptions
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


CAMERAS = [
    View(key=f"video.{name}", feature=f"observation.images.{name}", resolution=(48, 64))
    for name in ("front", "wrist")
]
RECORDED = Embodiment(
    tag="recorded",
    views=tuple(CAMERAS),
    state=(Part(key="state.joints", feature="observation.state", dim=6),),
    action=(Part(key="action.joints", feature="action", dim=6),),
    tiles=(tuple(view.key for view in CAMERAS),),
    prompt="{task}",
    timing=Timing(control_hz=20, action_horizon=16),
)
"""Writes the data; what trains is what `dzrobot init-robot` makes of them."""

SIMULATOR = """
import gymnasium as gym
import numpy as np


class Follows(gym.Env):
    # A simulator that knows nothing of dzrobot but the keys.

    def __init__(self):
        image = gym.spaces.Box(0, 255, (48, 64, 3), np.uint8)
        self.observation_space = gym.spaces.Dict({
            "video.front": image, "video.wrist": image, "annotation.task": gym.spaces.Text(99),
            "state.arm": gym.spaces.Box(-9, 9, (6,), np.float32),
        })
        self.action_space = gym.spaces.Box(-9, 9, (6,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.joints = np.zeros(6, np.float32)
        return self.seen()

    def step(self, action):
        self.joints = self.joints + np.clip(action - self.joints, -0.1, 0.1).astype(np.float32)
        observation, info = self.seen()
        return observation, 0.0, False, False, info

    def seen(self):
        shown = np.full((48, 64, 3), 128 + 100 * np.tanh(self.joints[0]), np.uint8)
        info = {"is_success": False, "task": "go on", "init_state_id": None, "reset_reason": ""}
        return {"video.front": shown, "video.wrist": shown[::-1], "state.arm": self.joints,
                "annotation.task": "go on"}, info


def make():
    return Follows()
"""


@pytest.fixture
def drafted(own_module, tmp_path):
    """Return a folder, the current one: recordings, the robot drafted from them, a simulator."""
    own_module("follows_world", SIMULATOR, "follows_world/make")
    with EpisodeWriter(tmp_path / "data", RECORDED, fps=20, version="v3.0", video=True) as writer:
        for episode in range(2):
            path = walk(np.random.default_rng(episode), 103, 6).astype(np.float32)
            for row in range(100):
                seen = images(RECORDED, 0, episode, row)
                writer.add_frame(
                    {**seen, "state.joints": path[row], RECORDED.language: "go on"}, path[row + 3]
                )
            writer.save_episode(success=True)
    typed("init-robot", "data", "--output", "drafted_arm.py")
    yield tmp_path
    sys.modules.pop("drafted_arm", None)


def forget_the_module():
    Path("drafted_arm.py").unlink()
    sys.modules.pop("drafted_arm", None)
    importlib.invalidate_caches()
    with pytest.raises(UnknownNameError):
        load_embodiment("drafted_arm:ROBOT")


def played(*words):
    """Return what an episode in the simulator depended on, and its actions."""
    output = Path("results", str(len(list(Path().glob("results/*")))))
    typed("eval", "--env", "follows_world:make", *words, "--episodes", 1, "--max-steps", 9,
          "--workers", 0, "--noise", "fixed", "--output", output)  # fmt: skip
    (line,) = (output / "records.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["steps"], record["error"]) == (9, None)
    assert (output / record["video"]).stat().st_size
    card = json.loads((output / "card.json").read_text())
    return card["policy"]["embodiment"], record["action_sha256"]


def test_a_drafted_robot_acts_and_is_served_where_its_module_is_not(drafted):
    robot = load_embodiment("drafted_arm:ROBOT")
    assert robot.action[0].reference == "state.arm"
    write_tiny_checkpoint(drafted / "made", robot, TinyOptions(with_passport=True))
    forget_the_module()
    here = played("--checkpoint", "made")
    assert here[0] == "drafted_arm"
    policy = DreamZeroPolicy.from_pretrained("made")
    with serving(policy) as server:
        where = f"ws://127.0.0.1:{server.ports[0]}"
        assert played("--server", where) == here
        client = RemotePolicy(where)
        described = dataclasses.replace(client.embodiment, action_anchor=robot.action_anchor)
        assert described == robot
        client.reset("arm")
        assert client.act(blank(client.embodiment, None), session="arm").shape == (6,)
        client.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_commands_with_a_robot_of_ones_own(drafted, train_environment):
    """Recordings, init-robot, train, an episode and an answer; the drafted file stays unedited."""
    write_tiny_checkpoint(drafted / "start", load_embodiment("drafted_arm:ROBOT"))
    words = [
        "tiny_cpu", "model.model_path=start", "model.embodiment_tag=drafted_arm:ROBOT",
        "data.train_data_paths=data", "runner.output_dir=run", "runner.max_steps=2",
        "runner.global_batch_size=2", "runner.resume_dir=auto",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "dzrobot", "train", *words],
        env=train_environment, cwd=drafted, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    trained = "run/export/step_00000002"
    forget_the_module()
    here = played("--checkpoint", trained)
    command = [sys.executable, "-m", "dzrobot", "serve", trained, "--port", "0"]
    with subprocess.Popen(
        [*command, "--no-array-port"], env=train_environment, cwd=drafted,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
            assert played("--server", re.findall(r"ws://\S+", said)[0]) == here
        finally:
            process.terminate()
    assert process.returncode == 0
