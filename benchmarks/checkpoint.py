"""Load time and peak memory of a sharded checkpoint, against plain loading.

Writes a synthetic 5B-style checkpoint (2 GB of bfloat16 in ten shards), then loads it in fresh
processes that take turns: ours, and `safetensors.torch.load_file` on every shard followed by
`load_state_dict`. Both end with a network in host memory; the second row is ours without the check
for NaN. The last row reads every weight without keeping it: what the host needs while a network on
another device is filled. `--also-dict` adds `load_file` alone, every page touched once.

    python benchmarks/checkpoint.py --rounds 5
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.checkpoints import load
from dzrobot.policies.dreamzero.checkpoints.directory import (
    Sidecars,
    open_checkpoint,
    write_directory,
)
from dzrobot.policies.dreamzero.checkpoints.load import (
    LoadOptions,
    expected_shapes,
    load_network,
    load_weights,
)
from dzrobot.policies.dreamzero.checkpoints.shards import ShardOptions
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.tiny import TinyWeightsSource, tiny_config

SHARDS = 10


def sized_config(gigabytes: float) -> NetworkConfig:
    """Return a 5B-style network of about so many bytes of bfloat16."""
    tiny = tiny_config("5b", load_embodiment("libero_sim"))
    width, hidden = 1536, 7168
    per_block = 10 * width**2 + 2 * width * hidden
    layers = max(1, round((gigabytes * 1e9 / 2 - 12 * width**2) / per_block))
    sizes = {"dim": width, "ffn_dim": hidden, "num_heads": 12, "num_layers": layers}
    return replace(tiny, dit=replace(tiny.dit, **sizes))


def ours(folder: Path) -> object:
    return load_network(open_checkpoint(folder), LoadOptions(dtype=torch.bfloat16))


def unchecked(folder: Path) -> object:
    """Load without looking for NaN, in a process of its own."""
    load.is_finite = lambda _: True
    return ours(folder)


def plain(folder: Path) -> object:
    config = NetworkConfig.from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        network = WorldActionModel(config)
    # On the meta device first, so that plain loading is not charged for drawing random weights.
    network = network.to(torch.bfloat16).to_empty(device="cpu")
    state = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state.update(load_file(shard))
    load_weights(network, StateDictSource(values=state))
    return network


def dictionary(folder: Path) -> object:
    state = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state.update(load_file(shard))
    return state, sum(tensor.view(torch.int16).sum().item() for tensor in state.values())


def elsewhere(folder: Path) -> object:
    """Read as for a device with memory of its own: what the host needs then."""
    weights = open_checkpoint(folder).weights
    return sum(t.view(torch.int16).sum().item() for _, t in weights.stream(weights.tensors))


METHODS: dict[str, Callable[[Path], object]] = {
    "ours": ours,
    "ours, NaN not looked for": unchecked,
    "load_file + load_state_dict": plain,
    "ours, network elsewhere": elsewhere,
    "load_file, touched": dictionary,
}


def measure(name: str, folder: Path) -> dict[str, float]:
    """Load once; return seconds, processor seconds and peak memory in bytes."""
    torch.set_num_threads(1)
    before, cpu = time.perf_counter(), time.process_time()
    base = _peak()
    kept = METHODS[name](folder)
    row = {
        "seconds": time.perf_counter() - before,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": float(_peak()),
        "before_bytes": float(base),
    }
    del kept
    return row


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--also-dict", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure[0], Path(args.measure[1]))))
        return
    names = [name for name in METHODS if args.also_dict or name != "load_file, touched"]
    with tempfile.TemporaryDirectory() as root:
        folder = _write(Path(root) / "checkpoint", args.gigabytes)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for turn in range(args.rounds + 1):
            for name in names[turn % 2 :] + names[: turn % 2]:
                command = [sys.executable, __file__, "--measure", name, str(folder)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                # The first turn fills the page cache and is not counted.
                if turn:
                    rows[name].append(json.loads(output))
    _report(rows)


def _write(folder: Path, gigabytes: float) -> Path:
    config = sized_config(gigabytes)
    shapes = expected_shapes(config)
    source = TinyWeightsSource(shapes, 0, torch.bfloat16)
    total = sum(info.nbytes for info in source.tensors.values())
    options = ShardOptions(shard_bytes=total // SHARDS + 20_000_000)
    write_directory(folder, source, Sidecars(config_json=config.to_dict()), options)
    files = list(folder.glob("*.safetensors"))
    largest = max(file.stat().st_size for file in files)
    print(f"{total / 1e9:.2f} GB, {len(files)} shards, largest {largest / 1e9:.2f} GB")
    return folder


def _report(rows: dict[str, list[dict[str, float]]]) -> None:
    for name, runs in rows.items():
        mid = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"{name:28} {mid['seconds']:6.2f} s  {mid['cpu_seconds']:6.2f} s processor  "
            f"{mid['peak_bytes'] / 1e9:5.2f} GB peak ({mid['before_bytes'] / 1e9:.2f} before)"
        )
    for name in list(rows)[1:]:
        if name.startswith("ours"):
            continue
        pairs = list(zip(rows["ours"], rows[name], strict=True))
        ratios = {
            key: statistics.median(a[key] / b[key] for a, b in pairs)
            for key in ("seconds", "cpu_seconds", "peak_bytes")
        }
        print(
            f"ours over {name}: {ratios['seconds']:.2f} time, {ratios['cpu_seconds']:.2f} "
            f"processor time, {ratios['peak_bytes']:.2f} peak memory (targets 1.2 and 0.6)"
        )


if __name__ == "__main__":
    main()
