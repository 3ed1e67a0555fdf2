"""Demonstrations from the real simulator: kept, gone on with, and away from held-back starts."""

import json

import numpy as np
import pytest

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ProtocolError
from dzrobot.rollout.collection import (
    ATTEMPTS_FILE,
    PLAN_FILE,
    CollectionPlan,
    collect,
    run_attempt,
)
from dzrobot.training.data import DatasetReader, ReaderOptions

ROBOT = load_embodiment("libero_mini")
LIFT = CollectionPlan(
    env="dzrobot/lift-v0", env_arguments={"resolution": 128, "quality": "draft"},
    embodiment=ROBOT.tag, episodes=2, noise=0.2, hold_steps=2,
)  # fmt: skip


class CtrlCError(Exception):
    """Someone pressed Ctrl-C."""


def interrupt(progress):
    raise CtrlCError


def attempts(root):
    return [json.loads(line) for line in (root / ATTEMPTS_FILE).read_text().splitlines()]


def data_files(root):
    return {path.name: path.read_bytes() for path in sorted(root.rglob("*.parquet"))}


@pytest.fixture(scope="module")
def lifts(tmp_path_factory):
    """Return two demonstrations of Lift, collected without a break."""
    root = tmp_path_factory.mktemp("straight") / "lift"
    done = collect(LIFT, root)
    assert done.episodes == 2
    return root


def test_demonstrations_are_what_training_reads(lifts):
    reader = DatasetReader(lifts, ROBOT, ReaderOptions(images=True))
    assert reader.catalog.episodes.length.tolist() == [
        attempt["steps"] for attempt in attempts(lifts) if attempt["success"]
    ]
    # The expert's own actions, without the noise that was executed: it never turns about x and y.
    actions = reader.states(0)["action.actions"]
    assert np.abs(actions).max() <= 1
    window = reader.window(0)
    assert window["video.image"].shape == (ROBOT.timing.frames, 128, 128, 3)
    assert window["annotation.task"] == "lift the red cube"


def test_interrupted_and_gone_on_with_is_the_same_to_the_byte(lifts, tmp_path):
    with pytest.raises(CtrlCError):
        collect(LIFT, tmp_path, report=interrupt)
    assert len(attempts(tmp_path)) == 1
    collect(LIFT, tmp_path, workers=2)
    assert data_files(tmp_path) == data_files(lifts)
    assert attempts(tmp_path) == attempts(lifts)


def test_another_plan_is_refused_and_nothing_is_lost(lifts):
    before = (lifts / PLAN_FILE).read_bytes()
    other = CollectionPlan(**{**vars(LIFT), "noise": 0.5})
    with pytest.raises(ProtocolError, match=r"noise: 0\.2 there, 0\.5 given"):
        collect(other, lifts)
    assert (lifts / PLAN_FILE).read_bytes() == before


def test_starts_are_taken_in_turn():
    plan = CollectionPlan(env="any", starts=(20, 21, 22), first_seed=100)
    assert [plan.init_state_id(seed) for seed in range(100, 105)] == [20, 21, 22, 20, 21]
    assert CollectionPlan(env="any").init_state_id(7) is None


@pytest.mark.libero
def test_held_back_starts_stay_unseen(libero_assets):
    plan = CollectionPlan(
        env="dzrobot/libero_object-v0", embodiment=ROBOT.tag, max_steps=1, starts=(41, 42),
        env_arguments={"cameras": False, "task_id": 3},
    )  # fmt: skip
    begun = [run_attempt(plan, plan.first_seed + number).init_state_id for number in range(3)]
    assert begun == [41, 42, 41]
