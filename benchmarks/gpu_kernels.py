"""What single kernels get of a device, at the shapes that the published networks give them."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from gpu_parts import Outcome, Request, compute_dtype
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from dzrobot.training.bench.measuring import synchronize
from dzrobot.training.cost.speed import device_peak

_REPEATS = 5
_SECONDS = 0.02
"""Seconds of one measurement; short kernels run as often as that takes."""

_HEAD = 128
"""Numbers of an attention head."""

_SUSTAINED_S = 8.0
"""Seconds of products without a pause: a card that is warm computes more slowly."""


class Attention(NamedTuple):
    """One call of attention."""

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    biased: bool = False
    """With a mask of padding, as prompts have."""

    learns: bool = True


PRODUCTS = {
    "5B, training, ffn": (28_800, 3072, 14_336),
    "5B, training, projection": (28_800, 3072, 3072),
    "14B, training, ffn": (14_180, 5120, 13_824),
    "14B, training, projection": (14_180, 5120, 5120),
    "5B, chunk, ffn": (250, 3072, 14_336),
    "5B, chunk, projection": (250, 3072, 3072),
    "14B, chunk, ffn": (3_570, 5120, 13_824),
}
"""Rows, inputs, outputs; training at micro-batch 32 (5B) and 1 (14B)."""

ATTENTIONS = (
    Attention("5B, training, first block", 32, 24, 100, 150),
    Attention("5B, training, last block", 32, 24, 124, 475),
    Attention("5B, training, prompt", 32, 24, 900, 128, biased=True),
    Attention("14B, training, first frame", 1, 40, 880, 880),
    Attention("14B, training, last block", 1, 40, 1784, 7945),
    Attention("14B, training, prompt", 1, 40, 14_180, 128, biased=True),
    Attention("5B, chunk", 2, 24, 125, 475, learns=False),
    Attention("14B, chunk", 2, 40, 1785, 7945, learns=False),
    Attention("14B, chunk, prompt", 2, 40, 1785, 128, biased=True, learns=False),
)

CONVOLUTIONS = {
    "5B, training, level 0": (32, 160, 6, 82, 162),
    "5B, training, level 1": (32, 320, 6, 42, 82),
    "5B, training, level 2": (32, 640, 4, 22, 42),
    "14B, training, level 0": (1, 96, 6, 354, 642),
    "14B, training, level 1": (1, 192, 6, 178, 322),
    "14B, training, level 2": (1, 384, 4, 90, 162),
}
"""Batch, channels, frames, height, width of the Wan encoder's inputs, padding included."""

BANDWIDTHS = {"H100 PCIe": 2.0, "H100": 3.35, "H200": 4.8, "A100": 2.039}
"""TB/s of the memory by the data sheets, by a part of the device's name."""

