"""Batches in a fixed order, whatever the number of workers and ranks."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import cv2
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dzrobot.errors import ConfigError
from dzrobot.modality.video import AugmentConfig, draw_augmentation, draw_dropped_view
from dzrobot.training.data.mixture import ActionCredit, Sample, SampleKey, TrainingData
from dzrobot.training.sft_config import uneven_batch

SHARED_MEMORY = Path("/dev/shm")
"""Where workers leave their batches for the training process."""


class CollatedBatch(TypedDict):
    """One micro-batch; see :mod:`dzrobot.training.data` for the shapes."""

    views: dict[int, dict[str, Tensor]]
    """Source -> video key -> images (b, T, H, W, 3) uint8, of the rows with that source."""

    state: Tensor
    """(B, S, 64) float32, normalized and padded."""

    state_mask: Tensor
    """(B, S, 64) bool: what is not padding."""

    conditions: dict[str, Tensor]
    """Key of a state part with an encoder -> (B, S, dim) float32, normalized."""

    action: Tensor
    """(B, A, 32) float32, normalized and padded."""

    action_mask: Tensor
    """(B, A, 32) bool: what is not padding."""

    has_real_action: Tensor
    """(B,) bool: whether the row has actions at all, and one to predict."""

    credit: ActionCredit | None
    """What is asked of the actions; None: to predict them all."""

    prompt: list[str]
    """B sentences."""

    sample_id: Tensor
    """(B,) int64: key of all that is random in a sample."""

    source: Tensor
    """(B,) int64: index into the sources."""

    slot: Tensor
    """(B,) int64: place in the global batch."""

    step: int
    """Optimizer step that the batch belongs to."""

    skipped: int
    """Unreadable windows that were replaced."""


def _stacked(credited: Sequence[ActionCredit]) -> ActionCredit | None:
    if not credited:
        return None
    given, weight = zip(*credited, strict=True)
    return ActionCredit(torch.stack(given), torch.stack(weight))


def collate(samples: Sequence[Sample]) -> CollatedBatch:
    """Return ``samples``, all of one step, as one batch."""
    groups: dict[int, list[dict[str, Tensor]]] = {}
    for sample in samples:
        groups.setdefault(sample.source, []).append(sample.views)
    vectors = [sample.vectors for sample in samples]
    credited = [sample.credit for sample in samples if sample.credit is not None]
    return CollatedBatch(
        views={
            source: {key: torch.stack([views[key] for views in group]) for key in group[0]}
            for source, group in sorted(groups.items())
        },
        state=torch.stack([sample["state"] for sample in vectors]),
        state_mask=torch.stack([sample["state_mask"] for sample in vectors]),
        conditions={
            key: torch.stack([sample["conditions"][key] for sample in vectors])
            for key in vectors[0]["conditions"]
        },
        action=torch.stack([sample["action"] for sample in vectors]),
        action_mask=torch.stack([sample["action_mask"] for sample in vectors]),
        has_real_action=torch.stack([sample["has_real_action"] for sample in vectors]),
        credit=_stacked(credited),
        prompt=[sample["prompt"] for sample in vectors],
        sample_id=torch.tensor([sample.key.sample_id for sample in samples]),
        source=torch.tensor([sample.source for sample in samples]),
        slot=torch.tensor([sample.key.slot for sample in samples]),
        step=samples[0].key.step,
        skipped=sum(sample.skipped for sample in samples),
    )


def encode_views(
    batch: CollatedBatch,
    data: TrainingData,
    *,
    augment: AugmentConfig | None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the tiled images of a batch, (B, T, H', W', 3) uint8 on ``device``.

    Args:
        batch: From the loader.
        data: What the loader reads; its seed keys the augmentation together with the sample id.
        augment: Ranges of crop and color, views that may be black; None for the center crop of
            evaluation.
        device: Where the work is done.
    """
    images: Tensor | None = None
    for source, views in batch["views"].items():
        rows = torch.nonzero(batch["source"] == source).flatten()
        moved = {key: frames.to(device, non_blocking=True) for key, frames in views.items()}
        draws = None
        if augment is not None:
            ids = batch["sample_id"][rows].tolist()
            draws = [draw_augmentation(data.seed, number, augment) for number in ids]
            moved = _without_dropped(moved, [draw_dropped_view(data.seed, n, augment) for n in ids])
        encoded = data.sources[source].pipeline.encode_video(moved, draws)
        if len(batch["views"]) == 1:
            return encoded
        if images is None:
            images = encoded.new_empty(len(batch["source"]), *encoded.shape[1:])
        images[rows.to(encoded.device, non_blocking=True)] = encoded
    assert images is not None, "a batch holds at least one sample"
    return images


