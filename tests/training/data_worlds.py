"""Small real datasets of moving images; imported by subprocesses too."""

import dataclasses
from pathlib import Path

import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.recording import EpisodeWriter

TASKS = ("lift the cube", "turn on the stove")
HEIGHT, WIDTH = 48, 64


def robot(tag="libero_sim", *, horizon=8, blocks=2):
    """Return a built-in robot with small images and short windows."""
    known = load_embodiment(tag)
    views = tuple(
        dataclasses.replace(view, size=(32, 48), resolution=(HEIGHT, WIDTH)) for view in known.views
    )
    timing = Timing(control_hz=known.timing.control_hz, action_horizon=horizon, blocks=blocks)
    return dataclasses.replace(known, views=views, timing=timing)


ROBOT = robot()
"""Named by tests of the command line as ``data_worlds:ROBOT``."""

RELATIVE = robot("oxe_droid")


def images(embodiment, seed, episode, step):
    """Return smooth moving images: they survive lossy codecs and differ in every frame."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    frames = {}
    for i, view in enumerate(embodiment.views):
        phase = 0.3 * step + episode + 2 * i + seed
        channels = [128 + 90 * np.sin(x / 9 + phase + c) * np.cos(y / 7 - c) for c in range(3)]
        frames[view.key] = np.stack(channels, axis=-1).astype(np.uint8)
    return frames


def step(embodiment, seed, episode, number):
    """Return observation and action of one step."""
    rng = np.random.default_rng([seed, episode, number])
    observation = images(embodiment, seed, episode, number)
    for part in embodiment.state:
        observation[part.key] = rng.normal(size=part.dim).astype(np.float32)
    observation[embodiment.language] = TASKS[episode % 2]
    action = {p.key: rng.normal(size=p.dim).astype(np.float32) for p in embodiment.action}
    return observation, action


def record(root, embodiment=ROBOT, *, lengths=(30, 25, 40, 12, 33), seed=0, failed=(), **options):
    """Write a dataset whose episodes ``failed`` are marked as failures; returns its folder."""
    with EpisodeWriter(
        Path(root), embodiment, fps=embodiment.timing.control_hz, **options
    ) as writer:
        for episode, length in enumerate(lengths, start=writer.episodes):
            for number in range(length):
                writer.add_frame(*step(embodiment, seed, episode, number), {"time.arm": number / 7})
            marks = {"reason": "dropped"} if episode in failed else {}
            writer.save_episode(success=episode not in failed, **marks)
    return Path(root)
