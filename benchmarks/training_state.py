"""What it costs to save, resume, export and load a run, for growing networks on one to three ranks.

    python benchmarks/training_state.py                       # 5, 50 and 200 million weights
    python benchmarks/training_state.py --sizes 5 --ranks 1 2

A run's state is its weights in float32 and both moments of AdamW, sharded over gloo ranks. It is
resumed on another number of ranks than it was saved on. Memory is the growth of the host's memory
in the process where it grows most, as a multiple of the whole state, so rows of different sizes can
be compared and carried on to networks that do not fit here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dzrobot import DreamZeroPolicy, default_checkpoint
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.checkpoints.load import expected_shapes
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.tiny import (
    NewCheckpoint,
    TinyWeightsSource,
    tiny_config,
    tiny_metadata,
    write_new_checkpoint,
)
from dzrobot.training.bench.measuring import record_noise
from dzrobot.training.recipes.read import load_recipe
from dzrobot.training.run.build import build
from dzrobot.training.run.checkpoint import choose_checkpoint, restore, training_state
from dzrobot.training.run.export import export, export_folder
from dzrobot.training.run.parallel import DistributedEnvironment, init_distributed
from dzrobot.training.run.trainer import Trainer

ROBOT = "libero_mini"
WIDTHS = {5: (256, 4), 50: (640, 8), 200: (1152, 10)}
"""Millions of trained weights, about -> width and number of blocks."""

GB = 1e9


@dataclass(frozen=True)
class Cost:
    """One operation, in the process where it costs most."""

    seconds: float
    growth: int
    """Bytes by which the process grew at its peak."""


def network(size: int) -> NetworkConfig:
    """Return a network of about ``size`` million weights in its transformer."""
    base = tiny_config("5b", load_embodiment(ROBOT))
    width, layers = WIDTHS[size]
    heads = width // 64
    dit = replace(base.dit, dim=width, ffn_dim=4 * width, num_heads=heads, num_layers=layers)
    return replace(base, dit=dit)


def write_start(folder: Path, size: int) -> None:
    """Write the checkpoint that runs start from, and a recording for them."""
    robot, config = load_embodiment(ROBOT), network(size)
    content = NewCheckpoint(
        config=config, metadata=tiny_metadata(robot), recipe=None,
        weights=TinyWeightsSource(expected_shapes(config), 0, torch.bfloat16),
    )  # fmt: skip
    write_new_checkpoint(folder / "start", robot, content)
    record_noise(folder / "data", robot, episodes=2, frames=60)


def recipe(folder: Path, resume: bool) -> list[str]:
    """Return the overrides of one optimizer step."""
    return [
        f"model.model_path={folder / 'start'}", f"model.embodiment_tag={ROBOT}",
        f"data.train_data_paths=[{folder / 'data'}]", "data.num_workers=0",
        "checkpoint.export_dtype=bf16", "logging.tensorboard=false",
        "runner.micro_batch_size=1", "runner.global_batch_size=6", "runner.max_steps=1",
        f"runner.output_dir={folder / 'run'}",
        *(["runner.resume_dir=auto"] if resume else []),
    ]  # fmt: skip


def status(key: str) -> int:
    """Return a line of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measured(operation: Callable[[], Any]) -> Cost:
    """Run an operation; the kernel's peak is set back before it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, began = status("VmRSS"), time.perf_counter()
    operation()
    return Cost(time.perf_counter() - began, max(0, status("VmHWM") - before))


def worst(cost: Cost, world: DistributedEnvironment) -> dict[str, float]:
    """Return the largest values of all ranks. Collective."""
    costs = world.gathered(cost)
    return {
        "seconds": max(cost.seconds for cost in costs),
        "growth": max(cost.growth for cost in costs),
    }


def work(folder: Path, job: str) -> None:
    """Do one rank's part; the main one prints a line of JSON."""
    world = init_distributed("cpu")
    resume = job == "resume"
    config = load_recipe("tiny_cpu", recipe(folder, resume), world.size)
    components = build(config, world)
    trainer = Trainer(components)
    rows: dict[str, Any] = {}
    if resume:
        own = config.runner.output_dir / "checkpoints"

        def resumed() -> None:
            saved = choose_checkpoint("auto", own, world)
            assert saved is not None, "the run before has saved"
            restore(saved, components)

        rows["resume"] = worst(measured(resumed), world)
    else:
        trainer.train_step(trainer.batches(1))
        trainer.step = 1
        state = training_state(components.optimizer, components.ema)
        tensors = [*state["model"].values()]
        tensors += [tensor for pair in state["optim"].values() for tensor in pair.values()]
        rows["state"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        rows["save"] = worst(measured(lambda: trainer.save(wait=True)), world)
        rows["export"] = worst(measured(lambda: export(components, 1)), world)
    if world.is_main:
        print(f"@@{json.dumps(rows)}", flush=True)
    dist.barrier(group=world.host_group)
    os._exit(0)


def load(folder: Path) -> None:
    """Open the export as a policy; another one before it, so that libraries are loaded."""
    DreamZeroPolicy.from_pretrained(default_checkpoint())
    target = export_folder(folder / "run", 1)
    cost = measured(lambda: DreamZeroPolicy.from_pretrained(target))
    print(f"@@{json.dumps({'load': cost.__dict__})}", flush=True)


def run(folder: Path, job: str, ranks: int) -> dict[str, Any]:
    """Return what a job prints, in processes of its own."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launch if job != "load" else []), __file__, "--job", job]
    done = subprocess.run(
        [*command, "--folder", str(folder)], capture_output=True, text=True, check=False
    )
    lines = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
    if not lines:
        sys.exit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@contextmanager
def prepared(size: int) -> Iterator[Path]:
    """Yield a folder with the start of runs of a size; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="training-state-") as name:
        os.environ["DZROBOT_CACHE"] = str(Path(name) / "cache")
        write_start(Path(name), size)
        yield Path(name)


def row(size: int, ranks: int, others: int) -> str:
    """Return the measurements of one size and number of ranks."""
    with prepared(size) as folder:
        rows = run(folder, "save", ranks)
        rows |= run(folder, "resume", others)
        rows |= run(folder, "load", 1)
    state = rows["state"]
    parts = [
        f"{rows[job]['seconds']:6.1f} s {rows[job]['seconds'] * GB / state:6.1f} s/GB "
        f"{rows[job]['growth'] / state:+5.2f}"
        for job in ("save", "export", "resume", "load")
    ]
    title = f"{size:>4}M {ranks:>5} {f'{ranks} to {others}':>7} {state / GB:>6.2f}"
    return " | ".join([title, *parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--sizes", type=int, nargs="+", choices=sorted(WIDTHS), default=[5, 50, 200]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--job", choices=("save", "resume", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job == "load":
        load(options.folder)
    elif options.job:
        work(options.folder, options.job)
    else:
        heads = [f"{job:<25}" for job in ("save", "export", "resume", "load")]
        print(" | ".join([f"{'size':>5} {'ranks':>5} {'resumed':>7} {'GB':>6}", *heads]))
        for size in options.sizes:
            for ranks in options.ranks:
                print(row(size, ranks, ranks % max(options.ranks) + 1), flush=True)


if __name__ == "__main__":
    main()
