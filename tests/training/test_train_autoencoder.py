"""A small autoencoder: fitted to recordings, its latents on the published scale."""

import copy
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import train_worlds

from dzrobot.cli import main
from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training.data import SourceSpec, TrainingData
from dzrobot.training.run.inputs import keyed_generator
from dzrobot.training.tiny.autoencoder import (
    CLIP,
    STILL,
    AutoencoderData,
    FitCheckpoint,
    _clips,
    _noise,
    _stills,
    _Updates,
    _weighted,
    calibrate,
    clip_source,
    fit_autoencoder,
    fit_decoder,
    reconstruction_psnr,
)
from dzrobot.training.tiny.fit_plan import SIZES, AutoencoderPlan
from dzrobot.training.tiny.init import mini_config

PLAN = AutoencoderPlan(still_steps=60, still_batch=2, clip_steps=12, held_batches=3)
SHORT = AutoencoderPlan(
    still_steps=3, still_batch=1, clip_steps=4, clip_batch=1, decoder_steps=3, held_batches=2
)
STEPS = SHORT.still_steps + SHORT.clip_steps + SHORT.decoder_steps


def new_vae():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Vae(mini_config(train_worlds.ROBOT).vae)


@pytest.fixture
def vae():
    return new_vae()


def data_of(train_root):
    """Return what is fitted."""
    paths, metadata = [train_root / "dataset"], train_root / "metadata.json"
    stills, clips = (
        clip_source(paths, train_worlds.ROBOT, metadata, frames) for frames in (STILL, CLIP)
    )
    return AutoencoderData(
        stills=TrainingData.open([stills], seed=0), clips=TrainingData.open([clips], seed=0)
    )


@pytest.fixture
def data(train_root):
    return data_of(train_root)


@pytest.fixture(scope="module")
def fitted(train_root, tmp_path_factory):
    """Return an autoencoder after a short fit, not to be changed, and the file that kept it."""
    vae, kept = new_vae(), tmp_path_factory.mktemp("fitted") / "kept"
    fit_autoencoder(vae, data_of(train_root), SHORT, saves=FitCheckpoint(kept, {"steps": "4"}))
    return vae, kept


@pytest.fixture
def whole(train_root):
    """Return whole samples."""
    source = SourceSpec(
        paths=[train_root / "dataset"], embodiment=train_worlds.ROBOT,
        metadata=train_root / "metadata.json",
    )  # fmt: skip
    return TrainingData.open([source], seed=0)


def clips(frames, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, 3, frames, 32, 96, generator=generator) * 2 - 1 for _ in range(3)]


@pytest.mark.parametrize("steps", [3, 4, 20, 21])
def test_a_fit_may_be_as_short_as_three_updates(steps):
    # One for either optimizer: matrices and the rest.
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((32, 32), (2,))]
    updates = _Updates(weights, AutoencoderPlan(), steps)
    for _ in range(steps):
        updates.step(sum(weight.square().sum() for weight in weights))
    assert [schedule.last_epoch for schedule in updates.parts[2:]] == [steps, steps]


def test_a_wrong_color_costs_more_than_a_wrong_brightness():
    scene = torch.zeros(1, 3, 1, 4, 4)
    brighter, greener = torch.full_like(scene, 0.1), torch.zeros_like(scene)
    greener[:, 1] = 0.3
    assert _weighted(greener, scene, PLAN) > 2 * _weighted(brighter, scene, PLAN)
    plain = replace(PLAN, color=0)
    assert _weighted(greener, scene, plain) == pytest.approx(_weighted(brighter, scene, plain))


def test_stills_are_drawn_from_no_more_than_fits_in_memory(data):
    two_clips = replace(PLAN, still_bytes=2 * data.stills.image_bytes)
    drawn = torch.cat(list(_stills(data.stills, two_clips, 0)))
    assert len(drawn) == PLAN.still_steps * PLAN.still_batch
    assert STILL < len(drawn.unique(dim=0)) <= 2 * STILL


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


