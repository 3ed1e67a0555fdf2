"""Steps of the transformer that are recorded once and then launched as one.

A step is hundreds of small kernels, and a processor launches them more slowly than a fast GPU runs
them. Every place of the memory's window has shapes of its own, so each is recorded by itself, when
it is first met. What was recorded reads and writes the same addresses for ever: inputs are copied
there, and the keys and values of the session whose turn it is.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.dit import CausalDiT, StepInputs
from dzrobot.policies.dreamzero.network.layers import ContextKV, Rope, rope_table
from dzrobot.policies.dreamzero.network.session import KVCache


class _Recorded(NamedTuple):
    """One step, with the tensors that it reads and writes whenever it runs."""

    inputs: list[Tensor]
    outputs: tuple[Tensor, Tensor | None]
    replay: Callable[[], object]
    rope: Rope
    """Made once and read by address: as long as the recording lives, so must it."""


@dataclass(eq=False)
class StepGraphs:
    """The recorded steps of one transformer. For one call at a time, as a policy's."""

    dit: CausalDiT

    def __post_init__(self) -> None:
        self._recorded: dict[Hashable, _Recorded] = {}
        self._contexts: dict[Hashable, list[ContextKV]] = {}
        self._newest: Sequence[ContextKV] | None = None
        self._cache: KVCache | None = None
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        # Torch's own stream for recording is one per process, on the device that records first:
        # from any other device nothing would be recorded.
        self._stream = (
            torch.cuda.Stream(self.dit.device)  # type: ignore[no-untyped-call]
            if self._on_gpu
            else None
        )

    @property
    def _on_gpu(self) -> bool:
        return self.dit.device.type == "cuda"

    def cache(self, rows: int, frames: int) -> KVCache:
        """Return where every step finds the past: the same one each time, emptied."""
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
        given = _tensors(inputs)
        key = (
            cache.length, inputs.start_frame, inputs.one_timestep, inputs.controls is None,
            *_shapes(given), *_shapes([one for one in own_contexts[0] if one is not None]),
        )  # fmt: skip
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = self._record(inputs, cache, own_contexts)
        else:
            torch._foreach_copy_(found.inputs, given)
        found.replay()
        video, action = found.outputs
        # The solver keeps what it got while the next step writes to the same place.
        return video.clone(), None if action is None else action.clone()

    def _placed(self, contexts: Sequence[ContextKV]) -> list[ContextKV]:
        """Return the contexts where recorded steps read them; those of a call are copied once."""
        tensors = [tensor for one in contexts for tensor in one if tensor is not None]
        shapes = _shapes(tensors)
        kept = self._contexts.get(shapes)
        if kept is None:
            kept = self._contexts[shapes] = [_cloned(one) for one in contexts]
        elif contexts is not self._newest:
            own = [tensor for one in kept for tensor in one if tensor is not None]
            torch._foreach_copy_(own, tensors)
        self._newest = contexts
        return kept

    def _record(self, inputs: StepInputs, cache: KVCache, contexts: list[ContextKV]) -> _Recorded:
        own = inputs.cloned()
        layout = self.dit.step_layout(own)
        rope = rope_table(layout, self.dit.config.head_dim, self.dit.device)
        # Libraries choose and allocate in a first run, which is not recorded.
        outputs = self.dit.step(own, cache, contexts)
        if not self._on_gpu:
            return _Recorded(
                _tensors(own), outputs, self._repeated(own, cache, contexts, outputs), rope
            )
        graph = torch.cuda.CUDAGraph()
        # What other threads, as those of a server, ask of a GPU meanwhile is none of its business.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(self.dit.device), recording:
            outputs = self.dit.step(own, cache, contexts)
        return _Recorded(_tensors(own), outputs, graph.replay, rope)

    def _repeated(
        self,
        inputs: StepInputs,
        cache: KVCache,
        contexts: list[ContextKV],
        outputs: tuple[Tensor, Tensor | None],
    ) -> Callable[[], object]:
        """Return what does without a GPU: the step from the same tensors into the same ones."""

        def replay() -> None:
            for kept, new in zip(outputs, self.dit.step(inputs, cache, contexts), strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new)

        return replay


def _cloned(context: ContextKV) -> ContextKV:
    bias = context.text_bias_BN
    return ContextKV(
        text_key=context.text_key.clone(),
        text_value=context.text_value.clone(),
        image_key=context.image_key.clone(),
        image_value=context.image_value.clone(),
        text_bias_BN=None if bias is None else bias.clone(),
    )


def _tensors(inputs: StepInputs) -> list[Tensor]:
    """Return all tensors of ``inputs``, in one order."""
    controls = inputs.controls
    found = [inputs.video_BCFYX, inputs.timestep_BF, inputs.first_frame_BCFYX]
    if controls is not None:
        found += [controls.action_BAM, controls.timestep_BA, controls.state_BSM]
    return [one for one in found if one is not None]


def _shapes(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    return tuple((tuple(one.shape), one.dtype) for one in tensors)
