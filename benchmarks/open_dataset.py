"""What it costs to open a dataset of DROID's size: 92,000 episodes of 300 frames, three views.

    python benchmarks/open_dataset.py --folder /data/synthetic --episodes 92000

One episode is recorded; all others have its numbers. Of v2.1 every film is a file of its own, with
pictures of other sizes in bytes than any other, as films of real recordings are; of v3.0 they are
hard links. Cold is the first opening, which copies states, actions and instructions into a cache;
warm is every later one.
Eight processes open the dataset at once, as the ranks of one node do. Prints wall seconds,
processor seconds and peak memory of each process.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.recording import EpisodeWriter
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions

ROBOT = "oxe_droid"
FRAMES = 300
PER_CHUNK = 1000


def record_one(folder: Path, version: str) -> None:
    """Record a single episode of random numbers and gray images."""
    robot = load_embodiment(ROBOT)
    random = np.random.default_rng(0)
    rate = robot.timing.control_hz
    with EpisodeWriter(folder, robot, fps=rate, version=version, video=True) as writer:
        for number in range(FRAMES):
            observation: dict[str, object] = {
                view.key: np.full((*view.resolution, 3), number % 256, np.uint8)
                for view in robot.views
            }
            for part in robot.state:
                observation[part.key] = random.normal(size=part.dim).astype(np.float32)
            observation[robot.language] = "put the marker in the cup"
            action = {
                part.key: random.normal(size=part.dim).astype(np.float32) for part in robot.action
            }
            writer.add_frame(observation, action)
        writer.save_episode(success=True)


def numbered(table: pa.Table, first: int, episodes: int) -> pa.Table:
    """Return the rows of ``table`` once for each episode from ``first`` on."""
    rows = pa.concat_tables([table] * episodes)
    numbers = np.arange(first, first + episodes)
    columns = {
        "episode_index": np.repeat(numbers, len(table)),
        "index": np.arange(first * len(table), (first + episodes) * len(table)),
    }
    for name, values in columns.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(values))
    return rows


def link(source: Path, target: Path) -> None:
    """Make ``target`` another name of ``source``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target != source:
        os.link(source, target)


def filled(packet: bytes, size: int) -> bytes:
    """Return a picture of H.264 with ``size`` bytes of filler behind it, which decoders skip."""
    return packet + size.to_bytes(4, "big") + b"\x0c" + b"\xff" * (size - 2) + b"\x80"


