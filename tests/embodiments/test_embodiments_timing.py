"""Frame grids and windows: exact vectors, then properties."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.timing import (
    FRAME_GRIDS,
    Timing,
    aligned_offsets,
    frame_grid,
    multi_anchor_window,
    padded_actions,
    valid_anchors,
    window,
)
from dzrobot.errors import ConfigError, DatasetError, UnknownNameError

# By hand: (robot, start, length, frames, state rows, first and last action).
DROID_FRAMES = [
    0, 3, 6, 9, 12, 15, 18, 21,
    24, 27, 30, 33, 36, 39, 42, 45,
    48, 51, 54, 57, 60, 63, 66, 69,
    72, 75, 78, 81, 84, 87, 90, 93,
    96,
]  # fmt: skip
LIBERO_FRAMES = [
    0, 2, 4, 6, 8, 10, 12, 14,
    16, 18, 20, 22, 24, 26, 28, 30,
    32, 34, 36, 38, 40, 42, 44, 46,
    48, 50, 52, 54, 56, 58, 60, 62,
    64,
]  # fmt: skip
FRANKA_FRAMES = [
    0, 2, 3, 4, 6, 8, 9, 10,
    12, 14, 15, 16, 18, 20, 21, 22,
    24, 26, 27, 28, 30, 32, 33, 34,
    36, 38, 39, 40, 42, 44, 45, 46,
    48,
]  # fmt: skip
BY_HAND = [
    ("oxe_droid", 0, 97, DROID_FRAMES, [0, 24, 48, 72], (0, 95)),
    ("oxe_droid", 50, 300, [50 + f for f in DROID_FRAMES], [50, 74, 98, 122], (50, 145)),
    ("oxe_droid", 203, 300, [203 + f for f in DROID_FRAMES], [203, 227, 251, 275], (203, 298)),
    ("libero_sim", 0, 180, LIBERO_FRAMES, [0, 16, 32, 48], (0, 63)),
    ("libero_sim", 31, 180, [31 + f for f in LIBERO_FRAMES], [31, 47, 63, 79], (31, 94)),
    ("libero_sim", 115, 180, [115 + f for f in LIBERO_FRAMES], [115, 131, 147, 163], (115, 178)),
    ("franka_pnp", 0, 70, FRANKA_FRAMES, [0, 12, 24, 36], (0, 47)),
    ("franka_pnp", 7, 70, [7 + f for f in FRANKA_FRAMES], [7, 19, 31, 43], (7, 54)),
    ("franka_pnp", 21, 70, [21 + f for f in FRANKA_FRAMES], [21, 33, 45, 57], (21, 68)),
]


@pytest.mark.parametrize(("tag", "t", "length", "frames", "states", "actions"), BY_HAND)
def test_exact_rows(tag, t, length, frames, states, actions):
    rows = window(t, length, EMBODIMENTS[tag].timing)
    assert rows.video.tolist() == frames
    assert rows.state.tolist() == states
    assert rows.action.tolist() == list(range(actions[0], actions[1] + 1))
    assert {part.dtype for part in rows} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("tag", "last"), [("oxe_droid", 203), ("libero_sim", 235), ("franka_pnp", 251)]
)
def test_first_and_last_start_of_300_rows(tag, last):
    starts = valid_anchors(300, EMBODIMENTS[tag].timing)
    assert starts.tolist() == list(range(last + 1))


TIMINGS = st.builds(
    lambda horizon, blocks: Timing(control_hz=10, action_horizon=horizon, blocks=blocks),
    st.integers(8, 60),
    st.integers(1, 5),
)


@given(TIMINGS)
def test_derived_grid_covers_exactly_its_block(timing):
    offsets = timing.frame_offsets
    assert offsets == aligned_offsets(timing.action_horizon)
    assert len(offsets) == 8
    assert max(offsets) + offsets[1] - offsets[0] == timing.anchor_stride == timing.action_horizon


@given(TIMINGS, st.integers(0, 400), st.data())
def test_windows_stay_in_range_and_are_even(timing, length, data):
    starts = valid_anchors(length, timing)
    assert len(starts) == max(0, length - timing.span)
    if not len(starts):
        return
    rows = window(data.draw(st.sampled_from(starts.tolist())), length, timing)
    assert rows.is_complete(timing)
    assert min(rows.video) >= 0
    assert max(rows.video) <= length - 1
    assert max(rows.action) <= length - 1
    step = timing.action_horizon / 8
    assert set(np.diff(rows.video)) <= {int(np.floor(step)), int(np.ceil(step))}
    assert set(np.diff(rows.action)) == {1}
    # Frame 8 b is the state row of block b, and its first action.
    assert rows.video[:-1:8].tolist() == rows.state.tolist()
    assert rows.action[:: timing.action_horizon].tolist() == rows.state.tolist()
    assert rows.video[-1] == rows.action[-1] + 1


@given(TIMINGS, st.integers(0, 400), st.data())
def test_a_padded_window_repeats_the_last_row_and_nothing_else(timing, length, data):
    padded = replace(timing, pad_tail=True)
    starts = valid_anchors(length, padded)
    assert starts.tolist() == list(range(length))
    if not length:
        return
    t = data.draw(st.sampled_from(starts.tolist()))
    rows, whole = window(t, length, padded), window(t, length + timing.span, timing)
    for part, wanted in zip(rows, whole, strict=True):
        assert part.tolist() == [min(row, length - 1) for row in wanted]
    count = padded_actions(t, length, padded)
    assert count == sum(row >= length for row in whole.action)
    assert count < timing.actions
    assert padded_actions(t, length, timing) == 0


def test_the_published_walk_pads_nothing():
    with pytest.raises(ConfigError, match="pad_tail=True needs sampling='aligned'"):
        Timing(control_hz=10, action_horizon=8, sampling="multi_anchor", pad_tail=True)


RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=5)


@given(RUNS, st.integers(8, 12))
def test_samples_keep_to_one_instruction(runs, horizon):
    labels = [label for label, count in runs for _ in range(count)]
    timing = Timing(control_hz=10, action_horizon=horizon, blocks=1)
    starts = valid_anchors(len(labels), timing, labels).tolist()
    expected = [
        t for t in range(len(labels) - horizon) if len(set(labels[t : t + horizon + 1])) == 1
    ]
    assert starts == expected
    for t in range(len(labels) - horizon):
        if t not in starts:
            with pytest.raises(DatasetError, match="instruction changes"):
                window(t, len(labels), timing, labels)


@pytest.mark.parametrize("t", [-1, 204, 300])
def test_a_start_out_of_range_is_refused(t):
    with pytest.raises(DatasetError, match=r"take t from valid_anchors \(0\.\.203\)"):
        window(t, 300, EMBODIMENTS["oxe_droid"].timing)


def test_labels_need_one_per_row():
    with pytest.raises(DatasetError, match="one per row"):
        valid_anchors(10, EMBODIMENTS["oxe_droid"].timing, [0, 0])


REFUSED = {
    "control_hz=0": {"control_hz": 0},
    "blocks=0": {"blocks": 0},
    "action_horizon=0": {"action_horizon": 0},
    "give at least 4": {"action_horizon": 3},
    "give a multiple of 4": {"frame_offsets": (0, 4, 8)},
    "must start at 0 and rise": {"frame_offsets": (0, 2, 2, 4)},
    "do not cover action_horizon=12 evenly": {"frame_offsets": (0, 1, 2, 3, 4, 5, 6, 7)},
    "gaps between 1 and 5": {"frame_offsets": (0, 1, 2, 3, 4, 5, 6, 11)},
    "differs from action_horizon=12": {"anchor_stride": 24},
    "sampling='random'": {"sampling": "random"},
}


@pytest.mark.parametrize(("message", "fields"), REFUSED.items(), ids=REFUSED)
def test_timing_refuses(message, fields):
    with pytest.raises(ConfigError, match=message):
        Timing(**{"control_hz": 10, "action_horizon": 12, **fields})


def test_four_frames_per_block_are_a_grid_too():
    timing = Timing(control_hz=10, action_horizon=12, frame_offsets=(0, 3, 6, 9))
    assert timing.frames == 17
    assert window(0, 49, timing).video.tolist() == list(range(0, 49, 3))


def test_published_grids_by_name():
    assert frame_grid("rlinf_libero_5b").frame_offsets == (0, 3, 6, 9, 12, 15, 18, 21)
    assert frame_grid("rlinf_libero_5b").anchor_stride == 16
    assert frame_grid("rlinf_franka").frame_offsets == (0, 1, 2, 3, 4, 5, 6, 7)
    assert frame_grid("official_droid").anchor_stride == 24
    with pytest.raises(UnknownNameError, match="Did you mean 'rlinf_franka'"):
        frame_grid("rlinf_frank")


def test_published_walk_overlaps_blocks_where_ours_does_not():
    published = window(0, 180, FRAME_GRIDS["rlinf_libero_5b"])
    assert set(np.diff(published.video)) == {1, 2, 3}
    assert published.video[-1] == published.action[-1] + 9


def test_published_walk_needs_one_row_more_than_its_actions():
    assert valid_anchors(48, FRAME_GRIDS["rlinf_franka"]).tolist() == []
    assert valid_anchors(49, FRAME_GRIDS["rlinf_franka"]).tolist() == [0, 12, 24, 36, 48]


@pytest.mark.parametrize("name", FRAME_GRIDS)
def test_published_walk_near_the_end_is_refused_not_padded(name):
    timing = FRAME_GRIDS[name]
    length = timing.span + 2 * timing.anchor_stride
    seeds = valid_anchors(length, timing).tolist()
    assert seeds
    for t in range(length):
        rows = multi_anchor_window(t, np.zeros(length, np.int64), timing)
        assert rows.is_complete(timing) == (t in seeds)
        assert all(0 <= row < length for part in rows for row in part)
        if t not in seeds:
            with pytest.raises(DatasetError, match="whole blocks"):
                window(t, length, timing)


@pytest.mark.parametrize(
    ("length", "share"), [(96, 0.0), (97, 5 / 97), (100, 0.20), (110, 0.64), (120, 0.98)]
)
def test_share_of_usable_seeds_equals_what_was_measured(length, share):
    """docs/model.md, section 8: DROID with four blocks under the published walk."""
    seeds = valid_anchors(length, FRAME_GRIDS["official_droid"])
    assert len(seeds) / length == pytest.approx(share, abs=0.006)


def test_replacing_the_horizon_derives_the_grid_again():
    timing = EMBODIMENTS["libero_sim"].timing
    with pytest.raises(ConfigError, match="frame_offsets=\\(\\) derives them"):
        replace(timing, action_horizon=24, anchor_stride=0)
    assert replace(
        timing, action_horizon=24, anchor_stride=0, frame_offsets=()
    ).frame_offsets == tuple(range(0, 24, 3))
