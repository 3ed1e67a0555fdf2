"""Fit a small video autoencoder to recordings, and put its latents on the published scale.

The transformer expects latents of zero mean and unit variance after the published constants of the
Wan autoencoders. A small autoencoder has latents of its own scale, so after training its last
encoder and first decoder layers, both 1x1x1, take that scale on: exactly, because they are linear.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dzrobot.documents import validated
from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import StatisticsError
from dzrobot.modality.stats import ACTION_HORIZON
from dzrobot.policies.dreamzero.checkpoints.directory import read_metadata
from dzrobot.policies.dreamzero.network.vae import MEAN, STD, Vae
from dzrobot.training.data import (
    LoaderOptions,
    LoaderPlan,
    SourceSpec,
    TrainingData,
    build_loader,
    encode_views,
)
from dzrobot.training.data.lerobot import DatasetCatalog
from dzrobot.training.data.provenance import PROVENANCE, RecordedProvenance, provenance
from dzrobot.training.run.inputs import keyed_generator
from dzrobot.training.sft_config import EpisodeChoice
from dzrobot.training.tiny.fit_checkpoint import FitCheckpoint

_LATENT_WEIGHT = 1e-3
_FEW = 20
"""Updates of which a twentieth is too short to raise the rate in; then it takes two."""
_FEWEST = 3
"""Updates that a rate rises and falls in; of fewer, only its first ones are used."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderPlan:
    """How the autoencoder is fitted."""

    steps: int = 600
    """Optimizer steps."""

    batch: int = 8
    """Clips per step; each is one latent frame and the four pixel frames of the next."""

    lr: float = 2e-3
    """Highest learning rate; it falls to zero along a cosine."""

    latent_noise: float = 0.05
    """Noise on latents of unit variance while decoding: neighbors must look alike."""

    focus: float = 12.0
    """Extra weight of what differs from the batch's mean image: cameras do not move, and a small
    object covers few pixels, which an even average would neglect."""

    decoder_steps: int = 300
    """Steps of the decoder alone, on whole samples: short clips have no third latent frame or later
    ones, and it must decode these too."""

    decoder_batch: int = 2
    """Samples per such step."""

    held_batches: int = 16
    """Batches after the last step that the latents' scale and the errors are measured on."""

    seed: int = 0
    """Seed of the order of clips and of the latent noise."""

    num_workers: int = 0
    """Processes that read recordings."""

    held_out: int = 0
    """Last episodes of each folder that nothing is fitted to, as ``data.holdout_episodes`` of a
    run."""

    episodes: EpisodeChoice = "successes"
    """Which are used, as in :class:`~dzrobot.training.data.ReaderOptions`."""


@dataclass(frozen=True)
class AutoencoderReport:
    """One line of progress."""

    step: int
    error: float
    """Mean absolute error of pixels in [-1, 1]."""


def fit_autoencoder(
    vae: Vae,
    data: TrainingData,
    plan: AutoencoderPlan,
    report: Callable[[AutoencoderReport], None] = lambda _: None,
    saves: FitCheckpoint | None = None,
) -> float:
    """Train ``vae`` in place on clips of ``data``; return the error after calibration.

    Args:
        vae: Float32, newly initialized.
        data: Opened with :func:`clip_source`.
        plan: Steps, batches and rates.
        report: Called after every step.
        saves: What an interrupted fit resumes from, with bit-identical results.
    """
    saves = saves or FitCheckpoint()
    if (known := saves.result("autoencoder", vae)) is not None:
        return known
    vae.train().requires_grad_(requires_grad=True)
    updates = _Updates(list(vae.parameters()), plan.lr, plan.steps)
    done = saves.restore("autoencoder", vae, *updates.parts)
    clips_left = _clips(data, plan.batch, plan, done, plan.steps)
    for step, clips in enumerate(clips_left, done):
        latents = vae.encode(clips)
        generator = keyed_generator("latent noise", plan.seed, step)
        noise = torch.randn(latents.shape, generator=generator)
        noisy = latents + plan.latent_noise * latents.detach().std() * noise
        error = (vae.decode(noisy, clamp=False) - clips).abs()
        loss = (error * _weights(clips, plan.focus)).mean()
        updates.step(loss + _LATENT_WEIGHT * latents.square().mean())
        saves.keep("autoencoder", step + 1, vae, *updates.parts)
        report(AutoencoderReport(step + 1, error.mean().item()))
    vae.eval().requires_grad_(requires_grad=False)
    last = plan.steps + plan.held_batches
    held = list(_clips(data, plan.batch, plan, plan.steps, last))
    calibrate(vae, held)
    return saves.finish("autoencoder", _error(vae, held), vae)


def fit_decoder(
    vae: Vae,
    data: TrainingData,
    plan: AutoencoderPlan,
    report: Callable[[AutoencoderReport], None] = lambda _: None,
    saves: FitCheckpoint | None = None,
) -> float:
    """Train the decoder of ``vae`` in place on whole samples; return the error afterwards.

    Latents stay as they are, so a network trained on them does too.

    Args:
        vae: From :func:`fit_autoencoder`.
        data: Opened with the embodiment's own timing.
        plan: Steps, batches and rates.
        report: Called after every step.
        saves: Those of :func:`fit_autoencoder`.
    """
    saves = saves or FitCheckpoint()
    decoder = [*vae.coder.decoder.parameters(), *vae.coder.post_quant_conv.parameters()]
    for parameter in decoder:
        parameter.requires_grad_(requires_grad=True)
    updates = _Updates(decoder, plan.lr / 2, plan.decoder_steps)
    done = saves.restore("decoder", vae, *updates.parts)
    clips_left = _clips(data, plan.decoder_batch, plan, done, plan.decoder_steps)
    for step, clips in enumerate(clips_left, done):
        with torch.no_grad():
            latents = vae.encode(clips)
        error = (vae.decode(latents, clamp=False) - clips).abs()
        updates.step((error * _weights(clips, plan.focus)).mean())
        saves.keep("decoder", step + 1, vae, *updates.parts)
        report(AutoencoderReport(step + 1, error.mean().item()))
    vae.requires_grad_(requires_grad=False)
    last = plan.decoder_steps + plan.held_batches
    return _error(vae, list(_clips(data, plan.decoder_batch, plan, plan.decoder_steps, last)))


