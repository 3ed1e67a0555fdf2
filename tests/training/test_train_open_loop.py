"""Open-loop errors: against the decode of the recorded chunk."""

import numpy as np
import train_worker
import train_worlds

from dzrobot.training.run.evaluation import action_errors

KEY = "libero_sim/action.actions"


def errors(data, batch, predicted):
    """Return (blocks of all samples, horizon, dim)."""
    return np.stack([error for _, error in action_errors(data, batch, predicted)])


def test_errors_are_those_of_the_decoded_chunk(train_root, solo):
    run = train_worker.trainer(solo, train_root, runner__micro_batch_size=4)
    data = run.components.datasets.train
    batch = next(run.batches(1))
    recorded = batch["action"]
    dim = train_worlds.ROBOT.action_dim
    blocks = recorded[..., :dim].reshape(-1, train_worlds.ROBOT.timing.action_horizon, dim)
    # What lies beyond the statistics is clipped, so that it cannot be decoded.
    inside = (blocks.abs() < 1).numpy()
    assert inside.mean() > 0.5
    assert errors(data, batch, recorded)[inside].max() <= 1e-5
    shifted = recorded.clone()
    shifted[:, 3] += 0.25
    found = errors(data, batch, shifted)
    timing, pipeline = train_worlds.ROBOT.timing, data.sources[0].pipeline
    expected = []
    for both in zip(recorded, shifted, strict=True):
        for block in range(timing.blocks):
            rows = slice(block * timing.action_horizon, (block + 1) * timing.action_horizon)
            one, other = (pipeline.decode(chunk[rows], {})["action.actions"] for chunk in both)
            expected.append(np.abs(other.astype(np.float64) - one))
    np.testing.assert_allclose(found[inside], np.stack(expected)[inside], rtol=0, atol=1e-5)
    assert found[:, 3].max() > 0.01
    assert {key for key, _ in action_errors(data, batch, recorded)} == {KEY}
