"""Training speed: one table of target, measured and the ratio to the published numbers.

    python benchmarks/train.py                                 tiny and mid-size, CPU or GPU
    python benchmarks/train.py --variant 5b --device cuda      true size, random weights
    python benchmarks/train.py --variant 5b --data loader      with recordings read by workers
    python benchmarks/train.py --variant 14b --device cuda     LoRA on one device

Run it from the repository root, with dzrobot installed or PYTHONPATH=. set.
Correctness comes first: bf16 against float32, compiled against eager. A case that does not fit
or fails is reported as such and the next one runs.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from train_setup import (
    Batches,
    Bench,
    Case,
    Running,
    build,
    device_bytes,
    make_bench,
    one_step,
    parallel_config,
    planned_cases,
    prepare,
    prompt,
)

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.network.world_action import (
    WorldActionModel,
)
from dzrobot.policies.dreamzero.tiny import tiny_config
from dzrobot.training.bench.measuring import GIB, device_name, release
from dzrobot.training.cost.flops import (
    SampleCost,
    encoder_flops,
    executed_flops,
    model_flops,
    recomputed_share,
    sample_shape,
)
from dzrobot.training.cost.speed import fitted_row
from dzrobot.training.run.inputs import sample_noise
from dzrobot.training.run.parallel import DistributedEnvironment, init_distributed

TARGET = {"5b": 12.0, "14b": 0.30}
"""Samples per second on one H200: the 5B with all weights, the 14B with adapters."""


def main() -> None:
    options = parse()
    # Worker-free process group of one: the same text as a real run, on a mesh of one rank.
    world = init_distributed(options.device)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {device_name(world.device)}, {os.cpu_count()} CPU cores")
    failures = correctness(world)
    variants = [options.variant] if options.variant else ["tiny", "mid"]
    tables: list[str] = []
    for variant in variants:
        bench = make_bench(variant, world, options.steps)
        tables += run_cases(bench, options, time.monotonic() + options.budget)
    print("\n".join(["", *tables, "", *(failures or ["correctness: passed"])]))
    sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(1 if failures else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=["tiny", "mid", "5b", "14b"])
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--data", choices=["dummy", "loader"], default="dummy")
    parser.add_argument("--mbs", type=int, nargs="*", help="micro-batch sizes to try")
    parser.add_argument("--recompute", nargs="*", choices=["none", "selective", "full"])
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a case")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--budget", type=float, default=420, help="seconds after which none starts")
    return parser.parse_args()


def cases_of(bench: Bench, options: argparse.Namespace) -> list[Case]:
    lora = bench.variant == "14b"
    if options.mbs:
        modes = options.recompute or ["full"]
        return [Case(mbs=mbs, recompute=mode, lora=lora) for mode in modes for mbs in options.mbs]
    match bench.variant:
        case "tiny" | "mid":
            return [
                Case(mbs=2, recompute=mode, compile=False) for mode in ("none", "selective", "full")
            ]
    cases, refused = planned_cases(bench, device_bytes(bench.world.device))
    print("\n".join(f"{bench.variant}: does not fit: {reason}" for reason in refused))
    return cases


def run_cases(bench: Bench, options: argparse.Namespace, deadline: float) -> list[str]:
    rows, device = [], bench.world.device
    for case in cases_of(bench, options):
        if time.monotonic() > deadline:
            rows.append((case, "not run: out of time"))
            continue
        start = time.monotonic()
        workers = options.workers if options.data == "loader" else None
        outcome = attempt(lambda case=case, workers=workers: measure(bench, case, workers), device)
        print(f"{bench.variant}: {case.name}: {outcome} ({time.monotonic() - start:.0f} s)")
        sys.stdout.flush()
        rows.append((case, outcome))
    return table(bench, rows)


def attempt(run: Callable[[], Any], device: torch.device) -> Any:
    """Return the result, or what went wrong; the next case starts with empty memory."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error).splitlines()[0][:70]}"
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        # A benchmark reports every case: one that cannot run must not hide the others.
        logging.getLogger(__name__).exception("case failed")
        return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    finally:
        release(device)


def measure(bench: Bench, case: Case, workers: int | None = None) -> dict[str, float]:
    """Return samples/s, milliseconds per stage and peak memory of one case.

    Args:
        bench: What the cases share.
        case: The case.
        workers: Processes that read recordings; None: the same noise again and again.
    """
    batches = Batches(bench, case.mbs, workers)
    running = Running(*build(bench, case), batches)
    stages: dict[str, float] = {}
    # The first step compiles, the second still allocates.
    for step in range(2):
        one_step(bench, running, step)
    bench.sync()
    batches.waited, start = 0.0, time.perf_counter()
    for step in range(bench.steps):
        one_step(bench, running, step)
    bench.sync()
    seconds = (time.perf_counter() - start) / bench.steps
    waited = batches.waited / bench.steps
    one_step(bench, running, 0, stages)
    cost = sample_cost(bench, case)
    rate = case.mbs / seconds
    result = {"samples_s": rate, "step_ms": seconds * 1e3, "wait_pct": 100 * waited / seconds}
    result |= {f"{name}_ms": ms for name, ms in stages.items()}
    if bench.world.device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    if bench.peak:
        result["mfu_pct"] = 100 * cost.model * rate / (bench.peak * 1e12)
        result["executed_pct"] = 100 * cost.executed * rate / (bench.peak * 1e12)
    return {name: round(value, 2) for name, value in result.items()}


