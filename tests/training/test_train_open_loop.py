"""Open-loop errors: against the decode of the recorded chunk."""

import json

import numpy as np
import pytest
import torch
import train_worker
import train_worlds

from dzrobot.training.run import evaluation
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


def trained(solo, root, folder, **changes):
    run = train_worker.trainer(
        solo, root, runner__output_dir=folder, runner__max_steps=4, runner__eval_interval=2,
        optim__lr=0.01, runner__micro_batch_size=4, **changes,
    )  # fmt: skip
    run.run()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return run, [json.loads(line) for line in lines]


def test_nothing_of_the_training_depends_on_own_rows(train_root, solo, tmp_path, caplog):
    caplog.set_level("INFO")
    held = {"data__holdout_episodes": 1, "runner__eval_windows": 1}
    run, without = trained(solo, train_root, tmp_path / "off", **held)
    assert "its data" not in caplog.text
    asked, rows = trained(solo, train_root, tmp_path / "on", runner__own_rows=6, **held)
    assert train_worker.digest(asked) == train_worker.digest(run)
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (without, rows)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    found = [row for row in rows if any(name.startswith("held_out_rows/") for name in row)]
    assert [row["step"] for row in found] == [2, 4]
    assert not [name for row in without for name in row if "_rows/" in name]
    # One line at the end, whichever it is.
    assert caplog.text.count("on 6 samples of the held-out episodes") == 1


def test_rows_of_the_training_data_are_asked_about_where_none_are_held_out(
    train_root, solo, tmp_path, caplog
):
    caplog.set_level("INFO")
    _, rows = trained(solo, train_root, tmp_path, runner__own_rows=5)
    numbers = rows[-1]
    dims = [v for k, v in numbers.items() if k.startswith(f"own_rows/{KEY}/dim_")]
    assert len(dims) == train_worlds.ROBOT.action_dim
    assert numbers["own_rows/libero_sim/share"] == np.median([v for v in dims if v is not None])
    assert caplog.text.count("on 5 samples of the training data") == 1
    # Four steps of a network without a past: it does not do its data, and a person is told.
    assert "does not do its data" in caplog.text


@pytest.mark.parametrize(("good", "share"), [(0.0, 0.0), (1.0, 1.0)])
def test_a_plan_is_measured_by_the_mean_action(train_root, solo, monkeypatch, good, share):
    """What is recorded has no error; what is the mean throughout has that of the mean."""
    run = train_worker.trainer(
        solo,
        train_root,
        runner__micro_batch_size=4,
        runner__own_rows=6,
        runner__global_batch_size=4,
    )
    seen = []

    def plans(components, prepared, batch):
        seen.append(batch)
        return batch["action"] * (1 - good) + good * mean

    mean = 0.0
    monkeypatch.setattr(evaluation, "predict_actions", plans)
    first = evaluation.ask_about_own_data(run.components)
    mean = torch.from_numpy(first.rows["libero_sim"].every.mean(0)).float()
    mean = torch.nn.functional.pad(mean, (0, 32 - len(mean)))
    found = evaluation.ask_about_own_data(run.components)
    np.testing.assert_allclose(found.rows["libero_sim"].share, share, atol=1e-5)
    assert found.does_it == (share < 0.6)
    # Two batches of four for six samples: what fills the second up is not counted.
    assert [len(batch["slot"]) for batch in seen[-2:]] == [4, 4]
    assert len(found.rows["libero_sim"].planned) == 6 * train_worlds.ROBOT.timing.blocks
    assert first.numbers.keys() == found.numbers.keys()
