"""Two builds beside each other: how many times as much, and how sure that is.

scipy does the work; it is imported where used.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dzrobot.training.bench.document import Measurement, Part, PartResult, Ratio

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