def _without_dropped(views: dict[str, Tensor], dropped: list[str | None]) -> dict[str, Tensor]:
    """Return ``views`` (B, T, H, W, 3) with the dropped one of each sample black."""

    def black(key: str, frames: Tensor) -> Tensor:
        rows = [row for row, name in enumerate(dropped) if name == key]
        if not rows:
            return frames
        return frames.index_fill(0, torch.tensor(rows).to(frames.device, non_blocking=True), 0)

    return {key: black(key, frames) for key, frames in views.items()}


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """Which micro-batches a rank reads."""

    global_batch: int
    """Samples of one optimizer step, over all ranks and accumulation parts."""

    micro_batch: int
    """Samples of one forward pass on one rank."""

    rank: int = 0
    """Which process reads."""

    world_size: int = 1
    """How many processes read."""

    start_step: int = 0
    """First step that is read."""

    stop_step: int
    """First step that is not read."""

    def __post_init__(self) -> None:
        if self.micro_batch < 1:
            raise ConfigError(f"micro_batch={self.micro_batch}: give at least 1")
        if fault := uneven_batch(self.global_batch, self.micro_batch, self.world_size):
            raise ConfigError(f"global_batch: {fault}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} of world_size={self.world_size}")

    @property
    def parts(self) -> int:
        """Micro-batches that a rank accumulates per step."""
        return self.global_batch // (self.micro_batch * self.world_size)

    def slots(self, part: int) -> list[int]:
        """Return the slots in the global batch of accumulation part ``part``."""
        first = (part * self.world_size + self.rank) * self.micro_batch
        return list(range(first, first + self.micro_batch))


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How batches are fetched."""

    num_workers: int = 0
    """Processes that read and decode; 0 reads in the training process."""

    prefetch_factor: int = 2
    """Batches each worker holds ready."""

    pin_memory: bool = False
    """Copy batches to page-locked memory, from where a GPU fetches them without waiting."""


class Batches:
    """Micro-batches of a plan, read ahead by workers; may be gone through more than once."""

    def __init__(self, loader: DataLoader[Sample]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[CollatedBatch]:
        """Yield the batches in order.

        Raises:
            DatasetError: A window cannot be read; see :class:`ReaderOptions`.
        """
        iterator = iter(self._loader)
        try:
            yield from iterator
        finally:
            if isinstance(iterator, _MultiProcessingDataLoaderIter):
                # Left to the garbage collector, workers are waited for five seconds each when an
                # error has kept the iterator in its traceback. Not a public name:
                # torch/utils/data/dataloader.py, _MultiProcessingDataLoaderIter (torch 2.13, line
                # 1606).
                iterator._shutdown_workers()


def build_loader(
    data: TrainingData, plan: LoaderPlan, options: LoaderOptions | None = None
) -> Batches:
    """Return an iterable of micro-batches, ``plan.parts`` for every step from start to stop.

    Args:
        data: Windows of all sources.
        plan: Which of them this rank reads.
        options: Worker processes and prefetching.
    """
    return read_batches(data, _MicroBatches(data, plan), options or LoaderOptions())


def read_batches(
    data: TrainingData, keys: Iterable[list[SampleKey]], options: LoaderOptions
) -> Batches:
    """Return the batches of ``keys``, one after the other, from ``data`` as ``options`` say.

    Raises:
        ConfigError: The batches that workers hold ready do not fit in shared memory.
    """
    workers = options.num_workers
    _check_shared_memory(data, len(next(iter(keys), ())), options)
    loader: DataLoader[Sample] = DataLoader(
        data,
        batch_sampler=keys,
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=options.prefetch_factor if workers else None,
        pin_memory=options.pin_memory,
        worker_init_fn=_prepare_worker,
        multiprocessing_context="fork" if workers else None,
    )
    return Batches(loader)


def _check_shared_memory(data: TrainingData, batch: int, options: LoaderOptions) -> None:
    """Check that all processes' batches fit in ``/dev/shm``; a worker that fills it is killed."""
    if not options.num_workers or not SHARED_MEMORY.is_dir():
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ready = processes * options.num_workers * options.prefetch_factor
    needed, free = ready * batch * data.image_bytes, shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and {options.num_workers} workers "
            f"of {processes} processes hold up to {needed / 2**20:.0f} MiB of images there "
            f"({ready} micro-batches of {batch}). Give the container more (docker run --shm-size), "
            "or set fewer data.num_workers, a smaller data.prefetch_factor or "
            "runner.micro_batch_size; data.num_workers=0 needs none"
        )


class _MicroBatches(Sampler[list[SampleKey]]):
    """Slots of each micro-batch, in order."""

    def __init__(self, data: TrainingData, plan: LoaderPlan) -> None:
        self._data = data
        self._plan = plan

    def __iter__(self) -> Iterator[list[SampleKey]]:
        plan = self._plan
        for step in range(plan.start_step, plan.stop_step):
            for part in range(plan.parts):
                yield self._data.sample_keys(step, plan.slots(part), plan.global_batch)

    def __len__(self) -> int:
        return (self._plan.stop_step - self._plan.start_step) * self._plan.parts


def _prepare_worker(_: int) -> None:
    """Keep a worker to one core: more workers, not more threads, share out the machine."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    # torchrun's termination request goes to a whole process group, and the trainer still needs its
    # readers to reach the step that it saves.
    os.setpgid(0, 0)
