"""What a checkpoint is, read from headers and sidecar files alone."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dzrobot.policies.dreamzero.checkpoints.directory import (
    METADATA_FILE,
    TOKENIZER_FOLDER,
    TRAINING_FILE,
    Checkpoint,
)
from dzrobot.policies.dreamzero.checkpoints.load import build_network, fits, slots
from dzrobot.policies.dreamzero.checkpoints.lora import (
    AdapterConfig,
    inject_adapters,
    trained_with_adapters,
)
from dzrobot.policies.dreamzero.checkpoints.names import DIT, PREFIXES, without_conditions
from dzrobot.policies.dreamzero.checkpoints.passport import PASSPORT_FILE, Passport
from dzrobot.policies.dreamzero.checkpoints.sources import TensorInfo
from dzrobot.policies.dreamzero.network.config import NetworkConfig, session_bytes
from dzrobot.policies.dreamzero.offload import offload_plans

_VARIANTS = {"i2v": "14B-style (i2v)", "ti2v": "5B-style (ti2v)"}
_BF16 = 2
_TRAINED = 16
"""Bytes per trained parameter: float32 master and gradient, and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One part of the network as stored."""

    name: str
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Expected memory in bytes, without the working memory of a step."""

    inference: int
    """All weights in bfloat16."""

    session: int
    """Keys and values of one session's history, in bfloat16."""

    full: int
    """Training the whole transformer on one device: float32 states, all else in bfloat16."""

    lora: int
    """Training adapters on one device."""

    whole: int
    """Memory of a device, to run with one session and all weights there; bfloat16, working memory
    of a plan included by estimate."""

    quantized: int
    """As ``whole``, with 8-bit weights in the transformer's blocks."""

    offloaded: int
    """As ``whole``, with as many weights as possible in the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of it."""

    path: Path
    layout: str
    variant: str
    parts: tuple[StoredPart, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]
    tags: tuple[str, ...] | None
    """Embodiments with statistics; None: no metadata.json."""

    action_horizon: int
    frame_size: tuple[int, int] | None
    """None: frames are taken as the embodiment tiles them."""

    adapters: bool
    passport: Passport | None
    sidecars: Mapping[str, bool]
    """File or folder beside the weights -> whether it is there."""

    memory: MemoryEstimate


def inspect_checkpoint(checkpoint: Checkpoint) -> Report:
    """Return what ``checkpoint`` is; no weight is read."""
    config, given = checkpoint.config, checkpoint.weights.tensors
    network = build_network(config)
    if checkpoint.has_adapters:
        inject_adapters(network.model, checkpoint.adapters)
    shapes = {name: slot.shape for name, slot in slots(network).items()}
    wrong = (
        name for name in shapes.keys() & given.keys() if not fits(given[name].shape, shapes[name])
    )
    has_metadata = (checkpoint.statistics or checkpoint.folder / METADATA_FILE).is_file()
    names = (str(METADATA_FILE), str(TRAINING_FILE), TOKENIZER_FOLDER, PASSPORT_FILE)
    return Report(
        path=checkpoint.path,
        layout=checkpoint.weights.layout,
        variant=f"{_VARIANTS[config.dit.model_type]}, Wan {config.vae.version} autoencoder",
        parts=tuple(_part(name, prefix, given) for name, prefix in PREFIXES.items()),
        missing=tuple(sorted(shapes.keys() - given.keys())),
        unexpected=tuple(sorted(filter(without_conditions, given.keys() - shapes.keys()))),
        misshapen=tuple(
            f"{name} {given[name].shape}, not {shapes[name]}" for name in sorted(wrong)
        ),
        tags=tuple(sorted(checkpoint.metadata)) if has_metadata else None,
        action_horizon=config.head.action_horizon,
        frame_size=config.target_size,
        adapters=checkpoint.has_adapters,
        passport=checkpoint.own_passport,
        sidecars={name: (checkpoint.folder / name).exists() for name in names},
        memory=expected_memory(config),
    )


def expected_memory(config: NetworkConfig) -> MemoryEstimate:
    """Return what a network of ``config`` needs, whatever dtype it is stored in."""
    network = build_network(config)
    offloads = list(offload_plans(network, torch.bfloat16))
    quantized = next(offload_plans(network, torch.bfloat16, "int8"))
    total = _elements([slot.shape for slot in slots(network).values()])
    trained = _elements([s.shape for name, s in slots(network).items() if name.startswith(DIT)])
    inject_adapters(network.model, AdapterConfig.of_head(config.head))
    adapted = slots(network)
    with_lora = _elements([s.shape for n, s in adapted.items() if trained_with_adapters(n)])
    return MemoryEstimate(
        inference=_BF16 * total,
        session=session_bytes(config, _BF16),
        full=_BF16 * (total - trained) + _TRAINED * trained,
        lora=_BF16 * total + _TRAINED * with_lora,
        whole=offloads[0].device_bytes,
        quantized=quantized.device_bytes,
        offloaded=offloads[-1].device_bytes,
    )


def _elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _part(name: str, prefix: str, given: Mapping[str, TensorInfo]) -> StoredPart:
    infos = [info for key, info in given.items() if key.startswith(prefix)]
    counts = Counter(str(info.dtype).removeprefix("torch.") for info in infos)
    return StoredPart(
        name=name,
        tensors=len(infos),
        parameters=sum(info.numel for info in infos),
        nbytes=sum(info.nbytes for info in infos),
        dtypes=tuple(dtype for dtype, _ in counts.most_common()),
    )
