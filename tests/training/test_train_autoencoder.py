"""A small autoencoder: fitted to recordings, its latents on the published scale."""

import json

import numpy as np
import pytest
import torch
import train_worlds

from dzrobot.cli import main
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.mini import mini_config
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training.autoencoder import (
    AutoencoderPlan,
    calibrate,
    clip_source,
    fit_autoencoder,
    fit_decoder,
)
from dzrobot.training.data import SourceSpec, TrainingData

PLAN = AutoencoderPlan(steps=40, batch=2, decoder_steps=8)


@pytest.fixture
def vae():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Vae(mini_config(train_worlds.ROBOT).vae)


@pytest.fixture
def data(train_root):
    """Return short clips and whole samples."""
    paths, metadata = [train_root / "dataset"], train_root / "metadata.json"
    clips = clip_source(paths, train_worlds.ROBOT, metadata)
    whole = SourceSpec(paths=paths, embodiment=train_worlds.ROBOT, metadata=metadata)
    return [TrainingData.open([source], seed=0) for source in (clips, whole)]


def clips(frames, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, 3, frames, 32, 96, generator=generator) * 2 - 1 for _ in range(3)]


def test_calibrating_scales_latents_and_decodes_as_before(vae):
    batches = clips(5)
    with torch.no_grad():
        before = [vae.decode(vae.encode(batch), clamp=False) for batch in batches]
    calibrate(vae, batches)
    with torch.no_grad():
        latents = torch.cat([vae.encode(batch) for batch in batches])
        after = [vae.decode(vae.encode(batch), clamp=False) for batch in batches]
    assert latents.mean(dim=(0, 2, 3, 4)).abs().max() < 1e-3
    assert (latents.std(dim=(0, 2, 3, 4)) - 1).abs().max() < 1e-3
    for one, other in zip(before, after, strict=True):
        assert (one - other).abs().max() < 1e-3 * one.abs().max()


def test_fitting_lowers_the_error_and_leaves_nothing_trainable(vae, data):
    seen = []
    error = fit_autoencoder(vae, data[0], PLAN, seen.append)
    assert [line.step for line in seen] == list(range(1, PLAN.steps + 1))
    assert error < 0.95 * seen[0].error
    assert not any(parameter.requires_grad for parameter in vae.parameters())


def test_the_decoder_learns_long_samples_and_latents_stay(vae, data):
    fit_autoencoder(vae, data[0], PLAN)
    (batch,) = clips(9)[:1]
    with torch.no_grad():
        latents = vae.encode(batch)
    seen = []
    error = fit_decoder(vae, data[1], PLAN, seen.append)
    assert error < seen[0].error
    with torch.no_grad():
        assert torch.equal(vae.encode(batch), latents)


def test_init_writes_a_checkpoint_that_acts(train_root, tmp_path, capsys):
    target = tmp_path / "start"
    words = [
        "init", str(target), "--embodiment", "train_worlds:ROBOT", "--dataset",
        str(train_root / "dataset"), "--metadata", str(train_root / "metadata.json"),
        "--steps", "2", "--batch", "2", "--decoder-steps", "2",
    ]  # fmt: skip
    assert main(words) == 0
    assert "in whole samples" in capsys.readouterr().out
    recipe = json.loads((target / "dzrobot_passport.json").read_text())["recipe"]
    assert (recipe["autoencoder_steps"], recipe["decoder_steps"]) == (2, 2)
    assert open_checkpoint(target).passport is not None
    policy = DreamZeroPolicy.from_pretrained(target, embodiment=train_worlds.ROBOT)
    observation, _ = train_worlds.frame(0, 0, np.random.default_rng(0))
    action = policy.act(observation)
    # Its last layers are zero: before training it plans what statistics call the middle.
    assert action.shape == (7,)
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
