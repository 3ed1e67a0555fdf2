"""Where tensors lie: files on disk, read one file at a time, under canonical names.

A source knows the name, shape and dtype of every tensor from the files' headers alone, so that
everything can be checked before the first byte of a weight is read. Pickled files are only ever
opened with ``weights_only=True``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from dzrobot.documents import read_json
from dzrobot.errors import CheckpointError, preview
from dzrobot.files import explained, in_parts, refuse_stand_ins, stand_in, stand_ins
from dzrobot.policies.dreamzero.checkpoints.names import ShardIndex, canonical_table
from dzrobot.policies.dreamzero.checkpoints.unpickling import can_be_mapped, load_tensors
from dzrobot.rng import torch_seed
from dzrobot.untrusted import parsing

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""What the format safetensors calls each dtype."""

_NESTINGS = (
    ("fsdp_checkpoint", "model"),
    ("state_dict",),
    ("model_state_dict",),
    ("model",),
    ("module",),
)
_FLAT_NESTING = "fsdp_checkpoint.model."


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a file's header says about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    """The file it lies in."""

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Return its number of elements."""
        return math.prod(self.shape)


PART_BYTES = 64 * 2**20
"""Bytes of a file that are read before its mapping is let go of; what is mapped counts as memory of
the process, as its own does."""

_PARTS = 32
"""Into so many parts a pickle is read at most: each time all that it names is built again."""


class WeightSource(Protocol):
    """Tensors in files."""

    @property
    def origin(self) -> str:
        """Return the path, for messages."""

    @property
    def layout(self) -> str:
        """Return what kind of files these are, in words."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return canonical name -> header entry."""

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors on the host, file by file.

        A tensor may be a view into the file: copy it before the next one is asked for.
        """


@dataclass(frozen=True, kw_only=True)
class SafetensorsSource:
    """One or several safetensors files."""

    origin: str
    layout: str
    tensors: Mapping[str, TensorInfo]
    raw: Mapping[str, str]
    """Canonical name -> name in the file."""

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, one shard after the other."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, wanted in sorted(by_file.items()):
            for part in in_parts(wanted, lambda name: self.tensors[name].nbytes, PART_BYTES):
                with _opened(file) as handle:
                    for name in part:
                        yield name, handle.get_tensor(self.raw[name])


def open_safetensors(folder: Path, stem: str = "model") -> SafetensorsSource:
    """Return the tensors of ``folder/<stem>.safetensors`` or of its shards and their index.

    Raises:
        CheckpointError: No such file, a missing or damaged shard, or an index that does not match
            its shards.
    """
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file() and single.is_file():
        raise CheckpointError(
            f"{folder} holds both {index.name} and {single.name}; remove the stale one"
        )
    if single.is_file():
        return _gather(folder, "single safetensors file", {single: _header(single)})
    if not index.is_file():
        refuse_stand_ins([single, index], CheckpointError)
        held = preview(path.name for path in folder.iterdir())
        raise CheckpointError(
            f"{folder} holds neither {single.name} nor {index.name} (it holds {held}); download "
            "the weights again"
        )
    weight_map = read_json(index, ShardIndex, CheckpointError).weight_map
    shards = sorted({folder / name for name in weight_map.values()})
    headers, faults = {}, stand_ins(shards)
    whole = [file for file in shards if stand_in(file) is None]
    if missing := [file.name for file in whole if not file.is_file()]:
        faults.append(
            f"{folder} lacks the shard {preview(missing)} that its index names; download it again"
        )
    for file in filter(Path.is_file, whole):
        try:
            headers[file] = _header(file)
        except CheckpointError as error:
            faults.append(str(error))
    faults += _index_faults(index, weight_map, headers)
    if faults:
        raise CheckpointError("\n".join(faults))
    return _gather(folder, f"{len(shards)} safetensors shards", headers)


def _index_faults(
    index: Path, weight_map: Mapping[str, str], headers: Mapping[Path, Mapping[str, Any]]
) -> list[str]:
    """Return where the index and the shards that could be read differ."""
    readable = {file.name for file in headers}
    listed = {(name, file) for name, file in weight_map.items() if file in readable}
    held = {(name, file.name) for file, header in headers.items() for name in header}
    faults = []
    if absent := [f"{name} ({file})" for name, file in listed - held]:
        faults.append(
            f"{index} lists {preview(absent)}, which is not in that shard; download the shards "
            "again"
        )
    if extra := [f"{name} ({file})" for name, file in held - listed]:
        faults.append(f"{index} has no entry for {preview(extra)}; download the index again")
    return faults


def _gather(
    folder: Path, layout: str, headers: Mapping[Path, Mapping[str, TensorInfo]]
) -> SafetensorsSource:
    merged = {name: info for header in headers.values() for name, info in header.items()}
    raw = canonical_table(merged, str(folder))
    return SafetensorsSource(
        origin=str(folder),
        layout=layout,
        raw=raw,
        tensors={name: merged[raw[name]] for name in raw},
    )


def _header(file: Path) -> dict[str, TensorInfo]:
    """Return the header of one safetensors file, whose length on disk is checked on the way."""
    with _opened(file) as handle:
        header = {}
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            part = handle.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise CheckpointError(
                    f"{file} holds {name} as {part.get_dtype()}, which is not supported"
                )
            header[name] = TensorInfo(
                shape=tuple(part.get_shape()), dtype=_DTYPES[part.get_dtype()], file=file
            )
    return header


def _opened(file: Path) -> Any:
    # The library reports every refusal of the operating system as a file that is not there.
    with explained(f"read {file}", CheckpointError), file.open("rb"):
        pass
    with parsing(file, CheckpointError, remedy="download it again"):
        return safe_open(file, framework="pt", device="cpu")


class ValuesSource:
    """Tensors that a subclass has by name, as ``values``."""

    values: Mapping[str, Tensor]
    origin: str

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of each."""
        return {
            name: TensorInfo(shape=tuple(value.shape), dtype=value.dtype, file=Path(self.origin))
            for name, value in self.values.items()
        }

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors."""
        for name in names:
            yield name, self.values[name]


@dataclass(frozen=True, kw_only=True)
class StateDictSource(ValuesSource):
    """Tensors in memory, or of one unpickled file that cannot be mapped from disk."""

    values: Mapping[str, Tensor]
    origin: str = "memory"
    layout: str = "state dict in memory"


@dataclass(frozen=True, kw_only=True)
class PickledSource:
    """Tensors of one unpickled file, which is mapped from disk, a part of it at a time."""

    file: Path
    layout: str
    tensors: Mapping[str, TensorInfo]
    raw: Mapping[str, str]
    """Canonical name -> name in the file."""

    @property
    def origin(self) -> str:
        """Return the file."""
        return str(self.file)

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors.

        Raises:
            CheckpointError: The file is another one than it was when it was opened.
        """
        whole = sum(info.nbytes for info in self.tensors.values())
        limit = max(PART_BYTES, whole / _PARTS)
        for part in in_parts(names, lambda name: self.tensors[name].nbytes, limit):
            values, _ = _unpickled(self.file)
            for name in part:
                value, info = values.get(self.raw[name]), self.tensors[name]
                if value is None or (value.shape, value.dtype) != (info.shape, info.dtype):
                    raise CheckpointError(
                        f"{self.file} was changed while it was read; run the command again"
                    )
                yield name, value


