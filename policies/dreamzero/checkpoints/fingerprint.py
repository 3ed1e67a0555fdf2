"""Telling base weights apart by a hash that takes seconds, not minutes."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.sources import WeightSource

_RUNS = 16
_RUN_LENGTH = 64


def fingerprint(source: WeightSource, names: Iterable[str]) -> str:
    """Return a hash of the named tensors: names, shapes and 1024 evenly spread values of each.

    Values are compared as bfloat16, so a float32 copy of bfloat16 weights (or the rounding of
    float32 weights) is the same base.
    """
    digest = hashlib.sha256()
    found = {name: _digest(tensor) for name, tensor in source.stream(sorted(names))}
    for name in sorted(found):
        digest.update(f"{name}:{found[name]};".encode())
    return digest.hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.reshape(-1)
    step = max(
        _RUN_LENGTH,
        (flat.numel() - _RUN_LENGTH) // (_RUNS - 1) if flat.numel() > _RUN_LENGTH else 1,
    )
    # Short runs rather than single values: each touches one page of a mapped file.
    runs = [flat[start : start + _RUN_LENGTH] for start in range(0, flat.numel(), step)]
    values = torch.cat(runs).to(device="cpu", dtype=torch.bfloat16)
    # Negative zero and zero are one weight.
    values = values + torch.zeros((), dtype=torch.bfloat16)
    shape = "" if flat.numel() == 1 else tuple(tensor.shape)
    return hashlib.sha256(
        f"{shape}".encode() + values.view(torch.uint8).numpy().tobytes()
    ).hexdigest()
