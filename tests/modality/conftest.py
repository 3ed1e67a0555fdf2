"""Robots, statistics and windows for the pipeline's tests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dzrobot.embodiments.registry import EMBODIMENTS, load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.pipeline import Pipeline
from dzrobot.modality.stats import Statistics

USERS_ROBOT = """
from dzrobot.embodiments.spec import Embodiment, Gripper, Part, View
from dzrobot.embodiments.timing import Timing

UR5 = Embodiment(
    tag="ur5",
    views=(
        View(key="video.front", feature="front", size=(96, 128), resolution=(120, 160)),
        View(key="video.hand", feature="hand", size=(96, 128), resolution=(90, 90)),
    ),
    state=(
        Part(key="state.joints", feature="state", dim=6, start=0),
        Part(key="state.gripper", feature="state", dim=1, start=6),
    ),
    action=(
        Part(key="action.joints", feature="action", dim=6, start=0, reference="state.joints"),
        Part(key="action.gripper", feature="action", dim=1, start=6, normalization="min_max",
             gripper=Gripper(threshold=0.5, low=0.0, high=255.0)),
    ),
    tiles=(("video.front", None), ("video.hand",)),
    prompt="A video shows that a robot {task}",
    timing=Timing(control_hz=10, action_horizon=10, blocks=2),
)
"""


def metadata(robot: Embodiment, seed: int = 0) -> dict[str, Any]:
    """Return the content of a ``metadata.json`` with made-up ranges."""
    rng = np.random.default_rng(seed)

    def entry(dim: int) -> dict[str, list[float]]:
        low = rng.uniform(-2, -0.5, dim)
        high = rng.uniform(0.5, 2, dim)
        return {
            "q01": low.tolist(),
            "q99": high.tolist(),
            "min": (low - 0.5).tolist(),
            "max": (high + 0.5).tolist(),
        }

    return {
        robot.tag: {
            "statistics": {
                "state": {part.name: entry(part.dim) for part in robot.state},
                "action": {part.name: entry(part.dim) for part in robot.action},
            },
            "embodiment_tag": robot.tag,
        }
    }


def make_window(
    robot: Embodiment, frames: int = 3, seed: int = 0, *, actions: bool = False
) -> dict[str, Any]:
    """Return a window with noise for images; with actions, two blocks of them."""
    rng = np.random.default_rng(seed)
    blocks = 2 if actions else 1
    window: dict[str, Any] = {
        view.key: rng.integers(0, 256, (frames, *view.resolution, 3), dtype=np.uint8)
        for view in robot.views
    }
    for part in robot.state:
        window[part.key] = rng.uniform(-1, 1, (blocks, part.dim)).astype(np.float32)
    if actions:
        for part in robot.action:
            shape = (blocks * robot.timing.action_horizon, part.dim)
            window[part.key] = rng.uniform(-1, 1, shape).astype(np.float32)
    window[robot.language] = f"Stack the {seed} Cups"
    return window


@pytest.fixture(params=[*EMBODIMENTS, "pipeline_test_robot:UR5"])
def robot(request, tmp_path, monkeypatch):
    """Every registered robot, and a user's own."""
    (tmp_path / "pipeline_test_robot.py").write_text(USERS_ROBOT)
    monkeypatch.chdir(tmp_path)
    return load_embodiment(request.param)


@pytest.fixture
def pipeline(robot):
    """The pipeline of ``robot``."""
    return Pipeline(robot, Statistics.from_metadata(metadata(robot), robot))


@pytest.fixture
def libero():
    """A pipeline of the LIBERO robot."""
    return robot_pipeline(EMBODIMENTS["libero_sim"])


@pytest.fixture
def droid():
    """A pipeline of the DROID robot, whose joints are relative."""
    return robot_pipeline(EMBODIMENTS["oxe_droid"])


@pytest.fixture
def small():
    """A pipeline of the LIBERO robot with small images of unequal sides."""
    libero = EMBODIMENTS["libero_sim"]
    views = tuple(replace(view, resolution=(60, 80), size=(48, 72)) for view in libero.views)
    return robot_pipeline(replace(libero, views=views))


def robot_pipeline(robot: Embodiment) -> Pipeline:
    return Pipeline(robot, Statistics.from_metadata(metadata(robot), robot))


@pytest.fixture
def window_maker():
    """:func:`make_window`."""
    return make_window


@pytest.fixture
def metadata_maker():
    """:func:`metadata`."""
    return metadata
