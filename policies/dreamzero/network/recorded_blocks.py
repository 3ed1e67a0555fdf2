"""Training blocks that a GPU launches as one: forward, and backward with its recomputation.

A block is about a hundred small kernels, which a processor launches more slowly than a fast GPU
runs a small micro-batch. Blocks are alike, so what is recorded of one serves all of them: before
it runs, inputs and weights are copied to where it reads them, and what it made is copied away
afterward. Nothing therefore depends on where FSDP2 puts the weights that it gathers, which is
elsewhere in every pass. (torch's ``mode="reduce-overhead"`` takes weights to lie still, and would
record them again whenever they have moved.)
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.func import functional_call

from dzrobot.policies.dreamzero.network.attention import PackedAttention
from dzrobot.policies.dreamzero.network.graphs import GraphRecorder
from dzrobot.policies.dreamzero.network.layers import Conditioning
from dzrobot.policies.dreamzero.network.session import map_tensors, tensors_of

recordable_devices = {"cuda"}
"""Devices whose work can be recorded; tests repeat it operator by operator on others."""


_NOTHING = torch.empty(0)


class _Inputs(NamedTuple):
    """What a block is given, all that changes from call to call."""

    x_BLD: Tensor
    given: Conditioning
    masks: tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a block, apart from the contents of its tensors."""

    block: nn.Module
    names: tuple[str, ...]
    """Names of the weights."""

    attention: PackedAttention
    kind: int
    """Number of the attention; see :meth:`RecordedBlocks.kind`."""

    inputs: _Inputs
    """Their structure, without contents."""

    needed: tuple[bool, ...]
    """Which tensors, those of the inputs and then the weights, get gradients."""

    @property
    def key(self) -> Hashable:
        """Return all that the work depends on besides shapes."""
        return self.kind, self.needed

    def forward(self, inputs: _Inputs, weights: Sequence[Tensor]) -> Tensor:
        """Return the tokens."""
        attention = replace(self.attention, masks=inputs.masks)
        named = dict(zip(self.names, weights, strict=True))
        tokens: Tensor = functional_call(self.block, named, (inputs.x_BLD, inputs.given, attention))
        return tokens

    def backward(
        self, inputs: _Inputs, weights: Sequence[Tensor], grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the needed tensors, after computing the block again."""
        leaves = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip((*tensors_of(inputs), *weights), self.needed, strict=True)
        ]
        count = len(leaves) - len(weights)
        with torch.enable_grad():
            out = self.forward(_filled(inputs, leaves[:count]), leaves[count:])
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            return torch.autograd.grad(out, wanted, grad, allow_unused=True)


def _filled(inputs: _Inputs, tensors: Sequence[Tensor]) -> _Inputs:
    """Return ``inputs`` with other tensors."""
    following = iter(tensors)
    return map_tensors(lambda _: next(following), inputs)


class RecordedBlocks:
    """The recorded work of all blocks of one network."""

    def __init__(self, device: torch.device) -> None:
        self.recorder = GraphRecorder(device)
        self._weights: list[Tensor] = []
        """Where recorded work reads the weights of the block whose turn it is."""

        self._known: set[Hashable] = set()
        self._kinds: dict[Hashable, int] = {}
        self._kind_of: WeakKeyDictionary[PackedAttention, int] = WeakKeyDictionary()

    def kind(self, attention: PackedAttention) -> int:
        """Return a number that attentions share which differ in the contents of masks alone."""
        known = self._kind_of.get(attention)
        if known is None:
            masked = tuple(mask is not None for mask in attention.masks)
            fixed = (attention.groups, attention.runs, attention.first_query, masked)
            known = self._kind_of[attention] = self._kinds.setdefault(fixed, len(self._kinds))
        return known

    def forward(self, call: _Call, tensors: Sequence[Tensor]) -> Tensor:
        """Return what a block makes of the tensors: those of its inputs, then its weights."""
        inputs = self._placed(call, tensors)
        out = self.recorder.run(
            ("forward", call.key), lambda own: call.forward(own, self._weights), inputs
        )
        known = (call.key, *(tensor.shape for tensor in tensors))
        if known not in self._known and any(call.needed):
            # Recorded here and not in the backward pass, which runs in threads of its own.
            self._known.add(known)
            self.backward(call, tensors, torch.zeros_like(out))
        return out

    def backward(self, call: _Call, tensors: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
        """Return the gradient of every tensor; None where none is needed."""
        inputs = self._placed(call, tensors)
        found = self.recorder.run(
            ("backward", call.key),
            lambda own: call.backward(own[0], self._weights, own[1]),
            (inputs, grad),
        )
        following = iter(found)
        return [next(following) if needed else None for needed in call.needed]

    def _placed(self, call: _Call, tensors: Sequence[Tensor]) -> _Inputs:
        """Copy the weights to their place; return the inputs."""
        count = len(tensors) - len(call.names)
        weights = list(tensors[count:])
        if not self._weights:
            self._weights = [weight.detach().clone() for weight in weights]
        else:
            torch._foreach_copy_(self._weights, weights)
        return _filled(call.inputs, tensors[:count])


class _Replayed(torch.autograd.Function):
    """A block by its recording; keeps its inputs alone, as activation checkpointing does."""

    @staticmethod
    def forward(ctx: Any, blocks: RecordedBlocks, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.blocks = blocks
        ctx.call = replace(call, needed=tuple(ctx.needs_input_grad[2:]))
        ctx.save_for_backward(*tensors)
        return blocks.forward(ctx.call, tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *ctx.blocks.backward(ctx.call, ctx.saved_tensors, grad)


class RecordedBlock(ActivationWrapper):
    """A block that trains by the recording; without gradients it runs as it is."""

    def __init__(self, block: nn.Module, blocks: RecordedBlocks) -> None:
        super().__init__(block)  # type: ignore[no-untyped-call]
        self._blocks = blocks

    @property
    def block(self) -> nn.Module:
        """Return the block."""
        block: nn.Module = self._checkpoint_wrapped_module
        return block

    def forward(self, x_BLD: Tensor, given: Conditioning, attention: Any) -> Tensor:
        """Return the tokens of the block."""
        if not (torch.is_grad_enabled() and isinstance(attention, PackedAttention)):
            plainly: Tensor = self.block(x_BLD, given, attention)
            return plainly
        names, weights = zip(*self.block.named_parameters(), strict=True)
        inputs = _Inputs(x_BLD, given, attention.masks)
        # What is recorded keeps the call, and must not keep its tensors.
        structure = map_tensors(lambda _: _NOTHING, inputs)
        plain = replace(attention, masks=structure.masks)
        call = _Call(self.block, names, plain, self._blocks.kind(attention), structure, needed=())
        tokens: Tensor = _Replayed.apply(  # type: ignore[no-untyped-call]
            self._blocks, call, *tensors_of(inputs), *weights
        )
        return tokens
