"""Distributed checkpoints (``*.distcp`` + ``.metadata``), read without trusting them.

torch reads ``.metadata`` with plain pickle, which runs whatever the file says. Here only the
handful of classes that describe tensors may appear in it, what they say is checked before it is
used, and each stored piece is opened with ``weights_only=True``. One reader serves policies, the
converter and a resumed training run. No process group is needed, and tensors are put together one
at a time, so memory stays at one tensor. docs/model.md, section 1.3.
"""

import hashlib
import io
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dzrobot.documents import validated
from dzrobot.errors import CheckpointError, preview
from dzrobot.files import diagnosed, refuse_stand_ins
from dzrobot.policies.dreamzero.checkpoints.names import DIT, canonical, canonical_table
from dzrobot.policies.dreamzero.checkpoints.sources import TensorInfo
from dzrobot.policies.dreamzero.checkpoints.unpickling import check_archive, load_listed, load_piece

DESCRIPTION = ".metadata"
"""The file that says which tensors there are and where their pieces lie."""

MODEL_KEYS = ("fsdp_checkpoint.model.", "model.", "state_dict.", "model_state_dict.", "module.", "")
"""How the names of model tensors begin in distributed checkpoints, most particular first."""

TRAINED_KEYS = ("ema.", "model.")
"""The same in a training checkpoint of this package: the average, if it keeps one, comes first."""

_DTYPE_NAMES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_PATH_CLASSES = {"Path", "PosixPath", "PurePosixPath"}
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *_DTYPE_NAMES},
    "collections": {"OrderedDict"},
    "pathlib": _PATH_CLASSES,
    "pathlib._local": _PATH_CLASSES,
}


class _Described(BaseModel):
    """What an unpickled object must be like; nothing of it is believed before."""

    model_config = ConfigDict(
        from_attributes=True, strict=True, frozen=True, arbitrary_types_allowed=True
    )


class _Place(_Described):
    relative_path: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00]+$")]
    offset: NonNegativeInt
    length: PositiveInt
    transform_descriptors: None = None


class _Chunk(_Described):
    offsets: tuple[NonNegativeInt, ...]
    sizes: tuple[NonNegativeInt, ...]


class _Properties(_Described):
    dtype: torch.dtype


class _Entry(_Described):
    properties: _Properties
    size: tuple[NonNegativeInt, ...]
    chunks: list[_Chunk]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of one tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a distributed checkpoint; its pieces cover it, each lies inside its file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a distributed checkpoint holds, checked."""

    folder: Path
    tensors: Mapping[str, Stored]
    metadata: Metadata
    """For torch's own reader; entries that are not tensors are taken out."""


def read_description(folder: Path) -> Description:
    """Return what the distributed checkpoint in ``folder`` holds.

    Raises:
        CheckpointError: No description, a missing or truncated file, tensors larger than the files
            they are said to lie in, or content that could run code.
    """
    file = folder / DESCRIPTION
    try:
        metadata = load_listed(file, _ALLOWED)
    except FileNotFoundError as error:
        refuse_stand_ins([file], CheckpointError)
        raise CheckpointError(
            f"{folder} has no {DESCRIPTION} file; copy the whole dcp_checkpoint folder"
        ) from error
    wanted = ("state_dict_metadata", "storage_data")
    table, places = (getattr(metadata, name, None) for name in wanted)
    if (
        not isinstance(metadata, Metadata)
        or not isinstance(table, dict)
        or not isinstance(places, dict)
    ):
        raise CheckpointError(f"{file} describes no checkpoint; copy it again")
    # Other values than tensors are pickles of any kind: nothing here has a use for them.
    entries = {n: e for n, e in table.items() if not isinstance(e, BytesStorageMetadata)}
    sizes: dict[str, int] = {}
    tensors = {}
    for name, entry in entries.items():
        tensors[name] = _stored(folder, name, entry, places, sizes)
    kept: dict[str, Any] = entries
    return Description(
        folder=folder, tensors=tensors, metadata=replace(metadata, state_dict_metadata=kept)
    )