BACKENDS = {
    "torch's choice": None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def kernels(request: Request) -> Outcome:
    """Time products, attention, convolutions and a copy, beside the peaks of the data sheet."""
    table = _Table(request)
    table.products()
    table.attentions()
    table.convolutions()
    table.copy()
    said = "TFLOP/s and TB/s, beside the peaks of the data sheet"
    if request.device.type == "cpu":
        return Outcome("skipped", "the table runs; the shapes are a GPU's, here smaller")
    return Outcome("measured", said)


def _bandwidth(device: torch.device) -> float | None:
    """Return TB/s of the memory by the data sheet, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BANDWIDTHS.items() if part in name), None)


class _Table:
    """Times kernels on one device and keeps each figure at once."""

    def __init__(self, request: Request) -> None:
        self._request, self._device = request, request.device
        self._dtype = compute_dtype(request.device)
        self._scale = 1 if request.size == "true" else 16
        self._peak = device_peak(request.device)

    def products(self) -> None:
        for name, (rows, inner, outer) in PRODUCTS.items():
            rows, inner, outer = (self._small(size) for size in (rows, inner, outer))
            x, weight = self._random(rows, inner), self._random(outer, inner)
            run = partial(F.linear, x, weight)
            flops = 2.0 * rows * inner * outer
            self._keep(f"product, {name}", flops, self._seconds(run))
        self._keep("product, sustained", flops, self._sustained(run))

    def attentions(self) -> None:
        for case in ATTENTIONS if self._scale == 1 else ATTENTIONS[:3]:
            for backend, kind in BACKENDS.items():
                if kind is None or self._device.type == "cuda":
                    self._attention(case, backend, kind)

    def _attention(self, case: Attention, backend: str, kind: SDPBackend | None) -> None:
        sizes = (case.queries, case.keys, case.keys)
        # Heads lie side by side in a token, as projections leave them.
        q, k, v = (
            self._random(case.batch, self._small(n), case.heads, _HEAD)
            .transpose(1, 2)
            .requires_grad_(case.learns)
            for n in sizes
        )
        bias = torch.zeros(case.batch, 1, 1, k.shape[2], device=self._device, dtype=self._dtype)
        bias[..., k.shape[2] // 2 :] = -torch.inf
        mask = bias if case.biased else None

        def run() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        name, flops = f"attention, {case.name}, {backend}", 4.0 * q.numel() * k.shape[2]
        try:
            with sdpa_kernel(list(SDPBackend.__members__.values())[1:] if kind is None else kind):
                self._keep(name, flops, self._seconds(run))
                if case.learns:
                    self._backward(name, flops, run, (q, k, v))
        except RuntimeError as error:
            # A kernel that refuses a shape is a finding, and the next one is tried.
            self._request.record(name, f"refused: {str(error).splitlines()[0][:100]}")

    def _backward(
        self, name: str, flops: float, run: Callable[[], Tensor], inputs: tuple[Tensor, ...]
    ) -> None:
        out = run()
        given = torch.ones_like(out)

        def differentiate() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, inputs, given, retain_graph=True)

        # Five products for the two of the forward pass.
        self._keep(f"{name}, backward", 2.5 * flops, self._seconds(differentiate))
        if not all(torch.isfinite(gradient).all() for gradient in differentiate()):
            self._request.record(f"{name}, backward", "not finite")

    def convolutions(self) -> None:
        for name, (batch, channels, frames, *size) in CONVOLUTIONS.items():
            channels, height, width = (self._small(one) for one in (channels, *size))
            clip = self._random(self._small(batch, 1), channels, frames, height, width)
            weight = self._random(channels, channels, 3, 3, 3)
            flops = 2.0 * 27 * channels**2 * clip[:, :1, 2:, 2:, 2:].numel()
            for form, layout in (
                ("channels first", torch.contiguous_format),
                ("channels last", torch.channels_last_3d),
            ):
                x, w = (one.contiguous(memory_format=layout) for one in (clip, weight))
                with torch.no_grad():
                    spent = self._seconds(partial(F.conv3d, x, w))
                self._keep(f"convolution, {name}, {form}", flops, spent)

    def copy(self) -> None:
        numbers = self._random(2**30 // self._scale**2)
        spent = self._seconds(numbers.clone)
        self._request.record(
            "copy, TB/s", 2 * numbers.nbytes / spent / 1e12, _bandwidth(self._device)
        )

    def _keep(self, name: str, flops: float, spent: float) -> None:
        self._request.record(f"{name}, TFLOP/s", flops / spent / 1e12, self._peak)

    def _small(self, size: int, least: int = 16) -> int:
        return max(least, size // self._scale)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, dtype=self._dtype)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the median seconds of a call, once it has run."""
        run()
        once = next(self._timed(run, 1))
        count = max(1, min(200, int(_SECONDS / once)))
        repeats = _REPEATS if self._scale == 1 else 1
        found = self._timed(run, count)
        return statistics.median(next(found) for _ in range(repeats))

    def _timed(self, run: Callable[[], object], count: int) -> Iterator[float]:
        while True:
            synchronize(self._device)
            start = time.perf_counter()
            for _ in range(count):
                run()
            synchronize(self._device)
            yield (time.perf_counter() - start) / count

    def _sustained(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call at the end of a long load."""
        turns, until = self._timed(run, 100 // self._scale), time.monotonic() + _SUSTAINED_S
        spent = next(turns)
        while self._scale == 1 and time.monotonic() < until:
            spent = next(turns)
        return spent
