"""The Wan 2.1 and 2.2 autoencoders: video to normalized latents and back.

Weights have the names of the diffusers library, and results are its results to the bit, except for
single frames in a fit. The state of a running call is in :class:`Carried`, never on a module.

Shapes: B clips, C channels, T frames, F latent frames, H W pixels, h w latent.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dzrobot.errors import ModalityError
from dzrobot.policies.dreamzero.network.config import VaeConfig
from dzrobot.policies.dreamzero.network.layers import convolve

if TYPE_CHECKING:
    from dzrobot.policies.dreamzero.network.graphs import Graphs

Held = Tensor | str | None
"""What a causal convolution carries over: frames, or that they are to come."""

_BEFORE = 2
"""Frames before those of a part that the longest kernel reads."""
_FIRST = "Rep"
"""Held by what doubles frames after the first one, which stands alone."""


class Carried:
    """What one side carries from part to part of a video, in the order of its convolutions."""

    def __init__(self, held: list[Held]) -> None:
        """Begin a part; ``held`` is changed in place."""
        self._held, self._next = held, 0

    def convolve(self, convolution: nn.Module, x: Tensor) -> Tensor:
        """Return the convolved frames, and keep the last ones for the next part."""
        held = self.take()
        kept = x[:, :, -_BEFORE:].clone()
        if kept.shape[2] < _BEFORE and isinstance(held, Tensor):
            kept = torch.cat([held[:, :, -1:], kept], dim=2)
        elif kept.shape[2] < _BEFORE and held == _FIRST:
            kept = torch.cat([torch.zeros_like(kept), kept], dim=2)
        out: Tensor = convolution(x, held if isinstance(held, Tensor) else None)
        self.put(kept)
        return out

    def take(self) -> Held:
        """Return what is held at this place."""
        return self._held[self._next]

    def put(self, held: Held) -> None:
        """Hold it here and go on to the next place."""
        self._held[self._next] = held
        self._next += 1


class CausalConv(nn.Conv3d):
    """A convolution that sees frames before, never after; it pads what it convolves by itself."""

    def __init__(
        self, channels: int, out: int, kernel: int | tuple[int, ...] = 3, *,
        stride: tuple[int, int, int] = (1, 1, 1), margins: tuple[int, int, int] = (1, 1, 1),
    ) -> None:  # fmt: skip
        """Build it with newly initialized weights; ``margins``: frames, rows and columns."""
        super().__init__(channels, out, kernel, stride, (0, *margins[1:]))  # type: ignore[arg-type]
        self._frames_before, self._beside = 2 * margins[0], margins[1:]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the weights, in the layout of where they are."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight.data = channels_last(self.weight.data)
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
        return convolve(torch.cat(parts, dim=2) if len(parts) > 1 else x_BCTHW, self)


def channels_last(tensor: Tensor) -> Tensor:
    """Return it with channels side by side, as an accelerator's convolutions read them.

    On a processor it stays as it is: last bits depend on the layout.
    """
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    return tensor.contiguous(memory_format=torch.channels_last_3d)


class ChannelNorm(nn.Module):
    """Scales the channels of every pixel to unit mean square; SiLU may follow.

    In half precision the library makes float32 copies of its inputs and results.
    """

    def __init__(self, channels: int, *, axes: int = 3, activated: bool = True) -> None:
        """Build it; ``axes`` of each frame or clip, ``activated``: SiLU follows."""
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * axes))
        self._scale, self._activated = channels**0.5, activated

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


class _Residual(nn.Module):
    """Two convolutions, each after a norm, beside a shortcut."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = ChannelNorm(channels), CausalConv(channels, out)
        self.norm2, self.conv2 = ChannelNorm(out), CausalConv(out, out)
        self.conv_shortcut = (
            nn.Identity() if channels == out else CausalConv(channels, out, 1, margins=(0, 0, 0))
        )

    def forward(self, x: Tensor, carried: Carried) -> Tensor:
        """Return the frames after the block."""
        short: Tensor = self.conv_shortcut(x)
        x = carried.convolve(self.conv1, self.norm1(x))
        return carried.convolve(self.conv2, self.norm2(x)) + short


class _Attention(nn.Module):
    """Attention with one head among the pixels of each frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels, axes=2, activated=False)
        self.to_qkv, self.proj = (nn.Conv2d(channels, n * channels, 1) for n in (3, 1))

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Return the frames after the block."""
        B, C, T, H, W = x_BCTHW.shape
        x = self.norm(x_BCTHW.permute(0, 2, 1, 3, 4).reshape(B * T, C, H, W))
        qkv = self.to_qkv(x).reshape(B * T, 1, 3 * C, -1).permute(0, 1, 3, 2).contiguous()
        x = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1))
        x = self.proj(x.squeeze(1).permute(0, 2, 1).reshape(B * T, C, H, W))
        out: Tensor = x.view(B, T, C, H, W).permute(0, 2, 1, 3, 4) + x_BCTHW
        return out


