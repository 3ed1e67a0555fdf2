"""Which token attends which, and the back ends of self-attention that follow it.

Source: docs/model.md, sections 2.2 and 2.6. A training sequence is
``[clean video | noisy video | actions | states]``; video frame 0 stands alone, the others form
blocks. A block's noisy frames and actions see the clean past and their own block, nothing else:
:class:`AttentionPattern` says so once. Back ends are training (dense or packed) and inference over
a key-value cache. They are plain objects handed to the blocks, so the network holds no episode and
no mask.

Packed attention makes one dense call per group of queries with the same keys. Those calls take no
mask, so every device runs its fastest kernel forward and backward, under activation checkpointing
and ``torch.compile`` alike. A mask-compiling kernel (FlexAttention) was not chosen: segment edges
(50, 100, 16 tokens) do not meet its 128-token tiles, and it has no backward without a GPU.

Shapes: B batch, L tokens of the sequence, Q queries, T cached tokens, H heads, K width of one head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, order=True)
class Span:
    """Tokens ``start`` to ``stop`` of the sequence."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """Return the span as a slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Group:
    """Queries that share one set of keys, so that one dense attention call serves them all."""

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    causal: bool = False
    """Whether query i from the end also ignores the last i keys."""

    video: Span | None = None
    """Keys that are hidden from these queries in samples whose video is; see
    :attr:`AttentionPattern.hides_video`. None: none."""


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Where the tokens of one sequence lie; also describes one inference call (no clean half)."""

    frames: int
    """Video frames being denoised, or read at inference."""

    rows: int
    """Token rows of one frame."""

    columns: int
    """Token columns of one frame."""

    block_frames: int
    """Frames denoised together."""

    block_actions: int
    """Actions of one block."""

    block_states: int
    """States of one block."""

    actions: int
    """Actions in the sequence."""

    states: int
    """States in the sequence."""

    clean_frames: int = 0
    """Frames of the clean half."""

    start_frame: int = 0
    """Absolute index of the first (non-clean) frame."""

    @property
    def frame_tokens(self) -> int:
        """Return the tokens of one frame."""
        return self.rows * self.columns

    @property
    def blocks(self) -> int:
        """Return the blocks after frame 0 of a training sequence."""
        return (self.frames - 1) // self.block_frames

    @property
    def first_block(self) -> int:
        """Return the absolute index of the block that the first action belongs to."""
        return max(0, self.start_frame - 1) // self.block_frames

    @property
    def clean(self) -> Span:
        """Return the clean half."""
        return self.clean_span(0, self.clean_frames)

    @property
    def video(self) -> Span:
        """Return the video frames after the clean half."""
        return self.video_span(0, self.frames)

    def clean_span(self, first: int, stop: int) -> Span:
        """Return the clean frames ``first`` to ``stop``."""
        return Span(first * self.frame_tokens, stop * self.frame_tokens)

    def video_span(self, first: int, stop: int) -> Span:
        """Return the video frames ``first`` to ``stop``."""
        return _shift(self.clean_span(first, stop), self.clean_frames * self.frame_tokens)

    def action_span(self, first: int, stop: int) -> Span:
        """Return the actions ``first`` to ``stop``."""
        return _shift(Span(first, stop), self.video.stop)

    def state_span(self, first: int, stop: int) -> Span:
        """Return the states ``first`` to ``stop``."""
        return _shift(Span(first, stop), self.video.stop + self.actions)

    @property
    def length(self) -> int:
        """Return the tokens in the sequence."""
        return self.state_span(0, self.states).stop

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (timesteps, tokens per timestep) of the parts: clean, video, actions, states.

        The clean half has one timestep, zero: far fewer time embeddings than tokens are needed.
        """
        clean = ((1, len(self.clean)),) if self.clean_frames else ()
        return (*clean, (self.frames, self.frame_tokens), (self.actions, 1), (self.states, 1))


