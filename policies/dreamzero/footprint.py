"""What a session takes of the memory of its device."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dzrobot.policies.base import Footprint
from dzrobot.policies.dreamzero.episode import SessionState
from dzrobot.policies.dreamzero.network.config import NetworkConfig

_MEMORY = Path("/proc/meminfo")

_PROMPTS = 2
"""Cached rows per session: with and without guidance."""


def footprint(episode: SessionState, device: torch.device) -> Footprint:
    """Return the bytes that ``episode`` holds and that are free on ``device``.

    Shared prompt embeddings are not counted: they stay however many sessions there are.
    """
    if device.type == "cuda":
        # What torch keeps for itself but does not use is as good as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    else:
        free = _available()
    taken = sum(tensor.untyped_storage().nbytes() for tensor in _tensors(episode))
    return Footprint(session=taken, free=free)


def session_bytes(config: NetworkConfig, itemsize: int) -> int:
    """Return the bytes of keys and values of one session's history, ``itemsize`` a number."""
    dit = config.dit
    frames = 1 + max(dit.max_chunk_size, 1) * dit.num_frame_per_block
    tokens = frames * dit.frame_seqlen + dit.num_action_per_block + dit.num_state_per_block
    return itemsize * _PROMPTS * 2 * dit.num_layers * tokens * dit.dim


def _tensors(episode: SessionState) -> Iterator[Tensor]:
    yield from episode.video.tensors()
    if episode.memory is not None:
        memory = episode.memory
        yield from (cache.data for cache in memory.keys_values.values())
        yield from (t for t in (memory.image_PE, memory.first_frame_CFYX) if t is not None)


def _available() -> int:
    for line in _MEMORY.read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(amount.split()[0])
    raise RuntimeError(f"{_MEMORY} does not say how much memory is available")
