"""How fast a recipe trains, and how fast its recordings are read: by the trainer's own loop."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from dzrobot.configuration import read_config
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.files import write_json
from dzrobot.modality.video import draw_augmentation, encode_views
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.recording import EpisodeWriter, VideoCodec, consolidate
from dzrobot.recording.small_films import small_copy
from dzrobot.rng import numpy_generator
from dzrobot.training.bench.document import BenchSettings, Measurement
from dzrobot.training.bench.measuring import add_noise, noise_format, record_noise, timed
from dzrobot.training.data import (
    DatasetReader,
    LoaderOptions,
    LoaderPlan,
    ReaderOptions,
    TrainingData,
    build_loader,
)
from dzrobot.training.data.mixture import SampleKey
from dzrobot.training.data.normalization import measure
from dzrobot.training.recipes.read import find_recipe, load_recipe, plan_recipe
from dzrobot.training.run.build import build
from dzrobot.training.run.initial_weights import open_initial_weights
from dzrobot.training.run.metrics import LogRecord
from dzrobot.training.run.opening import open_datasets
from dzrobot.training.run.parallel import init_distributed
from dzrobot.training.run.trainer import Trainer
from dzrobot.training.sft_config import SFTConfig

STEPS = 2
"""Optimizer steps of one repeat."""

CLIPS = 4
"""Samples of one repeat of decoding."""

DEFAULT_RECIPE = "mini_lift_cpu"

_DEFAULTS = (
    "data.cache_features=false", "data.holdout_episodes=0", "runner.eval_interval=null",
    "runner.own_rows=0", "runner.micro_batch_size=8", "runner.global_batch_size=8",
)  # fmt: skip
"""Changes to the default recipe: images are decoded and encoded in every step, as those of most
recordings are."""

_EPISODES, _FRAMES = 4, 120

_DRAWN = 10
"""Samples that are drawn for one that is read: those of other recordings are left out."""

_TAIL = 1500
"""Characters of what LeRobot said that are shown where it failed."""


def measure_train(settings: BenchSettings, folder: Path) -> tuple[list[Measurement], list[str]]:
    """Return samples per second of the recipe's steps, MFU, and the share of waiting for data."""
    config, notes = asked_recipe(settings, folder)
    world = init_distributed(torch.device(settings.device).type)
    try:
        trainer = Trainer(build(config, world))
        records = list(_records(trainer, settings.repeats))
    finally:
        dist.destroy_process_group()
    if records[0].mfu is None:
        notes.append(f"MFU: left out, the peak of this device ({world.device.type}) is unknown")
    return _of_records(records), notes


def _records(trainer: Trainer, repeats: int) -> Iterator[LogRecord]:
    """Yield the trainer's own record of every :data:`STEPS` steps; the first ones do not count."""
    batches = trainer.batches(STEPS * (repeats + 1))
    for repeat in range(repeats + 1):
        for _ in range(STEPS):
            trainer.train_step(batches)
            trainer.step += 1
        record = trainer.components.metrics.record(trainer.step)
        if repeat:
            yield record


def _of_records(records: Sequence[LogRecord]) -> list[Measurement]:
    found = [
        Measurement(
            name="training", unit="samples/s", better="more",
            values=tuple(record.samples_per_s for record in records),
        ),
        Measurement(
            name="data wait", unit="% of time", better="less",
            values=tuple(record.data_wait_pct for record in records),
        ),
    ]  # fmt: skip
    for name, values in (
        ("MFU", [record.mfu for record in records]),
        ("executed share of the peak", [record.utilisation for record in records]),
    ):
        known = tuple(100 * value for value in values if value is not None)
        if known:
            found.append(Measurement(name=name, unit="% of peak", values=known, better="more"))
    return found


def measure_data(settings: BenchSettings, folder: Path) -> tuple[list[Measurement], list[str]]:
    """Return the times to decode and to prepare one sample's frames, and the loader's rate."""
    config, notes = asked_recipe(settings, folder)
    initial = open_initial_weights(config.model, config.runner.seed)
    data = open_datasets(config, initial.metadata).train
    decoding = Measurement(
        name="decode, one sample", unit="ms", better="less",
        values=tuple(_decode_ms(data, settings.repeats)),
    )  # fmt: skip
    preparing = Measurement(
        name="prepare, one sample", unit="ms", better="less",
        values=tuple(_prepare_ms(data, settings, augmented=config.data.augment)),
    )  # fmt: skip
    workers = config.data.num_workers
    options = LoaderOptions(num_workers=workers, prefetch_factor=config.data.prefetch_factor)
    size = config.runner.micro_batch_size
    loading = Measurement(
        name=f"loader, {workers} workers" if workers else "loader, in the process",
        unit="samples/s", better="more",
        values=tuple(loader_rates(data, size, options, settings.repeats)),
    )  # fmt: skip
    found = [decoding, preparing, loading]
    if settings.lerobot is not None:
        found += beside_lerobot(data, settings.lerobot, settings.repeats)
    if settings.films is not None:
        robot = load_embodiment(config.model.embodiment_tag)
        found += beside_films(robot, folder, settings.repeats, settings.films)
    return found, notes


