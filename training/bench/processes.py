"""Measurements in processes of their own, of this build and of another one in turns.

Two builds are compared by ratios, with how sure they are; scipy is imported where it is used.
"""

import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dzrobot
from dzrobot.documents import read_json
from dzrobot.errors import ConfigError
from dzrobot.importing import required
from dzrobot.progress import Show
from dzrobot.training.bench.document import (
    EPISODES,
    LARGEST,
    BenchComparison,
    BenchResult,
    BenchSettings,
    Measurement,
    Part,
    PartResult,
    Ratio,
    check_same_machine,
    check_same_settings,
)
from dzrobot.training.bench.worker import FAULT, machine_of

_WORKER = "dzrobot.training.bench.worker"
_TAIL = 2000
"""Characters of what a failed process said that are shown."""


@dataclass(frozen=True)
class Build:
    """A tree that dzrobot is imported from."""

    name: str
    """For people."""

    tree: Path


def own_build() -> Build:
    """Return the build that this process runs."""
    return Build("this build", Path(dzrobot.__file__).resolve().parents[1])


def other_build(tree: Path) -> Build:
    """Return the build in ``tree``, the root of a checkout.

    Raises:
        ConfigError: there is none, or one that cannot measure.
    """
    if not (tree / "dzrobot/__init__.py").is_file():
        raise ConfigError(f"{tree} is not a tree of dzrobot: give the root of a checkout")
    if not (tree / "dzrobot/training/bench/worker.py").is_file():
        raise ConfigError(
            f"dzrobot in {tree} is too old to be measured: it has no dzrobot/training/bench; "
            "compare with a newer commit"
        )
    if tree.resolve() == own_build().tree:
        raise ConfigError(f"{tree} is the build that is running: give another tree")
    return Build(str(tree), tree.resolve())


def measure_build(settings: BenchSettings, show: Show) -> BenchResult:
    """Return what was measured of this build, part by part.

    Raises:
        ConfigError: a part cannot be measured; says why.
    """
    found: dict[Part, PartResult] = {}
    for index, part in enumerate(settings.parts):
        say = partial(show, index, len(settings.parts))
        found[part] = run_part(own_build(), part, settings, say, f"measuring: {part}")
    return BenchResult(settings=settings, parts=found)


def compare_with_result(settings: BenchSettings, base: BenchResult, show: Show) -> BenchComparison:
    """Return this build beside a result that was measured before.

    Raises:
        ConfigError: it has other settings, or is of another machine; said before anything runs.
    """
    required("comparing builds", "report", "scipy")
    check_same_settings(base.settings, settings)
    machine = machine_of(settings)
    for part in base.parts.values():
        check_same_machine(part.machine, machine)
    own = measure_build(settings, show)
    return BenchComparison(
        settings=settings, base=(base.parts,), own=(own.parts,),
        ratios=unpaired_ratios(base.parts, own.parts),
    )  # fmt: skip


def compare_with_tree(
    settings: BenchSettings, tree: Path, pairs: int, show: Show
) -> BenchComparison:
    """Return this build beside the one in ``tree``: both in turns, ``pairs`` times.

    Raises:
        ConfigError: there is no such build, or a part cannot be measured.
    """
    required("comparing builds", "report", "scipy")
    builds = (other_build(tree), own_build())
    rounds: tuple[list[Mapping[Part, PartResult]], ...] = ([], [])
    for number in range(pairs):
        found: tuple[dict[Part, PartResult], ...] = ({}, {})
        for index, part in enumerate(settings.parts):
            # Part by part, so that the two of a pair lie close in time.
            for side, build in enumerate(builds):
                done = (number * len(settings.parts) + index) * 2 + side
                text = f"round {number + 1} of {pairs}: {part}, {build.name}"
                say = partial(show, done, 2 * pairs * len(settings.parts))
                found[side][part] = run_part(build, part, settings, say, text)
        for side, parts in enumerate(found):
            rounds[side].append(parts)
    return BenchComparison(
        settings=settings, base=tuple(rounds[0]), own=tuple(rounds[1]),
        ratios=paired_ratios(*rounds),
    )  # fmt: skip


def run_part(
    build: Build, part: Part, settings: BenchSettings, say: Callable[[str], None], text: str
) -> PartResult:
    """Return what a new process of ``build`` measures of one part.

    Args:
        build: What the process imports.
        part: Name of the part.
        settings: What is measured, and for how long.
        say: Called with ``text``, and with it and how far the process is once it says so.
        text: What is being measured.

    Raises:
        ConfigError: it cannot be measured, or the process ran another build.
    """
    say(text)
    with tempfile.TemporaryDirectory(prefix="dzrobot-bench-") as name:
        target = Path(name) / "result.json"
        # Without -P, a tree in the current folder would come before the one that is asked for.
        command = [sys.executable, "-P", "-m", _WORKER, part, name, str(target)]
        # A tree from before a setting takes the others.
        given = settings.model_dump_json(exclude_none=True)
        env = _environment(build, part, settings, Path(name))
        code, said = _run(command, given, env, say, text)
        if code == FAULT:
            raise ConfigError(f"{part}, {build.name}: {_last(said)}")
        if code != 0:
            raise ConfigError(
                f"{part}, {build.name}: the process that measures ended with code {code}:\n"
                f"{_last(said)}"
            )
        result = read_json(target, PartResult, ConfigError, largest=LARGEST)
    if Path(result.tree).resolve() != build.tree:
        raise ConfigError(
            f"{part}: {build.tree} was to be measured, and {result.tree} was imported; install "
            "dzrobot editable, or not at all, in this environment"
        )
    return result


