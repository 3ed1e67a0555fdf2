"""What is measured of an episode in which time passes while the policy thinks."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

_Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# JSON has lists where these values are tuples.
_Counts = Annotated[tuple[_Count, ...], Field(strict=False)]
_Amounts = Annotated[tuple[_Amount, ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Of one episode; checked when it is read back."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    hz: _Amount
    """Control steps per second."""

    latency_s: _Amounts
    """Time that each plan took, in order; numbers for ``--latency file:``."""

    delay_steps: _Counts
    """Steps that passed before each of them was there."""

    held_steps: _Count
    """Steps without a plan: the robot was commanded to stay as it is."""

    stale_steps: _Count
    """Steps of a plan while a newer observation had been submitted already."""

    late: _Count
    """Plans that came later than foreseen: rows before the seam were not what they begin with."""

    reaction_mean_s: _Amount | None
    """Age of the observation that an executed action was planned from; None: none was."""

    reaction_p95_s: _Amount | None
    seam_jump: _Amount | None
    """See :func:`seam_jump`."""

    jerk: _Amount | None
    """Of the hand, see :func:`jerk`; None where nothing says where it is."""

    smoothness: _Number | None
    """See :func:`log_dimensionless_jerk`."""

    path_ratio: _Amount | None
    """See :func:`path_ratio`."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Of one measure over the episodes that have it."""

    mean: float
    half_width: float | None
    """Of the 95 % interval of the mean; None of a single episode."""

    episodes: int


AVERAGED = (
    "seconds",
    "idle_ratio",
    "stale_ratio",
    "late",
    "reaction_mean_s",
    "reaction_p95_s",
    "seam_jump",
    "jerk",
    "smoothness",
    "path_ratio",
)
"""Measures of a summary. ``seconds``: simulated time of the episode; ``idle_ratio`` and
``stale_ratio``: held and stale steps per step; the rest as in :class:`Measures`."""


def averages(measured: Sequence[tuple[int, Measures]], deviate: float) -> dict[str, Average]:
    """Return the mean of every measure.

    Args:
        measured: Steps and measures of every episode.
        deviate: Standard normal deviate of the intervals.
    """
    found: dict[str, Average] = {}
    rows = [_row(steps, one) for steps, one in measured if steps]
    for name in AVERAGED:
        values = [value for row in rows if (value := row[name]) is not None]
        if not values:
            continue
        spread = None
        if len(values) > 1:
            spread = deviate * float(np.std(values, ddof=1)) / math.sqrt(len(values))
        found[name] = Average(mean=float(np.mean(values)), half_width=spread, episodes=len(values))
    return found


def _row(steps: int, one: Measures) -> dict[str, float | None]:
    derived = {
        "seconds": steps / one.hz,
        "idle_ratio": one.held_steps / steps,
        "stale_ratio": one.stale_steps / steps,
    }
    return {**derived, **{name: getattr(one, name) for name in AVERAGED if name not in derived}}


_STILL_M = 1e-3
"""A hand that has moved less far has no path to speak of."""


def jerk(positions: NDArray[np.floating], hz: float) -> float | None:
    """Return the mean jerk in m/s^3 of positions (T, 3) in meters; None of fewer than four."""
    if len(positions) < 4:
        return None
    third = np.diff(np.asarray(positions, np.float64), n=3, axis=0)
    return float(np.linalg.norm(third, axis=1).mean() * hz**3)


def log_dimensionless_jerk(positions: NDArray[np.floating], hz: float) -> float | None:
    """Return the log dimensionless jerk of positions (T, 3); higher is smoother.

    Comparable between movements of different length and speed (Balasubramanian et al. 2015). None
    of fewer than four positions, and of a hand that stands still or moves without any jerk.
    """
    if len(positions) < 4:
        return None
    path = np.asarray(positions, np.float64)
    peak = float(np.linalg.norm(np.diff(path, axis=0), axis=1).max()) * hz
    third = np.diff(path, n=3, axis=0) * hz**3
    spent = float((third**2).sum() / hz)
    duration = (len(path) - 1) / hz
    if not peak or not spent:
        return None
    return -math.log(duration**3 / peak**2 * spent)


def path_ratio(positions: NDArray[np.floating]) -> float | None:
    """Return the length of a path (T, 3) over the distance of its ends; None without distance."""
    path = np.asarray(positions, np.float64)
    if len(path) < 2:
        return None
    straight = float(np.linalg.norm(path[-1] - path[0]))
    if straight < _STILL_M:
        return None
    return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum()) / straight


def seam_jump(plans: Sequence[NDArray[np.floating]]) -> float | None:
    """Return how much farther actions jump from plan to plan than within one; medians.

    Args:
        plans: Executed rows (k, A) of every plan, in order, in normalized units.
    """
    plans = [np.asarray(plan, np.float64) for plan in plans if len(plan)]
    within = [np.linalg.norm(np.diff(plan, axis=0), axis=1) for plan in plans]
    usual = float(np.median(np.concatenate(within))) if any(map(len, within)) else 0.0
    seams = [np.linalg.norm(b[0] - a[-1]) for a, b in itertools.pairwise(plans)]
    if not seams or not usual:
        return None
    return float(np.median(seams)) / usual