@dataclass(frozen=True)
class AttentionPattern:
    """The training pattern of one layout."""

    layout: TokenLayout

    max_chunk_size: int
    """Blocks of history that clean frames see besides frame 0; -1: token by token, causally."""

    hides_video: bool = False
    """Whether there are samples whose actions do not see the noisy video, as where it is skipped;
    actions are then groups of their own."""

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups; together they hold every query once."""
        at = self.layout
        frame0_clean, frame0_noisy = at.clean_span(0, 1), at.video_span(0, 1)
        return (
            Group((frame0_clean,), (frame0_clean,)),
            *self._clean_groups(),
            Group((frame0_noisy,), (frame0_noisy,)),
            *(group for block in range(at.blocks) for group in self._noisy_groups(block)),
            *self._state_groups(),
        )

    def _clean_groups(self) -> tuple[Group, ...]:
        at = self.layout
        if self.max_chunk_size == -1:
            queries = at.clean_span(1, at.clean_frames)
            return (Group((queries,), (at.clean,), causal=True),) if len(queries) else ()
        window = self.max_chunk_size * at.block_frames + 1
        groups = []
        for first in range(1, at.clean_frames, at.block_frames):
            stop = first + at.block_frames
            seen = at.clean_span(max(1, stop - window), stop)
            groups.append(Group((at.clean_span(first, stop),), _joined(at.clean_span(0, 1), seen)))
        return tuple(groups)

    def _noisy_groups(self, block: int) -> tuple[Group, ...]:
        at = self.layout
        first = 1 + block * at.block_frames
        video = at.video_span(first, first + at.block_frames)
        actions = at.action_span(block * at.block_actions, (block + 1) * at.block_actions)
        states = at.state_span(block * at.block_states, (block + 1) * at.block_states)
        past = at.clean_span(0, first)
        keys = _joined(past, video, actions, states)
        if self.hides_video:
            return Group((video,), keys), Group((actions,), keys, video=video)
        return (Group(_joined(video, actions), keys),)

    def _state_groups(self) -> tuple[Group, ...]:
        at = self.layout
        step = at.block_states
        spans = (at.state_span(first, first + step) for first in range(0, at.states, step))
        return tuple(Group((span,), (span,)) for span in spans)


@lru_cache(maxsize=32)
def dense_mask(pattern: AttentionPattern, device: torch.device) -> Tensor:
    """Return the (L, L) boolean mask of a pattern: True where query (row) attends key (column)."""
    length = pattern.layout.length
    # A kept mask may first be asked for in inference mode and later be needed in training.
    with torch.inference_mode(mode=False), torch.device("cpu"):
        mask_LL = torch.zeros(length, length, dtype=torch.bool)
        for group in pattern.groups:
            queries, keys = _indices(group.queries), _indices(group.keys)
            mask_LL[queries[:, None], keys] = group_mask(group)
        return mask_LL.to(device)


@lru_cache(maxsize=32)
def hidden_video(pattern: AttentionPattern, device: torch.device) -> Tensor:
    """Return (L, L): True where a query does not see a key in samples whose video is hidden."""
    length = pattern.layout.length
    with torch.inference_mode(mode=False), torch.device("cpu"):
        hidden_LL = torch.zeros(length, length, dtype=torch.bool)
        for group in pattern.groups:
            if group.video is not None:
                hidden_LL[_indices(group.queries)[:, None], _indices((group.video,))] = True
        return hidden_LL.to(device)


@lru_cache(maxsize=128)
def hidden_keys(group: Group, device: torch.device) -> Tensor:
    """Return (keys,): True on those of ``group.video``."""
    assert group.video is not None, "of groups that have such keys"
    with torch.inference_mode(mode=False), torch.device("cpu"):
        index = _indices(group.keys)
        return ((index >= group.video.start) & (index < group.video.stop)).to(device)


def group_mask(group: Group) -> Tensor:
    """Return the (queries, keys) boolean mask inside a group."""
    queries, keys = sum(map(len, group.queries)), sum(map(len, group.keys))
    mask = torch.ones(queries, keys, dtype=torch.bool)
    return mask.tril(keys - queries) if group.causal else mask


def _indices(spans: tuple[Span, ...]) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])


def _shift(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


def _joined(*spans: Span) -> tuple[Span, ...]:
    """Return the spans in order, neighbors merged, empty ones dropped."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        elif len(span):
            joined.append(span)
    return tuple(joined)


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