@pytest.mark.long
def test_fitting_lowers_the_error_and_leaves_nothing_trainable(vae, data, whole):
    seen, psnr = [], reconstruction_psnr(vae, whole, PLAN)
    error = fit_autoencoder(vae, data, PLAN, seen.append)
    assert [line.step for line in seen] == list(range(1, 73))
    assert error < 0.8 * seen[0].error
    assert reconstruction_psnr(vae, whole, PLAN) > psnr
    assert not any(parameter.requires_grad for parameter in vae.parameters())


@pytest.mark.long
def test_fitting_the_decoder_alone_raises_the_psnr_and_keeps_the_latents(vae, data, whole):
    fit_autoencoder(vae, data, PLAN)
    shown = clips(5)[0]
    before, psnr = vae.encode(shown), reconstruction_psnr(vae, whole, PLAN)
    fit_decoder(vae, data.clips, replace(PLAN, decoder_steps=12))
    assert reconstruction_psnr(vae, whole, PLAN) > psnr
    assert torch.equal(vae.encode(shown), before)
    assert not any(parameter.requires_grad for parameter in vae.parameters())


@pytest.mark.long
def test_a_decoder_fitted_alone_bears_inexact_predictions(vae, data):
    """Long enough to be told from rounding: after 30 steps, the order depended on the processor."""
    fit_autoencoder(vae, data, PLAN)
    shown = torch.cat(list(_clips(data.clips, 8, PLAN, 0, 3)))
    latents = vae.encode(shown)
    latents[:, :, 1:] += 4 * torch.randn(latents[:, :, 1:].shape, generator=keyed_generator("", 0))

    def error(predicted_noise):
        fitted = copy.deepcopy(vae)
        plan = replace(PLAN, decoder_steps=120, predicted_noise=predicted_noise)
        fit_decoder(fitted, data.clips, plan)
        return (fitted.decode(latents) - shown).square().mean()

    assert error(AutoencoderPlan.predicted_noise) < 0.9 * error(PLAN.latent_noise)


def test_the_decoder_alone_gets_a_first_frame_and_what_may_be_predictions():
    latents = torch.randn(400, 8, 3, 4, 4, generator=keyed_generator("latents", 0)) * 3

    def levels(*, predicted):
        noise = _noise(latents, PLAN, keyed_generator("noise", 0), predicted=predicted)
        return (noise / latents.std()).square().mean(dim=(1, 3, 4)).sqrt()

    alone, together = levels(predicted=True), levels(predicted=False)
    assert together.mean(dim=0).tolist() == pytest.approx([PLAN.latent_noise] * 3, rel=0.05)
    assert torch.equal(alone[:, 0], together[:, 0])
    most, later = PLAN.predicted_noise, alone[:, 1:]
    assert later.mean().item() == pytest.approx(most / 2, rel=0.1)
    assert later.min() < 0.1 * most < 0.9 * most < later.max()


def test_a_fit_in_bfloat16_goes_where_one_in_float32_does(vae, data):
    halved, whole, began = copy.deepcopy(vae), copy.deepcopy(vae), vae
    stills = replace(SHORT, clip_steps=0, decoder_steps=0)
    fit_autoencoder(whole, data, stills)
    fit_autoencoder(halved, data, replace(stills, dtype="bfloat16"))
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.float32}

    def flat(one):
        return torch.cat([parameter.flatten() for parameter in one.parameters()])

    exact, rounded = flat(whole) - flat(began), flat(halved) - flat(began)
    assert not torch.equal(exact, rounded)
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.9


@pytest.mark.parametrize("phase", ["still_steps", "clip_steps", "decoder_steps"])
def test_too_short_a_phase_is_refused(phase):
    with pytest.raises(ConfigError, match="a phase of 2 steps: it takes 0 or at least 3"):
        AutoencoderPlan(**{phase: 2})


@pytest.mark.long
def test_a_phase_may_be_left_out(vae, data):
    seen = []
    fit_autoencoder(vae, data, replace(SHORT, still_steps=0, decoder_steps=0), seen.append)
    assert [line.step for line in seen] == list(range(1, SHORT.clip_steps + 1))
    assert not any(parameter.requires_grad for parameter in vae.parameters())


