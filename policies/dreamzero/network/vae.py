"""Video to normalized latents and back.

The loop over parts of a video is here, the layers are in :mod:`.wan`.

Legend of shape suffixes: B clips, C channels, T frames, F latent frames, H W pixels, h w latent.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dzrobot.errors import ModalityError
from dzrobot.policies.dreamzero.network.config import VaeConfig
from dzrobot.policies.dreamzero.network.wan import ChannelNorm, Held, WanCoder, channels_last

if TYPE_CHECKING:
    from dzrobot.policies.dreamzero.network.graphs import Graphs

_Carried = tuple[Held, ...]
"""What the decoder carries over at each convolution: frames, or that they are to come."""

MEAN: dict[str, tuple[float, ...]] = {}
STD: dict[str, tuple[float, ...]] = {}

MEAN["2.1"] = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715,
    0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
STD["2.1"] = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652,
    1.5579, 1.6382, 1.1253, 2.8251, 1.916,
)  # fmt: skip
MEAN["2.2"] = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542,
    0.2813, 0.0891, 0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665,
    -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799,
    -0.123, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957,
    0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
STD["2.2"] = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894,
    1.0901, 0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146,
    0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709,
    0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537,
    0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip


class Vae(nn.Module):
    """The Wan 2.1 or 2.2 video autoencoder (DreamZero model, appendix A)."""

    def __init__(self, config: VaeConfig) -> None:
        """Build the autoencoder of ``config`` with newly initialized weights."""
        super().__init__()
        self.config = config
        self.coder = WanCoder(config)

    def pointwise_layers(self) -> Iterator[nn.Module]:
        """Yield the encoder's norms and averages, which several operators make: to be compiled."""
        for name, module in self.coder.encoder.named_modules():
            if isinstance(module, ChannelNorm) or name.endswith("avg_shortcut"):
                yield module

    def encode(self, video_B3THW: Tensor) -> Tensor:
        """Return the normalized latents (B, C, F, h, w), F = 1 + (T - 1) / 4.

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
        video_B3THW = channels_last(self._fold(video_B3THW.to(self._dtype)))
        cache = _new_cache(self.coder.encoder)
        # The first frame stands alone; the causal convolutions carry on from chunk to chunk.
        bounds = [(0, 1), *((start, start + stride) for start in range(1, frames, stride))]
        moments = [
            self.coder.quant_conv(self.coder.encoder(video_B3THW[:, :, start:end], cache))
            for start, end in bounds
        ]
        return self._normalize(torch.cat(moments, dim=2)[:, : self.config.z_dim])

    def encode_first_frame(self, frame_B3HW: Tensor) -> Tensor:
        """Return the latent (B, C, 1, h, w) of single frames; equals latent 0 of any such clip."""
        return self.encode(frame_B3HW[:, :, None])

    def encode_conditioning(self, frame_B3HW: Tensor, frames: int) -> Tensor:
        """Return the latents (B, C, F, h, w) of the frame followed by mid-gray ones."""
        return self.encode(conditioning_clip(frame_B3HW, frames))

    def decode(self, latent_BCFhw: Tensor, *, clamp: bool = True) -> Tensor:
        """Return the clips (B, 3, T, H, W) of normalized latents.

        Args:
            latent_BCFhw: Normalized latents, as :meth:`encode` returns them.
            clamp: Whether to cut the result to [-1, 1].
        """
        video_B3THW = Decoding(self).more(latent_BCFhw)
        return video_B3THW.clamp(-1, 1) if clamp else video_B3THW

    @property
    def _dtype(self) -> torch.dtype:
        weight: Tensor = self.coder.quant_conv.weight
        return weight.dtype

    def _normalize(self, mean_BCFhw: Tensor) -> Tensor:
        mean, std = channel_statistics(self.config, mean_BCFhw.device)
        return ((mean_BCFhw.float() - mean) * (1.0 / std)).to(mean_BCFhw.dtype)

    def _denormalize(self, latent_BCFhw: Tensor) -> Tensor:
        mean, std = channel_statistics(self.config, latent_BCFhw.device)
        return (latent_BCFhw.float() / (1.0 / std) + mean).to(self._dtype)

    def _fold(self, video_B3THW: Tensor) -> Tensor:
        """Move each p x p square of pixels into channels: color, column, row, row fastest."""
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


def conditioning_clip(frame_B3HW: Tensor, frames: int) -> Tensor:
    """Return the clip (B, 3, T, H, W) of the frame followed by mid-gray ones."""
    gray = torch.zeros_like(frame_B3HW)[:, :, None].expand(-1, -1, frames - 1, -1, -1)
    return torch.cat([frame_B3HW[:, :, None], gray], dim=2)


class Decoding:
    """A video that is decoded part by part.

    It holds what the decoder carries over, the last two frames before each of its convolutions:
    as much memory as a decoded part takes on its way.
    """

    def __init__(self, vae: Vae, graphs: "Graphs | None" = None) -> None:
        """Begin a video; with ``graphs``, a part is recorded once and then launched as one."""
        self._vae, self._graphs = vae, graphs
        self._cache = tuple(_new_cache(vae.coder.decoder))

    def more(self, latent_BCFhw: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the clips (B, 3, T, H, W) of the next normalized latents, not cut to [-1, 1].

        T = 4 F, and three fewer in the first part: its first latent stands for one frame.

        Args:
            latent_BCFhw: A part. Several calls may share one, with the same results to the bit.
            start: First of its latents to decode.
            stop: The one after the last; None: all.
        """
        given = latent_BCFhw, self._cache
        decode = partial(self._decoded, start=start, stop=stop)
        if self._graphs is None:
            frames_B3THW, self._cache = decode(given)
        else:
            marks = tuple(None if isinstance(one, Tensor) else str(one) for one in self._cache)
            key = "decode", marks, start, stop
            frames_B3THW, self._cache = self._graphs.run(key, decode, given)
        return frames_B3THW

    def _decoded(
        self, given: tuple[Tensor, _Carried], start: int, stop: int | None
    ) -> tuple[Tensor, _Carried]:
        """Return the clips of latents after what is held, and what is held then."""
        latent_BCFhw, held = given
        coder, cache = self._vae.coder, list(held)
        latent_BCFhw = coder.post_quant_conv(self._vae._denormalize(latent_BCFhw))
        decoded = [
            coder.decoder(latent_BCFhw[:, :, i : i + 1], cache, first=not i and held[0] is None)
            for i in range(latent_BCFhw.shape[2])[start:stop]
        ]
        return self._vae._unfold(torch.cat(decoded, dim=2)), tuple(cache)

    def tensors(self) -> list[Tensor]:
        """Return what is held."""
        return [held for held in self._cache if isinstance(held, Tensor)]


# Never dropped: recorded work reads them by address.
@cache
def channel_statistics(config: VaeConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and std of each channel, float32, ready to broadcast; sent to a device once."""
    # Kept tables may first be asked for in inference mode and later be needed in training.
    with torch.inference_mode(mode=False):
        mean, std = (
            torch.tensor(table[config.version][: config.z_dim], device=device)[:, None, None, None]
            for table in (MEAN, STD)
        )
        return mean, std


def _new_cache(side: nn.Module) -> list[Held]:
    """Return an empty slot per causal convolution for the frames it carries to the next chunk."""
    return [None] * sum(isinstance(module, nn.Conv3d) for module in side.modules())
