"""How fast a recipe trains, and how fast its recordings are read: by the trainer's own loop."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dzrobot.configuration import read_config
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.files import write_json
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.training.bench.document import BenchSettings, Measurement
from dzrobot.training.bench.measuring import noise_format, record_noise
from dzrobot.training.data import (
    DatasetReader,
    LoaderOptions,
    LoaderPlan,
    ReaderOptions,
    TrainingData,
    build_loader,
)
from dzrobot.training.data.normalization import measure
from dzrobot.training.recipes.read import find_recipe, load_recipe, read_planned
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
    "runner.micro_batch_size=8", "runner.global_batch_size=8",
)  # fmt: skip
"""Changes to the default recipe: images are decoded and encoded in every step, as those of most
recordings are."""

_EPISODES, _FRAMES = 4, 120


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
    """Return the time to decode one sample's frames, and samples per second of the loader."""
    config, notes = asked_recipe(settings, folder)
    initial = open_initial_weights(config.model, config.runner.seed)
    data = open_datasets(config, initial.metadata).train
    decoding = Measurement(
        name="decode, one sample", unit="ms", better="less",
        values=tuple(_decode_ms(data, settings.repeats)),
    )  # fmt: skip
    workers = config.data.num_workers
    options = LoaderOptions(num_workers=workers, prefetch_factor=config.data.prefetch_factor)
    size = config.runner.micro_batch_size
    loading = Measurement(
        name=f"loader, {workers} workers" if workers else "loader, in the process",
        unit="samples/s", better="more",
        values=tuple(loader_rates(data, size, options, settings.repeats)),
    )  # fmt: skip
    return [decoding, loading], notes


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
        own += _made_up(read_planned(name, own, 1)[0], folder)
        notes.append(
            f"recordings: none were given, so {_EPISODES} episodes of noise in {noise_format()} "
            "were made"
        )
    return load_recipe(name, [*own, f"runner.output_dir={folder / 'run'}"], 1), notes


def _made_up(config: SFTConfig, folder: Path) -> list[str]:
    """Return the overrides that name a recording of the recipe's robot, and its statistics."""
    robot = dataclasses.replace(load_embodiment(config.model.embodiment_tag), language_features=())
    recording = record_noise(folder / "recording", robot, episodes=_EPISODES, frames=_FRAMES)
    reader = DatasetReader(recording, robot, ReaderOptions(images=False))
    statistics = folder / "metadata.json"
    write_json(statistics, {robot.tag: measure([reader], robot)})
    return [f"data.train_data_paths={recording}", f"model.metadata_json_path={statistics}"]
