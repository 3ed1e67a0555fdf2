"""Weights that wait in the host's memory and are on the device only while they are used.

The device computes with the same numbers, so results are equal to the last bit; what it costs is
their way over the bus. Prompt and image encoder go first: they run once per prompt and per window.
Then go the transformer's last blocks, which every evaluation of the network needs.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import session_bytes
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.options import Quantization
from dzrobot.policies.dreamzero.quantize import quantized_bytes

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
        # The largest of all may run while the next largest is copied.
        weights = total - sum(sizes) + sum(sorted(sizes)[-2:])
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


def is_offloaded(root: nn.Module) -> bool:
    """Return whether weights of ``root`` or below wait on the host."""
    return any(
        isinstance(hook, _Fetched)
        for module in root.modules()
        for hook in module._forward_pre_hooks.values()
    )


class Offloader:
    """Keeps weights on the host that are on the device only while their module runs.

    While one module runs, the one that ran after it the last time is copied already, on a stream of
    its own, so copying and computing overlap. At most these two have their weights on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: _Fetched | None = None
        self._ahead: tuple[_Fetched, dict[str, Tensor]] | None = None
        self._computed: deque[torch.cuda.Event] = deque()

    def offload(self, modules: Iterable[nn.Module]) -> None:
        """Leave the weights of ``modules`` on the host until they run."""
        for module in modules:
            fetched = _Fetched(module, self._device, self)
            module.register_forward_pre_hook(fetched)
            module.register_forward_hook(fetched.leave, always_call=True)

    def fetch(self, fetched: "_Fetched") -> dict[str, Tensor]:
        """Return the weights of what runs now, and begin to copy those of what follows it."""
        ahead, self._ahead = self._ahead, None
        copied = ahead[1] if ahead and ahead[0] is fetched else self._copied(fetched)
        if self._stream is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_stream(self._stream)
            for part in chain.from_iterable(map(_parts, copied.values())):
                part.record_stream(computing)
        if self._last is not None:
            self._last.follower = fetched
        self._last = fetched
        if fetched.follower is not None:
            self._ahead = fetched.follower, self._copied(fetched.follower)
        return copied

    def left(self) -> None:
        """Note that the device has been given all work on the weights that are there."""
        if self._stream is not None:
            self._computed.append(torch.cuda.current_stream(self._device).record_event())

    def _copied(self, fetched: "_Fetched") -> dict[str, Tensor]:
        # The host is ahead of the device: copies for work that is only waiting would fill it.
        while self._computed:
            self._computed.popleft().synchronize()
        with torch.cuda.stream(self._stream):
            return {
                name: host.to(self._device, non_blocking=True, copy=True)
                for name, host in fetched.kept.items()
            }


class _Fetched:
    """The weights of one module: fetched before it runs, left on the host afterwards.

    Until then they read as NaN on the device, without memory: their dtype and device are what
    everybody expects, and whoever computes with them without calling the module is found out.
    """

    def __init__(self, module: nn.Module, device: torch.device, offloader: Offloader) -> None:
        self.follower: _Fetched | None = None
        self.kept: dict[str, Tensor] = {}
        self._module, self._offloader = module, offloader
        self._absent: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(recurse=False):
            host = parameter.data.cpu()
            self.kept[name] = _pinned(host) if device.type == "cuda" else host
            absent = torch.full((), torch.nan, dtype=host.dtype, device=device).expand(host.shape)
            self._absent[name] = nn.Parameter(absent, requires_grad=False)
        module._parameters.update(self._absent)

    def __call__(self, *_: Any) -> None:
        for name, present in self._offloader.fetch(self).items():
            self._module._parameters[name] = nn.Parameter(present, requires_grad=False)

    def leave(self, *_: Any) -> None:
        self._module._parameters.update(self._absent)
        self._offloader.left()


def _pinned(host: Tensor) -> Tensor:
    """Return it in memory that the device reads by itself; a quantized one is several tensors."""
    if type(host) is Tensor:
        return host.pin_memory()
    names, about = host.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(host, name).pin_memory() for name in names}
    whole: Tensor = type(host).__tensor_unflatten__(parts, about, host.shape, host.stride())  # type: ignore[attr-defined]
    return whole


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return what holds its numbers: itself, or of a quantized one several tensors."""
    if type(tensor) is Tensor:
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]


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