def _run(
    command: Sequence[str], given: str, env: dict[str, str], say: Callable[[str], None], text: str
) -> tuple[int, str]:
    """Run ``command``; return its exit code and what it wrote to standard error."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, env=env
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        said = []
        try:
            # One that ended at once says why.
            with suppress(BrokenPipeError):
                process.stdin.write(given)
                process.stdin.close()
            for line in process.stderr:
                said.append(line)
                if line.startswith(f"{EPISODES}: "):
                    say(f"{text}, {line.strip()}")
        except BaseException:
            process.kill()
            raise
    return process.returncode, "".join(said)


def _environment(build: Build, part: Part, settings: BenchSettings, folder: Path) -> dict[str, str]:
    paths = [str(build.tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if settings.recipe is None and part in ("train", "data"):
        # Recordings are made up: what is kept of them need not outlive the run. A simulator finds
        # its assets in the cache.
        own["DZROBOT_CACHE"] = str(folder / "cache")
    return own


def _last(text: str) -> str:
    return text.strip()[-_TAIL:] or "it said nothing"


Rounds = Sequence[Mapping[Part, PartResult]]

FEWEST = 2
"""Values that an interval needs."""


def paired_ratios(base: Rounds, own: Rounds) -> tuple[Ratio, ...]:
    """Return this build over the other for everything that both measured, from rounds in turns.

    Each round is one pair of processes, so what differs between processes (memory layout, the
    machine's company) is in the interval: Student's t on the logarithms of the rounds' ratios.

    Args:
        base: Parts of the other build, one entry for each round.
        own: Of this build, as many.
    """
    return tuple(_ratio(part, found, base, own) for part, found in _common(base[0], own[0]))


def unpaired_ratios(
    base: Mapping[Part, PartResult], own: Mapping[Part, PartResult]
) -> tuple[Ratio, ...]:
    """Return this build over one that was measured at another time.

    The interval is Welch's, of the repeats within the two processes; what differs between processes
    or has changed on the machine since is not in it.
    """
    found = []
    for part, (first, second) in _common(base, own):
        pair = [_logs(one.values) for one in (first, second)]
        low, high = _welch(*pair)
        found.append(_assembled(part, (first, second), _difference(*pair), (low, high), 0))
    return tuple(found)


def _common(
    base: Mapping[Part, PartResult], own: Mapping[Part, PartResult]
) -> list[tuple[Part, tuple[Measurement, Measurement]]]:
    """Return the measurements that both have, (other, this)."""
    found = []
    for part in own:
        for second in own[part].measurements:
            first = base[part].named(second.name) if part in base else None
            if first is not None and first.unit == second.unit:
                found.append((part, (first, second)))
    return found


def _ratio(part: Part, pair: tuple[Measurement, Measurement], base: Rounds, own: Rounds) -> Ratio:
    name = pair[1].name
    medians = [
        tuple(found.median for one in both if (found := one[part].named(name)) is not None)
        for both in zip(base, own, strict=True)
    ]
    pairs = [each for each in medians if len(each) == len(pair)]
    merged = tuple(
        one.model_copy(update={"values": tuple(each[i] for each in pairs)})
        for i, one in enumerate(pair)
    )
    logs = [_logs(one.values) for one in merged]
    differences = [b - a for a, b in zip(*logs, strict=True)] if all(logs) else []
    middle = sum(differences) / len(differences) if differences else None
    whole = (merged[0], merged[1])
    return _assembled(part, whole, middle, _student(differences), len(pairs))


def _assembled(
    part: Part, pair: tuple[Measurement, Measurement], middle: float | None,
    span: tuple[float | None, float | None], pairs: int,
) -> Ratio:  # fmt: skip
    first, second = pair
    low, high = (None if end is None else math.exp(end) for end in span)
    return Ratio(
        part=part, name=second.name, unit=second.unit, better=second.better, base=first.median,
        own=second.median, ratio=None if middle is None else math.exp(middle), low=low, high=high,
        pairs=pairs,
    )  # fmt: skip


def _logs(values: Sequence[float]) -> list[float]:
    """Return the logarithms; none where a value is zero, so that there is no ratio."""
    return [math.log(value) for value in values] if min(values) > 0 else []


def _difference(base: Sequence[float], own: Sequence[float]) -> float | None:
    return sum(own) / len(own) - sum(base) / len(base) if base and own else None


def _student(differences: Sequence[float]) -> tuple[float | None, float | None]:
    if len(differences) < FEWEST:
        return None, None
    from scipy.stats import ttest_1samp

    with _nearly_equal():
        found = ttest_1samp(differences, 0).confidence_interval(0.95)
    return _ends(found, sum(differences) / len(differences))


def _welch(base: Sequence[float], own: Sequence[float]) -> tuple[float | None, float | None]:
    if min(len(base), len(own)) < FEWEST:
        return None, None
    from scipy.stats import ttest_ind

    with _nearly_equal():
        found = ttest_ind(own, base, equal_var=False).confidence_interval(0.95)
    return _ends(found, sum(own) / len(own) - sum(base) / len(base))


@contextmanager
def _nearly_equal() -> Iterator[None]:
    """Leave out scipy's warnings about values that hardly differ, as those of memory do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _ends(interval: Any, middle: float) -> tuple[float, float]:
    low, high = float(interval.low), float(interval.high)
    # Values without any spread leave scipy nothing to divide by.
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (middle, middle)
