"""What the benchmarks share with the tests: importing this puts the folders of both on the path."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "goldens")]

from rehearsal.library import LibraryCoder  # noqa: E402
from rehearsal.operators import RECORDED, Call  # noqa: E402
from rehearsal.runs import (  # noqa: E402
    ChunkSetup,
    Rehearsal,
    StepSetup,
    rehearse,
    rehearse_chunks,
    rehearse_step,
    with_layers,
)

REFERENCE_NUMBERS = _TESTS / "goldens/reference"

__all__ = [
    "RECORDED", "REFERENCE_NUMBERS", "Call", "ChunkSetup", "LibraryCoder", "Rehearsal", "StepSetup",
    "rehearse",
    "rehearse_chunks", "rehearse_step", "with_layers",
]  # fmt: skip
