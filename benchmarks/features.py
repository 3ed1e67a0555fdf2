"""What storing the frozen encoders' outputs saves: training steps with and without, in pairs.

    python benchmarks/features.py --steps 6

Recordings and the small network of ``dzrobot init``, untrained; reading and decoding images is
part of a step. Correctness comes first: both runs must end with the same weights to the last bit.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.tiny import NewCheckpoint, tiny_metadata, write_new_checkpoint
from dzrobot.training.bench.measuring import record_noise
from dzrobot.training.recipes.read import load_recipe
from dzrobot.training.run.build import build
from dzrobot.training.run.parallel import DistributedEnvironment, init_distributed
from dzrobot.training.run.trainer import Trainer
from dzrobot.training.tiny.init import mini_config, new_weights

EPISODES, FRAMES = 4, 60


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="features-bench-") as folder:
        root = Path(folder)
        os.environ["DZROBOT_CACHE"] = str(root / "cache")
        fill(root)
        world = init_distributed("cpu")
        began = time.perf_counter()
        stored = run_of(root, world, options, cached=True)
        encoding_s = time.perf_counter() - began
        live = run_of(root, world, options, cached=False)
        times = list(pairs(live, stored, options.steps))
        same = all(
            torch.equal(one, other)
            for one, other in zip(weights(live), weights(stored), strict=True)
        )
        samples = len(stored.components.datasets.train)
        dist.destroy_process_group()
    before, after = (median(column) for column in zip(*times, strict=True))
    print(f"weights after {options.steps} steps: {'the same bits' if same else 'DIFFERENT'}")
    print(f"encoding {samples} samples once, start included: {encoding_s:.1f} s")
    print(f"step of {options.batch}: {before:.2f} s live, {after:.2f} s stored")
    print(f"ratio of medians: {before / after:.2f}x")
    os._exit(0 if same else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="pairs of steps")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    return parser.parse_args()


def fill(root: Path) -> None:
    """Write recordings, statistics and an untrained network."""
    robot = replace(load_embodiment("libero_mini"), language_features=())
    record_noise(root / "data", robot, episodes=EPISODES, frames=FRAMES)
    config = mini_config(robot)
    content = NewCheckpoint(
        config=config, metadata=tiny_metadata(robot), weights=new_weights(config, 0), recipe={}
    )
    write_new_checkpoint(root / "start", robot, content)


def run_of(
    root: Path, world: DistributedEnvironment, options: argparse.Namespace, *, cached: bool
) -> Trainer:
    overrides = {
        "model.model_path": root / "start", "data.train_data_paths": root / "data",
        "data.cache_features": str(cached).lower(), "data.num_workers": 0,
        "data.holdout_episodes": 0, "runner.eval_interval": "null",
        "runner.micro_batch_size": options.batch, "runner.global_batch_size": options.batch,
        "runner.max_steps": 1000, "runner.output_dir": root / f"run-{cached}",
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in overrides.items()]
    return Trainer(build(load_recipe("mini_lift_cpu", words, 1), world))


def pairs(live: Trainer, stored: Trainer, steps: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds of one step of each, after a step that is not counted."""
    batches = [run.batches(steps + 1) for run in (live, stored)]
    for step in range(steps + 1):
        seconds = []
        for run, source in zip((live, stored), batches, strict=True):
            began = time.perf_counter()
            run.train_step(source)
            seconds.append(time.perf_counter() - began)
        if step:
            yield seconds[0], seconds[1]


def weights(run: Trainer) -> list[torch.Tensor]:
    return list(run.components.optimizer.named.values())


if __name__ == "__main__":
    main()