def _stored(
    folder: Path, name: object, entry: object, places: Mapping[Any, object], sizes: dict[str, int]
) -> Stored:
    if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(
            f"{folder / DESCRIPTION} holds {name!r:.80}, which is not a tensor; copy it again"
        )
    where = f"{folder / DESCRIPTION}, {name[:80]}"
    stated = validated(entry, _Entry, where, CheckpointError)
    pieces = []
    for chunk in stated.chunks:
        found = places.get(MetadataIndex(name, chunk.offsets))
        if found is None:
            raise CheckpointError(
                f"{folder / DESCRIPTION} says nothing of where {name} lies; save the checkpoint "
                "again"
            )
        if getattr(found, "transform_descriptors", None):
            raise CheckpointError(
                f"{folder} is compressed, which is not supported; save without a stream transform"
            )
        place = validated(found, _Place, where, CheckpointError)
        file = folder / place.relative_path
        if place.relative_path not in sizes:
            sizes[place.relative_path] = _size(folder, file)
        size = sizes[place.relative_path]
        needed = math.prod(chunk.sizes) * stated.properties.dtype.itemsize
        if place.offset + place.length > size or needed > place.length:
            reason = f"is cut short ({size} bytes); copy it again"
            raise CheckpointError(diagnosed(file, reason))
        piece = Piece(
            offsets=chunk.offsets, sizes=chunk.sizes, file=file, start=place.offset,
            length=place.length,
        )  # fmt: skip
        pieces.append(piece)
    if not _covered(stated.size, pieces):
        raise CheckpointError(
            f"{folder / DESCRIPTION} describes pieces that do not make up {name} of shape "
            f"{stated.size}; copy it again"
        )
    return Stored(shape=stated.size, dtype=stated.properties.dtype, pieces=tuple(pieces))


def _size(folder: Path, file: Path) -> int:
    refuse_stand_ins([file], CheckpointError)
    if file.resolve().parent != folder.resolve() or not file.is_file():
        raise CheckpointError(
            f"{folder} lacks the file {file.relative_to(folder)}; copy the whole folder again"
        )
    return file.stat().st_size


