"""Writing weights: safetensors shards with an index, there whole or not at all."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dzrobot.errors import CheckpointError, preview
from dzrobot.files import explained, in_parts, move, one_at_a_time, remove
from dzrobot.policies.dreamzero.checkpoints.sources import (
    DTYPE_NAMES,
    StateDictSource,
    TensorInfo,
    WeightSource,
)

SHARD_BYTES = 4 * 1000**3
"""Largest shard of an exported checkpoint."""


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a path beside ``target`` to write to; renamed to ``target`` if all goes well.

    What a process that was killed left there is removed; one that still writes is waited for.

    Raises:
        CheckpointError: ``target`` exists already, or cannot be written.
    """
    with explained(f"write {str(target)[:200]}", CheckpointError):
        refuse_existing(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.partial")
        with one_at_a_time(target.with_name(f".{target.name}.lock"), f"writing {target}"):
            refuse_existing(target)
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
    return in_parts(sorted(tensors), lambda name: tensors[name].nbytes, limit)


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

    Host memory stays at one tensor.
    """
    options = options or ShardOptions()
    shards = plan_shards(source.tensors, options.shard_bytes)
    files = _file_names(options.stem, len(shards))
    weight_map: dict[str, str] = {}
    for names, file in zip(shards, files, strict=True):
        shard = {
            options.rename(name): _written_as(source.tensors[name], options.dtype) for name in names
        }
        tensors = ((options.rename(name), tensor) for name, tensor in source.stream(names))
        _write_tensors(folder / file, shard, tensors)
        weight_map.update(dict.fromkeys(shard, file))
    if len(files) > 1:
        total = sum(info.nbytes for info in source.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / f"{options.stem}.safetensors.index.json", index)
    return [folder / file for file in files]


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write ``tensors`` as one safetensors file.

    Raises:
        OSError: The system refuses.
    """
    _write_tensors(file, StateDictSource(values=tensors).tensors, tensors.items())


_ORDER = (
    torch.int64, torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.float16,
    torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Dtypes as the format's library orders tensors in a file."""


def _written_as(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return info if dtype is None else replace(info, dtype=dtype)


def _write_tensors(
    file: Path, infos: Mapping[str, TensorInfo], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a safetensors file, one tensor after the other, with the bytes that the library writes.

    The library itself wants all tensors of a file in memory.

    Args:
        file: A new file.
        infos: Shape and dtype of each tensor, as they are to be written.
        tensors: The tensors, in any order.

    Raises:
        CheckpointError: The format has no name for a dtype.
    """
    if odd := [
        f"{name} ({info.dtype})" for name, info in infos.items() if info.dtype not in _ORDER
    ]:
        raise CheckpointError(
            f"{preview(odd)} cannot be written to {file.name}; save with another dtype first"
        )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(infos, key=lambda name: (_ORDER.index(infos[name].dtype), name)):
        info = infos[name]
        begin, end = end, end + info.nbytes
        kind = DTYPE_NAMES[info.dtype]
        header[name] = {"dtype": kind, "shape": list(info.shape), "data_offsets": [begin, end]}
    content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    with file.open("wb") as out:
        out.write(len(content).to_bytes(8, "little") + content)
        for name, tensor in tensors:
            assert tuple(tensor.shape) == infos[name].shape, name
            out.seek(8 + len(content) + header[name]["data_offsets"][0])
            out.write(_bytes_of(tensor, infos[name].dtype))
            # Gone before the next one is made.
            del tensor


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> Any:
    """Return the numbers of a tensor as bytes on the host, converted to ``dtype``."""
    plain = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def _file_names(stem: str, count: int) -> Sequence[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write ``data`` as indented JSON."""
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
