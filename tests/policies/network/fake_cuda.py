"""A GPU that is not there: tensors on cuda:0 with shapes and without memory, on any machine.

Torch's fake tensors run an operator as far as its shapes and devices. Torch built for processors
lacks the little that Python's indexing and a few methods ask of a device before they call an
operator; :func:`fake_cuda` calls the operators directly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from rehearsal.operators import Constructors, OperatorCounter
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dzrobot.policies.dreamzero.checkpoints.load import build_network
from dzrobot.policies.dreamzero.network import diffusion, image, layers, vae, world_action
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.policies.dreamzero.network.session import Prompt

CUDA = torch.device("cuda:0")
SOLVER_STEPS = 2
_ATEN = torch.ops.aten
_METHODS = {Tensor.contiguous: _ATEN.contiguous, Tensor.copy_: _ATEN.copy_}
_KEPT = (
    diffusion._on, image._pixel_statistics, layers.rope_table, vae.channel_statistics,
    world_action.training_schedule,
)  # fmt: skip
"""Tables that are kept for each device."""


class _Operators(TorchFunctionMode):
    """Calls operators where methods of a tensor would look for the device first."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.__setitem__:
            tensor, where, value = args
            write = _ATEN.copy_ if isinstance(value, Tensor) else _ATEN.fill_
            return write(_indexed(tensor, where), value)
        return _METHODS.get(func, func)(*args, **(kwargs or {}))


def _indexed(tensor, where):
    """Return ``tensor[where]``."""
    items = where if isinstance(where, tuple) else (where,)
    dim, tensors = 0, {}
    for number, item in enumerate(items):
        if item is None:
            tensor = tensor.unsqueeze(dim)
            dim += 1
        elif item is Ellipsis:
            dim = tensor.ndim - sum(later is not None for later in items[number + 1 :])
        elif isinstance(item, int):
            tensor = tensor.select(dim, item)
        elif isinstance(item, slice):
            tensor = _ATEN.slice(tensor, dim, item.start, item.stop, item.step or 1)
            dim += 1
        else:
            tensors[dim] = item
            dim += 1
    if not tensors:
        return tensor
    return _ATEN.index(tensor, [tensors.get(dim) for dim in range(tensor.ndim)])


class _Resizing(TorchDispatchMode):
    """Resizes by the shape: torch would work it out by methods of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in (_ATEN.upsample_bicubic2d, _ATEN.upsample_bilinear2d):
            return args[0].new_empty(*args[0].shape[:2], *args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Let tensors on cuda devices be made and computed with, without a GPU."""
    # The host reads these numbers, so it makes them beforehand; the cache tells both calls apart.
    diffusion.inference_schedule(SOLVER_STEPS, solver="unipc")
    diffusion.inference_schedule(SOLVER_STEPS, final_noise=0.0, solver="unipc")
    for kept in _KEPT:
        kept.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Operators(), _Resizing():
            yield
    finally:
        # Those of other tests have contents.
        for kept in _KEPT:
            kept.cache_clear()


@contextmanager
def counted() -> Iterator[OperatorCounter]:
    """Yield the operators that run on cuda:0; a read by the host raises."""
    counter = OperatorCounter(CUDA)
    with Constructors(counter), counter:
        yield counter
    assert counter.calls, "nothing ran on the device"


def cut(name, blocks=2):
    """Return the network of a published size with few blocks, all of the true width."""
    config = preset(name)
    return replace(
        config,
        dit=replace(config.dit, num_layers=blocks),
        image=replace(config.image, vision_layers=blocks),
        vae=replace(config.vae, num_res_blocks=1),
    )


def placed(config, device=CUDA):
    """Return the network of ``config`` in bfloat16 on ``device``, without prompt encoder."""
    with unset_fake_temporarily():
        network = build_network(config, text_encoder=False)
    for module in network.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                own = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
                module._parameters[name] = nn.Parameter(own, requires_grad=False)
        for name, kept in module._buffers.items():
            module._buffers[name] = torch.empty(kept.shape, dtype=kept.dtype, device=device)
    return network.eval()


@dataclass(frozen=True, eq=False)
class KnownPrompt(Prompt):
    """A prompt whose tokens the host knows: it cannot read those of a fake tensor."""

    tokens: tuple[int, ...] = ()

    @property
    def key(self):
        return self.tokens


def known_prompt(config, token, length=20):
    """Return an embedded prompt of ``length`` equal tokens."""
    dit = config.dit
    return KnownPrompt(
        torch.empty(dit.text_len, dtype=torch.int64),
        torch.empty(dit.text_len, dtype=torch.bool),
        torch.empty(dit.text_len, dit.text_dim, dtype=torch.bfloat16, device=CUDA),
        (token,) * length,
    )
