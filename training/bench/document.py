"""What a measurement of speed holds, on disk and between processes: typed, frozen, self-checking.

Nothing here imports torch.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from dzrobot.configuration import FrozenConfig
from dzrobot.documents import read_json
from dzrobot.errors import ConfigError

Part = Literal["policy", "train", "data", "env", "eval"]

PARTS: tuple[Part, ...] = get_args(Part)
"""What can be measured, in the order in which it is."""

OPENING, WHOLE = "opening a task", "an episode"
"""Measurements of a profile that are not parts of an episode."""

REPEATS, PROFILED = 10, 4
"""How often everything is measured by default; of a profile, whose episodes take minutes."""

EPISODES = "episodes"
"""How a line begins in which the process that measures says how far it is."""

LARGEST = 2**20
"""Bytes of a document; one with a thousand repeats has fewer."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class BenchSettings(FrozenConfig):
    """What is measured, and how often."""

    parts: Annotated[tuple[Part, ...], Field(min_length=1)] = PARTS
    """Which parts."""

    repeats: Annotated[int, Field(ge=1, le=10_000)] = REPEATS
    """How often each thing is measured in one process."""

    checkpoint: str | None = None
    """Folder or Hugging Face id of the policy; None: the bundled one."""

    embodiment: str | None = None
    """Robot that the policy acts as; None: the environment's, else the checkpoint's."""

    device: str = "cpu"
    """Where networks run: ``cpu``, ``cuda``, ``cuda:1``."""

    compile: bool = False
    """Whether the policy's blocks are compiled, and compared with eager ones; of training, the
    recipe decides."""

    recipe: str | None = None
    """Recipe of the parts ``train`` and ``data``; None: the bundled policy, trained further."""

    overrides: tuple[str, ...] = ()
    """``section.field=value`` of the recipe."""

    lerobot: str | None = None
    """Python of an environment that has LeRobot, whose dataset class reads the samples of the part
    ``data`` too; None: they are not compared."""

    films: Literal["exact", "small"] | None = None
    """What the part ``data`` makes of films of three codecs and compares with them, as ``dzrobot
    consolidate --films`` does; None: nothing."""

    env: str = "dzrobot/lift-v0"
    """Gymnasium id of a simulator, of the parts ``env`` and ``eval``."""

    profile: bool | None = None
    """Whether the part ``eval`` counts what an episode consists of; None: it does not."""

    protocol: str | None = None
    """Protocol of the evaluation that ``profile`` estimates; None: ``standard-10x50`` of a suite of
    LIBERO, else ``custom``."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Simulators of the part ``eval``; 0: in the policy's process."""


class Machine(FrozenConfig):
    """On what it was measured; two results are compared only where all of this is equal."""

    processor: str
    """Name of the processor."""

    cores: int
    """Cores that the process may use."""

    system: str
    """Operating system and architecture."""

    device: str
    """Where networks ran: name of the accelerator, or ``cpu``."""

    threads: int
    """Threads of one torch process."""

    python: str
    """Version, major and minor."""

    torch: str
    """Version."""


class Measurement(FrozenConfig):
    """One quantity, measured again and again in one process."""

    name: str
    unit: str
    values: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    """In the order in which they were measured."""

    better: Literal["less", "more", "neither"]
    """Which direction is an improvement."""

    @property
    def median(self) -> float:
        """Return the middle value."""
        return statistics.median(self.values)


class PartResult(FrozenConfig):
    """What one process found out about one part."""

    machine: Machine
    version: str
    """Version of dzrobot."""

    tree: str
    """Folder that dzrobot was imported from."""

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()
    """What was left out or put in place of something, and why."""

    def named(self, name: str) -> Measurement | None:
        """Return the measurement called ``name``, if there is one."""
        return next((found for found in self.measurements if found.name == name), None)


class BenchResult(FrozenConfig):
    """One build, measured: what ``dzrobot bench --json`` writes."""

    kind: Literal["dzrobot bench"] = "dzrobot bench"
    format: Literal[1] = 1
    settings: BenchSettings
    parts: Mapping[Part, PartResult]


class Ratio(FrozenConfig):
    """How one quantity of this build compares with that of another."""

    part: Part
    name: str
    unit: str
    better: Literal["less", "more", "neither"]
    base: float
    """Median of the other build."""

    own: float
    """Median of this build."""

    ratio: float | None
    """This build over the other; geometric mean. None: one of the values is zero."""

    low: float | None
    """Lower end of the 95 % interval; None: too few values."""

    high: float | None
    """Upper end of that interval."""

    pairs: int
    """Pairs of processes; 0: the other build was measured at another time."""


class BenchComparison(FrozenConfig):
    """Two builds: what ``dzrobot bench --against --json`` writes."""

    kind: Literal["dzrobot bench comparison"] = "dzrobot bench comparison"
    format: Literal[1] = 1
    settings: BenchSettings
    base: tuple[Mapping[Part, PartResult], ...]
    """The other build, one entry for each round."""

    own: tuple[Mapping[Part, PartResult], ...]
    ratios: tuple[Ratio, ...]


def read_result(path: Path) -> BenchResult:
    """Return the result in the file ``path``.

    Raises:
        ConfigError: it is missing, damaged, or something else.
    """
    return read_json(path, BenchResult, ConfigError, largest=LARGEST)


def check_same_settings(base: BenchSettings, own: BenchSettings) -> None:
    """Check that two results measure the same.

    Args:
        base: Of the other result.
        own: Of this one.

    Raises:
        ConfigError: they do not; names every difference.
    """
    _refuse_unlike(base, own, "has other settings", "give the same flags as then")


def check_same_machine(base: Machine, own: Machine) -> None:
    """Check that two results are of one kind of machine and device.

    Raises:
        ConfigError: they are not; names every difference.
    """
    _refuse_unlike(
        base, own, "was measured on another machine or device",
        "measure it here: --against TREE runs both builds in turns",
    )  # fmt: skip


def _refuse_unlike(base: FrozenConfig, own: FrozenConfig, what: str, remedy: str) -> None:
    there, here = base.model_dump(mode="json"), own.model_dump(mode="json")
    found = [
        f"  {name}: {there[name]!r} there, {here[name]!r} here"
        for name in here
        if there[name] != here[name]
    ]
    if found:
        head = f"the result to compare with {what}, so times cannot be compared:"
        raise ConfigError("\n".join([head, *found, remedy]))


def short(value: float) -> str:
    """Return a number with three digits, or with all those before its point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