def sample_cost(bench: Bench, case: Case) -> SampleCost:
    config = bench.config
    shape = sample_shape(config.dit, config.head.num_frames)
    return SampleCost(
        model_forward=model_flops(config.dit, shape),
        executed_forward=executed_flops(config.dit, shape, min(128, config.dit.text_len)),
        encoders=encoder_flops(config, bench.robot.image_size, 0),
        recomputed_share=recomputed_share(parallel_config(bench, case), config.dit.num_layers),
    )


def correctness(world: DistributedEnvironment) -> list[str]:
    """Return what is wrong: bf16 and compiled passes must agree with float32."""
    robot = load_embodiment("oxe_droid")
    base = tiny_config("5b", robot)
    dit = replace(base.dit, dim=256, ffn_dim=512, num_heads=2, num_layers=3)
    config = replace(base, dit=dit)
    kinds = [("float32 eager", "fp32", False), ("bf16 eager", "bf16", False)]
    if world.device.type == "cuda":
        kinds.append(("bf16 compiled", "bf16", True))
    results = {}
    for name, dtype, compiled in kinds:
        bench = Bench(
            variant="check", robot=robot, config=config, world=world, steps=1, dtype=dtype
        )
        case = Case(mbs=2, compile=compiled)
        results[name] = attempt(
            lambda bench=bench, case=case: loss_and_norm(bench, case), world.device
        )
        print(f"check {name}: loss and gradient norm {results[name]}")
    reference = results["float32 eager"]
    return [
        f"correctness FAILED: {name} gives {found}, float32 {reference}"
        for name, found in results.items()
        if isinstance(found, str)
        or any(abs(a - b) > 0.03 * abs(b) for a, b in zip(found, reference, strict=True))
    ]


def loss_and_norm(bench: Bench, case: Case) -> tuple[float, float]:
    torch.manual_seed(1)
    model, optimizer = build(bench, replace(case, optimizer=True))
    assert optimizer is not None
    seed_weights(model)
    generator = torch.Generator().manual_seed(2)
    frames, (height, width) = bench.robot.timing.frames, bench.robot.image_size
    images = torch.randint(
        0, 256, (2, frames, height, width, 3), dtype=torch.uint8, generator=generator
    ).to(bench.world.device)
    timing, dit = bench.robot.timing, bench.config.dit
    vectors = {
        "state": torch.rand(2, timing.blocks, dit.max_state_dim, generator=generator),
        "action": torch.rand(2, timing.actions, dit.action_dim, generator=generator),
    }
    vectors["action_mask"] = torch.ones(vectors["action"].shape, dtype=torch.bool)
    vectors["has_real_action"] = torch.ones(2, dtype=torch.bool)
    torch.manual_seed(3)
    prepared = prepare(model, images, vectors, prompt(bench, len(images)))
    noise = sample_noise(bench.config, prepared, 0, 0, range(2))
    losses = model.loss(prepared, noise)
    losses.loss.backward()
    outcome = optimizer.step()
    return round(losses.loss.item(), 4), round(outcome.grad_norm.item(), 4)


@torch.no_grad()
def seed_weights(model: WorldActionModel) -> None:
    """Give every tensor values that do not depend on the device that draws them."""
    generator = torch.Generator().manual_seed(4)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        scale = 0.02 if tensor.ndim < 2 else float(np.prod(tensor.shape[1:])) ** -0.5
        drawn = torch.randn(tensor.shape, generator=generator) * scale
        if tensor.ndim < 2 and not name.endswith("bias"):
            drawn += 1
        local.copy_(drawn.to(torch.bfloat16).float())


def table(bench: Bench, rows: list[tuple[Case, Any]]) -> list[str]:
    target = TARGET.get(bench.variant)
    published = fitted_row(bench.variant).rate if target else None
    lines = [
        "",
        f"{bench.variant}, {bench.dtype}, DROID 3 views, {bench.config.head.num_frames} frames"
        + (f"; published {published} samples/s/GPU, target {target}" if published else ""),
        f"{'case':<34}{'samples/s':>10}{'ratio':>7}{'step ms':>9}{'MFU %':>7}{'exec %':>7}"
        f"{'GiB':>7}{'wait %':>7}",
    ]
    for case, found in rows:
        if isinstance(found, str):
            lines.append(f"{case.name:<34}{found}")
            continue
        ratio = f"{found['samples_s'] / published:.2f}" if published else "-"
        lines.append(
            f"{case.name:<34}{found['samples_s']:>10.2f}{ratio:>7}{found['step_ms']:>9.0f}"
            f"{found.get('mfu_pct', float('nan')):>7.1f}"
            f"{found.get('executed_pct', float('nan')):>7.1f}"
            f"{found.get('peak_gib', float('nan')):>7.1f}{found['wait_pct']:>7.1f}"
        )
    return lines


if __name__ == "__main__":
    main()
