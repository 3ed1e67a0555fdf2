"""Numbers: there and back, relative actions, constant numbers, grippers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.errors import StatisticsError
from dzrobot.modality.pipeline import Pipeline
from dzrobot.modality.stats import Bounds, Statistics

DROID, LIBERO = EMBODIMENTS["oxe_droid"], EMBODIMENTS["libero_sim"]


def bounded(robot, low, high):
    """Return a pipeline with the same bounds everywhere."""
    parts = (*robot.state, *robot.action)
    bounds = {part.key: Bounds((low,) * part.dim, (high,) * part.dim) for part in parts}
    return Pipeline(robot, Statistics(robot.tag, bounds, "made up"))


def inside(bounds, fractions):
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    return (low + fractions * (high - low)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(EMBODIMENTS)),
    st.lists(st.floats(0, 1), min_size=8, max_size=8),
    st.lists(st.floats(-3, 3), min_size=7, max_size=7),
    st.integers(0, 2**16),
)
def test_decoding_what_was_encoded_returns_it(tag, fractions, joints, seed):
    """Within the quantiles, for absolute and for relative parts."""
    robot = EMBODIMENTS[tag]
    rng = np.random.default_rng(seed)
    bounds = {}
    for part in (*robot.state, *robot.action):
        low = rng.uniform(-2, 2, part.dim)
        bounds[part.key] = Bounds(tuple(low), tuple(low + rng.uniform(0.01, 3, part.dim)))
    pipeline = Pipeline(robot, Statistics(tag, bounds, "made up"))
    horizon = robot.timing.action_horizon

    window, start = {robot.language: "go"}, 0
    for part in robot.state:
        value = np.resize(np.asarray(joints, np.float32), part.dim)
        window[part.key] = value[None]
    for part in robot.action:
        drawn = inside(bounds[part.key], np.resize(fractions, part.dim))
        if part.reference is not None:
            drawn = drawn + window[part.reference][0]
        window[part.key] = np.tile(drawn, (horizon, 1))
        start += part.dim
    encoded = pipeline.encode_vectors(window)
    assert encoded["action"].abs().max() <= 1
    decoded = pipeline.decode(encoded["action"], {key: window[key][0] for key in robot.state_keys})
    assert tuple(decoded) == robot.action_keys
    for key in robot.action_keys:
        np.testing.assert_allclose(decoded[key], window[key], atol=3e-6)


def test_normalization_by_hand():
    pipeline = bounded(LIBERO, -2.0, 6.0)
    state = np.asarray([[-2, 6, 2, 0, -3, 7, 4, 5]], np.float32)
    encoded = pipeline.encode_vectors({"state.state": state, LIBERO.language: "go"})
    expected = [-1, 1, 0, -0.5, -1, 1, 0.5, 0.75]
    assert encoded["state"][0, :8].tolist() == expected
    assert not encoded["state"][0, 8:].any()
    assert encoded["state_mask"][0].tolist() == [True] * 8 + [False] * 56
    assert "action" not in encoded


def test_prediction_beyond_the_bounds_is_not_clipped():
    pipeline = bounded(LIBERO, -2.0, 6.0)
    chunk = np.full((16, 32), 1.5, np.float32)
    assert set(pipeline.decode(chunk, {})["action.actions"].ravel()) == {8.0}


def test_relative_actions_by_hand():
    """Each block loses the state at its own start; the decoded chunk gains the last state."""
    pipeline = bounded(DROID, -4.0, 4.0)
    joints = np.stack([np.full(7, 1.0), np.full(7, 3.0)]).astype(np.float32)
    actions = np.concatenate([np.full((24, 7), 2.0), np.full((24, 7), 2.0)]).astype(np.float32)
    window = {
        "state.joint_position": joints,
        "state.gripper_position": np.zeros((2, 1), np.float32),
        "action.joint_position": actions,
        "action.gripper_position": np.ones((48, 1), np.float32),
        DROID.language: "go",
    }
    action = pipeline.encode_vectors(window)["action"]
    assert set(action[:24, :7].ravel().tolist()) == {0.25}
    assert set(action[24:, :7].ravel().tolist()) == {-0.25}
    assert set(action[:, 7].tolist()) == {0.25}
    decoded = pipeline.decode(action[24:], {"state.joint_position": joints[1]})
    assert set(decoded["action.joint_position"].ravel()) == {2.0}
    assert set(decoded["action.gripper_position"].ravel()) == {1.0}


def test_relative_actions_with_bounds_of_every_step_by_hand():
    """Each step of a block has a range of its own, for whole blocks and for their first steps."""
    horizon = DROID.timing.action_horizon
    plain = bounded(DROID, -4.0, 4.0).statistics.bounds
    wide = tuple((float(step + 1),) * 7 for step in range(horizon))
    narrow = tuple(tuple(-value for value in row) for row in wide)
    bounds = plain | {"action.joint_position": Bounds(narrow, wide)}
    pipeline = Pipeline(DROID, Statistics(DROID.tag, bounds, "made up"))
    joints = np.stack([np.full(7, 1.0), np.full(7, 3.0)]).astype(np.float32)
    # Step k of a block moves by (k + 1) / 2, half of its own range.
    moved = np.repeat((np.arange(horizon, dtype=np.float32) + 1)[:, None] / 2, 7, axis=1)
    window = {
        "state.joint_position": joints,
        "state.gripper_position": np.zeros((2, 1), np.float32),
        "action.joint_position": np.concatenate([joints[0] + moved, joints[1] + moved]),
        "action.gripper_position": np.ones((2 * horizon, 1), np.float32),
        DROID.language: "go",
    }
    action = pipeline.encode_vectors(window)["action"]
    np.testing.assert_allclose(action[:, :7], 0.5, atol=1e-6)
    state = {"state.joint_position": joints[1]}
    decoded = pipeline.decode(torch.stack([action[horizon:]] * 3), {
        "state.joint_position": np.stack([joints[1]] * 3)
    })["action.joint_position"]  # fmt: skip
    np.testing.assert_allclose(decoded[2], joints[1] + moved, atol=1e-5)
    targets = pipeline.decode_targets(action[horizon:], state)
    np.testing.assert_allclose(pipeline.encode_targets(targets[:5], state)[:, :7], 0.5, atol=1e-6)


def test_batches_of_chunks_use_their_own_state():
    pipeline = bounded(DROID, -4.0, 4.0)
    joints = np.stack([np.full(7, 1.0), np.full(7, 3.0)]).astype(np.float32)
    decoded = pipeline.decode(torch.zeros(2, 24, 32), {"state.joint_position": joints})
    assert decoded["action.joint_position"].shape == (2, 24, 7)
    assert set(decoded["action.joint_position"][0].ravel()) == {1.0}
    assert set(decoded["action.joint_position"][1].ravel()) == {3.0}


def test_numbers_clearly_beyond_the_statistics_are_counted():
    """A tenth of the width is let pass, constant numbers do not count, and the last row does."""
    pipeline = bounded(LIBERO, -2.0, 6.0)
    inside, beyond = np.full(8, 6.7, np.float32), np.full(8, 6.9, np.float32)
    assert pipeline.outside({"state.state": inside[None]}) == 0
    assert pipeline.outside({"state.state": (4 - beyond)[None]}) == 1
    assert pipeline.outside({"state.state": np.stack([beyond, inside])}) == 0
    some = np.concatenate([beyond[:2], inside[:6]])
    assert pipeline.outside({"state.state": some[None]}) == 0.25
    assert bounded(LIBERO, 0.5, 0.5).outside({"state.state": beyond[None]}) is None


def test_a_constant_number_passes_through_and_is_clipped():
    pipeline = bounded(LIBERO, 0.5, 0.5)
    state = np.asarray([[0.5, 0.25, -0.5, 3, -3, 0, 1, -1]], np.float32)
    encoded = pipeline.encode_vectors({"state.state": state, LIBERO.language: "go"})
    assert encoded["state"][0, :8].tolist() == [0.5, 0.25, -0.5, 1, -1, 0, 1, -1]
    assert set(pipeline.decode(torch.ones(16, 32), {})["action.actions"].ravel()) == {0.5}


def test_a_constant_number_under_extremes_becomes_zero():
    robot = replace(LIBERO, state=(replace(LIBERO.state[0], normalization="min_max"),))
    encoded = bounded(robot, 0.5, 0.5).encode_vectors(
        {"state.state": np.ones((1, 8), np.float32), LIBERO.language: "go"}
    )
    assert not encoded["state"].any()


@pytest.mark.parametrize(
    ("robot", "position", "given", "wanted"),
    [
        (LIBERO, 6, [0.001, -0.001, 0.0, 3.0], [1, -1, -1, 1]),
        (DROID, 7, [0.51, 0.49, 0.5, 7.0], [1, 0, 0, 1]),
    ],
)
def test_grippers_become_two_way_only_as_commands(robot, position, given, wanted):
    pipeline = bounded(robot, -1.0, 1.0)
    chunk = np.full((4, 32), 0.25, np.float32)
    chunk[:, position] = given
    state = {"state.joint_position": np.zeros(7, np.float32)}
    commands = pipeline.decode_actions(chunk, state)
    assert commands.shape == (4, robot.action_dim)
    assert commands.dtype == np.float32
    assert commands[:, position].tolist() == wanted
    others = np.delete(commands, position, axis=1)
    np.testing.assert_allclose(others, 0.25, atol=1e-6)
    raw = np.concatenate(list(pipeline.decode(chunk, state).values()), axis=-1)
    np.testing.assert_allclose(raw[:, position], given, atol=1e-6)


def test_half_precision_chunks_on_any_device_decode():
    pipeline = bounded(LIBERO, -1.0, 1.0)
    chunk = torch.full((16, 32), 0.5, dtype=torch.bfloat16, requires_grad=True)
    assert set(pipeline.decode(chunk, {})["action.actions"].ravel()) == {0.5}


def test_statistics_of_another_robot_are_refused():
    statistics = bounded(LIBERO, -1.0, 1.0).statistics
    with pytest.raises(StatisticsError, match=r"'libero_sim' do not fit state.joint_position"):
        Pipeline(DROID, statistics)
    with pytest.raises(StatisticsError, match=r"do not fit state.state \(19 numbers\)"):
        Pipeline(EMBODIMENTS["franka_pnp"], statistics)
