"""Fit a small video autoencoder to recordings, and put its latents on the published scale.

The transformer expects latents of zero mean and unit variance after the published constants of the
Wan autoencoders. A small autoencoder has latents of its own scale, so after training its last
encoder and first decoder layers, both 1x1x1, take that scale on: exactly, because they are linear.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.policies.dreamzero.network.latent_stats import MEAN, STD
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.training.data import (
    LoaderOptions,
    LoaderPlan,
    SourceSpec,
    TrainingData,
    build_loader,
    encode_views,
)

_LATENT_WEIGHT = 1e-3
_CALIBRATION_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class AutoencoderPlan:
    """How the autoencoder is fitted."""

    steps: int = 600
    """Optimiser steps."""

    batch: int = 8
    """Clips per step; each is one latent frame and the four pixel frames of the next."""

    lr: float = 2e-3
    """Highest learning rate; it falls to zero along a cosine."""

    latent_noise: float = 0.05
    """Noise on latents of unit variance while decoding: neighbours must look alike."""

    focus: float = 12.0
    """Extra weight of what differs from the batch's mean picture: cameras stand still, and a small
    object is a few pixels that an even average would leave out."""

    seed: int = 0
    """Of the order of clips and the latent noise."""

    num_workers: int = 0
    """Processes that read recordings."""


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
) -> float:
    """Train ``vae`` in place on clips of ``data``; return the error after calibration.

    Args:
        vae: Float32, with fresh weights.
        data: Opened with :func:`clip_source`.
        plan: How.
        report: Called after every step.
    """
    vae.train().requires_grad_(requires_grad=True)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=plan.lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.lr, total_steps=plan.steps, pct_start=0.05
    )
    noise = torch.Generator().manual_seed(plan.seed)
    for step, clips in enumerate(_clips(data, plan, 0, plan.steps)):
        latents = vae.encode(clips)
        spread = latents.detach().std()
        shaken = latents + plan.latent_noise * spread * torch.randn(latents.shape, generator=noise)
        error = (vae.decode(shaken, clamp=False) - clips).abs()
        loss = (error * _weights(clips, plan.focus)).mean()
        optimizer.zero_grad()
        (loss + _LATENT_WEIGHT * latents.square().mean()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(AutoencoderReport(step + 1, error.mean().item()))
    vae.eval().requires_grad_(requires_grad=False)
    held = list(_clips(data, plan, plan.steps, plan.steps + _CALIBRATION_BATCHES))
    calibrate(vae, held)
    with torch.no_grad():
        errors = [(vae.decode(vae.encode(clips)) - clips).abs().mean() for clips in held]
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


def clip_source(paths: list[Path], embodiment: Embodiment, metadata: Path) -> SourceSpec:
    """Return a source of five-frame clips, the shortest that has a second latent frame."""
    timing = Timing(
        control_hz=embodiment.timing.control_hz,
        action_horizon=4,
        frame_offsets=(0, 1, 2, 3),
        blocks=1,
    )
    return SourceSpec(paths=paths, embodiment=replace(embodiment, timing=timing), metadata=metadata)


def _clips(data: TrainingData, plan: AutoencoderPlan, start: int, stop: int) -> Iterator[Tensor]:
    """Yield clips (B, 3, 5, H, W) in [-1, 1]."""
    loader = build_loader(
        data,
        LoaderPlan(
            global_batch=plan.batch, micro_batch=plan.batch, start_step=start, stop_step=stop
        ),
        LoaderOptions(num_workers=plan.num_workers),
    )
    for batch in loader:
        images = encode_views(batch, data, augment=None, device="cpu")
        yield images.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
