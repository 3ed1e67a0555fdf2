"""Batches in a fixed order, whatever the number of workers and ranks."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import cv2
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dzrobot.errors import ConfigError
from dzrobot.training.data.collate import TrainingBatch, collate
from dzrobot.training.data.mixture import Sample, Slot, TrainingData


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """Which micro-batches a rank reads."""

    global_batch: int
    """Samples of one optimiser step, over all ranks and accumulation parts."""

    micro_batch: int
    """Samples of one forward pass on one rank."""

    rank: int = 0
    world_size: int = 1
    start_step: int = 0
    stop_step: int
    """First step that is not read."""

    def __post_init__(self) -> None:
        whole = self.micro_batch * self.world_size
        if self.micro_batch < 1 or self.global_batch % whole:
            raise ConfigError(
                f"global_batch={self.global_batch} is no multiple of "
                f"micro_batch={self.micro_batch} times world_size={self.world_size}: "
                f"try {-(-self.global_batch // whole) * whole}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} of world_size={self.world_size}")

    @property
    def parts(self) -> int:
        """Micro-batches that a rank accumulates per step."""
        return self.global_batch // (self.micro_batch * self.world_size)

    def slots(self, part: int) -> list[int]:
        """Return the places in the global batch of accumulation part ``part``."""
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

    def __iter__(self) -> Iterator[TrainingBatch]:
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
                # error has kept the iterator in its traceback.
                iterator._shutdown_workers()


def build_loader(
    data: TrainingData, plan: LoaderPlan, options: LoaderOptions | None = None
) -> Batches:
    """Return an iterable of micro-batches, ``plan.parts`` for every step from start to stop."""
    return read_batches(data, _MicroBatches(data, plan), options or LoaderOptions())


def read_batches(
    data: TrainingData, places: Iterable[list[Slot]], options: LoaderOptions
) -> Batches:
    """Return the batches of ``places``, one after the other."""
    workers = options.num_workers
    loader: DataLoader[Sample] = DataLoader(
        data,
        batch_sampler=places,
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=options.prefetch_factor if workers else None,
        pin_memory=options.pin_memory,
        worker_init_fn=_prepare_worker,
        multiprocessing_context="fork" if workers else None,
    )
    return Batches(loader)


class _MicroBatches(Sampler[list[Slot]]):
    """Slots of each micro-batch, in order."""

    def __init__(self, data: TrainingData, plan: LoaderPlan) -> None:
        self._data = data
        self._plan = plan

    def __iter__(self) -> Iterator[list[Slot]]:
        plan = self._plan
        for step in range(plan.start_step, plan.stop_step):
            for part in range(plan.parts):
                yield self._data.slots(step, plan.slots(part), plan.global_batch)

    def __len__(self) -> int:
        return (self._plan.stop_step - self._plan.start_step) * self._plan.parts


def _prepare_worker(_: int) -> None:
    """Keep a worker to one core: more workers, not more threads, share out the machine."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    # torchrun's termination request goes to a whole process group, and the trainer still needs its
    # readers to reach the step that it saves.
    os.setpgid(0, 0)
