"""Work of a GPU that is recorded once and then launched as one: when acting, and in training.

A chunk is thousands of small kernels, and a processor launches them more slowly than a fast GPU
runs them. Every place of the memory's window has shapes of its own, so each is recorded by itself,
when it is first met. What was recorded reads and writes the same addresses for ever: inputs are
copied there, and the keys and values of the session whose turn it is.

Guidance asks the transformer twice, with the prompt and with the negative one. On one device the
two are rows of one batch. With a copy of the transformer on a second device each runs on its own,
at the same time.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.dit import CausalDiT, StepInputs
from dzrobot.policies.dreamzero.network.layers import ContextKV
from dzrobot.policies.dreamzero.network.session import KVCache, map_tensors, tensors_of

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class _Recorded(NamedTuple):
    """Some work, with the tensors that it reads and writes whenever it runs."""

    inputs: list[Tensor]
    outputs: Any
    replay: Callable[[], object]


class GraphRecorder:
    """The recorded work of one device. For one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        # Torch's own stream for recording is one per process, on the device that records first:
        # from any other device nothing would be recorded.
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if self._on_gpu
            else None
        )

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def run(self, key: Hashable, work: Callable[[_In], _Out], given: _In) -> _Out:
        """Return what ``work`` makes of ``given``, both dataclasses or tuples of tensors.

        Args:
            key: All that ``work`` depends on besides the numbers and shapes in ``given``.
            work: Reads ``given``, else only what stays where it is; no number of the device may be
                read by the host.
            given: Its inputs, on the device.
        """
        tensors = tensors_of(given)
        key = (key, _shapes(tensors))
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = self._record(work, map_tensors(Tensor.clone, given))
        else:
            torch._foreach_copy_(found.inputs, tensors)
        found.replay()
        # The caller keeps what it got while the next work writes to the same place.
        outputs: _Out = map_tensors(Tensor.clone, found.outputs)
        return outputs

    def _record(self, work: Callable[[_In], _Out], own: _In) -> _Recorded:
        # Libraries choose and allocate in a first run, which is not recorded.
        outputs = work(own)
        if not self._on_gpu:
            return _Recorded(tensors_of(own), outputs, _repeated(work, own, outputs))
        graph = torch.cuda.CUDAGraph()
        # What other threads, as those of a server, ask of a GPU meanwhile is none of its business.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(self.device), recording:
            outputs = work(own)
        return _Recorded(tensors_of(own), outputs, graph.replay)


class Graphs(GraphRecorder):
    """The recorded work of one transformer's device. For one call at a time, as a policy's."""

    def __init__(self, dit: CausalDiT) -> None:
        super().__init__(dit.device)
        self.dit = dit
        self._contexts: dict[Hashable, list[ContextKV]] = {}
        self._newest: Sequence[ContextKV] | None = None
        self._cache: KVCache | None = None

    def cache(self, rows: int, frames: int) -> KVCache:
        """Return where recorded work finds the past: the same one each time, emptied."""
        kept = self._cache
        if kept is None or kept.rows != rows or not kept.fits(self.dit.config, frames):
            # What was recorded before reads the old one.
            self._recorded.clear()
            kept = self._cache = self.dit.new_cache(rows, frames)
        kept.length = 0
        return kept

    def step(
        self, inputs: StepInputs, cache: KVCache, contexts: Sequence[ContextKV]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what :meth:`CausalDiT.step` does; ``cache`` is from :meth:`cache`."""
        own_contexts = self._placed(contexts)
        key = (
            cache.length, inputs.start_frame, inputs.one_timestep, inputs.controls is None,
            _shapes(tensors_of(own_contexts[0])),
        )  # fmt: skip
        return self.run(key, lambda own: self.dit.step(own, cache, own_contexts), inputs)

    def _placed(self, contexts: Sequence[ContextKV]) -> list[ContextKV]:
        """Return the contexts where recorded steps read them; those of a call are copied once."""
        tensors = tensors_of(tuple(contexts))
        shapes = _shapes(tensors)
        kept = self._contexts.get(shapes)
        if kept is None:
            kept = self._contexts[shapes] = [map_tensors(Tensor.clone, one) for one in contexts]
        elif contexts is not self._newest:
            torch._foreach_copy_(tensors_of(tuple(kept)), tensors)
        self._newest = contexts
        return kept


def _repeated(work: Callable[[_In], _Out], own: _In, outputs: _Out) -> Callable[[], object]:
    """Return what does without a GPU: the work from the same tensors into the same ones."""

    def replay() -> None:
        torch._foreach_copy_(tensors_of(outputs), tensors_of(work(own)))

    return replay


def _shapes(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    return tuple((tuple(one.shape), one.dtype) for one in tensors)


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
