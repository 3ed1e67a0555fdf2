"""From recorded operators to the kernels that a device runs, one by one or compiled."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dzrobot.training.cost.accelerators import Kind
from dzrobot.training.forecast.operators import Access, Call, collapsed, compiled_part


class Kernel(NamedTuple):
    """One launch; equal ones are counted, not repeated."""

    stage: str
    module: str
    """Path of the module; numbers of layers are replaced by ``*``."""

    operator: str
    kind: Kind
    dtype: torch.dtype
    is_in_place: bool
    """Whether it writes only into memory that was there before."""

    flops: float
    bytes_: float


Kernels = Counter[Kernel]


def eager(calls: Sequence[Call]) -> Kernels:
    """Return the kernels where every operator runs by itself."""
    return Counter(_alone(call) for call in calls)


def compiled(calls: Sequence[Call]) -> Kernels:
    """Return the kernels where each transformer block and parts of the encoders are compiled.

    Between two products or attentions of one of them, everything becomes one kernel: it reads
    what it did not make itself, once, and writes what is read after it. A compiler may need more
    than one.
    """
    last_read = {access.storage: index for index, call in enumerate(calls) for access in call.reads}
    found: Kernels = Counter()
    for first, group in _groups(calls):
        kernel = (
            _alone(group[0])
            if _region(group[0]) is None
            else _fused(group, first + len(group) - 1, last_read)
        )
        if kernel is not None:
            found[kernel] += 1
    return found


def _alone(call: Call) -> Kernel:
    return Kernel(
        call.stage, collapsed(call.module), call.operator, call.kind, call.dtype,
        not any(access.is_new for access in call.writes), call.flops, call.bytes_,
    )  # fmt: skip


def _region(call: Call) -> tuple[str, str] | None:
    """Return the compiled part that fuses ``call`` with its neighbors, None if nothing does."""
    block = compiled_part(call.module)
    return (call.stage, block) if block and call.kind == "memory" else None


def _groups(calls: Sequence[Call]) -> Iterator[tuple[int, Sequence[Call]]]:
    """Yield runs of calls that become one kernel, each with the number of its first."""
    first = 0
    for index in range(1, len(calls) + 1):
        region = _region(calls[first])
        if index == len(calls) or region is None or _region(calls[index]) != region:
            yield first, calls[first:index]
            first = index


def _fused(group: Sequence[Call], last: int, last_read: dict[int, int]) -> Kernel | None:
    """Return one kernel for ``group``, None where nothing needs what it computes."""
    own: set[int] = set()
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for call in group:
        for access in call.reads:
            if access.storage not in own:
                read[access.storage] = max(read.get(access.storage, 0), access.bytes_)
        for access in call.writes:
            if access.is_new:
                own.add(access.storage)
            if _is_kept(access, last, last_read):
                written[access.storage] = max(written.get(access.storage, 0), access.bytes_)
    if not written:
        return None
    first, bytes_ = group[0], sum(read.values()) + sum(written.values())
    module = collapsed(compiled_part(first.module))
    is_in_place = own.isdisjoint(written)
    return Kernel(first.stage, module, "fused", "memory", first.dtype, is_in_place, 0.0, bytes_)


def _is_kept(access: Access, last: int, last_read: dict[int, int]) -> bool:
    return not access.is_new or last_read.get(access.storage, -1) > last
