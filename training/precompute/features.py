"""Outputs of the frozen image encoders, kept on disk: without augmentation they never change.

A small network spends more time on its frozen encoders and on decoding images than on what it
learns. Every sample is encoded once; an interrupted start resumes where it was.
"""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.checksums import fingerprint
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource
from dzrobot.policies.dreamzero.network.world_action import EncodedImages, WorldActionModel
from dzrobot.progress import progress_bar
from dzrobot.training.config import SFTConfig
from dzrobot.training.data import LoaderOptions, SampleKey, TrainingData, encode_views, read_batches
from dzrobot.training.distributed import DistributedEnvironment

_log = logging.getLogger(__name__)

_DONE = "done"
_ENCODERS = ("vae.coder.encoder.", "vae.coder.quant_conv.", "image_encoder.")


class StoredFeatures:
    """Encoded images of every sample, mapped rather than read."""

    def __init__(self, folder: Path, samples: int) -> None:
        self._folder = folder
        self._samples = samples
        self._arrays: dict[str, NDArray[Any]] = {}

    def missing(self) -> list[int]:
        """Return the samples that are not stored, in order."""
        if not (self._folder / f"{_DONE}.npy").exists():
            return list(range(self._samples))
        return np.flatnonzero(~self._map(_DONE)).tolist()

    def create(self, example: EncodedImages) -> None:
        """Make the files, each row as in ``example``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, values in example.tensors().items():
            shape = (self._samples, *values.shape[1:])
            np.lib.format.open_memmap(self._path(name), "w+", np.float32, shape).flush()
        # Last: with this file there, the others are whole.
        np.lib.format.open_memmap(self._path(_DONE), "w+", np.bool_, (self._samples,)).flush()

    def put(self, numbers: list[int], encoded: EncodedImages) -> None:
        """Store the rows of ``encoded`` as samples ``numbers``."""
        for name, values in encoded.tensors().items():
            self._map(name)[numbers] = values.float().cpu().numpy()
        self._map(_DONE)[numbers] = True

    def rows(self, sample_ids: Tensor, like: Tensor) -> EncodedImages:
        """Return what is stored of ``sample_ids`` (B,), on the device and in the type of ``like``.

        Latents and first frames stay float32, as the network uses them.
        """
        numbers = (sample_ids % self._samples).numpy()
        found = {
            path.stem: torch.from_numpy(self._map(path.stem)[numbers]).to(like.device)
            for path in self._folder.glob("*.npy")
            if path.stem != _DONE
        }
        return EncodedImages(
            latents_BCFYX=found["latents_BCFYX"],
            image_BPE=found["image_BPE"].to(like.dtype),
            first_frame_BCFYX=found.get("first_frame_BCFYX"),
        )

    def _map(self, name: str) -> NDArray[Any]:
        if name not in self._arrays:
            self._arrays[name] = np.load(self._path(name), mmap_mode="r+")
        return self._arrays[name]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"


def precompute_features(
    config: SFTConfig, model: WorldActionModel, data: TrainingData, world: DistributedEnvironment
) -> StoredFeatures:
    """Encode, shared over the processes, what is not on disk.

    Collective. The folder must be one that all processes see.
    """
    folder = config.runner.output_dir / "features" / _key(model, data)
    stored = StoredFeatures(folder, len(data))
    wanted = stored.missing()
    mine = wanted[world.rank :: world.size]
    # Everyone looks before anyone writes, else the shares would overlap.
    dist.barrier(group=world.host_group)
    size = config.runner.micro_batch_size
    if len(wanted) == len(data) and world.is_main:
        _, example = next(_encode(model, data, [mine[:1]], config, world))
        stored.create(example)
    dist.barrier(group=world.host_group)
    # All of one size, that of training: a smaller batch may round differently in its last bit. What
    # fills the last one up is encoded twice.
    filled = mine + [mine[number % len(mine)] for number in range(-len(mine) % size)]
    parts = [filled[first : first + size] for first in range(0, len(filled), size)]
    if world.is_main and parts:
        _log.info("encoding the images of %d samples once, to %s", len(wanted), folder)
    encoded = _encode(model, data, parts, config, world)
    console = Console(stderr=True, quiet=not world.is_main)
    with progress_bar("images", console) as show:
        for done, (numbers, features) in enumerate(encoded, 1):
            stored.put(numbers, features)
            show(done, len(parts))
    dist.barrier(group=world.host_group)
    return stored


def _encode(
    model: WorldActionModel,
    data: TrainingData,
    parts: list[list[int]],
    config: SFTConfig,
    world: DistributedEnvironment,
) -> Iterator[tuple[list[int], EncodedImages]]:
    slots = [[SampleKey(0, 0, number) for number in numbers] for numbers in parts]
    options = LoaderOptions(num_workers=config.data.num_workers)
    for batch in read_batches(data, slots, options):
        images = encode_views(batch, data, augment=None, device=world.device)
        yield batch["sample_id"].tolist(), model.encode(images)


def _key(model: WorldActionModel, data: TrainingData) -> str:
    """Return a name that changes with the encoders and with what a sample number means."""
    weights = {
        name: tensor for name, tensor in model.state_dict().items() if name.startswith(_ENCODERS)
    }
    parts = [fingerprint(StateDictSource(values=weights), weights), repr(model.config)]
    return hashlib.sha256("/".join([*parts, data.identity()]).encode()).hexdigest()[:24]
