"""Noise and noise levels of training samples, drawn from explicit generators.

Source: docs/model.md, section 3.2. A generator per sample makes a sample's noise independent of
the batch, rank and world size it is in.

Shapes: B batch, C channels, F latent frames, Y latent rows, X latent columns, A actions, M width of
an action.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import DiTConfig, HeadConfig
from dzrobot.policies.dreamzero.network.schedule import TRAIN_STEPS


@dataclass(frozen=True, eq=False, kw_only=True)
class Noise:
    """What is random about the training samples of a batch."""

    video_BCFYX: Tensor
    frame_index_BF: Tensor
    """Noise level of every frame, int64, 0 pure noise to 999; equal inside a block."""

    action_BAM: Tensor
    action_index_BA: Tensor
    """Noise level of every action, int64."""

    @classmethod
    def of(
        cls,
        config: DiTConfig,
        video_BCFYX: Tensor,
        action_BAM: Tensor,
        frame_index_BF: Tensor,
        action_index_BA: Tensor | None = None,
    ) -> "Noise":
        """Return noise from raw draws: the first frame of a block speaks for the block.

        Args:
            config: The transformer.
            video_BCFYX: Standard normal.
            action_BAM: Standard normal.
            frame_index_BF: One raw index per frame.
            action_index_BA: One index per action; None to take over that of the block's video.
        """
        first_BN = frame_index_BF[:, 1 :: config.num_frame_per_block]
        shared_BF = torch.cat(
            [
                frame_index_BF[:, :1],
                first_BN.repeat_interleave(config.num_frame_per_block, dim=1),
            ],
            dim=1,
        )
        if action_index_BA is None:
            action_index_BA = first_BN.repeat_interleave(config.num_action_per_block, dim=1)
        return cls(
            video_BCFYX=video_BCFYX,
            frame_index_BF=shared_BF,
            action_BAM=action_BAM,
            action_index_BA=action_index_BA,
        )


@dataclass(frozen=True)
class NoiseShape:
    """Sizes of one sample."""

    latent: tuple[int, int, int, int]
    """(C, F, Y, X)."""

    action: tuple[int, int]
    """(A, M)."""


def draw_noise(
    dit: DiTConfig,
    head: HeadConfig,
    shape: NoiseShape,
    generators: Sequence[torch.Generator],
    device: torch.device | str,
) -> Noise:
    """Return float32 noise on ``device``, sample b drawn from ``generators[b]`` alone.

    Order of the draws: video noise, frame indices, action noise, action indices if decoupled.
    """
    draws = [_draw(head, shape, generator) for generator in generators]
    video, frames, action, actions = (
        torch.stack(parts).to(device, non_blocking=True) for parts in zip(*draws, strict=True)
    )
    decoupled = head.decouple_video_action_noise
    return Noise.of(dit, video, action, frames, actions if decoupled else None)


def _draw(
    head: HeadConfig, shape: NoiseShape, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return video noise, frame indices, action noise and action indices of one sample."""
    device = generator.device
    video = torch.randn(shape.latent, generator=generator, device=device)
    frames = _frame_indices(head, shape.latent[1], generator)
    action = torch.randn(shape.action, generator=generator, device=device)
    if not head.decouple_video_action_noise:
        return video, frames, action, frames
    count = (shape.action[0],)
    actions = torch.randint(TRAIN_STEPS, count, generator=generator, device=device)
    return video, frames, action, actions


def _frame_indices(head: HeadConfig, frames: int, generator: torch.Generator) -> Tensor:
    """Return one raw noise index per frame."""
    if head.decouple_video_action_noise:
        if head.video_noise_beta_beta != 1:
            raise ConfigError(
                f"video_noise_beta_beta={head.video_noise_beta_beta}: only 1, the published value, "
                "can be drawn; change video_noise_beta_alpha instead"
            )
        alpha = head.video_noise_beta_alpha
    elif head.use_high_noise_emphasis:
        alpha = head.high_noise_beta_alpha
    else:
        return torch.randint(TRAIN_STEPS, (frames,), generator=generator, device=generator.device)
    uniform = torch.rand(frames, generator=generator, device=generator.device)
    # The inverse of the distribution function of Beta(alpha, 1).
    index = ((1 - uniform ** (1 / alpha)) * TRAIN_STEPS).long()
    return index.clamp(0, TRAIN_STEPS - 1)
