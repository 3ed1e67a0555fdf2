"""Demonstrations from the real simulator: kept, resumed, and away from held-back starts."""

import io
import json
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dzrobot.diagnostics.recorded import load_recording, noise_of
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, DatasetError, ProtocolError, UnknownNameError
from dzrobot.recording.catalog import DatasetCatalog, episode_facts
from dzrobot.recording.formats import ATTEMPTS
from dzrobot.recording.lists import lost_attempts
from dzrobot.rollout.demonstrations import collection
from dzrobot.rollout.demonstrations.collection import (
    PLAN_FILE,
    CollectionPlan,
    collect,
    run_attempt,
)
from dzrobot.rollout.demonstrations.record import NoisyActions, replay
from dzrobot.rollout.policy_spec import EXPERT, beside
from dzrobot.training.data import DatasetReader, ReaderOptions

pytestmark = pytest.mark.copies

ROBOT = load_embodiment("libero_mini")
LIFT = CollectionPlan(
    env="dzrobot/lift-v0", env_arguments={"resolution": 128, "quality": "draft"},
    embodiment=ROBOT.tag, episodes=2, noise=0.2, hold_steps=2,
)  # fmt: skip
POINT = CollectionPlan(
    env="dzrobot/point-v0", env_arguments={"resolution": 128}, embodiment=ROBOT.tag,
    policy="rollout_policies:Seeker", episodes=4, noise=0.9, max_steps=16,
)  # fmt: skip
"""Costs no simulator; with so much noise some attempts fail."""


class CtrlCError(Exception):
    """Someone pressed Ctrl-C."""


def interrupt(progress):
    raise CtrlCError


def attempts(root):
    """Return whether the attempt of each seed succeeded."""
    kept = {one.seed: one.success for one in episode_facts(root).values()}
    return dict(sorted((kept | {one.seed: False for one in lost_attempts(root)}).items()))


def data_files(root):
    return {path.name: path.read_bytes() for path in sorted(root.rglob("*.parquet"))}


@pytest.fixture(scope="module")
def lifts(tmp_path_factory):
    """Return two demonstrations of Lift, collected without a break."""
    root = tmp_path_factory.mktemp("straight") / "lift"
    done = collect(LIFT, root)
    assert done.kept == 2
    return root


def test_the_expert_is_a_policy_that_needs_no_adapter_and_no_images(caplog):
    with closing(gym.make(LIFT.env, cameras=False)) as env:
        obs, _ = env.reset(seed=0)
        policy = beside(EXPERT, env)
        policy.reset(episode=0)
        assert policy.act(obs).shape == (7,)
        assert policy.reads_frames() is False
    assert not caplog.records


@pytest.mark.long
def test_demonstrations_are_what_training_reads(lifts):
    reader = DatasetReader(lifts, ROBOT, ReaderOptions(images=True))
    # The expert's own actions, without the noise that was executed: it never turns about x and y.
    actions = reader.states(0)["action.actions"]
    assert np.abs(actions).max() <= 1
    window = reader.window(0)
    assert window["video.image"].shape == (ROBOT.timing.frames, 128, 128, 3)
    assert window["annotation.task"] == "lift the red cube"


@pytest.fixture(scope="module")
def points(policies, tmp_path_factory):
    """Return four demonstrations without a simulator, collected without a break."""
    root = tmp_path_factory.mktemp("straight") / "points"
    assert collect(POINT, root).kept == 4
    found = attempts(root)
    assert set(found.values()) == {True, False}
    assert list(found) == list(range(POINT.first_seed, POINT.first_seed + len(found)))
    return root


def test_what_was_done_is_kept_where_noise_was_added_and_leads_to_the_same_states(points):
    """Also in a sense of its own: what was chosen, repeated, leads elsewhere."""
    catalog = DatasetCatalog.open(points)
    assert noise_of(catalog) == 0
    for number in catalog.episodes.index.tolist():
        recording = load_recording(catalog, number, ROBOT)
        env = gym.make("dzrobot/point-v0", resolution=128, disable_env_checker=True)
        outcome, states = replay(env, recording, ROBOT)
        assert outcome.success
        np.testing.assert_array_equal(states[:-1], recording.states)
        _, other = replay(env, replace(recording, executed=None), ROBOT)
        assert np.abs(other[:-1] - recording.states[: len(other) - 1]).max() > 0.1