_LEROBOT = """
import json, sys, time
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
torch.set_num_threads(1)
given = json.load(sys.stdin)
data = LeRobotDataset("local/bench", root=given["root"], delta_timestamps=given["deltas"],
                      video_backend="pyav")
data[given["rows"][0]]
times = []
for row in given["rows"]:
    start = time.process_time()
    data[row]
    times.append(1000 * (time.process_time() - start))
print(json.dumps(times))
"""


def beside_lerobot(data: TrainingData, python: str, repeats: int) -> list[Measurement]:
    """Return what whole samples cost here and by LeRobot's dataset class, and the ratio.

    Processor time of one thread, from files to tensors, of the same rows of one recording; LeRobot
    decodes with PyAV.

    Args:
        data: What is read.
        python: Of an environment that has LeRobot.
        repeats: Samples.

    Raises:
        ConfigError: LeRobot cannot be run there, or cannot read the recording.
    """
    torch.set_num_threads(1)
    drawn = data.sample_keys(0, range(_DRAWN * repeats), _DRAWN * repeats)
    reader = data.locate(drawn[0].sample_id)[1]
    keys = [key for key in drawn if data.locate(key.sample_id)[1] is reader][:repeats]
    theirs = _lerobot_ms(data, python, keys)
    data[keys[0]]
    own = []
    for key in keys:
        start = time.process_time()
        data[key]
        own.append(1000 * (time.process_time() - start))
    ratios = tuple(other / mine for other, mine in zip(theirs, own, strict=True))
    name = "whole sample"
    return [
        Measurement(name=f"{name}, processor", unit="ms", values=tuple(own), better="less"),
        Measurement(name=f"{name}, LeRobot", unit="ms", values=tuple(theirs), better="neither"),
        Measurement(
            name=f"{name}, LeRobot over this package", unit="x", values=ratios, better="more"
        ),
    ]


def _lerobot_ms(data: TrainingData, python: str, keys: Sequence[SampleKey]) -> list[float]:
    reader = data.locate(keys[0].sample_id)[1]
    root, timing, rows = reader.catalog.root, reader.embodiment.timing, []
    for key in keys:
        episode, start = reader.windows.locate(data.locate(key.sample_id)[2])
        rows.append(int(reader.catalog.episodes.offset[episode]) + start)
    starts = [block * timing.action_horizon for block in range(timing.blocks)]
    steps = {
        "video": [*(start + offset for start in starts for offset in timing.frame_offsets),
                  timing.span],
        "state": starts, "action": list(range(timing.actions)),
    }  # fmt: skip
    info = json.loads((root / "meta/info.json").read_text(encoding="utf-8"))
    kinds = {
        name: "video" if feature["dtype"] in ("video", "image") else name.rpartition(".")[2]
        for name, feature in info["features"].items()
    }
    deltas = {
        name: [step / info["fps"] for step in steps[kind]]
        for name, kind in kinds.items()
        if kind in steps
    }
    given = json.dumps({"root": str(root), "deltas": deltas, "rows": rows})
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [python, "-c", _LEROBOT], input=given, capture_output=True, text=True, check=True,
            env=environment,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"--lerobot {python}: LeRobot did not read {root}; give the Python of an environment "
            f"with LeRobot of the recording's version ({info['codebase_version']}):\n"
            f"{said.strip()[-_TAIL:]}"
        ) from error
    return list(json.loads(done.stdout.splitlines()[-1]))


_FILMS = {
    "H.264, key frames 10 apart": VideoCodec(),
    "H.264, key frames 250 apart": VideoCodec(gop=250),
    "AV1, key frames 2 apart": VideoCodec(name="av1", gop=2),
}


def beside_films(
    robot: Embodiment, folder: Path, repeats: int, films: Literal["exact", "small"]
) -> list[Measurement]:
    """Return what whole samples cost from films of each codec, and from what is made of them.

    Processor time of the same samples, in turns; see :func:`dzrobot.recording.consolidate` and
    :mod:`dzrobot.recording.small_films`. Small ones are as large as the network needs: its crop of
    them has the size that it sees.

    Args:
        robot: Whose recordings are made up.
        folder: For them.
        repeats: Samples of each codec.
        films: What is made of them.
    """
    plain, found = dataclasses.replace(robot, language_features=()), []
    size = _fitting(robot)
    robots = (plain, plain if films == "exact" else plain.at_resolution(*size))
    for number, (name, codec) in enumerate(_FILMS.items()):
        kept, other = folder / f"films-{number}", folder / f"films-{number}-{films}"
        rate = plain.timing.control_hz
        with EpisodeWriter(kept, plain, fps=rate, version="v3.0", video=codec) as writer:
            add_noise(writer, plain, episodes=2, frames=_FRAMES)
        if films == "exact":
            shutil.copytree(kept, other)
            consolidate(other, films="exact")
        else:
            small_copy(kept, other, size)
        consolidate(kept)
        readers = [
            DatasetReader(path, reading, ReaderOptions())
            for path, reading in zip((kept, other), robots, strict=True)
        ]
        rng = numpy_generator("films of the bench", number)
        drawn = rng.integers(len(readers[0]), size=repeats + 1).tolist()
        times = [[_processor_ms(reader, window) for reader in readers] for window in drawn]
        # The first sample opens the files.
        before, after = zip(*times[1:], strict=True)
        ratios = tuple(b / a for a, b in times[1:])
        found += [
            Measurement(name=f"sample, {name}", unit="ms", values=before, better="less"),
            Measurement(name=f"sample, {name}, {films}", unit="ms", values=after, better="less"),
            Measurement(name=f"{films} over {name}", unit="x", values=ratios, better="less"),
        ]
    return found


