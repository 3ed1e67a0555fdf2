"""Rotary position embedding: where a token lies in time, height and width, or along the actions.

Source: docs/model.md, section 2.5. Angles are computed once in float64, the rotation runs in
float32.

Shapes: L tokens, K width of one head, B batch, H heads.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.pattern import TokenLayout

_BASE = 10000.0


class Rope(NamedTuple):
    """Cosine and sine of every token's angles, float32 of shape (L, 1, K // 2)."""

    cos: Tensor
    sin: Tensor

    def after(self, first: int) -> "Rope":
        """Return the tables without the first tokens."""
        return Rope(self.cos[first:], self.sin[first:])


def rotate(x_BLHK: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair of neighbouring channels by its token's angle; keeps the dtype."""
    # Half-precision channels times float32 tables make float32 products, without a copy of x.
    even, odd = torch.unflatten(x_BLHK, -1, (-1, 2)).unbind(-1)
    turned = (even * rope.cos - odd * rope.sin, even * rope.sin + odd * rope.cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x_BLHK.dtype)


@lru_cache(maxsize=64)
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
