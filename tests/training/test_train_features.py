"""Stored image features: the numbers of training without them, and nothing encoded twice."""

import numpy as np
import pytest
import torch
import train_worlds
from train_worker import digest

from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.recipes.check import find_faults
from dzrobot.training.run.build import build
from dzrobot.training.run.inputs import precompute_features
from dzrobot.training.run.run_log import describe_batch
from dzrobot.training.run.trainer import Trainer

STEPS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory, train_root):
    """Return a folder like ``train_root`` with few samples: every one of them is encoded here."""
    root = tmp_path_factory.mktemp("few")
    dataset = train_worlds.record(root / "dataset", episodes=2, length=22)
    train_worlds.statistics(dataset, root / "metadata.json")
    (root / "tiny").symlink_to(train_root / "tiny")
    return root


def trained(solo, root, folder, *, cached):
    """Return a run of a few steps and its trainer."""
    changes = {"runner__output_dir": folder, "data__augment": False}
    run = Trainer(build(train_worlds.config(root, data__cache_features=cached, **changes), solo))
    batches = run.batches(STEPS)
    for _ in range(STEPS):
        run.train_step(batches)
    return run


@pytest.fixture
def encodings(monkeypatch):
    """Return how many clips each call of the frozen encoders was given."""
    seen = []
    original = WorldActionModel.encode

    def counted(self, images):
        seen.append(len(images))
        return original(self, images)

    monkeypatch.setattr(WorldActionModel, "encode", counted)
    return seen


@pytest.mark.parametrize("variant", ["5b", pytest.param("14b", marks=pytest.mark.long)])
def test_stored_features_train_to_the_same_bits(root, tmp_path, solo, variant):
    world = tmp_path / "world"
    world.mkdir()
    for name in ("dataset", "metadata.json"):
        (world / name).symlink_to(root / name)
    train_worlds.checkpoint(world / "tiny", variant)
    live = trained(solo, world, tmp_path / "live", cached=False)
    stored = trained(solo, world, tmp_path / "stored", cached=True)
    for run, said in ((live, "image (1, "), (stored, "images from the cache of features")):
        assert said in describe_batch(next(run.batches(1)), run.components)
    assert digest(stored) == digest(live)
    assert (
        stored.components.datasets.train[
            stored.components.datasets.train.sample_keys(0, [0], 4)[0]
        ].views
        == {}
    )


def test_every_sample_is_encoded_once(root, tmp_path, solo, encodings):
    run = trained(solo, root, tmp_path / "run", cached=True)
    count = len(run.components.datasets.train)
    # One more: the example that says how large a row is.
    assert sum(encodings) == count + 1
    encodings.clear()
    trained(solo, root, tmp_path / "run", cached=True)
    assert encodings == []


@pytest.mark.long
def test_an_interrupted_start_goes_on_where_it_was(root, tmp_path, solo, encodings):
    run = trained(solo, root, tmp_path / "run", cached=True)
    (done,) = (tmp_path / "run" / "features").glob("*/done.npy")
    marks = np.load(done)
    assert marks.all()
    marks[3:7] = False
    np.save(done, marks)
    for values in done.parent.glob("*.npy"):
        if values != done:
            np.lib.format.open_memmap(values, "r+")[3:7] = 0
    encodings.clear()
    again = trained(solo, root, tmp_path / "run", cached=True)
    assert sum(encodings) == 4
    assert digest(again) == digest(run)


@pytest.mark.long
def test_other_encoders_get_other_features(root, tmp_path, solo, encodings):
    run = trained(solo, root, tmp_path / "run", cached=True)
    parameter = run.components.model.vae.coder.quant_conv.weight
    parameter.data.add_(0.1 * torch.ones_like(parameter))
    encodings.clear()
    data = run.components.datasets.train
    with_images = type(data)(data.sources, data.sources[0].readers[0].options, data.seed)
    precompute_features(run.components.config, run.components.model, with_images, solo)
    assert sum(encodings) == len(data) + 1


def test_what_cannot_be_stored_is_refused(train_root, tmp_path):
    config = train_worlds.config(
        train_root, data__cache_features=True, data__augment=True, data__on_corrupt="count",
        runner__output_dir=tmp_path,
    )  # fmt: skip
    faults = [fault for fault in find_faults(config, 1) if fault.field == "data.cache_features"]
    assert len(faults) == 2
    assert "data.augment=false" in str(faults[0])
    assert "on_corrupt=refuse" in str(faults[1])