class _Middle(nn.Module):
    """Attention between two residual blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first = _Residual(channels, channels)
        self.attentions = nn.ModuleList([_Attention(channels)])
        self.resnets = nn.ModuleList([first, _Residual(channels, channels)])

    def forward(self, x: Tensor, carried: Carried) -> Tensor:
        """Return the frames after the blocks."""
        x = self.attentions[0](self.resnets[0](x, carried))
        out: Tensor = self.resnets[1](x, carried)
        return out


class _Upsample(nn.Upsample):
    """Doubles rows and columns, in the dtype given."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, C, 2 H, 2 W)."""
        return super().forward(x.float()).type_as(x)


def _in_frames(resample: nn.Module, x: Tensor) -> Tensor:
    """Return what ``resample`` makes of each frame."""
    B, C, T, H, W = x.shape
    x = resample(x.permute(0, 2, 1, 3, 4).reshape(B * T, C, H, W))
    return x.view(B, T, *x.shape[1:]).permute(0, 2, 1, 3, 4)


class _Down(nn.Module):
    """Halves rows and columns, and with ``time`` the frames after the first."""

    def __init__(self, channels: int, *, time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2)
        )
        kernel, still = (3, 1, 1), (0, 0, 0)
        self.time_conv = (
            CausalConv(channels, channels, kernel, stride=(2, 1, 1), margins=still)
            if time
            else None
        )

    def forward(self, x: Tensor, carried: Carried) -> Tensor:
        """Return the smaller frames."""
        x = _in_frames(self.resample, x)
        if self.time_conv is None:
            return x
        held, kept = carried.take(), x[:, :, -1:].clone()
        if isinstance(held, Tensor):
            x = self.time_conv(torch.cat([held[:, :, -1:], x], 2))
        else:
            kept = x.clone()
        carried.put(kept)
        return x


class _Up(nn.Module):
    """Doubles rows and columns, and with ``time`` the frames after the first."""

    def __init__(self, channels: int, out: int, *, time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            _Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact"),
            nn.Conv2d(channels, out, 3, padding=1),
        )
        self.time_conv = (
            CausalConv(channels, 2 * channels, (3, 1, 1), margins=(1, 0, 0)) if time else None
        )

    def forward(self, x: Tensor, carried: Carried) -> Tensor:
        """Return the larger frames."""
        if self.time_conv is not None and carried.take() is None:
            carried.put(_FIRST)
        elif self.time_conv is not None:
            B, C, T, H, W = x.shape
            pairs = carried.convolve(self.time_conv, x).reshape(B, 2, C, T, H, W)
            x = torch.stack((pairs[:, 0], pairs[:, 1]), 3).reshape(B, C, 2 * T, H, W)
        return _in_frames(self.resample, x)


