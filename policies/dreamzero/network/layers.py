"""Layers of the causal video, action and state transformer; parameter names are the published ones.

The autoencoder's convolutions of single clips are here too.

Source: docs/model.md, sections 2.1 to 2.4.

Shapes: B batch, L tokens, Q tokens whose output is wanted, D width, H heads, K width of one head,
G distinct timesteps, N rows of the prompt, P rows of the image embedding.
"""

import math
from collections.abc import Iterable
from functools import cache
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dzrobot.policies.dreamzero.network.attention import Attention, TokenLayout, attend
from dzrobot.policies.dreamzero.network.config import DiTConfig

_BASE = 10000.0


class Rope(NamedTuple):
    """Cosine and sine of every token's angles, float32 of shape (L, 1, K // 2)."""

    cos: Tensor
    sin: Tensor

    def after(self, first: int) -> "Rope":
        """Return the tables without the first tokens."""
        return Rope(self.cos[first:], self.sin[first:])


def rotate(x_BLHK: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair of neighboring channels by its token's angle; keeps the dtype."""
    # Half-precision channels times float32 tables make float32 products, without a copy of x.
    even, odd = torch.unflatten(x_BLHK, -1, (-1, 2)).unbind(-1)
    turned = (even * rope.cos - odd * rope.sin, even * rope.sin + odd * rope.cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x_BLHK.dtype)


# Never dropped: recorded work reads them by address.
@cache
def rope_table(layout: TokenLayout, head_dim: int, device: torch.device) -> Rope:
    """Return the tables for a sequence ``[clean video | video | actions | states]``."""
    block = layout.first_block
    # Kept tables may first be asked for in inference mode and later be needed in training.
    with torch.inference_mode(mode=False), torch.device("cpu"):
        angles_LK = torch.cat(
            [
                _video_angles(layout, 0, layout.clean_frames, head_dim),
                _video_angles(layout, layout.start_frame, layout.frames, head_dim),
                _line_angles(block * layout.block_actions, layout.actions, head_dim),
                _line_angles(block * layout.block_states, layout.states, head_dim),
            ]
        )[:, None]
        return Rope(angles_LK.cos().float().to(device), angles_LK.sin().float().to(device))


def _line_angles(start: int, count: int, dim: int) -> Tensor:
    """Return (count, dim // 2) angles of the positions ``start ...``, float64."""
    position = torch.arange(start, start + count, dtype=torch.float64)
    frequency = _BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return position[:, None] * frequency


def _video_angles(layout: TokenLayout, start: int, frames: int, head_dim: int) -> Tensor:
    """Return (frames * rows * columns, K // 2) angles; channels are split time | height | width."""
    space = 2 * (head_dim // 6)
    shape = (frames, layout.rows, layout.columns)
    time = _line_angles(start, frames, head_dim - 2 * space)[:, None, None].expand(*shape, -1)
    row = _line_angles(0, layout.rows, space)[None, :, None].expand(*shape, -1)
    column = _line_angles(0, layout.columns, space)[None, None].expand(*shape, -1)
    return torch.cat([time, row, column], dim=-1).flatten(0, 2)


Runs = tuple[tuple[int, int], ...]

_MAX_PERIOD = 10000.0


class Context(NamedTuple):
    """What all tokens cross-attend, in the width of the transformer."""

    text_BND: Tensor
    image_BPD: Tensor
    text_bias_BN: Tensor | None
    """Added to the scores of the prompt rows; None for none."""


class ContextKV(NamedTuple):
    """Keys and values of the context in one block, each (B, rows, H, K)."""

    text_key: Tensor
    text_value: Tensor
    image_key: Tensor
    image_value: Tensor
    text_bias_BN: Tensor | None


class Conditioning(NamedTuple):
    """What a block needs besides its tokens."""

    time_BG6D: Tensor
    """Shift, scale and gate of each distinct timestep, before the block's own offset."""

    rope: Rope
    context: Context | ContextKV


def drawn(*shape: int, times: float = 1.0, over: float = 1.0) -> Tensor:
    """Return normal numbers of ``shape`` on the default device, scaled by ``times / over``.

    On the meta device nothing is computed: torch would load its compiler for that, which takes
    seconds.
    """
    if torch.get_default_device().type == "meta":
        return torch.empty(shape)
    return torch.randn(shape).mul_(times).div_(over)


def embedding(count: int, dim: int, times: float = 1.0) -> nn.Embedding:
    """Return a table of ``count`` new rows; see :func:`drawn`."""
    return nn.Embedding(count, dim, _weight=drawn(count, dim, times=times))


class RMSNorm(nn.Module):
    """Scales every token to unit mean square over the full width, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the normalized tokens in the dtype given."""
        return F.rms_norm(x_BLD, (x_BLD.shape[-1],), self.weight, self.eps)


class CategoryLinear(nn.Module):
    """A linear layer stored per robot category; the published network has one category."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(drawn(1, dim_in, dim_out, times=0.02))
        self.b = nn.Parameter(torch.zeros(1, dim_out))

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., dim_out)."""
        return torch.matmul(x, self.W[0]) + self.b[0]


class CategoryMLP(nn.Module):
    """Encodes states, decodes actions."""

    def __init__(self, dim_in: int, hidden: int, dim_out: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(dim_in, hidden)
        self.layer2 = CategoryLinear(hidden, dim_out)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., dim_out)."""
        out: Tensor = self.layer2(F.relu(self.layer1(x)))
        return out


class ActionEncoder(nn.Module):
    """Turns noisy actions and their timesteps into tokens."""

    def __init__(self, action_dim: int, dim: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(action_dim, dim)
        self.W2 = CategoryLinear(2 * dim, dim)
        self.W3 = CategoryLinear(dim, dim)

    def forward(self, action_BAM: Tensor, timestep_BA: Tensor) -> Tensor:
        """Return tokens (B, A, D); timesteps are raw, 0 to 1000."""
        action_BAD = self.W1(action_BAM)
        # Float32 angles: the published weights were trained with their rounding.
        waves_BAD = sinusoid(timestep_BA, action_BAD.shape[-1], torch.float32)
        cos, sin = waves_BAD.chunk(2, dim=-1)
        time_BAD = torch.cat([sin, cos], dim=-1).to(action_BAD.dtype)
        hidden_BAD = F.silu(self.W2(torch.cat([action_BAD, time_BAD], dim=-1)))
        out_BAD: Tensor = self.W3(hidden_BAD)
        return out_BAD


class ImageProjection(nn.Module):
    """Brings the image embedding to the width of the transformer."""

    def __init__(self, clip_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(clip_dim),
            nn.Linear(clip_dim, clip_dim),
            nn.GELU(),
            nn.Linear(clip_dim, dim),
            nn.LayerNorm(dim),
        )

    def forward(self, image_BPE: Tensor) -> Tensor:
        """Return (B, P, D)."""
        out_BPD: Tensor = self.proj(image_BPE)
        return out_BPD


class SelfAttention(nn.Module):
    """Attention among the tokens, with rotary positions."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim, config.eps), RMSNorm(dim, config.eps)

    def forward(self, x_BLD: Tensor, rope: Rope, attention: Attention) -> Tensor:
        """Return the update (B, Q, D) of the tokens from ``attention.first_query`` on."""
        first = attention.first_query
        q_BQHK = rotate(self._heads(self.norm_q(self.q(x_BLD[:, first:]))), rope.after(first))
        k_BLHK = rotate(self._heads(self.norm_k(self.k(x_BLD))), rope)
        out_BQHK = attention(q_BQHK, k_BLHK, self._heads(self.v(x_BLD)))
        out_BQD: Tensor = self.o(out_BQHK.flatten(2))
        return out_BQD

    def _heads(self, x_BLD: Tensor) -> Tensor:
        return torch.unflatten(x_BLD, -1, (self.heads, -1))


class CrossAttention(nn.Module):
    """Attention to the prompt plus attention to the first image, with shared queries."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.k_img, self.v_img = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm_q, self.norm_k = RMSNorm(dim, config.eps), RMSNorm(dim, config.eps)
        self.norm_k_img = RMSNorm(dim, config.eps)

    def forward(self, x_BLD: Tensor, context: Context | ContextKV) -> Tensor:
        """Return the update (B, L, D); keys and values may have been computed before."""
        kv = context if isinstance(context, ContextKV) else self.project(context)
        q_BLHK = self._heads(self.norm_q(self.q(x_BLD)))
        bias_B11N = None if kv.text_bias_BN is None else kv.text_bias_BN[:, None, None]
        text_BLHK = attend(q_BLHK, kv.text_key, kv.text_value, bias_B11N)
        image_BLHK = attend(q_BLHK, kv.image_key, kv.image_value)
        out_BLD: Tensor = self.o((text_BLHK + image_BLHK).flatten(2))
        return out_BLD

    def project(self, context: Context) -> ContextKV:
        """Return the block's keys and values of the context."""
        text, image = context.text_BND, context.image_BPD
        return ContextKV(
            text_key=self._heads(self.norm_k(self.k(text))),
            text_value=self._heads(self.v(text)),
            image_key=self._heads(self.norm_k_img(self.k_img(image))),
            image_value=self._heads(self.v_img(image)),
            text_bias_BN=context.text_bias_BN,
        )

    def _heads(self, x_BLD: Tensor) -> Tensor:
        return torch.unflatten(x_BLD, -1, (self.heads, -1))


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward, modulated by time."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.self_attn = SelfAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, eps=config.eps)
        self.cross_attn = CrossAttention(config)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.ffn_dim, config.dim),
        )
        self.modulation = nn.Parameter(drawn(1, 6, config.dim, over=math.sqrt(config.dim)))

    def forward(self, x_BLD: Tensor, given: Conditioning, attention: Attention) -> Tensor:
        """Return the tokens (B, Q, D) from ``attention.first_query`` on."""
        rows_6BGD = (self.modulation[:, None] + given.time_BG6D).unbind(2)
        shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = (
            spread(row_BGD, attention.runs) for row_BGD in rows_6BGD
        )
        first = attention.first_query
        seen_BLD = modulate(x_BLD, shift, scale, self.eps)
        update_BQD = self.self_attn(seen_BLD, given.rope, attention)
        x_BQD = torch.addcmul(x_BLD[:, first:], gate[:, first:], update_BQD)
        x_BQD = x_BQD + self.cross_attn(self.norm3(x_BQD), given.context)
        seen_BQD = modulate(x_BQD, shift_ffn[:, first:], scale_ffn[:, first:], self.eps)
        return torch.addcmul(x_BQD, gate_ffn[:, first:], self.ffn(seen_BQD))