@torch.no_grad()
def reconstruction_psnr(vae: Vae, data: TrainingData, plan: AutoencoderPlan) -> float:
    """Return the PSNR (dB) of decoded frames, the mean over those of ``plan.held_batches`` batches.

    Args:
        vae: After the fit.
        data: Recordings that nothing was fitted to.
        plan: Size and number of the batches.
    """
    values = [
        -10 * ((vae.decode(vae.encode(clips)) - clips) / 2).square().mean(dim=(1, 3, 4)).log10()
        for clips in _clips(data, plan.decoder_batch, plan, 0, plan.held_batches)
    ]
    return float(torch.cat(values).mean())


class _Updates:
    """AdamW with a one-cycle learning rate over ``steps``."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, steps: int) -> None:
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99))
        total = max(steps, _FEWEST)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, lr, total_steps=total, pct_start=0.05 if total > _FEW else 2 / total
        )
        self.parts = (self._optimizer, self._schedule)

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()


@torch.no_grad()
def _error(vae: Vae, batches: list[Tensor]) -> float:
    errors = [(vae.decode(vae.encode(clips)) - clips).abs().mean() for clips in batches]
    return float(torch.stack(errors).mean())


def _weights(clips: Tensor, focus: float) -> Tensor:
    weights: Tensor = 1 + focus * (clips - clips.mean(dim=(0, 2), keepdim=True)).abs()
    return weights / weights.mean()


@torch.no_grad()
def calibrate(vae: Vae, clips: list[Tensor]) -> None:
    """Make the latents of ``clips`` zero mean and unit variance, and decode as before."""
    latents = torch.cat([vae.encode(clip) for clip in clips])
    shift = latents.mean(dim=(0, 2, 3, 4))
    scale = latents.std(dim=(0, 2, 3, 4)).clamp(min=1e-3)
    z = vae.config.z_dim
    mean = torch.tensor(MEAN[vae.config.version][:z])
    std = torch.tensor(STD[vae.config.version][:z])
    encoder, decoder = vae.coder.quant_conv, vae.coder.post_quant_conv
    encoder.weight[:z] /= scale[:, None, None, None, None]
    encoder.bias[:z] = (encoder.bias[:z] - mean - std * shift) / scale + mean
    # raw = scale * raw' + offset, folded into the decoder's first layer.
    offset = mean + std * shift - scale * mean
    weight = decoder.weight[:, :, 0, 0, 0].clone()
    decoder.bias += weight @ offset
    decoder.weight *= scale[None, :, None, None, None]


def clip_source(
    paths: Sequence[Path | DatasetCatalog], embodiment: Embodiment, metadata: Path
) -> SourceSpec:
    """Return a source of five-frame clips, the shortest that has a second latent frame."""
    timing = Timing(
        control_hz=embodiment.timing.control_hz,
        action_horizon=4,
        frame_offsets=(0, 1, 2, 3),
        blocks=1,
    )
    robot = replace(embodiment, timing=timing)
    return SourceSpec(paths=paths, embodiment=robot, metadata=images_metadata(metadata, robot))


def images_metadata(file: Path, embodiment: Embodiment) -> dict[str, Any]:
    """Return the statistics in ``file`` as if they were measured with the timing of ``embodiment``.

    An autoencoder sees images alone, so it does not matter over how many steps relative actions
    were measured; which recordings the numbers are of still does.
    """
    content = read_metadata(file)
    entry = content.get(embodiment.tag)
    if entry is None:
        return content
    steps = embodiment.timing.action_horizon
    entry = {
        name: _first_steps(value, steps) if name == "statistics" else value
        for name, value in entry.items()
        if name != ACTION_HORIZON
    }
    note = validated(
        entry, RecordedProvenance, f"{file}, {embodiment.tag}", StatisticsError
    ).provenance
    if note is not None:
        entry[PROVENANCE] = provenance(embodiment, note.datasets)[PROVENANCE]
    return {**content, embodiment.tag: entry}


def _first_steps(value: Any, steps: int) -> Any:
    """Return statistics with ``steps`` lists wherever there is one for each step of a block."""
    if isinstance(value, dict):
        return {name: _first_steps(inner, steps) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], list):
        return (value * steps)[:steps]
    return value


def _clips(
    data: TrainingData, batch: int, plan: AutoencoderPlan, start: int, stop: int
) -> Iterator[Tensor]:
    """Yield clips (B, 3, T, H, W) in [-1, 1]."""
    loader = build_loader(
        data,
        LoaderPlan(global_batch=batch, micro_batch=batch, start_step=start, stop_step=stop),
        LoaderOptions(num_workers=plan.num_workers),
    )
    for samples in loader:
        images = encode_views(samples, data, augment=None, device="cpu")
        yield images.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
