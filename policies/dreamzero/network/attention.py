"""Self-attention back ends: training (dense or packed) and inference over a key-value cache.

All follow :mod:`~dzrobot.policies.dreamzero.network.pattern`. They are plain objects handed to the
blocks, so the network holds no episode and no mask.

Packed attention makes one dense call per group of queries with the same keys. Those calls take no
mask, so every device runs its fastest kernel forward and backward, under activation checkpointing
and ``torch.compile`` alike. A mask-compiling kernel (FlexAttention) was not chosen: segment edges
(50, 100, 16 tokens) do not meet its 128-token tiles, and it has no backward without a GPU.

Shapes: B batch, L tokens of the sequence, Q queries, T cached tokens, H heads, K width of one head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dzrobot.policies.dreamzero.network.pattern import (
    AttentionPattern,
    Group,
    Span,
    dense_mask,
    group_mask,
    hidden_keys,
    hidden_video,
)

Backend = Literal["dense", "packed"]


class Attention(Protocol):
    """How the tokens of one sequence attend each other."""

    @property
    def first_query(self) -> int:
        """Return the first token whose output is wanted; the earlier ones are only keys."""
        ...

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (timesteps, tokens per timestep) of each part of the sequence."""
        ...

    def __call__(self, q_BQHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
        """Return the attended values (B, Q, H, K) of the queries from ``first_query`` on."""
        ...


def train_attention(
    pattern: AttentionPattern,
    backend: Backend,
    device: torch.device,
    *,
    noisy_only: bool = False,
    hides_video_B: Tensor | None = None,
) -> "DenseAttention | PackedAttention":
    """Return the back end that runs a training pattern.

    Args:
        pattern: What attends what.
        backend: ``packed``, or ``dense`` for the plain form with an (L, L) mask.
        device: Where the mask lies.
        noisy_only: Leave out the queries of the clean half: all that the last block is asked for.
        hides_video_B: True for samples whose actions do not see the noisy video; None: there are
            none, and the pattern says so too.
    """
    first = len(pattern.layout.clean) if noisy_only else 0
    runs = pattern.layout.runs
    if backend == "dense":
        mask_QL = dense_mask(pattern, device)[first:]
        if hides_video_B is None:
            return DenseAttention(mask_QL, runs, first)
        hidden_QL = hidden_video(pattern, device)[first:]
        mask_B1QL = mask_QL & ~(hides_video_B[:, None, None, None] & hidden_QL)
        return DenseAttention(mask_B1QL, runs, first)
    groups = tuple(group for group in pattern.groups if group.queries[0].start >= first)
    spans = [span for group in groups for span in group.queries]
    order = sorted(range(len(spans)), key=lambda number: spans[number])
    masks = tuple(_mask(group, hides_video_B, device) for group in groups)
    return PackedAttention(groups, runs, first, tuple(order), masks)


def _mask(group: Group, hides_video_B: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the mask of a group, (queries, keys) or (B, 1, 1, keys); None: all keys are seen."""
    if group.causal:
        return group_mask(group).to(device)
    if group.video is None or hides_video_B is None:
        return None
    return ~(hides_video_B[:, None, None, None] & hidden_keys(group, device))


@dataclass(frozen=True, eq=False)
class DenseAttention:
    """One masked call over the whole sequence: the plain form."""

    mask_QL: Tensor
    """Or (B, 1, Q, L), where samples differ."""

    runs: tuple[tuple[int, int], ...]
    first_query: int

    def __call__(self, q_BQHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
        """Return the attended values (B, Q, H, K)."""
        return attend(q_BQHK, k_BLHK, v_BLHK, self.mask_QL)


@dataclass(frozen=True, eq=False)
class PackedAttention:
    """One dense call per group of queries with the same keys."""

    groups: tuple[Group, ...]
    runs: tuple[tuple[int, int], ...]
    first_query: int
    order: tuple[int, ...]
    """For each span of queries in the sequence, its number among the spans of all groups."""

    masks: tuple[Tensor | None, ...]
    """For each group which keys are seen, (queries, keys) or of each sample (B, 1, 1, keys); None:
    all."""

    def __call__(self, q_BQHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
        """Return the attended values (B, Q, H, K)."""
        pieces: list[Tensor] = []
        for group, mask in zip(self.groups, self.masks, strict=True):
            out_BGHK = self._group(group, mask, q_BQHK, k_BLHK, v_BLHK)
            pieces += out_BGHK.split_with_sizes([len(span) for span in group.queries], dim=1)
        return torch.cat([pieces[number] for number in self.order], dim=1)

    def _group(
        self, group: Group, mask: Tensor | None, q_BQHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor
    ) -> Tensor:
        if group.queries == group.keys and len(group.keys[0]) == 1:
            # A softmax over one key is one: a lone state token gets its own value.
            return v_BLHK[:, group.keys[0].slice]
        return attend(
            _take(q_BQHK, group.queries, -self.first_query),
            _take(k_BLHK, group.keys),
            _take(v_BLHK, group.keys),
            mask,
        )


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """Inference: new tokens see the cached past and each other, without a mask.

    Source: docs/model.md, section 2.7.
    """

    keys_BTHK: Tensor
    """Preallocated keys of one layer; the first ``past`` are valid."""

    values_BTHK: Tensor
    """Preallocated values of one layer."""

    past: int
    """Cached tokens; the new ones are written behind them and stay only if committed."""

    runs: tuple[tuple[int, int], ...]
    """(timesteps, tokens per timestep) of each part of the new tokens."""

    first_query: int = 0

    def __call__(self, q_BQHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
        """Write the new keys and values behind the past, then attend all of them."""
        stop = self.past + k_BLHK.shape[1]
        self.keys_BTHK[:, self.past : stop] = k_BLHK
        self.values_BTHK[:, self.past : stop] = v_BLHK
        return attend(q_BQHK, self.keys_BTHK[:, :stop], self.values_BTHK[:, :stop])


plain_devices = {"cpu"}
"""Devices where bfloat16 training uses plain products; none while rehearsing an accelerator."""


def attend(q_BQHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax attention (B, Q, H, K); ``mask`` is boolean or an additive bias."""
    q, k, v = (x.transpose(1, 2) for x in (q_BQHK, k_BLHK, v_BLHK))
    slow = q.dtype == torch.bfloat16 and q.device.type in plain_devices
    if slow and torch.is_grad_enabled() and q.requires_grad:
        return _plainly(q, k, v, mask).transpose(1, 2)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _plainly(q_BHQK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, mask: Tensor | None) -> Tensor:
    """Return the same, as products and a softmax.

    PyTorch's kernel for bfloat16 on a processor takes four times as long backward, with a similar
    error.
    """
    width = math.sqrt(q_BHQK.shape[-1])
    scores = (q_BHQK.float() / width) @ k_BHLK.float().transpose(-1, -2)
    if mask is not None:
        is_bias = mask.dtype != torch.bool
        scores = scores + mask if is_bias else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1).to(v_BHLK.dtype) @ v_BHLK


def _take(x_BLHK: Tensor, spans: Sequence[Span], shift: int = 0) -> Tensor:
    """Return the tokens of the spans, a view where there is one span."""
    parts = [x_BLHK[:, span.start + shift : span.stop + shift] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