def open_pickled(file: Path) -> StateDictSource | PickledSource:
    """Return the tensors of a ``.pt`` or ``.pth`` state dict, nested in any of the published ways.

    Raises:
        CheckpointError: The file is damaged, holds anything but tensors, or wants to run code when
            opened.
    """
    values, nesting = _unpickled(file)
    raw, layout = canonical_table(values, str(file)), f"pickled state dict ({nesting})"
    held = StateDictSource(
        values={name: values[raw[name]] for name in raw}, origin=str(file), layout=layout
    )
    if not can_be_mapped(file):
        return held
    return PickledSource(file=file, layout=layout, tensors=held.tensors, raw=raw)


def _unpickled(file: Path) -> tuple[dict[str, Tensor], str]:
    """Return the flat, checked state dict in ``file`` and how it was nested."""
    values, nesting = _unnest(load_tensors(file), file)
    _check_dense(values, file)
    return values, nesting


def _check_dense(values: Mapping[str, Tensor], file: Path) -> None:
    """Check that every tensor is plain numbers that are there: a view can claim any size."""
    size = file.stat().st_size
    odd = [
        name
        for name, value in values.items()
        if value.layout is not torch.strided
        or value.device.type != "cpu"
        or value.is_quantized
        or value.numel() * value.element_size() > size
    ]
    if odd:
        raise CheckpointError(
            f"{file} holds {preview(map(str, odd))} as something other than stored numbers "
            "(sparse, quantized, without data, or larger than the file); save plain tensors"
        )