class _Averages(nn.Module):
    """The shortcut past what makes clips smaller: averages of neighbors and channels."""

    def __init__(self, out: int, factors: tuple[int, int]) -> None:
        super().__init__()
        self._out, self._factors = out, factors

    def forward(self, x: Tensor) -> Tensor:
        """Return the smaller clips; a first part of too few frames begins with black ones."""
        time, space = self._factors
        x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % time, 0))
        B, C, T, H, W = x.shape
        x = x.view(B, C, T // time, time, H // space, space, W // space, space)
        x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).contiguous()
        return x.view(B, self._out, -1, T // time, H // space, W // space).mean(dim=2)


class _Copies(nn.Module):
    """The shortcut past what makes clips larger: every value is repeated."""

    def __init__(self, out: int, factors: tuple[int, int]) -> None:
        super().__init__()
        self._out, self._factors = out, factors

    def forward(self, x: Tensor, first: bool) -> Tensor:
        """Return the larger clips; the first frame of a video stays one."""
        time, space = self._factors
        B, C, T, H, W = x.shape
        x = x.repeat_interleave(self._out * time * space**2 // C, dim=1)
        x = x.view(B, self._out, time, space, space, T, H, W)
        x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).contiguous()
        x = x.view(B, self._out, T * time, H * space, W * space)
        return x[:, :, time - 1 :] if first else x


class _DownStage(nn.Module):
    """A stage of Wan 2.2: residual blocks and a smaller size, beside averages."""

    def __init__(self, channels: int, out: int, blocks: int, down: tuple[bool, bool]) -> None:
        super().__init__()
        space, time = down
        self.avg_shortcut = _Averages(out, (1 + time, 1 + space))
        self.resnets = _residuals(channels, out, blocks)
        self.downsampler = _Down(out, time=time) if space else None

    def forward(self, x: Tensor, carried: Carried) -> Tensor:
        """Return the frames after the stage."""
        short: Tensor = self.avg_shortcut(x)
        for block in self.resnets:
            x = block(x, carried)
        if self.downsampler is not None:
            x = self.downsampler(x, carried)
        return x + short


class _UpStage(nn.Module):
    """Residual blocks and a larger size; of Wan 2.2, beside copies."""

    def __init__(
        self, channels: int, out: int, blocks: int, up: tuple[bool, bool], *, copies: bool
    ) -> None:
        super().__init__()
        space, time = up
        self.resnets = _residuals(channels, out, blocks + 1)
        self.avg_shortcut = _Copies(out, (1 + time, 2)) if copies and space else None
        made = [_Up(out, out if copies else out // 2, time=time)] if space else []
        self.upsamplers = nn.ModuleList(made)

    def forward(self, x: Tensor, carried: Carried, *, first: bool) -> Tensor:
        """Return the frames after the stage; ``first``: the video begins with them."""
        short = None if self.avg_shortcut is None else self.avg_shortcut(x, first)
        for block in (*self.resnets, *self.upsamplers):
            x = block(x, carried)
        return x if short is None else x + short


def _residuals(channels: int, out: int, blocks: int) -> nn.ModuleList:
    return nn.ModuleList(_Residual(out if i else channels, out) for i in range(blocks))


class _Encoder(nn.Module):
    """Frames to mean and logarithm of the variance of latents."""

    def __init__(self, config: VaeConfig, channels: int) -> None:
        super().__init__()
        widths = [config.dim * times for times in (1, *config.dim_mult)]
        self.conv_in = CausalConv(channels, widths[0])
        self.down_blocks = nn.ModuleList()
        last = len(config.dim_mult) - 1
        for i, (width, out) in enumerate(pairwise(widths)):
            time = i != last and config.temporal_downsample[i]
            blocks = config.num_res_blocks
            if config.version == "2.2":
                self.down_blocks.append(_DownStage(width, out, blocks, (i != last, time)))
                continue
            self.down_blocks.extend(_residuals(width, out, blocks))
            if i != last:
                self.down_blocks.append(_Down(out, time=time))
        self.mid_block = _Middle(widths[-1])
        self.norm_out = ChannelNorm(widths[-1])
        self.conv_out = CausalConv(widths[-1], 2 * config.z_dim)

    def forward(self, x: Tensor, held: list[Held]) -> Tensor:
        """Return the moments (B, 2 C, F, h, w) of a part of the video; changes ``held``."""
        carried = Carried(held)
        x = carried.convolve(self.conv_in, x)
        for block in self.down_blocks:
            x = block(x, carried)
        return carried.convolve(self.conv_out, self.norm_out(self.mid_block(x, carried)))


class _Decoder(nn.Module):
    """Latents to frames."""

    def __init__(self, config: VaeConfig, channels: int) -> None:
        super().__init__()
        mult = config.dim_mult[::-1]
        dim = config.dec_dim or config.dim
        widths = [dim * times for times in (mult[0], *mult)]
        self.conv_in = CausalConv(config.z_dim, widths[0])
        self.mid_block = _Middle(widths[0])
        self.up_blocks = nn.ModuleList()
        last, copies = len(mult) - 1, config.version == "2.2"
        for i, (width, out) in enumerate(pairwise(widths)):
            given = width if copies or i == 0 else width // 2
            time = i != last and config.temporal_downsample[::-1][i]
            self.up_blocks.append(
                _UpStage(given, out, config.num_res_blocks, (i != last, time), copies=copies)
            )
        self.norm_out = ChannelNorm(widths[-1])
        self.conv_out = CausalConv(widths[-1], channels)

    def forward(self, x: Tensor, held: list[Held], *, first: bool) -> Tensor:
        """Return the frames of a part of the latents; changes ``held``.

        Args:
            x: Latents (B, C, F, h, w).
            held: What was carried over.
            first: Whether the video begins with them.
        """
        carried = Carried(held)
        x = self.mid_block(carried.convolve(self.conv_in, x), carried)
        for block in self.up_blocks:
            x = block(x, carried, first=first)
        return carried.convolve(self.conv_out, self.norm_out(x))


class WanCoder(nn.Module):
    """Both sides of the autoencoder."""

    def __init__(self, config: VaeConfig) -> None:
        """Build it with newly initialized weights."""
        super().__init__()
        channels, z = 3 * config.patch_size**2, config.z_dim
        self.encoder = _Encoder(config, channels)
        self.quant_conv = CausalConv(2 * z, 2 * z, 1, margins=(0, 0, 0))
        self.post_quant_conv = CausalConv(z, z, 1, margins=(0, 0, 0))
        self.decoder = _Decoder(config, channels)


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