def _covered(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Return whether the pieces make up a tensor of ``shape``, each element once."""
    if any(len(p.sizes) != len(shape) or len(p.offsets) != len(shape) for p in pieces):
        return False
    if sum(math.prod(p.sizes) for p in pieces) != math.prod(shape):
        return False
    solid = [p for p in pieces if math.prod(p.sizes)]
    ends = [tuple(o + s for o, s in zip(p.offsets, p.sizes, strict=True)) for p in solid]
    if any(e > side for end in ends for e, side in zip(end, shape, strict=True)):
        return False
    if len(solid) < 2 or not shape:
        return len(solid) < 2
    low, high = np.array([p.offsets for p in solid]), np.array(ends)
    # Boxes of the right volume in all, inside the whole, overlap nowhere: then nothing is left out.
    return not any(
        np.all((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i]), axis=1).any()
        for i in range(len(solid) - 1)
    )


@dataclass(frozen=True, kw_only=True)
class DcpSource:
    """The model tensors of a distributed checkpoint."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    stored: Mapping[str, Stored]
    """By canonical name."""

    layout: str = "distributed checkpoint"

    @property
    def origin(self) -> str:
        """Return the folder."""
        return str(self.folder)

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, each put together from its pieces."""
        with ExitStack() as stack:
            handles: dict[Path, BinaryIO] = {}
            for name in names:
                for piece in self.stored[name].pieces:
                    if piece.file not in handles:
                        handles[piece.file] = stack.enter_context(piece.file.open("rb"))
                yield name, _assembled(name, self.stored[name], handles)


def _assembled(name: str, stored: Stored, handles: Mapping[Path, BinaryIO]) -> Tensor:
    if [piece.sizes for piece in stored.pieces] == [stored.shape]:
        return _checked_piece(name, stored, stored.pieces[0], handles).contiguous()
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for piece in stored.pieces:
        where = (slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
        whole[tuple(where)] = _checked_piece(name, stored, piece, handles)
    return whole


def _checked_piece(
    name: str, stored: Stored, piece: Piece, handles: Mapping[Path, BinaryIO]
) -> Tensor:
    tensor = _piece(handles[piece.file], piece)
    if tuple(tensor.shape) != piece.sizes or tensor.dtype != stored.dtype:
        raise CheckpointError(
            f"{piece.file} holds a piece of {name} of shape {tuple(tensor.shape)} as "
            f"{tensor.dtype}, expected {piece.sizes} as {stored.dtype}; save the checkpoint again"
        )
    return tensor


def _piece(handle: BinaryIO, piece: Piece) -> Tensor:
    handle.seek(piece.start)
    tensor = load_piece(handle.read(piece.length), piece.file)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(
            f"{piece.file} holds a {type(tensor).__name__} where a tensor should be; copy it again"
        )
    return tensor


def open_dcp(folder: Path) -> DcpSource:
    """Return the model tensors of the distributed checkpoint in ``folder``, and nothing else.

    Raises:
        CheckpointError: See :func:`read_description`; or it holds no DreamZero network.
    """
    held = read_description(folder)
    for key in MODEL_KEYS:
        below = {n: n.removeprefix(key) for n in held.tensors if n.startswith(key)}
        if any(canonical(name).startswith("action_head.") for name in below.values()):
            return _source(held, below)
    raise CheckpointError(
        f"{folder} holds no tensor action_head.*, plain or under {', '.join(MODEL_KEYS[:-1])} (it "
        f"holds {preview(held.tensors)}); give the dcp_checkpoint folder of a DreamZero training "
        "run"
    )


def open_trained(folder: Path) -> DcpSource:
    """Return the trained tensors in the ``state`` folder of one of our own training checkpoints.

    Where the run keeps an average of its weights, that is what is returned: what an export holds.

    Raises:
        CheckpointError: See :func:`read_description`; or it is not such a state.
    """
    held = read_description(folder)
    for key in TRAINED_KEYS:
        if below := {n: DIT + n.removeprefix(key) for n in held.tensors if n.startswith(key)}:
            return replace(_source(held, below), layout=f"training checkpoint ({key[:-1]})")
    raise CheckpointError(
        f"{folder} holds no trained weights (it holds {preview(held.tensors)}); give a folder "
        "checkpoints/step_* of a training run"
    )


def _source(held: Description, names: Mapping[str, str]) -> DcpSource:
    """Return the tensors of ``names``, name there -> name to be called by."""
    back = {new: old for old, new in names.items()}
    table = canonical_table(back, str(held.folder))
    stored = {clean: held.tensors[back[name]] for clean, name in table.items()}
    infos = {
        clean: TensorInfo(shape=one.shape, dtype=one.dtype, file=held.folder / DESCRIPTION)
        for clean, one in stored.items()
    }
    return DcpSource(folder=held.folder, tensors=infos, stored=stored)


class CheckedReader(FileSystemReader):
    """torch's reader of a distributed checkpoint, given a checked description of it.

    It never opens ``.metadata`` itself, and reads nothing but tensors.
    """

    def __init__(self, description: Description) -> None:
        super().__init__(description.folder)
        self._metadata = description.metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the checked description."""
        return replace(self._metadata, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of ``plan``; anything else in it would be unpickled without limits."""
        if any(item.type is not LoadItemType.TENSOR for item in plan.items):
            raise CheckpointError(f"{self.path} holds a value that is not a tensor; copy it again")
        return super().read_data(plan, planner)

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        # In memory, a piece at a time: torch's own view of a part of a file is none to zipfile.
        file.seek(sinfo.offset)
        part = io.BytesIO(file.read(sinfo.length))
        check_archive(part)
        part.seek(0)
        return part


class _HashedFile(io.RawIOBase):
    """A file that is hashed as it is written, from its beginning to its end."""

    def __init__(self, file: io.IOBase) -> None:
        self._file: Any = file
        self._hash = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self._hash.update(data)
        written: int = self._file.write(data)
        return written

    def tell(self) -> int:
        return int(self._file.tell())

    def fileno(self) -> int:
        return int(self._file.fileno())

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _HashingFiles(FileSystem):
    """Opens files for writing as `_HashedFile`, and keeps their hashes by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as file:
            hashed = _HashedFile(file)
            yield hashed
            self.digests[Path(path).name] = hashed.hexdigest()


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """Where a tensor was written, and the SHA-256 of the whole file."""

    sha256: str


class HashingWriter(FileSystemWriter):
    """torch's writer of a distributed checkpoint; it hashes files while it writes them.

    Every process hashes its own, so nothing is read again to seal a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self._files = _HashingFiles()
        self.digests: dict[str, str] = {}
        """SHA-256 of the files of all processes, by name; in the main process, once all is written.
        """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's tensors; see the base class."""
        digests = self._files.digests
        results: Future[list[WriteResult]] = Future()
        results.set_result(
            [
                _HashedResult(**vars(written), sha256=digests[written.storage_data.relative_path])
                for written in super().write_data(plan, planner).wait()
            ]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what lies where, and collect the hashes; called in the main process."""
        super().finish(metadata, results)
        for written in chain.from_iterable(results):
            if isinstance(written, _HashedResult):
                self.digests[written.storage_data.relative_path] = written.sha256


class _ReadWhenWritten(DefaultSavePlanner):
    """Gives torch's writer the tensors of a source one by one, as it writes them."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor that is written next."""
        return self._read(index.fqn.removeprefix(_WRITTEN_KEY))


_WRITTEN_KEY = "fsdp_checkpoint.model."


def write_dcp(folder: Path, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write a one-process distributed checkpoint under the key a trainer uses.

    Args:
        folder: New folder.
        shapes: The tensors by name, on the meta device.
        read: Returns one of them, on the host.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        # A single process is what is wanted; torch warns about it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            {"fsdp_checkpoint": {"model": dict(shapes)}}, storage_writer=writer,
            planner=_ReadWhenWritten(read), no_dist=True,
        )  # fmt: skip