def test_without_noise_nothing_is_kept_beside_the_action(policies, tmp_path):
    collect(replace(POINT, noise=0.0, episodes=1), tmp_path / "set")
    catalog = DatasetCatalog.open(tmp_path / "set")
    assert "executed_action" not in catalog.features
    assert load_recording(catalog, 0, ROBOT).executed is None


@pytest.mark.parametrize("given", [None, 64])
def test_images_have_the_size_of_the_robot_that_is_named_unless_another_is_given(tmp_path, given):
    tag, arguments = ROBOT.tag, {}
    if given is not None:
        tag, arguments = f"{ROBOT.tag}@{given}x{given}", {"resolution": given}
    plan = replace(POINT, env_arguments=arguments, embodiment=tag, episodes=1)
    collect(plan, tmp_path / "set")
    features = json.loads((tmp_path / "set/meta/info.json").read_text())["features"]
    sizes = {tuple(one["shape"][:2]) for one in features.values() if len(one["shape"]) == 3}
    assert sizes == {(given or 128, given or 128)}
    with pytest.raises(ProtocolError, match=r"does not fit libero_mini.*--env-arg resolution=128"):
        collect(
            replace(plan, embodiment=ROBOT.tag, env_arguments={"resolution": 64}), tmp_path / "x"
        )


def test_interrupted_and_gone_on_with_is_the_same_to_the_byte(points, tmp_path):
    with pytest.raises(CtrlCError):
        collect(POINT, tmp_path, report=interrupt)
    assert len(attempts(tmp_path)) == 1
    collect(POINT, tmp_path, workers=2)
    assert data_files(tmp_path) == data_files(points)
    assert attempts(tmp_path) == attempts(points)


@pytest.mark.long
def test_a_fresh_simulator_repeats_what_a_used_one_gave(lifts):
    """To the bit, so that an interruption, which restarts simulators, does not show."""
    again = run_attempt(LIFT, max(attempts(lifts)))
    assert again.outcome.success
    rows = pq.read_table(max(lifts.rglob("episode_*.parquet"))).to_pylist()
    view = ROBOT.views[0]
    for row, (observation, action, extra) in zip(rows, again.frames, strict=True):
        np.testing.assert_array_equal(row["action"], action)
        np.testing.assert_array_equal(row["executed_action"], extra["executed_action"])
        np.testing.assert_array_equal(row["observation.state"], observation["state.state"])
        image = Image.open(io.BytesIO(row[view.feature]["bytes"]))
        np.testing.assert_array_equal(image, observation[view.key])


def test_a_collection_that_is_whole_stays_as_it_is(points, tmp_path):
    root = shutil.copytree(points, tmp_path / "set")
    before = attempts(root)
    done = collect(POINT, root)
    assert (done.kept, done.attempts) == (4, len(before))
    assert attempts(root) == before
    more = CollectionPlan(**{**vars(POINT), "episodes": 5})
    assert collect(more, root).kept == 5


def test_killed_while_a_failure_is_noted(points, tmp_path):
    root = shutil.copytree(points, tmp_path / "set")
    path = root / ATTEMPTS
    path.write_bytes(path.read_bytes()[:-5])
    more = CollectionPlan(**{**vars(POINT), "episodes": 5})
    collect(more, root)
    straight = tmp_path / "straight"
    collect(more, straight)
    assert attempts(root) == attempts(straight)
    assert data_files(root) == data_files(straight)


def test_attempts_run_side_by_side_and_none_is_made_twice(points, tmp_path, monkeypatch):
    """Where earlier failures are not noted, they are made again; what was kept is not."""
    root = shutil.copytree(points, tmp_path / "set")
    (root / ATTEMPTS).unlink()
    started = []

    class Pool:
        size = 2

        def start(self, plan, seed):
            started.append(seed)
            return partial(run_attempt, plan, seed)

    monkeypatch.setattr(collection, "_pool", lambda _: nullcontext(Pool()))
    more = CollectionPlan(**{**vars(POINT), "episodes": 5})
    collect(more, root)
    assert len(started) == len(set(started))
    kept = {seed for seed, success in attempts(points).items() if success}
    assert not kept & set(started)
    assert {seed for seed, success in attempts(points).items() if not success} < set(started)


