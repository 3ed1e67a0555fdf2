"""The attention pattern: against its rule token by token, and back end against back end."""

import pytest
import torch

from dzrobot.policies.dreamzero.network.attention import (
    AttentionPattern,
    TokenLayout,
    dense_mask,
    train_attention,
)

CPU = torch.device("cpu")


def layout(blocks, horizon, states=1, dropped=0):
    frames = 1 + 2 * blocks
    return TokenLayout(
        frames=frames, rows=1, columns=3,
        block_frames=2, block_actions=horizon, block_states=states,
        actions=blocks * horizon, states=blocks * states, clean_frames=frames - dropped,
    )  # fmt: skip


def tokens(at):
    """Return (kind, frame or block) of every token, written out plainly."""
    return [
        *(("clean", f) for f in range(at.clean_frames) for _ in range(at.frame_tokens)),
        *(("noisy", f) for f in range(at.frames) for _ in range(at.frame_tokens)),
        *(("action", i // at.block_actions) for i in range(at.actions)),
        *(("state", i // at.block_states) for i in range(at.states)),
    ]


def block_of(kind, index):
    return index if kind in ("action", "state") else (index - 1) // 2


def may_attend(query, key, window):
    """Say the rule of docs/model.md, section 2.6, for one pair of tokens."""
    (kind, index), (other, position) = query, key
    own, its = block_of(*query), block_of(*key)
    if kind == "clean":
        if other != "clean" or its > own:
            return False
        last = 1 + (own + 1) * 2
        return index == 0 or position == 0 or position >= max(1, last - window)
    if kind == "state":
        return other == "state" and its == own
    if kind == "noisy" and index == 0:
        return key == ("noisy", 0)
    if other == "clean":
        return its < own
    return its == own and key != ("noisy", 0)


@pytest.mark.parametrize("chunk", [4, 2, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_mask_is_the_rule_token_by_token(blocks, chunk):
    at = layout(blocks, horizon=3, states=2)
    mask = dense_mask(AttentionPattern(at, chunk), CPU)
    named = tokens(at)
    expected = [[may_attend(q, k, 2 * chunk + 1) for k in named] for q in named]
    assert mask.tolist() == expected


@pytest.mark.parametrize("horizon", [12, 16, 24])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_packed_equals_dense_forward_and_backward(blocks, horizon):
    for chunk, states, dropped, noisy_only in [
        (4, 1, 0, False), (4, 1, 2, False), (4, 1, 2, True),
        (1, 2, 0, False), (-1, 1, 0, False), (-1, 1, 2, True),
    ]:  # fmt: skip
        at = layout(blocks, horizon, states, dropped)
        pattern = AttentionPattern(at, chunk)
        generator = torch.Generator().manual_seed(blocks)
        q, k, v, cotangent = torch.randn(4, 2, at.length, 2, 8, generator=generator)
        first = len(at.clean) if noisy_only else 0
        outcomes = []
        for backend in ("dense", "packed"):
            attention = train_attention(pattern, backend, CPU, noisy_only=noisy_only)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attention(leaves[0][:, first:], *leaves[1:])
            (out * cotangent[:, first:]).sum().backward()
            outcomes.append([out, *(leaf.grad for leaf in leaves)])
        for dense, packed in zip(*outcomes, strict=True):
            torch.testing.assert_close(packed, dense, rtol=1e-5, atol=1e-5)


def test_groups_hold_every_query_once():
    for chunk in (4, 1, -1):
        at = layout(3, 5, states=2)
        spans = [span for group in AttentionPattern(at, chunk).groups for span in group.queries]
        covered = sorted(token for span in spans for token in range(span.start, span.stop))
        assert covered == list(range(at.length))
