"""Forecast against measured, on this processor: why a forecast for a GPU may be believed.

The processor's row is measured first: products, attention, convolutions and what lies between
them, each from small to large, and operators with next to nothing to do. Nothing else is adjusted.
Times are of the processor, on one thread, so company on the machine hardly changes them.

    python benchmarks/forecast.py                       tiny and mid-size
    python benchmarks/forecast.py --variants mid --repeats 5
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from chunks import episodes, random_network
from torch import nn
from torch.nn import functional as F  # noqa: N812
from train_setup import (
    Batches,
    Bench,
    Case,
    Running,
    build,
    chunk_setup,
    make_bench,
    one_step,
    step_setup,
)

from dzrobot.commands.options import flags
from dzrobot.training.cost.accelerators import Rate, Roofline
from dzrobot.training.forecast.forecast import forecast
from dzrobot.training.forecast.rehearsal import rehearse, rehearse_chunks, rehearse_step
from dzrobot.training.run.parallel import init_distributed

STAGES = {
    "frames": ("augment",),
    "encoders": ("encoders",),
    "transformer": ("forward", "backward"),
}
"""Stage of a rehearsal -> parts of a timed step."""

_MICRO_BATCH = 2
_NUMBERS = (2**10, 2**13, 2**16, 2**19, 2**22, 2**24)
"""In the tensors that traffic is measured with."""

_WIDTH, _LAYERS = 256, 64
"""Of the layers that products are measured with: 17 MB of weights."""


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median processor time of ``run``, once it has run."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def calibrate(repeats: int) -> Roofline:
    """Return this processor's row, measured."""
    sizes = BySize(repeats)
    rates = {
        "product": Rate(tuple(sizes.products())),
        "attention": Rate(tuple(sizes.attentions())),
        "convolution": Rate(tuple(sizes.convolutions())),
    }
    traffic, in_place = Rate(tuple(sizes.traffic())), Rate(tuple(sizes.in_place()))
    return Roofline(
        name="this processor, one thread", half=rates, single=rates, bytes_s=traffic,
        in_place_bytes_s=in_place,
        launch_s=launch_seconds(repeats, learns=False), link_bytes_s=traffic.points[-1][1],
        overlaps=False,
    )  # fmt: skip


def launch_seconds(repeats: int, *, learns: bool) -> float:
    """Return what a small operator costs, within modules as networks have them.

    Args:
        repeats: How often it is measured.
        learns: With gradients, which an operator costs too.
    """
    layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.GELU()) for _ in range(200)))

    def run(layers: nn.Module, small: torch.Tensor) -> None:
        with torch.set_grad_enabled(learns):
            result = layers(small)
            if learns:
                result.backward(result.detach())
                layers.zero_grad(set_to_none=True)

    meta = copy.deepcopy(layers).to("meta")
    operators = rehearse(lambda _: run(meta, torch.empty(1, 8, device="meta"))).eager.total()
    small = torch.randn(1, 8)
    return seconds(lambda: run(layers, small), repeats) / operators


