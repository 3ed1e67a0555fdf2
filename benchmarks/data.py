"""Speed of the data path: decoding of clips, single samples, batches of the loader, whole steps.

python benchmarks/data.py                      # all tables
python benchmarks/data.py --only loader --workers 0 2 12 --step-ms 1700
python benchmarks/data.py --only sample --lerobot LEROBOTS_ENVIRONMENT/bin/python
python benchmarks/data.py --only step

Decoders are compared in one run on one thread: milliseconds of processor time per random clip, the
median over clips. A decoder that is not installed, or cannot read a codec, shows a dash. A sample
is everything from files to tensors that a training step reads, by our reader and by LeRobot's
dataset class, which takes its frames by time and runs in an environment of its own. "Frames alone"
is the decoding in ours, by PyAV. A step of many micro-batches is timed with each read when it is
needed, and with all of them read first; a device is taken to compute 1.2 times as long as reading
takes.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.recording import EpisodeWriter, VideoCodec
from dzrobot.recording.media import VideoFile
from dzrobot.training.data import (
    DatasetReader,
    LoaderOptions,
    LoaderPlan,
    ReaderOptions,
    SourceSpec,
    TrainingData,
    build_loader,
)
from dzrobot.training.data.films import FrameTable
from dzrobot.training.data.mixture import SampleKey
from dzrobot.training.data.normalization import measure
from dzrobot.training.data.video_decoding import DECODERS, PyAvDecoder

FRAMES = 300
CLIP = 33
SIZES = ((256, 256), (180, 320), (480, 640))
CODECS = (
    VideoCodec(name="h264", gop=2),
    VideoCodec(name="h264", gop=10),
    VideoCodec(name="h264", gop=250),
    VideoCodec(name="av1", gop=2, crf=30),
)


def scene(height, width, number):
    """Return a moving noisy image: codecs find it as hard as a real camera's."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 70 * np.sin(x / 17 + number / 9 + c) * np.cos(y / 23 - c) for c in range(3)]
    noise = rng.normal(0, 6, (height, width, 3))
    return np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def opencv_clip(path, numbers):
    """Read frames as is usual with OpenCV: seek once, then grab forward."""
    capture = cv2.VideoCapture(str(path))
    if not capture.isOpened():
        return None
    capture.set(cv2.CAP_PROP_POS_FRAMES, int(numbers[0]))
    images, at = [], int(numbers[0])
    for number in numbers:
        while at < number:
            capture.grab()
            at += 1
        done, image = capture.read()
        at += 1
        if not done:
            return None
        images.append(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
    capture.release()
    return np.stack(images)


def decord_clip(path, numbers):
    """Read frames with decord, on one thread."""
    import decord

    return decord.VideoReader(str(path), num_threads=1).get_batch(numbers).asnumpy()


def ours_clip(name):
    """Return a reader of one clip that opens the file again each time, as a random sample does."""

    def read(path, numbers):
        decoder = DECODERS[name](path, FrameTable.of(path, path.parent / "tables"))
        frames = decoder.frames(numbers)
        decoder.close()
        return frames

    return read


def clip_ms(read, path, stride, clips=15):
    """Return the median processor milliseconds per random clip, or None if unreadable."""
    rng = np.random.default_rng(0)
    times = []
    for _ in range(clips):
        first = int(rng.integers(0, FRAMES - stride * (CLIP - 1)))
        numbers = np.arange(first, first + stride * CLIP, stride)
        start = time.process_time()
        try:
            frames = read(path, numbers)
        except ImportError:
            return None
        if frames is None:
            return None
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def decode_table(stride):
    cv2.setNumThreads(1)
    # OpenCV's wheel cannot read AV1 and says so for every frame.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    readers = {"pyav": ours_clip("pyav"), "torchcodec": ours_clip("torchcodec")}
    readers |= {"opencv": opencv_clip, "decord": decord_clip}
    print(f"ms per clip of {CLIP} frames, stride {stride}")
    print(f"{'file':28}" + "".join(f"{name:>12}" for name in readers))
    with tempfile.TemporaryDirectory() as folder:
        for height, width in SIZES:
            images = [scene(height, width, number) for number in range(FRAMES)]
            for codec in CODECS:
                path = Path(folder) / f"{height}x{width}-{codec.name}-{codec.gop}.mp4"
                video = VideoFile(path, 15, codec)
                for image in images:
                    video.add(image)
                video.close()
                found = [clip_ms(read, path, stride) for read in readers.values()]
                cells = "".join(f"{'-' if ms is None else f'{ms:.1f}':>12}" for ms in found)
                print(f"{height}x{width} {codec.name} gop {codec.gop:<10}{cells}", flush=True)


def opened(path, robot, cache):
    """Return a recording as training data, by its own statistics."""
    reading = ReaderOptions(cache=cache)
    metadata = {robot.tag: measure([DatasetReader(path, robot, reading)], robot)}
    spec = SourceSpec(paths=[path], embodiment=robot, metadata=json.loads(json.dumps(metadata)))
    return TrainingData.open([spec], seed=0, options=reading)


EPISODE = 150
"""Rows of a recorded episode."""


def record(folder, robot, video, version="v2.1"):
    rate = robot.timing.control_hz
    with EpisodeWriter(folder, robot, fps=rate, video=video, version=version) as writer:
        rng = np.random.default_rng(0)
        for episode in range(4):
            for number in range(EPISODE):
                observation = {
                    view.key: scene(*view.resolution, 1000 * episode + number)
                    for view in robot.views
                }
                observation[robot.language] = "pick up the cup"
                for part in robot.state:
                    observation[part.key] = rng.normal(size=part.dim).astype(np.float32)
                writer.add_frame(observation, rng.normal(size=robot.action_dim))
            writer.save_episode()


LEROBOT = """
import json, statistics, sys, time
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
torch.set_num_threads(1)
given = json.loads(sys.argv[1])
data = LeRobotDataset("local/benchmark", root=given["root"], delta_timestamps=given["deltas"],
                      video_backend=given["backend"])
data[given["rows"][0]]
times = []
for row in given["rows"]:
    start = time.process_time()
    data[row]
    times.append(1000 * (time.process_time() - start))
print("@@", statistics.median(times))
"""
"""Times samples of LeRobot's dataset class, in its environment."""


def lerobot_ms(python, path, timing, rows, backend):
    """Return the processor milliseconds of LeRobot's sample that holds what one of ours does."""
    info = json.loads((path / "meta/info.json").read_text())
    rate = info["fps"]
    starts = [block * timing.action_horizon for block in range(timing.blocks)]
    frames = [start + offset for start in starts for offset in timing.frame_offsets]
    steps = {"video": [*frames, timing.span], "state": starts, "action": range(timing.actions)}
    deltas = {}
    for name, feature in info["features"].items():
        kind = "video" if feature["dtype"] == "video" else name.split(".")[-1]
        if kind in steps:
            deltas[name] = [step / rate for step in steps[kind]]
    given = {"root": str(path), "deltas": deltas, "rows": rows, "backend": backend}
    done = subprocess.run(
        [python, "-c", LEROBOT, json.dumps(given)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    if not lines:
        raise SystemExit(done.stderr[-2000:])
    return float(lines[-1].split()[1])


def own_ms(data, count):
    """Return the processor milliseconds of one of our samples, and of decoding its frames."""
    rng = np.random.default_rng(0)
    ids = rng.choice(len(data), count, replace=False).tolist()
    data[SampleKey(0, 0, ids[0])]
    whole, decoding = [], []
    decode = PyAvDecoder.frames

    def timed(self, numbers):
        start = time.process_time()
        frames = decode(self, numbers)
        decoding[-1] += 1000 * (time.process_time() - start)
        return frames

    PyAvDecoder.frames = timed
    for number in ids:
        decoding.append(0.0)
        start = time.process_time()
        data[SampleKey(0, 0, number)]
        whole.append(1000 * (time.process_time() - start))
    PyAvDecoder.frames = decode
    return statistics.median(whole), statistics.median(decoding)


def sample_table(options, count=40):
    torch.set_num_threads(1)
    backends = options.backends if options.lerobot else []
    print("ms per sample, from files to tensors")
    print(f"{'recording':24}{'ours':>10}{'frames alone':>14}" + "".join(
        f"{f'LeRobot, {name}':>22}" for name in backends
    ))  # fmt: skip
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        for tag in options.embodiments:
            robot = load_embodiment(tag)
            for name, video in (("h264", True), ("av1", CODECS[-1])):
                path = Path(folder) / f"{tag}-{name}"
                record(path, robot, video, version="v3.0")
                own, decoding = own_ms(opened(path, robot, Path(folder) / "cache"), count)
                # Rows of the first episode at which a whole sample begins.
                rows = rng.integers(0, EPISODE - robot.timing.span, count).tolist()
                others = [
                    lerobot_ms(options.lerobot, path, robot.timing, rows, backend)
                    for backend in backends
                ]
                cells = "".join(f"{ms:14.1f} ({ms / own:4.2f})" for ms in others)
                print(f"{tag + ' ' + name:24}{own:10.1f}{decoding:14.1f}{cells}", flush=True)


def resident_mb(process):
    """Return the memory that only this process holds, in MiB."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "Private_" in line) / 1024


def loader_row(data, workers, options):
    """Return samples per second, share of time waited, private MiB of the largest worker."""
    batches = options.batches
    plan = LoaderPlan(global_batch=options.batch, micro_batch=options.batch, stop_step=batches + 2)
    loader = iter(build_loader(data, plan, LoaderOptions(num_workers=workers)))
    next(loader)
    waited, start = 0.0, time.perf_counter()
    for _ in range(batches):
        before = time.perf_counter()
        next(loader)
        waited += time.perf_counter() - before
        time.sleep(options.step_ms / 1000)
    total = time.perf_counter() - start
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    memory = max((resident_mb(child) for child in children), default=resident_mb(os.getpid()))
    loader.close()
    return batches * options.batch / total, waited / total, memory


def loader_table(options):
    print(
        f"batches of {options.batch}, a step of {options.step_ms:g} ms; processor has "
        f"{os.cpu_count()} cores"
    )
    print(f"{'recording':24}{'workers':>8}{'samples/s':>12}{'waited':>9}{'MiB/worker':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for tag in options.embodiments:
            robot = load_embodiment(tag)
            for name, video in (("images", False), ("h264", True), ("av1", CODECS[-1])):
                path = Path(folder) / f"{tag}-{name}"
                record(path, robot, video)
                data = opened(path, robot, Path(folder) / "cache")
                for workers in options.workers:
                    speed, waited, memory = loader_row(data, workers, options)
                    print(
                        f"{tag + ' ' + name:24}{workers:8}{speed:12.1f}{waited:9.1%}{memory:12.0f}",
                        flush=True,
                    )


PARTS = 32
"""Micro-batches of a timed step."""


def step_seconds(data, compute_s, is_listed):
    """Return how long a step takes, with one reader and two batches ready."""
    plan = LoaderPlan(global_batch=PARTS, micro_batch=1, stop_step=2)
    loader = iter(build_loader(data, plan, LoaderOptions(num_workers=1)))
    for _ in range(2):
        # The first step starts the reader, and leaves it ahead.
        start = time.perf_counter()
        parts = itertools.islice(loader, PARTS)
        for _ in list(parts) if is_listed else parts:
            time.sleep(compute_s)
    loader.close()
    return time.perf_counter() - start


def step_table(repeats=5):
    """Print the time of a step, in turns."""
    robot = load_embodiment("libero_sim")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step"
        record(path, robot, True)
        data = opened(path, robot, Path(folder) / "cache")
        start, count = time.perf_counter(), 16
        for number in range(count):
            data[SampleKey(sample_id=number, step=0, slot=number)]
        compute_s = 1.2 * (time.perf_counter() - start) / count
        times = {is_listed: [] for is_listed in (True, False)}
        for _ in range(repeats):
            for is_listed, found in times.items():
                found.append(step_seconds(data, compute_s, is_listed))
    listed, streamed = (statistics.median(found) for found in times.values())
    print(f"a step of {PARTS} micro-batches, each computed in {1e3 * compute_s:.0f} ms")
    print(f"read first {listed:.1f} s, read when needed {streamed:.1f} s: {streamed / listed:.2f}")


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["decode", "sample", "loader", "step"])
    parser.add_argument(
        "--lerobot", help="Python of an environment that has LeRobot, to compare with"
    )
    parser.add_argument(
        "--backends", nargs="+", default=["pyav"], help="decoders of LeRobot: pyav, torchcodec"
    )
    parser.add_argument("--stride", type=int, default=3, help="frames between those of a clip")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="time a training step would take"
    )
    parser.add_argument("--embodiments", nargs="+", default=["libero_sim", "oxe_droid"])
    options = parser.parse_args()
    if options.only in (None, "decode"):
        decode_table(options.stride)
    if options.only in (None, "sample"):
        sample_table(options)
    if options.only in (None, "loader"):
        loader_table(options)
    if options.only in (None, "step"):
        step_table()


if __name__ == "__main__":
    main()
