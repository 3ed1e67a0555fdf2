"""Time and peak memory of loading, merging and converting weights.

Writes a synthetic 5B-style checkpoint (2 GB of bfloat16) in one layout after the other and handles
it in fresh processes that take turns. Memory is what the process holds beyond what it held with
torch and this package imported: at its peak in all (mapped pages of files counted, as the system
counts them), and the highest of its own memory and of mapped files apart. The ratio is that of the
peak to the weights that stay.

    python benchmarks/checkpoint.py --rounds 3
    python benchmarks/checkpoint.py --rounds 3 --layouts shards --also-plain
    python benchmarks/checkpoint.py --sparse-14b

`--also-plain` adds `safetensors.torch.load_file` on every shard followed by `load_state_dict`.
`--sparse-14b` merges and converts the published 14B without room for it: files are zeros that take
no place, and what is written has its zeros taken out again while the command runs (`fallocate`, on
Linux). Nothing stays in memory then, so the peak is compared with the largest tensor.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import (
    Sidecars,
    open_checkpoint,
    write_directory,
)
from dzrobot.policies.dreamzero.checkpoints.load import (
    LoadOptions,
    empty_network,
    load_network,
    load_weights,
    slots,
)
from dzrobot.policies.dreamzero.checkpoints.lora import trained_with_adapters
from dzrobot.policies.dreamzero.checkpoints.shards import SHARD_BYTES, ShardOptions, write_json
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource, in_parts
from dzrobot.policies.dreamzero.network.config import NetworkConfig, preset
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.tiny import TinyWeightsSource, tiny_config

SHARDS = 10
LAYOUTS = ("shards", "file", "adapters", "full_weights", "dcp")


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


def elsewhere(folder: Path) -> object:
    """Read as for a device with memory of its own: what the host needs then."""
    weights = open_checkpoint(folder).weights
    return sum(t.view(torch.int16).sum().item() for _, t in weights.stream(weights.tensors))


def rewritten(folder: Path) -> None:
    """Write as an official folder; adapters are merged."""
    merge = open_checkpoint(folder).has_adapters
    with tempfile.TemporaryDirectory(dir=folder.parent) as target:
        convert([folder], Path(target) / "out", ConvertOptions(merge=merge))


def exported(folder: Path) -> None:
    """Write adapters and their base as one network, as `dzrobot export` does."""
    base = str(folder.with_name("base"))
    options = ConvertOptions(whole=True, base=(base,), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=folder.parent) as target, _holes(Path(target)):
        convert([folder], Path(target) / "out", options)


def copied(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as target, _holes(Path(target)):
        convert([folder], Path(target) / "out", ConvertOptions(dtype=torch.bfloat16))


METHODS: dict[str, Callable[[Path], object]] = {
    "load": ours,
    "read, network elsewhere": elsewhere,
    "convert": rewritten,
    "load_file + load_state_dict": plain,
    "export of the 14B": exported,
    "convert of the 14B": copied,
}
STAYS = {"load", "load_file + load_state_dict"}


@contextmanager
def _holes(folder: Path) -> Iterator[None]:
    """Give back the room of the files of zeros that appear in ``folder`` while the block runs."""
    done = threading.Event()

    def dig() -> None:
        while not done.wait(0.5):
            for file in folder.rglob("*.safetensors"):
                if file.stat().st_blocks * 512 > 2**28:
                    # All that follows the header.
                    place = ["--offset", str(2**20), "--length", str(file.stat().st_size)]
                    command = ["fallocate", "--punch-hole", *place, str(file)]
                    subprocess.run(command, check=False, capture_output=True)

    thread = threading.Thread(target=dig)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure(name: str, folder: Path) -> dict[str, float]:
    """Run once; return seconds, processor seconds and memory in bytes."""
    torch.set_num_threads(1)
    idle, highest, done = _status(), dict.fromkeys(("RssAnon", "RssFile"), 0.0), threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            now = _status()
            for key, value in highest.items():
                highest[key] = max(value, now[key] - idle[key])

    watcher = threading.Thread(target=watch)
    watcher.start()
    before, cpu = time.perf_counter(), time.process_time()
    kept = METHODS[name](folder)
    row = {"seconds": time.perf_counter() - before, "cpu": time.process_time() - cpu}
    done.set()
    watcher.join()
    del kept
    return {**row, **highest, "peak": _status()["VmHWM"] - idle["VmRSS"]}


def _status() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: float(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--also-plain", action="store_true")
    parser.add_argument("--sparse-14b", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure[0], Path(args.measure[1]))))
        return
    with tempfile.TemporaryDirectory() as root:
        if args.sparse_14b:
            _sparse_14b(Path(root))
            return
        for layout in args.layouts:
            folder, weights = _write(Path(root), args.gigabytes, layout)
            names = ["load", "read, network elsewhere"]
            names += ["convert"] if layout in ("shards", "adapters") else []
            names += (
                ["load_file + load_state_dict"] if args.also_plain and layout == "shards" else []
            )
            _report(layout, weights, _turns(names, folder, args.rounds))
            shutil.rmtree(folder)


def _turns(names: list[str], folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            output = _measured(name, folder)
            # The first turn fills the page cache and is not counted.
            if turn:
                rows[name].append(output)
    return rows


def _measured(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, str(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output))


def _write(root: Path, gigabytes: float, layout: str) -> tuple[Path, float]:
    """Return the folder, and the bytes of the network's weights."""
    config = sized_config(gigabytes)
    stay = sum(2 * torch.Size(shape).numel() for shape in _shapes(config, is_lora=False).values())
    is_lora = layout == "adapters"
    source = TinyWeightsSource(_shapes(config, is_lora=is_lora), 0, torch.bfloat16)
    options = ShardOptions(shard_bytes=stay // SHARDS + 20_000_000 if layout != "file" else 2**50)
    sidecars = Sidecars(config_json=_config_json(config, is_lora=is_lora), complete=not is_lora)
    folder = write_directory(root / "weights", source, sidecars, options)
    if layout in ("full_weights", "dcp"):
        other = root / "weights.pt" if layout == "full_weights" else root / "weights_dcp"
        convert([folder], other, ConvertOptions(to=layout))  # type: ignore[arg-type]
        for file in folder.glob("model*"):
            file.unlink()
        target = "full_weights.pt" if layout == "full_weights" else "dcp_checkpoint"
        shutil.move(other, folder / target)
    return folder, stay


def _shapes(config: NetworkConfig, *, is_lora: bool) -> dict[str, tuple[int, ...]]:
    network = empty_network(config, is_lora=is_lora, text_encoder=True)
    return {name: slot.shape for name, slot in slots(network).items()}


def _config_json(config: NetworkConfig, *, is_lora: bool) -> dict[str, object]:
    head = replace(config.head, train_architecture="lora" if is_lora else "full")
    return replace(config, head=head).to_dict()


def _sparse_14b(root: Path) -> None:
    config = preset("14b")
    whole = _shapes(config, is_lora=True)
    parts = {
        "base": {n: s for n, s in whole.items() if ".lora_" not in n},
        "adapters": {n: s for n, s in whole.items() if trained_with_adapters(n)},
    }
    for name, shapes in parts.items():
        (root / name).mkdir()
        write_json(root / name / "config.json", _config_json(config, is_lora=name == "adapters"))
        _sparse(root / name, shapes)
    largest = 2.0 * max(torch.Size(shape).numel() for shape in whole.values())
    for name, folder in (("export of the 14B", "adapters"), ("convert of the 14B", "base")):
        _report("zeros", largest, {name: [_measured(name, root / folder)]})


def _sparse(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write safetensors files of zeros in bfloat16 that take no room, as large as exported ones."""
    parts = in_parts(shapes, lambda name: 2 * torch.Size(shapes[name]).numel(), SHARD_BYTES)
    weight_map = {}
    for number, names in enumerate(parts):
        header, end = {}, 0
        for name in names:
            begin, end = end, end + 2 * torch.Size(shapes[name]).numel()
            place = {"data_offsets": [begin, end]}
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), **place}
        content = json.dumps(header).encode()
        file = folder / f"model-{number}.safetensors"
        with file.open("wb") as out:
            out.write(len(content).to_bytes(8, "little") + content)
            out.truncate(8 + len(content) + end)
        weight_map.update(dict.fromkeys(names, file.name))
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _report(layout: str, weights: float, rows: Mapping[str, list[dict[str, float]]]) -> None:
    for name, runs in rows.items():
        mid = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        against = f"{mid['peak'] / weights:5.2f} of the weights" if name in STAYS else ""
        if layout == "zeros":
            against = f"largest tensor {weights / 1e9:.2f} GB"
        print(
            f"{layout:13} {name:28} {mid['seconds']:7.2f} s  {mid['cpu']:7.2f} s processor  "
            f"peak {mid['peak'] / 1e9:5.2f} GB  (own {mid['RssAnon'] / 1e9:5.2f}, "
            f"mapped {mid['RssFile'] / 1e9:5.2f})  {against}",
            flush=True,
        )


if __name__ == "__main__":
    main()
