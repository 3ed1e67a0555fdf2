"""What the parts of ``benchmarks/gpu.py`` take and return, and the network that they check."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Status = Literal["passed", "measured", "failed", "skipped", "not built"]


class Request(NamedTuple):
    """What a part is run with."""

    device: torch.device
    size: Literal["true", "tiny"]
    """Of the networks that are timed."""

    goldens: Path | None
    """Folder of reference numbers."""


class Outcome(NamedTuple):
    """What became of a part."""

    status: Status
    reason: str
    """What was found; of one that did not run, why."""

    numbers: Mapping[str, float | str | None] = {}


def judged(errors: Mapping[str, float], limit: float, what: str) -> Outcome:
    """Return passed if every error is at most ``limit``; nan is not, and nothing is no proof."""
    if not errors:
        return Outcome("failed", f"{what}: nothing was compared")
    beyond = [name for name, error in errors.items() if not error <= limit]
    if beyond:
        return Outcome("failed", f"{what}: {', '.join(beyond)} above {limit:.0e}", errors)
    return Outcome("passed", f"{what}: at most {limit:.0e}", errors)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected|."""
    actual, expected = (tensor.detach().double().cpu() for tensor in (actual, expected))
    return float((actual - expected).norm() / expected.norm())


def limit(dtype: torch.dtype) -> float:
    """Return the largest relative error between two forms of one computation.

    In float32 only the order of sums differs. In bfloat16 a number has 8 bits (error 4e-3), and two
    forms round at different places in every layer.
    """
    return 1e-4 if dtype == torch.float32 else 5e-2


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return what networks compute in on ``device`` by default."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
