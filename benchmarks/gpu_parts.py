"""What the parts of ``benchmarks/gpu.py`` take and return, and the lines that they leave.

Nothing here imports dzrobot: on a bare machine it may lack what it needs.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Status = Literal["passed", "measured", "failed", "skipped"]
Value = float | str | None


class Record(Protocol):
    """Keeps one figure: prints it and appends it to the output."""

    def __call__(self, name: str, value: Value, peak: float | None = None) -> None:
        """Keep ``value``, beside the ``peak`` that the device's data sheet gives, if any."""


class Request(NamedTuple):
    """What a part is run with."""

    device: torch.device
    size: Literal["true", "tiny"]
    """Size of the networks that are timed."""

    goldens: Path | None
    """Folder of reference numbers."""

    record: Record
    """To be called with every figure, the moment it exists."""


class Outcome(NamedTuple):
    """What became of a part."""

    status: Status
    reason: str
    """What was found; of one that did not run, why."""


class Line(NamedTuple):
    """One line of the output: a figure, or the end of a part."""

    part: str
    device: str
    """Name of the device."""

    size: str
    versions: str
    when: str
    """Date and time, UTC."""

    name: str = ""
    """Name of a figure; empty where a part ends."""

    value: Value = None
    peak: float | None = None
    """By the data sheet, in the unit of the value."""

    status: str = ""
    """Where a part ends."""

    reason: str = ""
    seconds: float = 0.0
    """That the part took."""


def append(output: Path, line: Line) -> None:
    """Add ``line`` to the file, so that it outlives this process and the machine's next crash."""
    output.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in line._asdict().items() if value not in ("", None)}
    with output.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(fields)}\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(output: Path) -> Iterator[Line]:
    """Yield the lines of the file, if there is one.

    Raises:
        ValueError: a line is not one of ours.
    """
    text = output.read_text(encoding="utf-8") if output.exists() else ""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield Line(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{output}:{number} is not a line of this benchmark ({error}): give another "
                "--output, or remove the line"
            ) from error


def judged(errors: Mapping[str, float], limit: float, what: str) -> Outcome:
    """Return passed if every error is at most ``limit``; nan is not, nor an empty list."""
    if not errors:
        return Outcome("failed", f"{what}: nothing was compared")
    beyond = [name for name, error in errors.items() if not error <= limit]
    if beyond:
        return Outcome("failed", f"{what}: {', '.join(beyond)} above {limit:.0e}")
    return Outcome("passed", f"{what}: at most {limit:.0e}")


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
