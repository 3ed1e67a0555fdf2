"""Clocks, memory and recordings that every measurement of speed uses."""

import gc
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dzrobot.embodiments.spec import Embodiment
from dzrobot.policies.dreamzero.options import device_name
from dzrobot.recording.writer import EpisodeWriter
from dzrobot.rng import numpy_generator
from dzrobot.training.bench.document import Machine

GIB = 2**30

PROMPT = "put the cup on the plate"
"""Instruction of recordings that are made up."""


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Free what nothing refers to any more, and begin to count the device's peak memory anew.

    Sharded networks and compiled code refer to themselves: until they are collected, a network that
    was deleted still fills the device.
    """
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def timed(seconds: list[float], device: torch.device) -> Iterator[None]:
    """Append the seconds that the block takes, from an idle device to an idle device."""
    synchronize(device)
    before = time.perf_counter()
    yield
    synchronize(device)
    seconds.append(time.perf_counter() - before)


def this_machine(device: torch.device) -> Machine:
    """Return on what this process measures."""
    return Machine(
        processor=_processor(), cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.machine()}", device=device_name(device),
        threads=torch.get_num_threads(), torch=torch.__version__,
        python=".".join(platform.python_version_tuple()[:2]),
    )  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def noise_format() -> str:
    """Return how recordings that are made up are stored: without PyAV there are no videos."""
    return "H.264" if find_spec("av") else "PNG"


def record_noise(
    root: Path, robot: Embodiment, *, episodes: int, frames: int, version: str = "v2.1"
) -> Path:
    """Write a dataset of ``robot``: moving ramps with noise, as hard as a camera's images.

    Args:
        root: Folder of the dataset; made.
        robot: Whose keys and sizes it has.
        episodes: How many.
        frames: Of each.
        version: Of the LeRobot format.
    """
    video = noise_format() == "H.264"
    rate = robot.timing.control_hz
    with EpisodeWriter(root, robot, fps=rate, version=version, video=video) as writer:
        add_noise(writer, robot, episodes=episodes, frames=frames)
    return root


def add_noise(writer: EpisodeWriter, robot: Embodiment, *, episodes: int, frames: int) -> None:
    """Write episodes as those of :func:`record_noise`.

    Args:
        writer: Takes them.
        robot: Whose keys and sizes they have.
        episodes: How many.
        frames: Of each.
    """
    rng = numpy_generator("made-up recording", 0)
    for _ in range(episodes):
        for number in range(frames):
            writer.add_frame(*_noise_frame(robot, rng, number))
        writer.save_episode()


def _noise_frame(
    robot: Embodiment, rng: np.random.Generator, number: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    seen: dict[str, Any] = {robot.language: PROMPT}
    for view in robot.views:
        height, width = view.resolution
        ramp = np.add.outer(np.arange(height), np.arange(width) + 3 * number)
        colored = ramp[..., None] * [1, 2, 3]
        seen[view.key] = ((colored + rng.integers(0, 12, colored.shape)) % 256).astype(np.uint8)
    for part in robot.state:
        seen[part.key] = rng.uniform(-1, 1, part.dim).astype(np.float32)
    return seen, {p.key: rng.uniform(-1, 1, p.dim).astype(np.float32) for p in robot.action}