def _unnest(payload: Any, file: Path) -> tuple[dict[str, Tensor], str]:
    """Return the flat state dict inside ``payload`` and how it was nested."""
    nesting = "flat"
    for path in _NESTINGS:
        inner = payload
        for key in path:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            payload, nesting = inner, ".".join(path)
            break
    if not isinstance(payload, Mapping):
        raise CheckpointError(f"{file} holds a {type(payload).__name__}, not a state dict")
    flat = {
        k.removeprefix(_FLAT_NESTING): v
        for k, v in payload.items()
        if isinstance(k, str) and k.startswith(_FLAT_NESTING)
    }
    found = flat or dict(payload)
    if foreign := [
        name
        for name, value in found.items()
        if not isinstance(value, Tensor) or not isinstance(name, str)
    ]:
        raise CheckpointError(
            f"{file} holds entries that are not tensors: {preview(map(str, foreign))}; give a file "
            "whose state dict lies "
            "flat or under fsdp_checkpoint.model, state_dict, model_state_dict, model or module"
        )
    return found, nesting if not flat else "fsdp_checkpoint.model"


@dataclass(frozen=True, kw_only=True)
class PartSource:
    """Part of another source under other names."""

    source: WeightSource
    layout: str
    names: Mapping[str, str]
    """Name here -> name there."""

    @property
    def origin(self) -> str:
        """Return where the tensors lie."""
        return self.source.origin

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return the header entries."""
        return {here: self.source.tensors[there] for here, there in self.names.items()}

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors."""
        back = {self.names[name]: name for name in names}
        for there, tensor in self.source.stream(back):
            yield back[there], tensor


@dataclass(frozen=True, kw_only=True)
class UnionSource:
    """Several sources; a later one replaces the tensors of an earlier one."""

    sources: tuple[WeightSource, ...]

    @property
    def origin(self) -> str:
        """Return where the tensors lie."""
        return ", ".join(dict.fromkeys(source.origin for source in self.sources))

    @property
    def layout(self) -> str:
        """Return the kinds of files."""
        return " + ".join(source.layout for source in self.sources)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return the header entries."""
        return {name: info for source in self.sources for name, info in source.tensors.items()}

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, one source after the other."""
        left = set(names)
        for source in reversed(self.sources):
            mine = [name for name in source.tensors if name in left]
            left.difference_update(mine)
            yield from source.stream(mine)


def renamed(source: WeightSource, rename: Callable[[str], str | None]) -> PartSource:
    """Return ``source`` with ``rename`` applied to every name; None drops the tensor."""
    names = {new: old for old in source.tensors if (new := rename(old)) is not None}
    return PartSource(source=source, layout=source.layout, names=names)


@dataclass(frozen=True)
class RandomInitSource(ABC):
    """A weight source without files: equal shapes, seed and names give equal tensors."""

    shapes: Mapping[str, tuple[int, ...]]
    seed: int
    dtype: torch.dtype = torch.float32

    origin: ClassVar[str]
    """What records call it."""

    key: ClassVar[str]
    """Begins the key of every generator: kinds of weights must not share their noise."""

    @property
    def layout(self) -> str:
        """Return the origin, where a source of files names their layout."""
        return self.origin

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of each."""
        return {
            name: TensorInfo(shape=shape, dtype=self.dtype, file=Path(self.origin))
            for name, shape in self.shapes.items()
        }

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors."""
        for name in names:
            generator = torch.Generator().manual_seed(torch_seed(f"{self.key}{self.seed}", name))
            yield name, self.draw(name, self.shapes[name], generator).to(self.dtype)

    @abstractmethod
    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the tensor ``name`` in float32."""