def _fitting(robot: Embodiment) -> tuple[int, int]:
    """Return the height and width of pictures whose crop has the largest size that is shown."""
    high, wide = robot.views[0].resolution
    needed = max(
        max(view.size[0] / view.resolution[0], view.size[1] / view.resolution[1])
        for view in robot.views
    )
    share = min(1.0, needed / robot.crop_scale)
    return math.ceil(high * share), math.ceil(wide * share)


def _processor_ms(reader: DatasetReader, window: int) -> float:
    start = time.process_time()
    reader.window(window)
    return 1000 * (time.process_time() - start)


def _decode_ms(data: TrainingData, repeats: int) -> Iterator[float]:
    """Yield milliseconds of one sample's frames of all cameras, mean of :data:`CLIPS`."""
    count = CLIPS * (repeats + 1)
    keys = data.sample_keys(0, range(count), count)
    for first in range(0, count, CLIPS):
        start = time.perf_counter()
        for key in keys[first : first + CLIPS]:
            _, reader, window = data.locate(key.sample_id)
            reader.views(window)
        # The first ones open the files.
        if first:
            yield 1000 * (time.perf_counter() - start) / CLIPS


def _prepare_ms(data: TrainingData, settings: BenchSettings, *, augmented: bool) -> Iterator[float]:
    """Yield milliseconds in which the device makes one sample's frames images of the network."""
    device = torch.device(settings.device)
    (key,) = data.sample_keys(0, range(1), 1)
    _, reader, window = data.locate(key.sample_id)
    frames = reader.views(window).items()
    views = {name: torch.from_numpy(images)[None].to(device) for name, images in frames}
    draws = [draw_augmentation(0, 0)] if augmented else None
    spent: list[float] = []
    for _ in range(settings.repeats + 1):
        with timed(spent, device):
            encode_views(views, reader.embodiment, draws)
    yield from (1000 * seconds for seconds in spent[1:])


def loader_rates(
    data: TrainingData, size: int, options: LoaderOptions, repeats: int
) -> Iterator[float]:
    """Yield samples per second of every micro-batch, after those that workers had ready.

    Args:
        data: What is read.
        size: Samples of a micro-batch.
        options: How it is read.
        repeats: Micro-batches that are timed.

    Raises:
        ConfigError: See :func:`dzrobot.training.data.loader.read_batches`.
    """
    ahead = 1 + options.num_workers * options.prefetch_factor
    plan = LoaderPlan(global_batch=size, micro_batch=size, stop_step=ahead + repeats)
    batches = iter(build_loader(data, plan, options))
    before = time.perf_counter()
    for number in range(ahead + repeats):
        next(batches)
        now = time.perf_counter()
        if number >= ahead:
            yield size / max(now - before, 1e-9)
        before = now


def asked_recipe(settings: BenchSettings, folder: Path) -> tuple[SFTConfig, list[str]]:
    """Return the recipe to run, and what was put in place of what it leaves open.

    Args:
        settings: Name the recipe.
        folder: For what the run writes, and for recordings that are made up.

    Raises:
        ConfigError: the recipe cannot be run.
        UnknownNameError: no such recipe.
    """
    own, notes = list(settings.overrides), []
    if settings.recipe is None:
        own = [*_DEFAULTS, f"model.model_path={default_checkpoint()}", *own]
    name = settings.recipe or DEFAULT_RECIPE
    if read_config(find_recipe(name), own).values.get("data", {}).get("train_data_paths") is None:
        version = "v2.1" if settings.lerobot is None else "v3.0"
        own += _made_up(plan_recipe(name, own, 1).config, folder, version)
        notes.append(
            f"recordings: none were given, so {_EPISODES} episodes of noise in {noise_format()} "
            "were made"
        )
    return load_recipe(name, [*own, f"runner.output_dir={folder / 'run'}"], 1), notes


def _made_up(config: SFTConfig, folder: Path, version: str) -> list[str]:
    """Return the overrides that name a recording of the recipe's robot, and its statistics."""
    robot = dataclasses.replace(load_embodiment(config.model.embodiment_tag), language_features=())
    recording = record_noise(
        folder / "recording", robot, episodes=_EPISODES, frames=_FRAMES, version=version
    )
    reader = DatasetReader(recording, robot, ReaderOptions(images=False))
    statistics = folder / "metadata.json"
    write_json(statistics, {robot.tag: measure([reader], robot)})
    return [f"data.train_data_paths={recording}", f"model.metadata_json_path={statistics}"]
