"""Video to normalised latents and back.

The weights sit in the library's causal autoencoder; the loop over time chunks is here, because the
library keeps the state of a running call on the module.

Legend of shape suffixes: B clips, C channels, T frames, F latent frames, H W pixels, h w latent.
"""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from dzrobot.errors import ModalityError
from dzrobot.policies.dreamzero.network.config import VaeConfig
from dzrobot.policies.dreamzero.network.latent_stats import MEAN, STD


class Vae(nn.Module):
    """The Wan 2.1 or 2.2 video autoencoder (DreamZero model, appendix A)."""

    def __init__(self, config: VaeConfig) -> None:
        """Build the autoencoder of ``config`` with fresh weights."""
        super().__init__()
        self.config = config
        channels = 3 * config.patch_size**2
        self.coder = AutoencoderKLWan(
            base_dim=config.dim,
            decoder_base_dim=config.dec_dim,
            z_dim=config.z_dim,
            dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks,
            temperal_downsample=list(config.temporal_downsample),
            is_residual=config.version == "2.2",
            in_channels=channels,
            out_channels=channels,
        )

    def encode(self, video_B3THW: Tensor) -> Tensor:
        """Return the normalised latents (B, C, F, h, w), F = 1 + (T - 1) / 4.

        Args:
            video_B3THW: Clips in [-1, 1] of 1, 5, 9, ... frames.

        Raises:
            ModalityError: The number of frames is none of these.
        """
        frames, stride = video_B3THW.shape[2], self.config.temporal_stride
        if frames % stride != 1:
            raise ModalityError(
                f"a clip of {frames} frames cannot be encoded: it must have 1 + {stride}k frames "
                f"(1, {1 + stride}, {1 + 2 * stride}, ...); cut or repeat frames"
            )
        video_B3THW = self._fold(video_B3THW.to(self._dtype))
        cache = _new_cache(self.coder.encoder)
        # The first frame stands alone; the causal convolutions carry on from chunk to chunk.
        bounds = [(0, 1), *((start, start + stride) for start in range(1, frames, stride))]
        moments = [
            self.coder.quant_conv(
                self.coder.encoder(video_B3THW[:, :, start:end], feat_cache=cache, feat_idx=[0])
            )
            for start, end in bounds
        ]
        return self._normalise(torch.cat(moments, dim=2)[:, : self.config.z_dim])

    def encode_first_frame(self, frame_B3HW: Tensor) -> Tensor:
        """Return the latent (B, C, 1, h, w) of single frames; equals latent 0 of any such clip."""
        return self.encode(frame_B3HW[:, :, None])

    def encode_conditioning(self, frame_B3HW: Tensor, frames: int) -> Tensor:
        """Return the latents (B, C, F, h, w) of the frame followed by mid-grey ones."""
        grey = torch.zeros_like(frame_B3HW)[:, :, None].expand(-1, -1, frames - 1, -1, -1)
        return self.encode(torch.cat([frame_B3HW[:, :, None], grey], dim=2))

    def decode(self, latent_BCFhw: Tensor, *, clamp: bool = True) -> Tensor:
        """Return the clips (B, 3, T, H, W) of normalised latents.

        Args:
            latent_BCFhw: Normalised latents, as :meth:`encode` returns them.
            clamp: Whether to cut the result to [-1, 1].
        """
        latent_BCFhw = self.coder.post_quant_conv(self._denormalise(latent_BCFhw))
        cache = _new_cache(self.coder.decoder)
        decoded = [
            self.coder.decoder(
                latent_BCFhw[:, :, i : i + 1], feat_cache=cache, feat_idx=[0], first_chunk=i == 0
            )
            for i in range(latent_BCFhw.shape[2])
        ]
        video_B3THW = self._unfold(torch.cat(decoded, dim=2))
        return video_B3THW.clamp(-1, 1) if clamp else video_B3THW

    @property
    def _dtype(self) -> torch.dtype:
        weight: Tensor = self.coder.quant_conv.weight
        return weight.dtype

    def _normalise(self, mean_BCFhw: Tensor) -> Tensor:
        mean, std = self._statistics(mean_BCFhw.device)
        return ((mean_BCFhw.float() - mean) * (1.0 / std)).to(mean_BCFhw.dtype)

    def _denormalise(self, latent_BCFhw: Tensor) -> Tensor:
        mean, std = self._statistics(latent_BCFhw.device)
        return (latent_BCFhw.float() / (1.0 / std) + mean).to(self._dtype)

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and std of each channel, float32, ready to broadcast."""

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values[: self.config.z_dim], device=device)[:, None, None, None]

        return column(MEAN[self.config.version]), column(STD[self.config.version])

    def _fold(self, video_B3THW: Tensor) -> Tensor:
        """Move each p x p square of pixels into channels: colour, column, row, row fastest."""
        p = self.config.patch_size
        B, C, T, H, W = video_B3THW.shape
        squares = video_B3THW.reshape(B, C, T, H // p, p, W // p, p)
        return squares.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)

    def _unfold(self, video_BCTHW: Tensor) -> Tensor:
        """Undo :meth:`_fold`."""
        p = self.config.patch_size
        B, C, T, H, W = video_BCTHW.shape
        squares = video_BCTHW.reshape(B, C // p**2, p, p, T, H, W)
        return squares.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)


def _new_cache(side: nn.Module) -> list[Tensor | str | None]:
    """Return an empty slot per causal convolution for the frames it carries to the next chunk."""
    return [None] * sum(isinstance(module, nn.Conv3d) for module in side.modules())
