"""Weights that wait in the host's memory and are on the device only while they are used.

The device computes with the same numbers, so results are equal to the last bit; what it costs is
their way over the bus. Prompt and image encoder go first: they run once per prompt and per window.
Then go the transformer's last blocks, which every evaluation of the network needs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.quantize import Quantization, quantized_bytes
from dzrobot.policies.dreamzero.session_state import session_bytes

ALLOWANCE = 2 * 2**30
"""Bytes for the runtime, its kernels and what one plan computes with: an estimate."""

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Which weights wait on the host, and what that saves and costs."""

    text_encoder: bool = False
    image_encoder: bool = False

    blocks: int = 0
    """Last blocks of the transformer."""

    device_bytes: int
    """Taken on the device at most, with one session and `ALLOWANCE`."""

    host_bytes: int
    """Taken by those that wait on the host, where the device reads them by itself."""

    moved_bytes: int
    """That cross the bus in every evaluation of the transformer."""

    def modules(self, network: WorldActionModel) -> list[nn.Module]:
        """Return the modules of ``network`` whose weights wait on the host."""
        return _waiting(network, text=self.text_encoder, image=self.image_encoder, last=self.blocks)

    def describe(self) -> str:
        """Return it in one line."""
        waiting = [
            name
            for name, waits in (
                ("prompt encoder", self.text_encoder),
                ("image encoder", self.image_encoder),
                (f"{self.blocks} blocks of the transformer", self.blocks),
            )
            if waits
        ]
        if not waiting:
            return f"all weights on the device, {self.device_bytes / _GIB:.1f} GiB in all"
        moved = f", {self.moved_bytes / _GIB:.1f} GiB to move in every evaluation of the network"
        return (
            f"{', '.join(waiting)} on the host ({self.host_bytes / _GIB:.1f} GiB), "
            f"{self.device_bytes / _GIB:.1f} GiB on the device"
            f"{moved if self.moved_bytes else ''}"
        )


def offload_plans(
    network: WorldActionModel, dtype: torch.dtype, quantize: Quantization | None = None
) -> Iterator[OffloadPlan]:
    """Yield what can be done, from all weights on the device to as few as possible.

    Args:
        network: Built; its weights need no memory.
        dtype: That it will compute in.
        quantize: How the transformer's blocks are to be quantized.
    """
    blocks = len(network.model.blocks)
    last = blocks if quantize is not None else 0
    in_eight_bits = set(_waiting(network, text=False, image=False, last=last))

    def tensors(part: nn.Module) -> list[int]:
        if part in in_eight_bits:
            return quantized_bytes(part, dtype.itemsize)  # type: ignore[arg-type]
        return [dtype.itemsize * one.numel() for one in part.parameters(recurse=False)]

    def room(part: nn.Module) -> int:
        return sum(tensors(part))

    buffers = dtype.itemsize * sum(one.numel() for one in network.buffers())
    total = buffers + sum(map(room, network.modules()))
    choices = [(False, False, 0), (True, False, 0), *((True, True, n) for n in range(blocks + 1))]
    for text, image, count in choices:
        waiting = _waiting(network, text=text, image=image, last=count)
        sizes = [room(part) for part in waiting]
        in_blocks = _waiting(network, text=False, image=False, last=count)
        weights = total - sum(sizes) + max(sizes, default=0)
        yield OffloadPlan(
            text_encoder=text, image_encoder=image, blocks=count,
            device_bytes=weights + session_bytes(network.config, dtype.itemsize) + ALLOWANCE,
            host_bytes=sum(_pinned_bytes(one) for part in waiting for one in tensors(part)),
            moved_bytes=sum(map(room, in_blocks)),
        )  # fmt: skip


def plan_offload(
    network: WorldActionModel,
    dtype: torch.dtype,
    limit: int,
    quantize: Quantization | None = None,
) -> OffloadPlan:
    """Return the plan that moves least among those that fit into ``limit`` bytes of the device.

    Raises:
        ConfigError: None does.
    """
    least = None
    for plan in offload_plans(network, dtype, quantize):
        if plan.device_bytes <= limit:
            return plan
        least = plan
    assert least is not None, "there is always one"
    raise ConfigError(
        f"memory={limit / _GIB:.1f} GiB is too little for this network in "
        f"{str(dtype).removeprefix('torch.')}: with most of it on the host it takes "
        f"{least.device_bytes / _GIB:.1f} GiB of the device; give at least that"
    )


def offload(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Keep the weights of ``modules`` on the host; they come to ``device`` only while they run."""
    for module in modules:
        fetched = _Fetched(module, device)
        module.register_forward_pre_hook(fetched)
        module.register_forward_hook(fetched.leave, always_call=True)


def is_offloaded(root: nn.Module) -> bool:
    """Return whether weights of ``root`` or below wait on the host."""
    return any(
        isinstance(hook, _Fetched)
        for module in root.modules()
        for hook in module._forward_pre_hooks.values()
    )


class _Fetched:
    """The weights of one module: fetched before it runs, left on the host afterwards.

    Until then they read as NaN on the device, without memory: their dtype and device are what
    everybody expects, and whoever computes with them without calling the module is found out.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._kept: dict[str, Tensor] = {}
        self._absent: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(recurse=False):
            host = parameter.data.cpu()
            self._kept[name] = _pinned(host) if device.type == "cuda" else host
            absent = torch.full((), torch.nan, dtype=host.dtype, device=device).expand(host.shape)
            self._absent[name] = nn.Parameter(absent, requires_grad=False)
        self.leave()

    def __call__(self, *_: Any) -> None:
        for name, host in self._kept.items():
            present = host.to(self._device, non_blocking=True, copy=True)
            self._module._parameters[name] = nn.Parameter(present, requires_grad=False)

    def leave(self, *_: Any) -> None:
        self._module._parameters.update(self._absent)


def _pinned(host: Tensor) -> Tensor:
    """Return it in memory that the device reads by itself; a quantized one is several tensors."""
    if type(host) is Tensor:
        return host.pin_memory()
    names, about = host.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(host, name).pin_memory() for name in names}
    whole: Tensor = type(host).__tensor_unflatten__(parts, about, host.shape, host.stride())  # type: ignore[attr-defined]
    return whole


def _pinned_bytes(size: int) -> int:
    """Return what a tensor of ``size`` bytes takes there: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _waiting(network: WorldActionModel, *, text: bool, image: bool, last: int) -> list[nn.Module]:
    """Return what holds nearly all weights of these parts, and is only ever used by calling it."""
    blocks = list(network.model.blocks)
    roots = blocks[len(blocks) - last :]
    if image:
        roots.insert(0, network.image_encoder.vision.encoder)
    if text and network.text_encoder is not None:
        roots.insert(0, network.text_encoder)
    return [m for root in roots for m in root.modules() if isinstance(m, nn.Linear | nn.Embedding)]
