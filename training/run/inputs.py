"""What the network is given for a batch of the loader: images, prompts, and keyed noise.

Random numbers depend on what they are for, never on which process draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dzrobot.modality.video import AugmentConfig
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.diffusion import (
    DiffusionNoise,
    NoiseShape,
    draw_given,
    draw_noise,
)
from dzrobot.policies.dreamzero.network.world_action import (
    EncodedImages,
    PreparedBatch,
    TrainBatch,
    WorldActionModel,
)
from dzrobot.rng import torch_seed
from dzrobot.training.data import CollatedBatch, TrainingData, encode_views
from dzrobot.training.run.encoder_cache import Prompts, StoredLatents
from dzrobot.training.sft_config import ModelConfig


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


def with_given_actions(
    config: NetworkConfig, noise: DiffusionNoise, batch: CollatedBatch, seed: int, most: int
) -> DiffusionNoise:
    """Return ``noise`` with actions given: the first of every block, and what is not imitated.

    Args:
        config: The network.
        noise: Of a micro-batch.
        batch: The micro-batch, with the credit of its actions.
        seed: Of the run.
        most: ``rtc_training_max_delay``: up to so many first actions, drawn evenly; 0: none.
    """
    device, credit = noise.action_BAM.device, batch["credit"]
    given = None if credit is None else credit.given.to(device, non_blocking=True)
    if most:
        key = ("given actions", seed, batch["step"])
        generators = [keyed_generator(*key, slot) for slot in batch["slot"].tolist()]
        first = draw_given(config.dit, noise.action_BAM.shape[1], most, generators).to(device)
        given = first if given is None else given | first
    return replace(noise, given_BA=given)


def with_less_video(
    noise: DiffusionNoise, key: tuple[int, int], slots: Sequence[int], model: ModelConfig
) -> DiffusionNoise:
    """Return ``noise`` with some samples as they are where plans are made with less video.

    Args:
        noise: Of a micro-batch.
        key: Seed and step.
        slots: Of its samples.
        model: Says how many, and how; see ``action_only_ratio``.
    """
    if not model.action_only_ratio:
        return noise
    draws = [torch.rand((), generator=keyed_generator("action only", *key, slot)) for slot in slots]
    chosen = (torch.stack(draws) < model.action_only_ratio).to(noise.video_BCFYX.device)
    if model.action_only_video == "skip":
        return replace(noise, hides_video_B=chosen)
    # Index 0 is pure noise, and the video's loss has no weight there.
    return replace(noise, frame_index_BF=noise.frame_index_BF.masked_fill(chosen[:, None], 0))


@dataclass(frozen=True, kw_only=True)
class NetworkInputs:
    """Turns batches of the loader into inputs of the network: augmentation, frozen encoders."""

    model: WorldActionModel
    prompts: Prompts
    data: TrainingData
    """The data that the batches are read from."""

    device: torch.device
    augment: AugmentConfig | None = None
    """Ranges of crop and color; None for the center crop of evaluation."""

    features: StoredLatents | None = None
    """Latents of every sample; None where images are encoded."""

    cut_prompts: bool = False
    """Whether every prompt is zero from the length of the shortest on."""

    def held_out(self, data: TrainingData) -> "NetworkInputs":
        """Return the same for held-out ``data``: no augmentation, no cache, whole prompts."""
        return replace(self, data=data, augment=None, features=None, cut_prompts=False)

    def prepare(self, batch: CollatedBatch) -> PreparedBatch:
        """Return a micro-batch after augmentation and the frozen encoders."""
        credit = batch["credit"]
        weight = None if credit is None else credit.weight.to(self.device, non_blocking=True)
        prompt = self.prompts.embed(batch["prompt"], self.device)
        return self.model.prepare(
            TrainBatch(
                images=self._images(batch),
                state_BSM=batch["state"].to(self.device, non_blocking=True),
                conditions=tuple(
                    values.to(self.device, non_blocking=True)
                    for values in batch["conditions"].values()
                ),
                action_BAM=batch["action"].to(self.device, non_blocking=True),
                action_mask_BAM=batch["action_mask"].to(self.device, non_blocking=True),
                has_real_action_B=batch["has_real_action"].to(self.device, non_blocking=True),
                prompt=prompt.cut() if self.cut_prompts else prompt,
                action_weight_BA=weight,
            )
        )

    def _images(self, batch: CollatedBatch) -> Tensor | EncodedImages:
        if self.features is not None:
            like = next(self.model.image_encoder.parameters())
            return self.features.rows(batch["sample_id"], like)
        return encode_views(batch, self.data, augment=self.augment, device=self.device)