def test_another_plan_is_refused_and_nothing_is_lost(points):
    before = (points / PLAN_FILE).read_bytes()
    other = CollectionPlan(**{**vars(POINT), "noise": 0.5})
    with pytest.raises(ProtocolError, match=r"noise: 0\.9 there, 0\.5 given"):
        collect(other, points)
    assert (points / PLAN_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (PLAN_FILE, b"null", "collection.json"),
        (PLAN_FILE, b"[" * 100_000, "collection.json is nested 100000 levels"),
        (PLAN_FILE, b'{"env": "\xe9"}', "collection.json is not UTF-8"),
        (PLAN_FILE, b'{"surplus": 1}', "surplus: 1 there, None given"),
        (ATTEMPTS, b"null\n", "attempts.jsonl:1"),
        (ATTEMPTS, b'{"seed": 1000000}\n', "outcome: is missing"),
        (ATTEMPTS, b"[" * 100_000 + b"\n", "attempts.jsonl:1 is nested"),
    ],
)  # fmt: skip
def test_corrupted_notes_of_a_collection_are_one_message(points, tmp_path, name, content, said):
    root = shutil.copytree(points, tmp_path / "set")
    (root / name).write_bytes(content)
    with pytest.raises((ProtocolError, DatasetError), match=said):
        collect(POINT, root)
    assert data_files(root) == data_files(points)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"env": "nobody/knows-v0"}, UnknownNameError),
        ({"env_arguments": {"resolusion": 128}}, UnknownNameError),
        ({"env_arguments": {"resolution": "wide"}}, ConfigError),
        ({"policy": "nobody"}, UnknownNameError),
        ({"policy": "nobody:Expert"}, UnknownNameError),
        ({"policy": "rollout_policies:Nobody"}, UnknownNameError),
    ],
)
def test_what_cannot_be_collected_is_said_before_anything_is_written(tmp_path, changes, error):
    with pytest.raises(error):
        collect(CollectionPlan(**{**vars(POINT), **changes}), tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_an_attempt_that_raises_ends_the_collection_and_keeps_the_rest(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    monkeypatch.setenv("BROKEN", str(broken))
    broken.touch()
    plan = CollectionPlan(**{**vars(POINT), "policy": "rollout_policies:Raising"})
    with pytest.raises(ProtocolError, match="raised RuntimeError: the expert broke"):
        collect(plan, tmp_path / "set")
    broken.unlink()
    assert collect(plan, tmp_path / "set").kept == 4


def test_each_plan_has_its_own_limit_of_steps(policies):
    """Two plans in one process: the second does not act in the environment of the first."""
    seeds = range(POINT.first_seed, POINT.first_seed + 3)
    short = CollectionPlan(**{**vars(POINT), "max_steps": 3})
    assert not any(run_attempt(short, seed).outcome.success for seed in seeds)
    assert any(run_attempt(POINT, seed).outcome.success for seed in seeds)


def test_actions_stay_within_the_action_space_and_not_within_another():
    """Absolute joint angles go beyond 1; clipped there they are another motion, unseen."""
    env = gym.Env()
    env.action_space = gym.spaces.Box(-4.0, 4.0, (8,), np.float32)
    wanted = np.array([0.3, -2.2, 1.9, 0, 0, 0, 3.5, 9.0], np.float32)
    done = NoisyActions(env, 0.0).action(wanted)
    assert done.tolist() == [*wanted[:7].tolist(), 4.0]


def test_starts_are_taken_in_turn():
    plan = CollectionPlan(env="any", starts=(20, 21, 22), first_seed=100)
    assert [plan.init_state_id(seed) for seed in range(100, 105)] == [20, 21, 22, 20, 21]
    assert CollectionPlan(env="any").init_state_id(7) is None


@pytest.mark.long
@pytest.mark.libero
def test_held_back_starts_stay_unseen(libero_assets):
    plan = CollectionPlan(
        env="dzrobot/libero_object-v0", embodiment=ROBOT.tag, max_steps=1, starts=(41, 42),
        env_arguments={"cameras": False, "task_id": 3},
    )  # fmt: skip
    begun = [
        run_attempt(plan, plan.first_seed + number).outcome.init_state_id for number in range(3)
    ]
    assert begun == [41, 42, 41]
