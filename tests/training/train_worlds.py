"""A small real dataset, a tiny checkpoint and a recipe for them; imported by subprocesses too."""

import dataclasses
import json
import re
from pathlib import Path

import gymnasium as gym
import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.envs.fakes import PointEnv
from dzrobot.recording.writer import EpisodeWriter

LAB_PAGE = Path(__file__).parents[2] / "docs" / "extend" / "training.md"
LAB = re.findall(r"^```python\n(.*?)^```", LAB_PAGE.read_text(), re.DOTALL | re.MULTILINE)
"""The modules that the page has a lab write, in the order of LAB_NAMES."""

LAB_NAMES = ("smooth", "touch", "grasps", "keep")
SMALL_HAND = """
from dataclasses import replace

import touch
import train_worlds

HAND = replace(train_worlds.ROBOT, tag="hand", state=touch.HAND.state)
"""

TASKS = ("lift the cube", "turn on the stove")
HEIGHT, WIDTH = 48, 64


def _small(tag):
    known = load_embodiment(tag)
    views = tuple(
        dataclasses.replace(view, size=(32, 48), resolution=(HEIGHT, WIDTH)) for view in known.views
    )
    timing = Timing(control_hz=known.timing.control_hz, action_horizon=8, blocks=2)
    return dataclasses.replace(known, views=views, timing=timing)


ROBOT = _small("libero_sim")
"""LIBERO with small images and short windows; recipes name it ``train_worlds:ROBOT``."""


ARM = dataclasses.replace(ROBOT, tag="small_arm", action_frame="base", action_anchor="measured")
"""The same as an arm whose steps may be measured from either anchor."""


class SmallEnv(PointEnv):
    """The point, in images of the size that this world's robot has."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.embodiment = ROBOT
        spaces = {
            view.key: gym.spaces.Box(0, 255, (*view.resolution, 3), np.uint8)
            for view in ROBOT.views
        }
        self.observation_space = gym.spaces.Dict({**self.observation_space.spaces, **spaces})

    def _image(self, center, reach):
        return super()._image(center, reach)[:HEIGHT]


def register_small():
    """Register `SmallEnv` as ``small-v0``."""
    gym.register("small-v0", SmallEnv, disable_env_checker=True, max_episode_steps=3)


def record(root, *, version="v2.1", video=False, episodes=3, length=40, growth=1, robot=ROBOT):
    """Write a dataset of moving gradients whose actions follow from the state."""
    with EpisodeWriter(root, robot, fps=20, version=version, video=video) as writer:
        for episode in range(episodes):
            rng = np.random.default_rng([7, episode])
            for i in range(length + growth * episode):
                writer.add_frame(*frame(episode, i, rng, robot))
            writer.save_episode(success=True)
    return root


def frame(episode, i, rng, robot=ROBOT):
    phase = 0.05 * i + episode
    observation = {robot.language: TASKS[episode % len(TASKS)]}
    for j, view in enumerate(robot.views):
        ramp = np.linspace(0, 255, WIDTH)[None] * np.ones((HEIGHT, 1))
        image = np.stack([ramp, ramp[:, ::-1], np.full_like(ramp, 40 * j + 3 * i % 200)], axis=-1)
        observation[view.key] = np.roll(image, 2 * i, axis=1).astype(np.uint8)
    for part in robot.state:
        observation[part.key] = np.sin(phase + np.arange(part.dim)).astype(np.float32)
    actions = {}
    for part in robot.action:
        values = 0.5 * np.cos(phase + np.arange(part.dim)) + rng.normal(0, 0.01, part.dim)
        actions[part.key] = values if part.gripper is None else part.gripper.command(values)
    return observation, {key: value.astype(np.float32) for key, value in actions.items()}


def statistics(dataset, target, robot=ROBOT):
    """Write the dataset's own statistics."""
    from dzrobot.training.data import DatasetReader, ReaderOptions
    from dzrobot.training.data.normalization import measure

    reader = DatasetReader(dataset, robot, ReaderOptions(images=False))
    target.write_text(json.dumps({robot.tag: measure([reader], robot)}))
    return target


def checkpoint(target, variant="5b"):
    """Write a tiny random checkpoint."""
    from dzrobot.policies.dreamzero.tiny import TinyOptions, write_tiny_checkpoint

    return write_tiny_checkpoint(target, ROBOT, TinyOptions(variant=variant))


def fill(root):
    """Put dataset, statistics and checkpoint into ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    record(root / "dataset")
    statistics(root / "dataset", root / "metadata.json")
    checkpoint(root / "tiny")
    return root


def write_lab(folder):
    """Write the page's modules, and ``lab.py`` with its robot in small images."""
    folder.mkdir()
    for name, block in zip(LAB_NAMES, LAB, strict=True):
        (folder / f"{name}.py").write_text(block)
    (folder / "lab.py").write_text(SMALL_HAND)
    return folder


def recipe(root, **changes):
    """Return a recipe for what lies in ``root``; ``section__field`` changes it."""
    root = Path(root)
    values = {
        "model": {
            "model_path": str(root / "tiny"), "embodiment_tag": "train_worlds:ROBOT",
            "metadata_json_path": str(root / "metadata.json"),
        },
        "data": {"train_data_paths": [str(root / "dataset")], "num_workers": 0},
        "optim": {"lr": 1e-3, "lr_warmup_steps": 2, "lr_scheduler": "cosine"},
        "parallel": {"param_dtype": "fp32", "compile": False, "activation_checkpointing": "none"},
        "checkpoint": {"save_interval": 4, "export": False, "export_dtype": "fp32"},
        "logging": {"log_interval": 2, "tensorboard": False},
        "runner": {
            "output_dir": str(root / "run"), "max_steps": 8, "micro_batch_size": 1,
            "global_batch_size": 4, "seed": 3, "own_rows": 0,
        },
    }  # fmt: skip
    for name, value in changes.items():
        section, _, field = name.partition("__")
        values[section][field] = str(value) if isinstance(value, Path) else value
    return values


def config(root, **changes):
    """Return the recipe as a configuration."""
    from dzrobot.configuration import load_config
    from dzrobot.training.sft_config import SFTConfig

    return load_config(SFTConfig, recipe(root, **changes))