def test_the_scale_of_latents_counts_the_third_frame(fitted, data):
    """From the third on, latent frames are encoded beside one of four frames."""
    vae, _ = fitted
    last = SHORT.clip_steps + SHORT.held_batches
    with torch.no_grad():
        held = _clips(data.clips, SHORT.clip_batch, SHORT, SHORT.clip_steps, last)
        latents = torch.cat([vae.encode(clip) for clip in held])
    assert latents.shape[2] == 3
    assert (latents.std(dim=(0, 2, 3, 4)) - 1).abs().max() < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("stop", [SHORT.still_steps - 1, SHORT.still_steps + 2, STEPS - 1])
def test_a_stopped_fit_goes_on_to_the_same_bits(stop, vae, data, tmp_path):
    fresh, path, seen = copy.deepcopy(vae), tmp_path / "kept", []

    def interrupt(line):
        seen.append(line)
        if len(seen) == stop:
            raise KeyboardInterrupt

    expected = copy.deepcopy(vae)
    whole = fit_autoencoder(expected, data, SHORT)
    with pytest.raises(KeyboardInterrupt):
        fit_autoencoder(vae, data, SHORT, interrupt, FitCheckpoint(path, every=2))
    seen.clear()
    assert fit_autoencoder(fresh, data, SHORT, seen.append, FitCheckpoint(path, every=2)) == whole
    assert len(seen) <= STEPS - stop + 1
    for one, other in zip(fresh.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_stopped_fit_of_something_else_is_refused(fitted, vae, tmp_path):
    path = shutil.copy(fitted[1], tmp_path / "kept")
    assert FitCheckpoint(path, {"steps": "4"}).result("calibration", vae) is not None
    with pytest.raises(CheckpointError, match="steps: 4, now 50"):
        FitCheckpoint(path, {"steps": "50"})
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="unreadable"):
        FitCheckpoint(path, {"steps": "4"})


@pytest.mark.long
def test_init_goes_on_after_a_kill(train_root, train_environment, tmp_path):
    def start(target):
        command = [
            sys.executable, "-m", "dzrobot.cli", "init", str(target),
            "--embodiment", "train_worlds:ROBOT", "--dataset", str(train_root / "dataset"),
            "--metadata", str(train_root / "metadata.json"),
            "--still-steps", "24", "--clip-steps", "3",
        ]  # fmt: skip
        return subprocess.Popen(command, env=train_environment, stderr=subprocess.DEVNULL)

    killed, kept = tmp_path / "killed", tmp_path / "killed.unfinished"
    process = start(killed)
    end = time.monotonic() + 120
    while not kept.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert kept.exists()
    assert not killed.exists()
    assert start(killed).wait() == 0
    assert open_checkpoint(killed).passport is not None
    assert not kept.exists()


@pytest.mark.long
def test_init_writes_a_checkpoint_that_acts(train_root, tmp_path, capsys):
    target = tmp_path / "start"
    words = [
        "init", str(target), "--embodiment", "train_worlds:ROBOT", "--dataset",
        str(train_root / "dataset"), "--metadata", str(train_root / "metadata.json"),
        "--still-steps", "3", "--clip-steps", "3", "--decoder-steps", "0",
        "--holdout-episodes", "1", "--size", "mini", "--dtype", "bfloat16", "--threads", "1",
    ]  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert main(words) == 0
        assert torch.get_num_threads() == 1
        torch.set_num_threads(3)
        assert main(words[:-2]) == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    recipe = json.loads((target / "dzrobot_passport.json").read_text())["recipe"]
    assert f"PSNR {recipe['psnr']:.1f} dB in held-out episodes" in out
    assert recipe["dtype"] == "bfloat16"
    assert [recipe[f"{phase}_steps"] for phase in ("still", "clip", "decoder")] == [3, 3, 0]
    opened = open_checkpoint(target)
    assert opened.passport is not None
    assert opened.config.vae.z_dim == SIZES["mini"].latents
    policy = DreamZeroPolicy.from_pretrained(target, embodiment=train_worlds.ROBOT)
    observation, _ = train_worlds.frame(0, 0, np.random.default_rng(0))
    action = policy.act(observation)
    # Its last layers are zero: before training it plans what statistics call the middle.
    assert action.shape == (7,)
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
