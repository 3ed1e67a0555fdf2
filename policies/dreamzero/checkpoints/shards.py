"""Writing weights: safetensors shards with an index, there whole or not at all."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dzrobot.errors import CheckpointError
from dzrobot.files import explained, move, remove
from dzrobot.policies.dreamzero.checkpoints.sources import TensorInfo, WeightSource

SHARD_BYTES = 4 * 1000**3
"""Largest shard of an exported checkpoint."""


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a path beside ``target`` to write to; renamed to ``target`` if all goes well.

    Raises:
        CheckpointError: ``target`` exists already, or cannot be written.
    """
    with explained(f"write {str(target)[:200]}", CheckpointError):
        refuse_existing(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
        remove(temporary)
        try:
            yield temporary
            move(temporary, target)
        finally:
            remove(temporary)


def refuse_existing(target: Path) -> None:
    """Raise :class:`CheckpointError` if ``target`` exists, before work is spent on it."""
    if target.exists():
        raise CheckpointError(f"{target} exists already; choose another path or remove it first")


def plan_shards(tensors: Mapping[str, TensorInfo], limit: int = SHARD_BYTES) -> list[list[str]]:
    """Return the names of each shard: sorted, filled in order, none above ``limit`` bytes.

    A single tensor above the limit gets a shard of its own.
    """
    shards: list[list[str]] = []
    room = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How weights are written."""

    shard_bytes: int = SHARD_BYTES
    """Largest file."""

    dtype: torch.dtype | None = None
    """Dtype to convert to; None keeps each tensor's own."""

    rename: Callable[[str], str] = str
    """Name in the file of a canonical name."""

    stem: str = "model"
    """How the names of the files begin."""


def write_weights(
    folder: Path, source: WeightSource, options: ShardOptions | None = None
) -> list[Path]:
    """Write all tensors of ``source`` to ``folder`` as ``<stem>*.safetensors``; returns the files.

    Host memory stays at one shard.
    """
    options = options or ShardOptions()
    shards = plan_shards(source.tensors, options.shard_bytes)
    files = _file_names(options.stem, len(shards))
    weight_map: dict[str, str] = {}
    for names, file in zip(shards, files, strict=True):
        shard = {
            options.rename(name): _own(tensor, options.dtype or source.tensors[name].dtype)
            for name, tensor in source.stream(names)
        }
        save_tensors(shard, folder / file)
        # The library makes files that only their owner reads; others may read what they may enter.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
        weight_map.update(dict.fromkeys(shard, file))
    if len(files) > 1:
        total = sum(info.nbytes for info in source.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / f"{options.stem}.safetensors.index.json", index)
    return [folder / file for file in files]


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write ``tensors``, contiguous and on the host, as one safetensors file.

    Raises:
        OSError: The system refuses. The library's own error has its number in the text alone.
    """
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(file)) from error
        raise


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous host tensor that shares no memory with others, as the format demands."""
    return tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()


def _file_names(stem: str, count: int) -> Sequence[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write ``data`` as indented JSON."""
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
