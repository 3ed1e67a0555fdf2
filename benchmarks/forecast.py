"""Forecast against measured, on this processor: why a forecast for a GPU may be believed.

The processor's row is measured first: large products, an attention, a convolution, a large copy,
and operators with next to nothing to do. Nothing else is adjusted. Times are of the processor, on
one thread, so company on the machine hardly changes them.

    python benchmarks/forecast.py                       tiny and mid-size
    python benchmarks/forecast.py --variants mid --repeats 5
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from train import make_bench
from train_setup import PROMPT_ROWS, Batches, Bench, Case, Running, build, one_step, parallel_config

from dzrobot.commands import flags
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.session import (
    GenerateOptions,
    InferenceRequest,
    Prompt,
    SessionCache,
)
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.build import empty_network
from dzrobot.training.config import ModelConfig
from dzrobot.training.distributed import init_distributed
from dzrobot.training.planning.devices import Roofline
from dzrobot.training.planning.forecast import forecast
from dzrobot.training.planning.memory import Setup
from dzrobot.training.planning.rehearsal import (
    ChunkSetup,
    StepSetup,
    rehearse_chunks,
    rehearse_step,
)

STAGES = {
    "frames": ("augment",),
    "encoders": ("encoders",),
    "transformer": ("forward", "backward"),
}
"""Stage of a rehearsal -> parts of a timed step."""

_MICRO_BATCH = 2


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
    x = torch.randn(1024, 1024)
    product = 2 * 1024**3 / seconds(lambda: x @ x, repeats)
    q = torch.randn(1, 8, 512, 64)
    attended = 4 * 8 * 512**2 * 64
    attention = attended / seconds(
        lambda: nn.functional.scaled_dot_product_attention(q, q, q), repeats
    )
    clip, kernel = torch.randn(1, 64, 4, 32, 32), torch.randn(64, 64, 3, 3, 3)
    convolved = 2 * 27 * 64**2 * 4 * 32**2
    convolution = convolved / seconds(
        lambda: nn.functional.conv3d(clip, kernel, padding=1), repeats
    )
    source = torch.randn(2**25)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), repeats)
    # Modules with a few small operators each, as networks are made of.
    layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.GELU()) for _ in range(200)))
    small = torch.randn(1, 8)
    with torch.no_grad():
        launch = seconds(lambda: layers(small), repeats) / 400
    rates = {"product": product, "attention": attention, "convolution": convolution}
    return Roofline(
        name="this processor, one thread", half=rates, single=rates, bytes_s=copied,
        launch_s=launch, link_bytes_s=copied, overlaps=False,
    )  # fmt: skip


def step_rows(bench: Bench, roof: Roofline, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yield stage, forecast and measured seconds of a training step."""
    case = Case(mbs=_MICRO_BATCH, recompute="none", compile=False)
    setup = Setup(
        network=bench.config, model=ModelConfig(embodiment_tag=bench.robot.tag),
        parallel=parallel_config(bench, case), image_size=bench.robot.image_size,
        micro_batch=case.mbs, devices=1, averaged=False,
    )  # fmt: skip
    rehearsed = rehearse_step(StepSetup(setup=setup, robot=bench.robot, prompt_rows=PROMPT_ROWS))
    batches = Batches(bench, case.mbs, argparse.Namespace(data="dummy"))
    running = Running(*build(bench, case), batches)
    times: dict[str, list[float]] = {}
    for step in range(repeats + 1):
        stages: dict[str, float] = {}
        one_step(bench, running, step, stages, clock=time.process_time)
        for name, found in stages.items() if step else ():
            times.setdefault(name, []).append(found / 1e3)
    measured = {name: statistics.median(found) for name, found in times.items()}
    for stage, parts in STAGES.items():
        kernels = rehearsed.micro_batch.of_stage(stage)
        yield (
            f"step, {stage}",
            forecast(kernels, roof, "eager").total,
            sum(measured[part] for part in parts),
        )
    whole = forecast(rehearsed.micro_batch, roof, "eager").total
    whole += forecast(rehearsed.update, roof, "eager").total
    yield "step", whole, sum(measured.values())


def chunk_rows(bench: Bench, roof: Roofline, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yield place in the window, forecast and measured seconds of a chunk."""
    options = GenerateOptions()
    plan = ChunkSetup(
        network=bench.config, image_size=bench.robot.image_size, options=options,
        prompt_rows=PROMPT_ROWS, dtype=torch.float32,
    )  # fmt: skip
    rehearsed = rehearse_chunks(plan)
    model = random_network(bench)
    times: dict[int, list[float]] = {start: [] for start in rehearsed}
    prompts = SessionCache().prompts
    for episode in range(repeats + 1):
        session = SessionCache(prompts=prompts)
        for place in rehearsed:
            request = question(bench, 4 if place else 1)
            start = time.process_time()
            predict(model, [session], [request], options)
            if episode:
                times[place].append(time.process_time() - start)
    for place, rehearsal in rehearsed.items():
        expected = forecast(rehearsal, roof, "eager").total
        yield f"chunk, frame {place}", expected, statistics.median(times[place])


def random_network(bench: Bench, dtype: torch.dtype = torch.float32) -> WorldActionModel:
    """Return the network as a policy has it, with random weights."""
    model = empty_network(bench.config, is_lora=False, text_encoder=True).to(dtype)
    model.to_empty(device=bench.world.device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(std=0.02)
    return model.requires_grad_(requires_grad=False)


def question(bench: Bench, frames: int) -> InferenceRequest:
    """Return one call's question."""
    config = bench.config
    height, width = config.target_size or bench.robot.image_size
    rows = torch.arange(config.dit.text_len)
    prompt, negative = (
        Prompt(torch.full_like(rows, token), rows < min(PROMPT_ROWS, len(rows))) for token in (1, 2)
    )
    return InferenceRequest(
        images_THW3=torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8),
        state_SM=torch.rand(1, config.dit.max_state_dim), prompt=prompt, negative=negative,
    )  # fmt: skip


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
    roof = calibrate(10 * arguments.repeats)
    print(
        f"{roof.name}: products {roof.single['product'] / 1e9:.0f} GFLOP/s, attention "
        f"{roof.single['attention'] / 1e9:.0f}, convolutions {roof.single['convolution'] / 1e9:.0f}"
        f", memory {roof.bytes_s / 1e9:.1f} GB/s, {1e6 * roof.launch_s:.1f} us per operator"
    )
    print(f"{'network':<8}{'what':<22}{'forecast ms':>12}{'measured ms':>12}{'ratio':>7}")
    found = []
    for variant in arguments.variants:
        bench = make_bench(variant, world, argparse.Namespace(steps=arguments.repeats))
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
