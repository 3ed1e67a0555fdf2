"""Video to normalized latents and back.

The weights sit in the library's causal autoencoder; the loop over time chunks is here, because the
library keeps the state of a running call on the module.

Legend of shape suffixes: B clips, C channels, T frames, F latent frames, H W pixels, h w latent.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dzrobot.errors import ModalityError
from dzrobot.policies.dreamzero.network.config import VaeConfig
from dzrobot.policies.dreamzero.network.libraries import members

if TYPE_CHECKING:
    from dzrobot.policies.dreamzero.network.graphs import Graphs

_Held = tuple[Tensor | str | None, ...]
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
        (AutoencoderKLWan,) = members("diffusers", "AutoencoderKLWan")
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
        _lighten(self.coder)

    def pointwise_layers(self) -> Iterator[nn.Module]:
        """Yield the encoder's norms and averages, which several operators make: to be compiled."""
        for name, module in self.coder.encoder.named_modules():
            if isinstance(module, _ChannelNorm) or name.endswith("avg_shortcut"):
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
        video_B3THW = _channels_last(self._fold(video_B3THW.to(self._dtype)))
        cache = _new_cache(self.coder.encoder)
        # The first frame stands alone; the causal convolutions carry on from chunk to chunk.
        bounds = [(0, 1), *((start, start + stride) for start in range(1, frames, stride))]
        moments = [
            self.coder.quant_conv(
                self.coder.encoder(video_B3THW[:, :, start:end], feat_cache=cache, feat_idx=[0])
            )
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
        self, given: tuple[Tensor, _Held], start: int, stop: int | None
    ) -> tuple[Tensor, _Held]:
        """Return the clips of latents after what is held, and what is held then."""
        latent_BCFhw, held = given
        coder, cache = self._vae.coder, list(held)
        latent_BCFhw = coder.post_quant_conv(self._vae._denormalize(latent_BCFhw))
        decoded = [
            coder.decoder(
                latent_BCFhw[:, :, i : i + 1],
                feat_cache=cache,
                feat_idx=[0],
                first_chunk=not i and held[0] is None,
            )
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


def _new_cache(side: nn.Module) -> list[Tensor | str | None]:
    """Return an empty slot per causal convolution for the frames it carries to the next chunk."""
    return [None] * sum(isinstance(module, nn.Conv3d) for module in side.modules())


class _CausalConv(nn.Conv3d):
    """The library's causal convolution, padded by the convolution itself.

    The library first writes a padded copy of all that it convolves. Results are the same bits,
    except for single frames in a fit.
    """

    def __init__(self, original: nn.Conv3d, margins: tuple[int, ...]) -> None:
        """Take over the weights of ``original``.

        Args:
            original: The library's.
            margins: What it pads: columns, rows and frames, before and after each.
        """
        super().__init__(
            original.in_channels, original.out_channels, device="meta",
            kernel_size=cast(tuple[int, int, int], original.kernel_size),
            stride=cast(tuple[int, int, int], original.stride),
            padding=(0, margins[2], margins[0]),
        )  # fmt: skip
        self.weight, self.bias = original.weight, original.bias
        self._frames_before, self._beside = margins[4], (margins[2], margins[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the weights, in the layout of where they are."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight.data = _channels_last(self.weight.data)
        return self

    def forward(self, x_BCTHW: Tensor, cache_x: Tensor | None = None) -> Tensor:
        """Return the convolved frames, those of ``cache_x`` and then black ones before them."""
        parts, missing = [x_BCTHW], self._frames_before
        fitted = torch.is_grad_enabled() and self.weight.requires_grad
        if fitted and cache_x is None and x_BCTHW.shape[2] == 1:
            # Only black frames come before it: the kernel's last frame is enough, a third of the
            # time. Last bits may differ, so only fits do this.
            frame_BCHW, weight = x_BCTHW[:, :, 0], self.weight[:, :, -1]
            strides = self.stride[1:]
            return F.conv2d(frame_BCHW, weight, self.bias, strides, self._beside)[:, :, None]
        if cache_x is not None and missing:
            parts.insert(0, cache_x)
            missing -= cache_x.shape[2]
        if missing > 0:
            B, C, _, H, W = x_BCTHW.shape
            # Laid out so that on an accelerator all parts are laid out alike.
            black = torch.zeros(B, missing, H, W, C, dtype=x_BCTHW.dtype, device=x_BCTHW.device)
            parts.insert(0, black.permute(0, 4, 1, 2, 3))
        return super().forward(torch.cat(parts, dim=2) if len(parts) > 1 else x_BCTHW)


class _ChannelNorm(nn.Module):
    """The library's norm over channels, and the activation that follows it.

    In half precision the library makes float32 copies of its inputs and results. Results are the
    same bits.
    """

    def __init__(self, original: nn.Module, *, activated: bool) -> None:
        """Take over the weights of ``original``; ``activated``: SiLU follows."""
        super().__init__()
        (self.gamma,) = original.parameters()
        self._scale = len(self.gamma) ** 0.5
        self._activated = activated

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized channels of (B, C, ...)."""
        if x.dtype == torch.float32:
            normal = F.normalize(x, dim=1)
        else:
            length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
            # torch.compile refuses an ``out`` with channels side by side, and autograd any ``out``.
            trained = torch.is_grad_enabled() and x.requires_grad
            out = None if trained or torch.compiler.is_compiling() else torch.empty_like(x)
            normal = torch.div(x, length.clamp_min(1e-12), out=out).to(x.dtype)
        # Weights are float32 where only products are in half precision.
        normal = normal * self._scale * self.gamma.to(x.dtype)
        return F.silu(normal) if self._activated else normal


def _lighten(coder: nn.Module) -> None:
    """Let the library's layers of ``coder`` move less memory; names of weights stay."""
    convolution, norm = members(
        "diffusers.models.autoencoders.autoencoder_kl_wan", "WanCausalConv3d", "WanRMS_norm"
    )
    for module in coder.modules():
        children = dict(module.named_children())
        activated = isinstance(children.get("nonlinearity"), nn.SiLU)
        for name, child in children.items():
            if isinstance(child, convolution):
                module.register_module(name, _CausalConv(child, child._padding))
            elif isinstance(child, norm):
                module.register_module(name, _ChannelNorm(child, activated=activated))
        if activated:
            module.register_module("nonlinearity", nn.Identity())


def _channels_last(tensor: Tensor) -> Tensor:
    """Return it with channels side by side, as an accelerator's convolutions read them.

    On a processor it stays as it is: last bits depend on the layout.
    """
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    return tensor.contiguous(memory_format=torch.channels_last_3d)