class Head(nn.Module):
    """Turns video tokens into patches of latent pixels."""

    def __init__(self, config: DiTConfig, patch_values: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, patch_values)
        self.modulation = nn.Parameter(drawn(1, 2, config.dim, over=math.sqrt(config.dim)))

    def forward(self, x_BLD: Tensor, time_BFD: Tensor) -> Tensor:
        """Return (B, L, patch values); ``time`` has one embedding per frame."""
        rows_2BFD = (self.modulation[:, None] + time_BFD[:, :, None]).unbind(2)
        run = ((time_BFD.shape[1], x_BLD.shape[1] // time_BFD.shape[1]),)
        shift_BLD, scale_BLD = (spread(row_BFD, run) for row_BFD in rows_2BFD)
        out_BLV: Tensor = self.head(modulate(x_BLD, shift_BLD, scale_BLD, self.eps))
        return out_BLV


_SHAPES = 64
"""Most shapes that a block is compiled for."""


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile every block by itself, for the shapes that it meets; last bits may change.

    The compiler's limits of the process are raised, as every place of the memory's window is a
    shape of its own.
    """
    blocks, limits = list(blocks), torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _SHAPES)
    entries = _SHAPES * len(blocks)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, entries)
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False)


def modulate(x_BLD: Tensor, shift_BLD: Tensor, scale_BLD: Tensor, eps: float) -> Tensor:
    """Return the normalized tokens, scaled and shifted."""
    normal_BLD = F.layer_norm(x_BLD, (x_BLD.shape[-1],), eps=eps)
    return torch.addcmul(shift_BLD, normal_BLD, 1 + scale_BLD)


def spread(rows_BGD: Tensor, runs: Runs) -> Tensor:
    """Repeat the rows of the distinct timesteps over their tokens: (B, L, D).

    Expanding instead of gathering keeps the backward pass a plain sum.
    """
    if len(runs) == 1 and runs[0][0] == 1:
        # One row for all tokens needs no copy.
        return rows_BGD.expand(-1, runs[0][1], -1)
    parts = rows_BGD.split_with_sizes([count for count, _ in runs], dim=1)
    return torch.cat(
        [
            part_BCD[:, :, None].expand(-1, -1, tokens, -1).flatten(1, 2)
            for part_BCD, (_, tokens) in zip(parts, runs, strict=True)
        ],
        dim=1,
    )


def sinusoid(timestep: Tensor, dim: int, precision: torch.dtype = torch.float64) -> Tensor:
    """Return (..., dim) float32: cosines, then sines, of timesteps from 0 to 1000.

    Args:
        timestep: Float32 or integers; in bf16 986 would be 988.
        dim: Even width.
        precision: Dtype of the angles. They are few, so float64 costs nothing; in float32 the
            fastest ones are off by 1e-4.

    Raises:
        TypeError: The timesteps came in half precision.
    """
    refuse_half(timestep)
    half, device = dim // 2, timestep.device
    rate = torch.full((), _MAX_PERIOD, dtype=precision, device=device).log() / half
    frequency = (-torch.arange(half, dtype=precision, device=device) * rate).exp()
    angle = timestep.to(precision)[..., None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def refuse_half(timestep: Tensor) -> None:
    """Raise ``TypeError`` for timesteps that a mixed-precision cast has rounded."""
    if timestep.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"timesteps came as {timestep.dtype}, which rounds them; pass float32 or integers and "
            "shard with MixedPrecisionPolicy(cast_forward_inputs=False)"
        )


_KEPT = local()
"""Memory for what a convolution's pixels see: to get it anew takes as long as to fill it."""


def convolve(x_BCTHW: Tensor, layer: nn.Conv3d) -> Tensor:
    """Return what ``layer`` makes of the clips, to the bit.

    For single clips on one thread of a processor, torch writes out what every pixel sees value by
    value, and multiplies. This is the same product, and what is seen is copied row by row, which
    takes about half of the time.
    """
    weight, bias, stride = layer.weight, layer.bias, layer.stride
    if bias is None or not _is_written_out(x_BCTHW, layer):
        return F.conv3d(x_BCTHW, weight, bias, stride, layer.padding, layer.dilation, layer.groups)
    frames, high, wide = map(int, layer.padding)
    x = F.pad(x_BCTHW, (wide, wide, high, high, frames, frames)).contiguous()
    kernel, steps = weight.shape[2:], x.stride()[2:]
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], kernel, stride, strict=True)]
    between = [step * s for step, s in zip(steps, stride, strict=True)]
    seen = x.as_strided((*weight.shape[1:], *sizes), (x.stride(1), *steps, *between))
    if getattr(_KEPT, "values", x[:0]).numel() < seen.numel():
        # It may first be used in inference mode and later without.
        with torch.inference_mode(mode=False):
            _KEPT.values = x.new_empty(seen.numel())
    columns = _KEPT.values[: seen.numel()].view(seen.shape).copy_(seen)
    rows = weight.flatten(1)
    product = torch.addmm(bias[:, None], rows, columns.view(rows.shape[1], -1))
    return product.view(1, -1, *sizes)


def _is_written_out(x_BCTHW: Tensor, layer: nn.Conv3d) -> bool:
    """Return whether torch would write out what pixels see, and nothing asks how it came about."""
    if x_BCTHW.device.type != "cpu" or x_BCTHW.dtype != torch.float32 or len(x_BCTHW) != 1:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if layer.kernel_size[1:] == (1, 1) or layer.groups != 1 or layer.dilation != (1, 1, 1):
        return False
    sizes = layer.stride, layer.padding, layer.dilation, False, layer.output_padding, layer.groups
    chosen = torch._C._select_conv_backend(x_BCTHW, layer.weight, layer.bias, *sizes)
    return bool(chosen.name == "Slow3d")
