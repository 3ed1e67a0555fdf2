"""Where the prompts of a call run: all as one batch, or each on a device of its own.

Guidance asks the transformer twice, with the prompt and with the negative one. On one device the
two are rows of one batch. With a copy of the transformer on a second device each runs on its own,
at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.dit import CausalDiT, StepInputs
from dzrobot.policies.dreamzero.network.layers import ContextKV
from dzrobot.policies.dreamzero.network.session import KVCache


@dataclass(frozen=True, eq=False)
class Lane:
    """One transformer, and the prompts that it runs as one batch."""

    number: int
    """Under which sessions keep its keys and values."""

    dit: CausalDiT

    prompts: tuple[int, ...]
    """0 is the prompt, 1 the negative one."""

    def allocate(self, frames: int, sessions: int) -> KVCache:
        """Return an empty cache with room for ``frames`` frames of ``sessions`` sessions."""
        return KVCache.allocate(
            self.dit.config,
            rows=sessions * len(self.prompts),
            frames=frames,
            device=self.dit.device,
            dtype=self.dit.dtype,
        )


def lanes_of(model: CausalDiT, negative: CausalDiT | None, prompts: int) -> tuple[Lane, ...]:
    """Return the lanes of ``prompts`` prompts, with ``negative`` running the second."""
    if negative is None or prompts == 1:
        return (Lane(0, model, tuple(range(prompts))),)
    return Lane(0, model, (0,)), Lane(1, negative, (1,))


def step_lanes(
    lanes: Sequence[Lane],
    inputs: StepInputs,
    caches: Sequence[KVCache],
    contexts: Sequence[list[ContextKV]],
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Return the velocities of every prompt, ordered by prompt, then session, on ``device``."""
    # All are sent before any runs: a copy waits for what its source's device was given before.
    sent = [inputs.repeat(len(lane.prompts)).to(lane.dit.device) for lane in lanes]
    results = [
        lane.dit.step(given, cache, context)
        for lane, given, cache, context in zip(lanes, sent, caches, contexts, strict=True)
    ]
    if len(results) == 1:
        return results[0]
    videos = [video.to(device, non_blocking=True) for video, _ in results]
    actions = [None if action is None else action.to(device) for _, action in results]
    kept = [action for action in actions if action is not None]
    return torch.cat(videos), torch.cat(kept) if kept else None