class BySize:
    """Rates of single operators, from small to large."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        one = torch.zeros(1)
        self._launch_s = seconds(lambda: [one.add_(1) for _ in range(1000)], repeats) / 1000

    def products(self) -> Iterator[tuple[float, float]]:
        """Yield operations per byte, and operations per second, from few rows to many.

        Layers take turns, as in a network, so no weight waits in the nearest cache.
        """
        layers = [(torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH)) for _ in range(_LAYERS)]
        turns = itertools.cycle(layers)
        for rows in (1, 4, 16, 64, 256, 1024):
            x = torch.randn(rows, _WIDTH)
            flops = 2.0 * rows * _WIDTH**2
            taken = self._seconds(lambda x=x: F.linear(x, *next(turns)), flops)
            yield flops / (2 * x.nbytes + 4 * (_WIDTH + 1) * _WIDTH), flops / taken

    def attentions(self) -> Iterator[tuple[float, float]]:
        """Yield operations per byte, and operations per second, by the number of tokens."""
        run = F.scaled_dot_product_attention
        for tokens in (32, 128, 512):
            # Heads lie side by side in a token, as projections leave them.
            q = torch.randn(1, tokens, 8, 64).transpose(1, 2)
            flops = 4.0 * 8 * tokens**2 * 64
            yield flops / (4 * q.nbytes), flops / self._seconds(lambda q=q: run(q, q, q), flops)

    def convolutions(self) -> Iterator[tuple[float, float]]:
        """Yield operations per byte, and operations per second, by the number of channels."""
        for channels in (4, 16, 64):
            clip = torch.randn(1, channels, 4, 32, 32)
            conv = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
            flops = 2.0 * 27 * channels**2 * 4 * 32**2
            taken = self._seconds(lambda conv=conv, clip=clip: conv(clip), flops)
            yield flops / (2 * clip.nbytes + conv.weight.nbytes), flops / taken

    def traffic(self) -> Iterator[tuple[float, float]]:
        """Yield bytes, and bytes per second, of what networks do between products.

        A sum, an activation, a normalization and a copy: the arithmetic of the middle two is what
        takes a processor long. Results are new tensors, as in a network: large ones are memory that
        the system has to hand out first.
        """
        for numbers in _NUMBERS:
            x = torch.randn(numbers // 256, 256)
            runs: tuple[tuple[int, Callable[[], object]], ...] = (
                (3, lambda x=x: x + x),
                (2, lambda x=x: F.gelu(x, approximate="tanh")),
                (2, lambda x=x: F.layer_norm(x, (256,))),
                (2, lambda x=x: x.clone()),
            )
            moved = float(sum(times for times, _ in runs) * x.nbytes)
            yield moved / 4, moved / sum(self._seconds(run, x.nbytes) for _, run in runs)

    def in_place(self) -> Iterator[tuple[float, float]]:
        """Yield bytes, and bytes per second, of what is written over: a product and a copy."""
        for numbers in _NUMBERS:
            x, y = torch.randn(2, numbers)
            runs = (lambda x=x: x.mul_(1.0), lambda x=x, y=y: y.copy_(x))
            taken = sum(self._seconds(run, x.nbytes) for run in runs)
            yield 2.0 * x.nbytes, 4 * x.nbytes / taken

    def _seconds(self, run: Callable[[], object], size: float) -> float:
        """Return the time of ``run`` without its launch, which a forecast adds by itself."""
        times = max(1, int(1e7 / size))
        taken = seconds(lambda: [run() for _ in range(times)], self._repeats) / times
        return max(taken - self._launch_s, taken / 10)


def step_rows(bench: Bench, roof: Roofline, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yield stage, forecast and measured seconds of a training step."""
    case = Case(mbs=_MICRO_BATCH, recompute="none", compile=False)
    rehearsed = rehearse_step(step_setup(bench, case))
    running = Running(*build(bench, case), Batches(bench, case.mbs))
    times: dict[str, list[float]] = {}
    for step in range(repeats + 1):
        stages: dict[str, float] = {}
        one_step(bench, running, step, stages, clock=time.process_time)
        for name, found in stages.items() if step else ():
            times.setdefault(name, []).append(found / 1e3)
    measured = {name: statistics.median(found) for name, found in times.items()}
    learning = replace(roof, launch_s=launch_seconds(10 * repeats, learns=True))
    between = rehearsed.micro_batch.of_stage("weights and gradients")
    whole = sum(forecast(part, roof, "eager").total for part in (rehearsed.update, between))
    for stage, parts in STAGES.items():
        kernels = rehearsed.micro_batch.of_stage(stage)
        row = learning if stage == "transformer" else roof
        expected = forecast(kernels, row, "eager").total
        whole += expected
        yield f"step, {stage}", expected, sum(measured[part] for part in parts)
    yield "step", whole, sum(measured.values())


def chunk_rows(bench: Bench, roof: Roofline, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yield place in the window, forecast and measured seconds of a chunk."""
    rehearsed = rehearse_chunks(chunk_setup(bench, torch.float32))
    model = random_network(bench.config, bench.world.device, torch.float32)
    found = episodes(bench, model, clock=time.process_time)
    _, *times = itertools.islice(found, repeats + 1)
    for place, rehearsal in rehearsed.items():
        expected = forecast(rehearsal, roof, "eager").total
        yield f"chunk, frame {place}", expected, statistics.median(one[place] for one in times)


def main() -> None:
    """Measure, forecast, print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", type=flags.names, default=("tiny", "mid"))
    parser.add_argument("--repeats", type=flags.whole(1), default=3)
    parser.add_argument("--json", type=flags.path, help="write the rows to this file as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = init_distributed("cpu")
    with torch.no_grad():
        roof = calibrate(10 * arguments.repeats)
    print(f"{roof.name}: {1e6 * roof.launch_s:.1f} us per operator")
    rates = {**roof.single, "memory": roof.bytes_s, "in place": roof.in_place_bytes_s}
    for kind, rate in rates.items():
        curve = ", ".join(f"{found / 1e9:.1f} at {size:.0f}" for size, found in rate.points)
        print(f"  {kind}, 1e9 a second: {curve}")
    print(f"{'network':<8}{'what':<22}{'forecast ms':>12}{'measured ms':>12}{'ratio':>7}")
    found = []
    for variant in arguments.variants:
        bench = make_bench(variant, world, arguments.repeats)
        bench = replace(bench, dtype="fp32")
        for rows in (step_rows, chunk_rows):
            for what, expected, measured in rows(bench, roof, arguments.repeats):
                found.append({"network": variant, "what": what, "ratio": expected / measured})
                print(
                    f"{variant:<8}{what:<22}{1e3 * expected:>12.1f}{1e3 * measured:>12.1f}"
                    f"{expected / measured:>7.2f}"
                )
    if arguments.json:
        text = json.dumps({"roofline": asdict(roof), "rows": found}, indent=1)
        Path(arguments.json).write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
