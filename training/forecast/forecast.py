"""How long it will take: kernels of a rehearsal on the roofline of a device."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Literal

from dzrobot.training.cost.accelerators import Roofline
from dzrobot.training.forecast.kernels import Kernel, Kernels
from dzrobot.training.forecast.operators import BETWEEN, RECORDED
from dzrobot.training.forecast.rehearsal import Rehearsal, StepRehearsal

Form = Literal["eager", "compiled", "graph"]
"""Operators one by one; blocks and parts of the encoders compiled; compiled, and all of a chunk
launched as one graph."""

REPLAY_LAUNCHES = 16
"""Of one recorded chunk, at most: the replay, copies of its ten inputs and its three results, of
the keys and values of the session to where it reads them, and of new ones back."""

_DEPTH = 5


@dataclass(frozen=True)
class Time:
    """Seconds of one run."""

    device: float
    host: float
    """Launching, on the processor."""

    link: float
    """Sending to other devices."""

    total: float


def forecast(rehearsal: Rehearsal, roof: Roofline, form: Form) -> Time:
    """Return the time of what was rehearsed.

    An accelerator computes while the host launches and the link sends, so the longest of the three
    counts; a processor does one after the other.
    """
    kernels = _kernels(rehearsal, form)
    if form != "graph":
        return _time(kernels, kernels.total(), rehearsal.link_bytes, roof)
    # Until the first recorded step the host may be behind; from then on it is ahead.
    before = Counter({k: n for k, n in kernels.items() if k.stage not in (RECORDED, BETWEEN)})
    later = kernels - before
    between = sum(count for kernel, count in later.items() if kernel.stage == BETWEEN)
    launches = between + REPLAY_LAUNCHES * rehearsal.replays
    first = _time(before, before.total(), rehearsal.link_bytes, roof)
    second = _time(later, launches, 0.0, roof)
    return Time(*(sum(both) for both in zip(astuple(first), astuple(second), strict=True)))


def _time(kernels: Kernels, launches: int, link_bytes: float, roof: Roofline) -> Time:
    device = sum(count * _seconds(kernel, roof) for kernel, count in kernels.items())
    host, link = roof.launch_s * launches, link_bytes / roof.link_bytes_s
    total = max(device, host, link) if roof.overlaps else device + host + link
    return Time(device, host, link, total)


def step_seconds(step: StepRehearsal, roof: Roofline, form: Form, parts: int = 1) -> float:
    """Return the time of one optimizer step of ``parts`` micro-batches."""
    parts_s = parts * forecast(step.micro_batch, roof, form).total
    return parts_s + forecast(step.update, roof, "eager").total


@dataclass(frozen=True)
class Cost:
    """One line of what costs most."""

    stage: str
    module: str
    operator: str
    seconds: float
    share: float
    """Of the device's time."""

    launches: int
    flops: float
    bytes_: float


def costs(rehearsal: Rehearsal, roof: Roofline, form: Form) -> list[Cost]:
    """Return what the device spends its time on, most first; equal layers are one line."""
    grouped: defaultdict[tuple[str, str, str], list[tuple[Kernel, int]]] = defaultdict(list)
    for kernel, count in _kernels(rehearsal, form).items():
        module = ".".join(kernel.module.split(".")[:_DEPTH])
        grouped[kernel.stage, module, kernel.operator].append((kernel, count))
    whole = forecast(rehearsal, roof, form).device
    return sorted(_lines(grouped, roof, whole), key=lambda cost: -cost.seconds)


def _lines(
    grouped: dict[tuple[str, str, str], list[tuple[Kernel, int]]], roof: Roofline, whole: float
) -> Iterator[Cost]:
    for (stage, module, operator), kernels in grouped.items():
        seconds = sum(count * _seconds(kernel, roof) for kernel, count in kernels)
        yield Cost(
            stage, module, operator, seconds, seconds / whole,
            sum(count for _, count in kernels),
            sum(count * kernel.flops for kernel, count in kernels),
            sum(count * kernel.bytes_ for kernel, count in kernels),
        )  # fmt: skip


def _kernels(rehearsal: Rehearsal, form: Form) -> Kernels:
    return rehearsal.eager if form == "eager" else rehearsal.compiled


def _seconds(kernel: Kernel, roof: Roofline) -> float:
    return roof.seconds(
        kernel.kind, kernel.dtype, kernel.flops, kernel.bytes_, is_in_place=kernel.is_in_place
    )
