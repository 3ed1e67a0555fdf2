"""What accelerators can do, by their data sheets, and what of it a network gets.

Peaks and bandwidths are those of the maker. No network reaches them: a forecast multiplies them
with the shares of :data:`SUSTAINED`, and a floor with one. A processor's row is measured, see
``benchmarks/forecast.py``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from dzrobot.errors import find

Kind = Literal["product", "attention", "convolution", "memory"]
"""What a kernel's time depends on: three kinds of arithmetic, or only the bytes that it moves."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator."""

    name: str
    memory_gb: float
    half_tflops: float
    """Dense bf16 products with float32 sums, TFLOP/s."""

    single_tflops: float
    """Float32 without tensor cores, as torch computes by default, TFLOP/s."""

    memory_gbs: float
    """Bandwidth of its memory, GB/s."""

    link_gbs: float
    """Bandwidth to its neighbors in one direction, GB/s."""

    source: str


DEVICES = (
    Accelerator(
        name="H100", memory_gb=80, half_tflops=989, single_tflops=67, memory_gbs=3350,
        link_gbs=450, source="NVIDIA H100 data sheet, SXM",
    ),
    Accelerator(
        name="H200", memory_gb=141, half_tflops=989, single_tflops=67, memory_gbs=4800,
        link_gbs=450, source="NVIDIA H200 data sheet, SXM",
    ),
    Accelerator(
        name="A100", memory_gb=80, half_tflops=312, single_tflops=19.5, memory_gbs=2039,
        link_gbs=300, source="NVIDIA A100 80GB data sheet, SXM",
    ),
    Accelerator(
        name="RTX 4090", memory_gb=24, half_tflops=165, single_tflops=82.6, memory_gbs=1008,
        link_gbs=32, source="NVIDIA Ada architecture paper; PCIe 4.0 x16",
    ),
    Accelerator(
        name="RTX 5090", memory_gb=32, half_tflops=210, single_tflops=104.8, memory_gbs=1792,
        link_gbs=64, source="NVIDIA RTX Blackwell architecture paper; PCIe 5.0 x16",
    ),
)  # fmt: skip
"""Those that forecasts are made for."""


def forecast_device(name: str) -> Accelerator:
    """Return one of :data:`DEVICES`.

    Raises:
        UnknownNameError: no forecast is made for it.
    """
    return find({device.name: device for device in DEVICES}, "device of a forecast", name)


PEAK_TFLOPS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H800": 989.0,
    "A800": 312.0,
    "L40S": 362.0,
    "RTX PRO 6000": 503.0,
    **{device.name: float(device.half_tflops) for device in DEVICES},
}
"""Dense bf16 peak of accelerators in TFLOP/s by a part of their name, longer parts first within a
family."""

SUSTAINED: Mapping[Kind, float] = {
    "product": 0.66,
    "attention": 0.5,
    "convolution": 0.25,
    "memory": 0.9,
}
"""Share of a peak that large kernels get for seconds on end."""

SHARE_SOURCES: Mapping[Kind, str] = {
    "product": "a step of GPT 1.5B at 493 of an H100's 989 TFLOP/s (pytorch/ao#1297), three "
    "quarters of its time in products; a cold 8192^3 product alone reaches 80%",
    "attention": "the lower end of FlashAttention-2 on an A100, 50 to 73% (arXiv 2307.08691)",
    "convolution": "eager, channels first: Conv3d is 2.7 to 3.7 times faster with channels last "
    "on Hopper (sgl-project/sglang#27431), which is given 80%",
    "memory": "a copy on an H200 at 4.3 of 4.8 TB/s",
}
"""Where the shares come from; nothing of this network was measured on a GPU."""

FULL: Mapping[Kind, float] = dict.fromkeys(SUSTAINED, 1.0)
"""Nothing lost: the floor that no implementation of the same kernels can beat."""

LAUNCH_S = 8e-6
"""Host time of one operator in eager mode. Assumed: 3.8 us for a kernel that is launched behind
another (NVIDIA, "Getting Started with CUDA Graphs"), the rest for Python and torch's dispatcher."""


@dataclass(frozen=True)
class Rate:
    """Operations or bytes per second, by a size of the kernel."""

    points: tuple[tuple[float, float], ...]
    """Rising sizes, and the rate at each. Between two of them it runs along a line in logarithms,
    beyond the last ones it stays; a single point holds for every size."""

    def at(self, size: float) -> float:
        """Return the rate of a kernel of ``size``."""
        sizes, rates = np.log(np.array(self.points)).T
        return float(np.exp(np.interp(math.log(max(size, 1.0)), sizes, rates)))


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What kernels get of one device."""

    name: str
    half: Mapping[Kind, Rate]
    """Operations per second in half precision, by kind of arithmetic and by the kernel's operations
    per byte: few rows or channels use a device badly, however wide a layer or large an image is."""

    single: Mapping[Kind, Rate]
    """Likewise in float32."""

    bytes_s: Rate
    """Bytes of memory per second, by the bytes that a kernel reads and writes."""

    in_place_bytes_s: Rate
    """Likewise of kernels that make no new tensors: a processor's system hands out large ones'
    memory anew each time, an accelerator's are kept and used again."""

    launch_s: float
    """Host seconds of one operator."""

    link_bytes_s: float
    """Bytes per second to neighbors."""

    overlaps: bool
    """Whether the host goes on while the device computes."""

    def seconds(
        self, kind: Kind, dtype: torch.dtype, flops: float, bytes_: float, *, is_in_place: bool
    ) -> float:
        """Return the device time of one kernel: its arithmetic or its traffic, whichever lasts."""
        moving = bytes_ / (self.in_place_bytes_s if is_in_place else self.bytes_s).at(bytes_)
        if kind == "memory":
            return moving
        rates = self.half if dtype in (torch.bfloat16, torch.float16) else self.single
        return max(moving, flops / rates[kind].at(flops / max(bytes_, 1)))


def roofline(device: Accelerator, shares: Mapping[Kind, float] = SUSTAINED) -> Roofline:
    """Return what ``shares`` of a device's peaks are."""
    bytes_s = _steady(1e9 * device.memory_gbs * shares["memory"])
    return Roofline(
        name=device.name,
        half={kind: _steady(1e12 * device.half_tflops * shares[kind]) for kind in shares},
        single={kind: _steady(1e12 * device.single_tflops * shares[kind]) for kind in shares},
        bytes_s=bytes_s,
        in_place_bytes_s=bytes_s,
        launch_s=LAUNCH_S,
        link_bytes_s=1e9 * device.link_gbs * shares["memory"],
        overlaps=True,
    )


def floor(device: Accelerator) -> Roofline:
    """Return a device that reaches its peaks and launches for nothing: nothing is faster."""
    return replace(roofline(device, FULL), launch_s=0.0)


def _steady(rate: float) -> Rate:
    return Rate(((1.0, rate),))


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s, None where it is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def accelerator(device_name: str) -> Accelerator | None:
    """Return the row of a device, None where there is none: not every H100 is the one listed."""
    part = next((part for part in PEAK_TFLOPS if part in device_name), None)
    return next((device for device in DEVICES if device.name == part), None)


def device_peak(device: torch.device) -> float | None:
    """Return the dense bf16 peak of ``device`` in TFLOP/s, None where it is not known."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
