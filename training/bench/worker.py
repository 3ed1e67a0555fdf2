"""One part, measured: what each process of ``dzrobot bench`` runs.

``python -P -m dzrobot.training.bench.worker PART FOLDER RESULT``, settings as JSON on standard
input. Processes of another tree take the same, so none of it may depend on who starts them.
"""

import importlib
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import dzrobot
from dzrobot.documents import parse_json
from dzrobot.errors import ConfigError, DzrobotError, find
from dzrobot.files import write_text
from dzrobot.importing import current_folder_importable
from dzrobot.training.bench.document import BenchSettings, Machine, Measurement, Part, PartResult

MODULES: dict[Part, str] = {
    "policy": "acting", "train": "learning", "data": "learning", "env": "stepping",
    "eval": "acting",
}  # fmt: skip
"""Part -> module below this package that holds ``measure_PART``. A simulator needs no torch, so
that it is not imported for it: memory would be counted that the part does not use."""

FAULT = 2
"""Exit code of an error that is the user's to fix."""


def main(argv: Sequence[str]) -> int:
    """Measure one part and write the result; return the exit code."""
    part, folder, target = argv
    try:
        settings = parse_json(sys.stdin.buffer.read(), BenchSettings, "the settings", ConfigError)
        with current_folder_importable():
            result = measure_part(cast(Part, part), settings, Path(folder))
    except DzrobotError as error:
        sys.stderr.write(f"{error}\n")
        return FAULT
    write_text(Path(target), result.model_dump_json())
    return 0


def measure_part(part: Part, settings: BenchSettings, folder: Path) -> PartResult:
    """Return what was measured of one part in this process.

    Args:
        part: Name of the part to measure.
        settings: What is measured, and for how long.
        folder: Where it may write meanwhile.
    """
    module = find(cast(Any, MODULES), "part", part)
    measure = getattr(importlib.import_module(f"{__package__}.{module}"), f"measure_{part}")
    found, notes = measure(settings, folder)
    # Kibibytes on Linux.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return PartResult(
        machine=machine_of(settings), version=dzrobot.__version__,
        tree=str(Path(dzrobot.__file__).parents[1]), notes=tuple(notes),
        measurements=(*found, _memory("process", resident), *_device_memory(settings)),
    )  # fmt: skip


def machine_of(settings: BenchSettings) -> Machine:
    """Return on what ``settings`` are measured here."""
    import torch

    from dzrobot.training.bench.measuring import this_machine

    return this_machine(torch.device(settings.device))


def _device_memory(settings: BenchSettings) -> list[Measurement]:
    import torch

    device = torch.device(settings.device)
    if device.type != "cuda":
        return []
    return [_memory("device", torch.cuda.max_memory_allocated(device) / 2**20)]


def _memory(what: str, mebibytes: float) -> Measurement:
    return Measurement(name=f"peak memory, {what}", unit="MiB", values=(mebibytes,), better="less")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