def write_unlike(source: Path, targets: list[Path]) -> None:
    """Write the film ``source`` into every target, each with other sizes of its pictures."""
    with av.open(str(source)) as film:
        video = film.streams.video[0]
        packets = [
            (bytes(packet), packet.pts, packet.dts, packet.is_keyframe)
            for packet in film.demux(video) if packet.dts is not None
        ]  # fmt: skip
        sizes = np.random.default_rng(0).integers(16, 96, (len(targets), len(packets)))
        for target, own in zip(targets, sizes.tolist(), strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            with av.open(str(target), "w") as output:
                stream = output.add_stream_from_template(video, opaque=True)
                for (content, pts, dts, key), size in zip(packets, own, strict=True):
                    packet = av.Packet(filled(content, size))
                    packet.pts, packet.dts, packet.time_base = pts, dts, video.time_base
                    packet.stream, packet.is_keyframe = stream, key
                    output.mux(packet)


def multiply_v2(folder: Path, episodes: int) -> None:
    """Write the other episodes of a v2.1 dataset: a data file and a video of each view for each."""
    data = pq.read_table(folder / "data/chunk-000/episode_000000.parquet")
    (line,) = (folder / "meta/episodes.jsonl").read_text().splitlines()
    row = json.loads(line)
    views = sorted(path.name for path in (folder / "videos/chunk-000").iterdir())
    with (folder / "meta/episodes.jsonl").open("w") as listed:
        for number in range(episodes):
            chunk, name = f"chunk-{number // PER_CHUNK:03d}", f"episode_{number:06d}"
            listed.write(json.dumps({**row, "episode_index": number}) + "\n")
            path = folder / "data" / chunk / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(numbered(data, number, 1), path)
    for view in views:
        targets = [
            folder / f"videos/chunk-{number // PER_CHUNK:03d}/{view}/episode_{number:06d}.mp4"
            for number in range(1, episodes)
        ]
        write_unlike(folder / "videos/chunk-000" / view / "episode_000000.mp4", targets)


def repeat_film(path: Path, times: int, rate: float) -> None:
    """Let a video show itself ``times`` times, one after the other."""
    whole = path.with_name("whole.mp4")
    with av.open(str(path)) as source, av.open(str(whole), "w") as output:
        video = source.streams.video[0]
        stream = output.add_stream_from_template(video, opaque=True)
        packets = [packet for packet in source.demux(video) if packet.dts is not None]
        sizes = [(bytes(packet), packet.pts, packet.dts, packet.is_keyframe) for packet in packets]
        step = round(FRAMES / rate / video.time_base)
        for turn in range(times):
            for content, pts, dts, key in sizes:
                packet = av.Packet(content)
                packet.pts, packet.dts = pts + turn * step, dts + turn * step
                packet.time_base, packet.stream, packet.is_keyframe = video.time_base, stream, key
                output.mux(packet)
    whole.replace(path)


def multiply_v3(folder: Path, episodes: int) -> None:
    """Write the other episodes of a v3.0 dataset: `PER_CHUNK` of them in each file."""
    data = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    (listed,) = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    row = pq.read_table(listed).to_pylist()[0]
    rows, rate = [], json.loads((folder / "meta/info.json").read_text())["fps"]
    starts = {name: name.rpartition("/")[2] for name in row if name.endswith("_timestamp")}
    for view in sorted((folder / "videos").iterdir()):
        repeat_film(view / "chunk-000/file-000.mp4", min(PER_CHUNK, episodes), rate)
    for first in range(0, episodes, PER_CHUNK):
        count, file = min(PER_CHUNK, episodes - first), first // PER_CHUNK
        path = folder / f"data/chunk-000/file-{file:03d}.parquet"
        pq.write_table(numbered(data, first, count), path)
        for view in sorted((folder / "videos").iterdir()):
            link(view / "chunk-000/file-000.mp4", view / f"chunk-000/file-{file:03d}.mp4")
        places = {name: file for name in row if name.endswith("/file_index") and "meta" not in name}
        for at in range(count):
            times = {
                name: (at + (kind == "to_timestamp")) * FRAMES / rate
                for name, kind in starts.items()
            }
            rows.append({**row, **places, **times, "episode_index": first + at})
    pq.write_table(pa.Table.from_pylist(rows), listed)


def write(folder: Path, version: str, episodes: int) -> None:
    """Write the dataset."""
    record_one(folder, version)
    {"v2.1": multiply_v2, "v3.0": multiply_v3}[version](folder, episodes)
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    counts = {"total_episodes": episodes, "total_frames": episodes * FRAMES}
    path.write_text(json.dumps({**info, **counts}))


@dataclass(frozen=True)
class Opening:
    """What one process needed."""

    wall_s: float
    processor_s: float
    peak_mib: float


def open_once(folder: Path, cache: Path, results: "multiprocessing.Queue[Opening]") -> None:
    """Open the dataset and read one sample's numbers."""
    began = time.monotonic(), time.process_time()
    reader = DatasetReader(folder, load_embodiment(ROBOT), ReaderOptions(cache=cache))
    reader.vectors(len(reader) // 2)
    results.put(
        Opening(
            time.monotonic() - began[0],
            time.process_time() - began[1],
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )
    )


def opened(folder: Path, cache: Path, processes: int) -> Iterator[Opening]:
    """Open the dataset in several new processes at once."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[Opening] = context.Queue()
    started = [
        context.Process(target=open_once, args=(folder, cache, results)) for _ in range(processes)
    ]
    for process in started:
        process.start()
    for _ in started:
        yield results.get()
    for process in started:
        process.join()


def main() -> None:
    """Write the dataset unless it is there, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--version", choices=("v2.1", "v3.0"), default="v2.1")
    parser.add_argument("--episodes", type=int, default=92_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    folder = options.folder / f"{options.version}-{options.episodes}"
    if not (folder / "meta/info.json").exists():
        began = time.monotonic()
        write(folder, options.version, options.episodes)
        print(f"written in {time.monotonic() - began:.0f} s", flush=True)
    print("| opening | processes | wall s, longest | processor s, all | peak MiB, each |")
    print("|---|---|---|---|---|")
    for processes in options.processes:
        cache = options.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        for kind in ("cold", "warm"):
            found = list(opened(folder, cache, processes))
            wall, peak = max(one.wall_s for one in found), max(one.peak_mib for one in found)
            spent = sum(one.processor_s for one in found)
            print(f"| {kind} | {processes} | {wall:.2f} | {spent:.3f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
