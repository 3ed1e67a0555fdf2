"""Layers of the Wan 2.1 and 2.2 autoencoders; weights have the names of the diffusers library.

Results are those of the library to the bit, except for single frames in a fit. The state of a
running call is in :class:`Carried`, never on a module.

Shapes: B clips, C channels, T frames, H W pixels.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dzrobot.policies.dreamzero.network.config import VaeConfig

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
        return super().forward(torch.cat(parts, dim=2) if len(parts) > 1 else x_BCTHW)


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
