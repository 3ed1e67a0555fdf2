"""Where the prompts of a call run: all as one batch, or each on a device of its own.

Guidance asks the transformer twice, with the prompt and with the negative one. On one device the
two are rows of one batch. With a copy of the transformer on a second device each runs on its own,
at the same time.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.dit import CausalDiT, StepInputs
from dzrobot.policies.dreamzero.network.graphs import Graphs
from dzrobot.policies.dreamzero.network.layers import ContextKV
from dzrobot.policies.dreamzero.network.session import KVCache

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """One transformer, and the prompts that it runs as one batch."""

    number: int
    """Under which sessions keep its keys and values."""

    dit: CausalDiT

    prompts: tuple[int, ...]
    """0 is the prompt, 1 the negative one."""

    graphs: Graphs | None = None
    """Its recorded work; None: it is launched operator by operator."""

    def allocate(self, frames: int, sessions: int) -> KVCache:
        """Return an empty cache with room for ``frames`` frames of ``sessions`` sessions."""
        return self.dit.new_cache(sessions * len(self.prompts), frames)

    def step(
        self, inputs: StepInputs, cache: KVCache, contexts: list[ContextKV]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what :meth:`CausalDiT.step` does."""
        run = self.dit.step if self.graphs is None else self.graphs.step
        return run(inputs, cache, contexts)

    def call(self, key: Hashable, work: Callable[[_In], _Out], given: _In) -> _Out:
        """Return what ``work``, a whole call with :meth:`unrecorded`, makes of ``given``."""
        return work(given) if self.graphs is None else self.graphs.run(key, work, given)

    def unrecorded(self) -> "PromptBatch":
        """Return it with steps that are launched operator by operator, or by what is around."""
        return replace(self, graphs=None)


def prompt_batches(
    model: CausalDiT, prompts: int, negative: CausalDiT | None = None, *, graphs: bool = False
) -> tuple[PromptBatch, ...]:
    """Return the batches of a call.

    Args:
        model: The transformer.
        prompts: How many there are: 2 with guidance.
        negative: A copy of the transformer on another device, for the second prompt; None: both
            run as one batch.
        graphs: Whether steps are recorded; then one session runs at a time.
    """
    parts = [(model, tuple(range(prompts)))]
    if negative is not None and prompts > 1:
        parts = [(model, (0,)), (negative, (1,))]
    return tuple(
        PromptBatch(number, dit, rows, Graphs(dit) if graphs else None)
        for number, (dit, rows) in enumerate(parts)
    )


def step_batches(
    batches: Sequence[PromptBatch],
    inputs: StepInputs,
    caches: Sequence[KVCache],
    contexts: Sequence[list[ContextKV]],
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Return the velocities of every prompt, ordered by prompt, then session, on ``device``."""
    # All are sent before any runs: a copy waits for what its source's device was given before.
    sent = [inputs.repeat(len(batch.prompts)).to(batch.dit.device) for batch in batches]
    results = [
        batch.step(given, cache, context)
        for batch, given, cache, context in zip(batches, sent, caches, contexts, strict=True)
    ]
    if len(results) == 1:
        return results[0]
    videos = [video.to(device, non_blocking=True) for video, _ in results]
    actions = [None if action is None else action.to(device) for _, action in results]
    kept = [action for action in actions if action is not None]
    return torch.cat(videos), torch.cat(kept) if kept else None
