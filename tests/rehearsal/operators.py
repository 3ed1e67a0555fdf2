"""Every operator that torch runs while something is computed, without computing it.

On the meta device tensors have a shape and a dtype and no memory, so a network of any size runs
through in seconds. A dispatch mode sees each operator as an accelerator would: what it multiplies,
which bytes it moves, whether it is launched at all, and where the host would wait for the device.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from dzrobot.errors import DzrobotError
from dzrobot.policies.dreamzero.network.attention import plain_devices
from dzrobot.training.run.parallel import clean_name

_ATEN = torch.ops.aten
_ALLOCATIONS = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided,
}  # fmt: skip
_OVERWRITES = {_ATEN.copy_, _ATEN.fill_, _ATEN.zero_, _ATEN.normal_, _ATEN.uniform_}
_GATHERS = {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather}
_SAMPLED = {_ATEN.upsample_bilinear2d: 2, _ATEN.upsample_bicubic2d: 4}
"""Resizing -> rows of the image that one pixel of the result is made of."""

_LINE = 64
"""Bytes that memory is read in."""

_COPIES = {_ATEN._to_copy, _ATEN.copy_}
_READS = {
    _ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.masked_select, _ATEN.equal, _ATEN.is_nonzero,
}  # fmt: skip
_HOST = torch.device("cpu")
_WIDEST_HEAD = 256
"""Of what flash attention takes."""


RECORDED = "recorded"
"""Stage of what graphs launch as one."""

Kind = Literal["product", "attention", "convolution", "memory"]
"""Three kinds of arithmetic; what only moves bytes."""


class HostReadError(DzrobotError):
    """The host reads what the device has computed, so it would wait for the device."""


class Call(NamedTuple):
    """One operator that launches something on the device."""

    stage: str
    module: str
    """Path of the innermost module, with numbers of layers replaced by ``*``; nothing in a backward
    pass."""

    operator: str
    kind: Kind
    dtype: torch.dtype
    """Of the factors of a product; of the first tensor elsewhere."""

    flops: float
    bytes_: int
    """Read and written."""


class Upload(NamedTuple):
    """A tensor that the host sends to the device."""

    stage: str
    place: str
    """Function that sends it."""

    bytes_: int
    is_blocking: bool
    """Whether the host waits until the device has done all that it was told before."""


class OperatorCounter(TorchDispatchMode):
    """Records the operators on ``device`` that run inside of it, forward and backward."""

    def __init__(self, device: torch.device) -> None:
        """Count on ``device``, the meta device or one that computes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[Call] = Counter()
        self.uploads: Counter[Upload] = Counter()
        self.misplaced: Counter[str] = Counter()
        """Operators that mix tensors of the device with tensors of another, by place."""

        self.replays = 0
        """Times that graphs launch something as one; see :meth:`recorded`."""

        self.device = _indexed(device)
        self._stage = ""
        self._modules = ModuleTracker()

    def __enter__(self) -> Self:
        self._modules.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._modules.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record what runs inside under ``name``."""
        before, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = before

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs inside as what graphs would launch as one."""
        self.replays += 1
        with self.stage(RECORDED):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` and record it.

        Raises:
            HostReadError: The host reads what is on the device.
        """
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        self._check_reads(func._overloadpacket, args, kwargs, given)
        result = _SHAPES.run(func, args, kwargs, given)
        self._record(func, (args, kwargs), given, result)
        return result

    def _check_reads(
        self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> None:
        on_device = [tensor for tensor in given if tensor.device == self.device]
        if not on_device or self.device == _HOST:
            return
        leaves = packet in _COPIES and (
            args[0].device == _HOST if packet is _ATEN.copy_ else kwargs.get("device") == _HOST
        )
        masks = packet in (_ATEN.index, _ATEN.index_put_) and any(
            tensor is not None and tensor.dtype == torch.bool for tensor in args[1]
        )
        if packet in _READS or leaves or masks:
            raise HostReadError(
                f"{_place()} reads a tensor {tuple(on_device[0].shape)} of the device "
                f"({packet}), so the host waits for everything before it"
            )

    def _record(self, func: Any, given_all: Any, given: list[Tensor], result: Any) -> None:
        packet, made = func._overloadpacket, _tensors(result)
        known = {_storage(tensor) for tensor in given}
        new = {_storage(tensor): tensor for tensor in made if _storage(tensor) not in known}
        if packet in _ALLOCATIONS:
            return
        changed = _changed(func, *given_all)
        written = changed or list(new.values())
        if not written or all(tensor.device != self.device for tensor in (*given, *written)):
            return
        if packet in _COPIES and given[-1].device == _HOST and self.device != _HOST:
            # A transfer of its own engine, beside the kernels.
            self._upload(given_all, given[-1])
            return
        if self._is_mixed(given):
            self.misplaced[f"{packet} in {_place()}"] += 1
        skipped = {id(tensor) for tensor in changed} if packet in _OVERWRITES else set()
        reads = [tensor for tensor in given if id(tensor) not in skipped]
        sizes = [_bytes(tensor) for tensor in reads]
        if packet in _GATHERS:
            # Only the rows that are asked for are read.
            sizes[0] = min(sizes[0], sum(map(_bytes, written)))
        if packet in _SAMPLED:
            # A much smaller image skips most of the larger one.
            pixels = sum(tensor.numel() for tensor in written)
            sizes[0] = min(sizes[0], _SAMPLED[packet] * _LINE * pixels)
        formula = flop_registry.get(packet)
        args, kwargs = given_all
        call = Call(
            stage=f"{self._stage}, backward" if _is_backward() else self._stage,
            module=self._module(),
            operator=str(packet).removeprefix("aten."),
            kind=_kind(packet),
            dtype=(given or written)[0].dtype,
            flops=0.0 if formula is None else formula(*args, **kwargs, out_val=result),
            bytes_=sum(sizes) + sum(map(_bytes, written)),
        )
        self.calls[call] += 1

    def _is_mixed(self, given: Sequence[Tensor]) -> bool:
        # Single numbers may come from the host: they travel with the launch.
        whole = [tensor for tensor in given if tensor.ndim]
        return len({tensor.device for tensor in whole}) > 1

    def _upload(self, given_all: Any, tensor: Tensor) -> None:
        args, kwargs = given_all
        self.sent(
            tensor, is_blocking=not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        )

    def sent(self, tensor: Tensor, *, is_blocking: bool) -> None:
        """Record that the host has sent ``tensor``, of any shape, to the device."""
        self.uploads[Upload(self._stage, _place(), _bytes(tensor), is_blocking)] += 1

    def _module(self) -> str:
        """Return the deepest module that is running; torch tells none in a backward pass."""
        if _is_backward():
            return ""
        names = self._modules.parents - {"Global"}
        deepest = clean_name(max(names, key=lambda name: (name.count("."), name), default=""))
        # Equal layers are one.
        return re.sub(r"\.\d+(?=\.|$)", ".*", deepest)


def _indexed(device: torch.device) -> torch.device:
    """Return ``device`` as its tensors name it: ``cuda`` is one of several, ``cuda:0`` is one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


class _Layout(NamedTuple):
    """A tensor without its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Shapes:
    """Remembers what operators of the meta device return: to work it out takes torch a millisecond.

    Blocks are equal and steps of the solver too, so nearly every operator has run before.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Layout | tuple[_Layout, ...]] = {}

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Return what ``func`` returns, new tensors for new tensors."""
        if func.is_view or func._schema.is_mutable or any(not x.is_meta for x in given):
            return func(*args, **kwargs)
        key = (func, _key(args), _key(list(kwargs.items())))
        known = self._known.get(key)
        if isinstance(known, _Layout):
            return _remade(known)
        if known is not None:
            return tuple(map(_remade, known))
        result = func(*args, **kwargs)
        own = {_storage(tensor) for tensor in given}
        if isinstance(result, Tensor):
            if result.is_meta and _storage(result) not in own:
                self._known[key] = _layout(result)
        elif isinstance(result, tuple) and all(
            isinstance(x, Tensor) and x.is_meta and _storage(x) not in own for x in result
        ):
            self._known[key] = tuple(map(_layout, result))
        return result


_SHAPES = _Shapes()
"""Of all rehearsals of the process."""


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _layout(value)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def _layout(tensor: Tensor) -> _Layout:
    return _Layout(tensor.shape, tensor.stride(), tensor.dtype)


def _remade(leaf: _Layout) -> Tensor:
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")


class Constructors(TorchFunctionMode):
    """Tells a counter of tensors that are made of numbers of the host, which no operator shows."""

    def __init__(self, counter: OperatorCounter) -> None:
        """Watch for tensors on the device of ``counter``."""
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``."""
        result = func(*args, **(kwargs or {}))
        made = func in (torch.tensor, torch.as_tensor)
        if made and result.device == self._counter.device != _HOST:
            self._counter.sent(result, is_blocking=True)
        return result


@contextmanager
def accelerator_attention() -> Iterator[None]:
    """Let the meta device run attention by the kernels that an accelerator would run.

    By itself it would take the plain form, with all scores in memory. Backward passes that compute
    blocks again are part of it. On a processor, bfloat16 training calls PyTorch's attention too.
    """
    plain = plain_devices.copy()
    plain_devices.clear()
    try:
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
            yield
    finally:
        plain_devices.update(plain)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] <= _WIDEST_HEAD:
        flash = _ATEN._scaled_dot_product_flash_attention
        return cast(Tensor, flash(query, key, value, dropout_p, is_causal, scale=scale)[0])
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = bias.masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    differentiated = torch.is_grad_enabled() and query.requires_grad
    found = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, differentiated, dropout_p, is_causal, scale=scale
    )
    return cast(Tensor, found[0])


def _is_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor stands on: an expanded one has fewer than its shape says."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@cache
def _changed_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that ``func`` changes in place."""
    return _tensors(
        [
            kwargs[name] if name in kwargs else args[index]
            for index, name in _changed_arguments(func)
            if name in kwargs or index < len(args)
        ]
    )


@cache
def _kind(packet: Any) -> Kind:
    if packet not in flop_registry:
        return "memory"
    name = str(packet)
    if "attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "product"


def _place() -> str:
    """Return the function of this package that asked for what is running."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("dzrobot."):
            return f"{module.removeprefix('dzrobot.')}.{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside of dzrobot"
