"""A small real dataset, a tiny checkpoint and a recipe for them; imported by tests and by their subprocesses."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.recording.writer import EpisodeWriter

TASKS = ("lift the cube", "turn on the stove")
LENGTH = 90


def record(
    root: Path,
    *,
    tag: str = "libero_sim",
    version: str = "v2.1",
    video: bool = False,
    episodes: int = 3,
) -> Path:
    """Write a dataset of moving gradients whose actions follow from the state."""
    robot = load_embodiment(tag)
    with EpisodeWriter(
        root, robot, fps=robot.timing.control_hz, version=version, video=video
    ) as writer:
        for episode in range(episodes):
            rng = np.random.default_rng([7, episode])
            for i in range(LENGTH + episode):
                phase = 0.05 * i + episode
                observation: dict[str, Any] = {robot.language: TASKS[episode % len(TASKS)]}
                for j, view in enumerate(robot.views):
                    height, width = view.resolution
                    ramp = np.linspace(0, 255, width)[None] * np.ones((height, 1))
                    frame = np.stack(
                        [ramp, ramp[:, ::-1], np.full_like(ramp, 40 * j + 2 * i % 200)], axis=-1
                    )
                    observation[view.key] = np.roll(frame, 3 * i, axis=1).astype(np.uint8)
                for part in robot.state:
                    observation[part.key] = np.sin(phase + np.arange(part.dim)).astype(np.float32)
                action = {
                    part.key: (
                        np.cos(phase + np.arange(part.dim)) * 0.5 + rng.normal(0, 0.01, part.dim)
                    ).astype(np.float32)
                    for part in robot.action
                }
                writer.add_frame(observation, action)
            writer.save_episode(success=True)
    return root


def statistics(dataset: Path, target: Path, tag: str = "libero_sim") -> Path:
    """Write the dataset's own statistics."""
    from dzrobot.training.data import DatasetReader, ReaderOptions
    from dzrobot.training.data.statistics import measure

    robot = load_embodiment(tag)
    reader = DatasetReader(dataset, robot, ReaderOptions(pictures=False))
    target.write_text(json.dumps({tag: measure([reader], robot)}))
    return target


def checkpoint(target: Path, tag: str = "libero_sim", variant: str = "5b") -> Path:
    """Write a tiny random checkpoint."""
    from dzrobot.policies.dreamzero.tiny import TinyOptions, write_tiny_checkpoint

    return write_tiny_checkpoint(target, load_embodiment(tag), TinyOptions(variant=variant))  # type: ignore[arg-type]


def recipe(root: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe for what lies in ``root``; ``changes`` are dotted with double underscores."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "model_path": str(root / "tiny"), "embodiment_tag": "libero_sim",
            "metadata_json_path": str(root / "metadata.json"),
        },
        "data": {"train_data_paths": [str(root / "dataset")], "num_workers": 0},
        "optim": {"lr": 1e-3, "lr_warmup_steps": 2, "lr_scheduler": "constant"},
        "parallel": {"param_dtype": "fp32", "compile": False},
        "checkpoint": {"save_interval": 4, "export": False, "export_dtype": "fp32"},
        "logging": {"log_interval": 2, "tensorboard": False},
        "runner": {
            "output_dir": str(root / "run"), "max_steps": 8, "micro_batch_size": 1, "global_batch_size": 2, "seed": 3,
        },
    }  # fmt: skip
    for name, value in changes.items():
        section, _, field = name.partition("__")
        values[section][field] = value
    return values


def world_folder(root: Path) -> Path:
    """Fill ``root`` with dataset, statistics and checkpoint."""
    record(root / "dataset")
    statistics(root / "dataset", root / "metadata.json")
    checkpoint(root / "tiny")
    return root
