import numpy as np
import pytest
from data_worlds import ROBOT

from dzrobot.embodiments.timing import valid_anchors
from dzrobot.errors import ConfigError
from dzrobot.training.data import LoaderPlan
from dzrobot.training.data.sampler import BLOCK, SampleStream, permute
from dzrobot.training.data.windows import build_windows


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permutations_are_permutations(size):
    places = permute(np.arange(size), size, key=7)
    assert sorted(places.tolist()) == list(range(size))
    if size > 3:
        assert places.tolist() != permute(np.arange(size), size, key=8).tolist()
        # Each place is computed alone.
        assert permute(np.array([size - 1]), size, key=7)[0] == places[-1]


def test_permutations_are_spread():
    """Neighbors of the stream are no neighbors of the dataset."""
    places = permute(np.arange(100_000), 100_000, key=1)
    assert abs(np.corrcoef(np.arange(100_000), places)[0, 1]) < 0.01
    gaps = np.abs(np.diff(places))
    assert 0.3 < gaps.mean() / 100_000 < 0.37


@pytest.mark.parametrize(("world", "micro"), [(1, 6), (2, 3), (3, 1), (2, 1)])
def test_every_window_exactly_once_per_epoch(world, micro):
    """A12: over all ranks and parts; the stream does not depend on how it is shared out."""
    windows, batch = 103, 6
    stream = SampleStream([windows], [1.0], seed=5)
    found = {}
    for rank in range(world):
        plan = LoaderPlan(
            global_batch=batch, micro_batch=micro, rank=rank, world_size=world, stop_step=1
        )
        for step in range(3 * windows // batch + 1):
            for part in range(plan.parts):
                slots = [step * batch + slot for slot in plan.slots(part)]
                found |= dict(zip(slots, stream.at(slots).window.tolist(), strict=True))
    order = [found[position] for position in range(3 * windows)]
    for lap in range(3):
        assert sorted(order[lap * windows : (lap + 1) * windows]) == list(range(windows))
    assert order[:windows] != order[windows : 2 * windows]
    assert order == stream.at(range(3 * windows)).window.tolist()


def test_mixtures_keep_their_weights_and_cover_each_part():
    sizes, weights = [700, 50, 311], [4, 1, 2.5]
    stream = SampleStream(sizes, weights, seed=0)
    draws = stream.at(range(20 * BLOCK))
    share = np.bincount(draws.part) / len(draws.part)
    np.testing.assert_allclose(share, np.array(weights) / sum(weights), atol=3 / len(draws.part))
    # Within every stretch the shares hold, too.
    first = np.bincount(draws.part[: 2 * BLOCK]) / (2 * BLOCK)
    np.testing.assert_allclose(first, np.array(weights) / sum(weights), atol=0.002)
    for part, size in enumerate(sizes):
        mine = draws.window[draws.part == part]
        laps = draws.epoch[draws.part == part]
        for lap in range(len(mine) // size):
            assert sorted(mine[lap * size : (lap + 1) * size].tolist()) == list(range(size))
            assert (laps[lap * size : (lap + 1) * size] == lap).all()
    anywhere = np.random.default_rng(0).permutation(20 * BLOCK)[:500]
    again = stream.at(anywhere)
    np.testing.assert_array_equal(again.window, draws.window[anywhere])
    np.testing.assert_array_equal(again.part, draws.part[anywhere])


def test_far_positions_cost_nothing():
    stream = SampleStream([273_465, 1000], [9, 1], seed=0)
    draws = stream.at([10**12, 10**12 + 1])
    assert (draws.epoch > 0).all()


def test_bad_weights_and_batches_are_refused():
    with pytest.raises(ConfigError, match="above 0"):
        SampleStream([5, 5], [1, 0], seed=0)
    with pytest.raises(ConfigError, match="at least one"):
        SampleStream([5, 0], [1, 1], seed=0)
    with pytest.raises(ConfigError, match="differ by more than"):
        SampleStream([5, 5], [1, 1e-9], seed=0)
    with pytest.raises(ConfigError, match="nearest that is: 12"):
        LoaderPlan(global_batch=10, micro_batch=3, world_size=2, stop_step=1)
    with pytest.raises(ConfigError, match="rank=2 of world_size=2"):
        LoaderPlan(global_batch=8, micro_batch=1, rank=2, world_size=2, stop_step=1)


def test_the_window_table_lists_the_valid_starts():
    """Whole episodes, changes of instruction, rows without one, episodes left out."""
    rng = np.random.default_rng(0)
    lengths = np.array([40, 16, 17, 60, 90, 33])
    labels = [np.zeros(length, dtype=np.int64) for length in lengths]
    labels[3][25:] = 1
    labels[4][rng.integers(0, 90, 1)[0] :] = -1
    table = build_windows(lengths, ROBOT.timing, labels.__getitem__, {5: "not selected"})
    expected = [
        (ordinal, int(start))
        for ordinal in range(5)
        for start in valid_anchors(int(lengths[ordinal]), ROBOT.timing, labels[ordinal])
        if labels[ordinal][start] >= 0
    ]
    assert [table.locate(i) for i in range(len(table))] == expected
    assert table.dropped == {"too short": 1, "not selected": 1}
    for ordinal in range(6):
        assert table.starts(ordinal).tolist() == [s for e, s in expected if e == ordinal]
    with pytest.raises(IndexError):
        table.locate(len(table))
