"""Random numbers that depend on what they are for, never on which process draws them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.diffusion import (
    DiffusionNoise,
    NoiseShape,
    draw_given,
    draw_noise,
)
from dzrobot.policies.dreamzero.network.world_action import PreparedBatch
from dzrobot.rng import torch_seed


def keyed_generator(purpose: str, *key: int | str) -> torch.Generator:
    """Return a new CPU generator; equal arguments give equal draws."""
    return torch.Generator().manual_seed(torch_seed(purpose, *key))


def sample_noise(
    config: NetworkConfig, prepared: PreparedBatch, seed: int, step: int, slots: Sequence[int]
) -> DiffusionNoise:
    """Return the noise of a micro-batch: each sample's follows from seed, step and slot alone."""
    latents = prepared.latents_BCFYX
    channels, frames, rows, columns = latents.shape[1:]
    actions, width = prepared.action_BAM.shape[1:]
    generators = [keyed_generator("noise", seed, step, slot) for slot in slots]
    shape = NoiseShape(latent=(channels, frames, rows, columns), action=(actions, width))
    return draw_noise(config.dit, config.head, shape, generators, latents.device)


def with_given(
    config: NetworkConfig,
    noise: DiffusionNoise,
    key: tuple[int, int],
    slots: Sequence[int],
    most: int,
) -> DiffusionNoise:
    """Return ``noise`` with the first actions of every block given, up to ``most`` of them.

    Args:
        config: The network.
        noise: Of a micro-batch.
        key: Seed and step.
        slots: Of its samples.
        most: ``rtc_training_max_delay``; 0 leaves everything as it is.
    """
    if not most:
        return noise
    generators = [keyed_generator("given actions", *key, slot) for slot in slots]
    given = draw_given(config.dit, noise.action_BAM.shape[1], most, generators)
    return replace(noise, given_BA=given.to(noise.action_BAM.device))
