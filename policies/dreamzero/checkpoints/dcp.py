"""Distributed checkpoints (``*.distcp`` + ``.metadata``), read without trusting them.

torch reads ``.metadata`` with plain pickle, which runs whatever the file says. Here only the
handful of classes that describe tensors may appear in it, and each stored piece is opened with
``weights_only=True``. No process group is needed, and tensors are put together one at a time, so
memory stays at one tensor. docs/model.md, section 1.3.
"""

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from dzrobot.errors import CheckpointError, preview
from dzrobot.policies.dreamzero.checkpoints.names import canonical_table
from dzrobot.policies.dreamzero.checkpoints.sources import TensorInfo

MODEL_KEY = "fsdp_checkpoint.model."
"""How the names of model tensors begin in a trainer's distributed checkpoint."""

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


class _DescriptionUnpickler(pickle.Unpickler):
    """Unpickles descriptions of tensors and refuses every other class."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class."""
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


@dataclass(frozen=True, kw_only=True)
class DcpSource:
    """The model tensors of a distributed checkpoint."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    raw: Mapping[str, str]
    """Canonical name -> name in the checkpoint."""

    metadata: Metadata
    layout: str = "distributed checkpoint"

    @property
    def origin(self) -> str:
        """Return the folder."""
        return str(self.folder)

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, each put together from its pieces."""
        with ExitStack() as stack:
            handles: dict[str, BinaryIO] = {}
            for name in names:
                yield name, self._assemble(self.raw[name], handles, stack)

    def _assemble(self, raw: str, handles: dict[str, BinaryIO], stack: ExitStack) -> Tensor:
        entry = self.metadata.state_dict_metadata[raw]
        assert isinstance(entry, TensorStorageMetadata)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            place = self.metadata.storage_data[MetadataIndex(raw, chunk.offsets)]
            file = self.folder / place.relative_path
            if place.relative_path not in handles:
                handles[place.relative_path] = stack.enter_context(file.open("rb"))
            piece = _piece(handles[place.relative_path], place, str(file))
            if piece.shape != chunk.sizes:
                raise CheckpointError(
                    f"{file} holds a piece of {raw} of shape {tuple(piece.shape)}, expected "
                    f"{tuple(chunk.sizes)}; save the checkpoint again"
                )
            where = (slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[tuple(where)] = piece
        return whole


def open_dcp(folder: Path) -> DcpSource:
    """Return the model tensors of the distributed checkpoint in ``folder``, and nothing else.

    Raises:
        CheckpointError: No description, a missing or truncated file, or content that could run
            code.
    """
    metadata = _read_description(folder / ".metadata")
    entries = {
        name: entry for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }  # fmt: skip
    model = {name: entry for name, entry in entries.items() if name.startswith(MODEL_KEY)}
    if not model:
        raise CheckpointError(
            f"{folder} holds no tensor under {MODEL_KEY}* (it holds {preview(entries)}); "
            "give the dcp_checkpoint folder of a DreamZero training run"
        )
    _check_files(folder, metadata, model)
    table = canonical_table((name.removeprefix(MODEL_KEY) for name in model), str(folder))
    raw = {clean: MODEL_KEY + name for clean, name in table.items()}
    infos = {
        clean: TensorInfo(
            shape=tuple(model[name].size),
            dtype=model[name].properties.dtype,
            file=folder / ".metadata",
        )
        for clean, name in raw.items()
    }
    return DcpSource(folder=folder, tensors=infos, raw=raw, metadata=metadata)


def write_dcp(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` as a one-process distributed checkpoint under the key a trainer uses."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        # A single process is what is wanted; torch warns about it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"fsdp_checkpoint": {"model": dict(tensors)}}, storage_writer=writer, no_dist=True)


def _read_description(file: Path) -> Metadata:
    try:
        with file.open("rb") as handle:
            description = _DescriptionUnpickler(handle).load()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file.parent} has no .metadata file; copy the whole dcp_checkpoint folder"
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds something other than descriptions of tensors and was not opened: it "
            f"could run code ({error}); "
            "get the checkpoint from a source you trust"
        ) from error
    except (EOFError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); copy it again") from error
    if not isinstance(description, Metadata) or not isinstance(description.storage_data, dict):
        raise CheckpointError(f"{file} describes no checkpoint; copy it again")
    return description


def _check_files(
    folder: Path, metadata: Metadata, model: Mapping[str, TensorStorageMetadata]
) -> None:
    """Check that every piece of every tensor lies inside a file that is there."""
    sizes: dict[str, int] = {}
    for name, entry in model.items():
        for chunk in entry.chunks:
            place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                raise CheckpointError(
                    f"{folder}/.metadata says nothing of where {name} lies; save the checkpoint "
                    "again"
                )
            file = folder / place.relative_path
            if file.resolve().parent != folder.resolve() or not file.is_file():
                raise CheckpointError(
                    f"{folder} lacks the file {place.relative_path}; copy the whole folder again"
                )
            size = sizes.setdefault(place.relative_path, file.stat().st_size)
            if place.offset + place.length > size:
                raise CheckpointError(f"{file} is cut short ({size} bytes); copy it again")
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(
                    f"{file} is compressed, which is not supported; save without a stream transform"
                )


def _piece(handle: BinaryIO, place: Any, origin: str) -> Tensor:
    handle.seek(place.offset)
    try:
        piece = torch.load(
            io.BytesIO(handle.read(place.length)), map_location="cpu", weights_only=True
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{origin} is damaged or holds no tensor where one should be; copy it again"
        ) from error
    if not isinstance(piece, Tensor):
        raise CheckpointError(
            f"{origin} holds a {type(piece).__name__} where a tensor should be; copy it again"
        )
    return piece
