"""Which token may attend which: the one description that every attention back end follows.

Source: docs/model.md, sections 2.2 and 2.6. A training sequence is
``[clean video | noisy video | actions | states]``; video frame 0 stands alone, the others form
blocks. A block's noisy frames and actions see the clean past and their own block, nothing else.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


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
