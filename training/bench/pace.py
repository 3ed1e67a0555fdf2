"""Which ways of planning keep up with a robot: from the time of a plan to a row and an advice.

A plan takes ``d`` control steps. A robot that waits for it stands still for so long, after every
``s`` steps. One that moves on needs plans of at least ``2 d`` actions: ``d <= s <= H - d``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.policies.dreamzero.network.config import Video
from dzrobot.policies.dreamzero.options import DIT_STEPS
from dzrobot.policies.dreamzero.parts import PolicyParts
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.progress import Show
from dzrobot.rollout.asynchronous.execution import (
    ExecutionOptions,
    Latency,
    schedule,
    steps_of,
)
from dzrobot.training.bench.acting import chunk_times, open_parts, policy_spec
from dzrobot.training.bench.document import BenchSettings, short

Way = tuple[Video, int]
"""What is computed of the video, and evaluations of the network."""

WAYS: tuple[Way, ...] = tuple((video, n) for video in get_args(Video) for n in (DIT_STEPS, 5))
"""Those that are looked at, in the order in which they are advised: the published one first, then
ever less of the video."""


@dataclass(frozen=True, kw_only=True)
class PacedRobot:
    """A robot whose plans are to be there in time."""

    embodiment: Embodiment
    rate: float
    """Control steps per second."""

    trained_delay: int = 0
    """Most rows that the network was trained to be given of a plan; 0: none."""

    @property
    def horizon(self) -> int:
        """Return the actions of one plan, H."""
        return self.embodiment.timing.action_horizon


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How one way of planning goes with a robot."""

    way: Way
    seconds: float
    """Time of a plan at the slowest place in the memory's window."""

    delay: int
    """Control steps that pass meanwhile, d."""

    waits_after: int
    """Steps between two waits of a robot that stands still for its plans (``sync``)."""

    moves: tuple[int, int, int] | None
    """For a robot that moves on (``naive``, ``rtc``): fewest and most steps from one request to the
    next, and how many to choose. None: plans take too long for their length."""

    is_trained: bool
    """Whether ``trained`` goes as well: the network was trained to be given so many actions."""

    @property
    def still(self) -> float:
        """Return the share of time in which a robot that waits stands still."""
        return self.delay / (self.delay + self.waits_after)


def pace_of(way: Way, seconds: float, robot: PacedRobot) -> Pace:
    """Return how ``way`` goes with ``robot``, if a plan takes so many seconds.

    Raises:
        ConfigError: it is not known how the robot holds still.
    """
    latency = Latency(text=f"{seconds:.3g}", kind="seconds", values=(seconds,))
    waits = schedule(ExecutionOptions(latency=latency), robot.embodiment, robot.rate, None)
    delay = max(1, steps_of(seconds, robot.rate))
    moves = None
    if 2 * delay <= robot.horizon:
        options = ExecutionOptions(execution="rtc", latency=latency)
        chosen = schedule(options, robot.embodiment, robot.rate, None).execute
        moves = (delay, robot.horizon - delay, chosen)
    return Pace(
        way=way, seconds=seconds, delay=delay, waits_after=waits.execute, moves=moves,
        is_trained=moves is not None and delay <= robot.trained_delay,
    )  # fmt: skip


def advice(rows: Sequence[Pace], robot: PacedRobot) -> str:
    """Return in a sentence or two what to choose.

    Args:
        rows: In the order of :data:`WAYS`.
        robot: Whose plans they are.
    """
    first, best = rows[0], next((row for row in rows if row.moves is not None), None)
    known = f"At {robot.rate:g} steps per second and {robot.horizon} actions a plan"
    if best is None:
        least = min(rows, key=lambda row: row.seconds)
        return (
            f"{known}, nothing keeps up: even {_flags(least.way)} takes {_time(least)}, more than "
            f"half a plan. Choose --execution sync --execute {least.waits_after}, which stands "
            f"still {least.still:.0%} of the time, at most {robot.horizon / 2 / least.seconds:.3g} "
            "steps per second, or a faster device."
        )
    low, high, chosen = best.moves or (0, 0, 0)
    method = "trained" if best.is_trained else "rtc"
    text = (
        f"{known}, choose {_flags(best.way)} --execution {method} --execute {chosen} ({low} to "
        f"{high}): a plan takes {_time(best)}. Where the robot may wait, --execution sync "
        f"--execute {best.waits_after} is the safe choice, and stands still {best.still:.0%} of "
        "the time."
    )
    if best is first:
        return text
    return (
        f"{text} {_flags(first.way)}, as published, takes {_time(first)} and does not keep up; the "
        "actions of the faster way are others, so measure its success."
    )


def _flags(way: Way) -> str:
    return f"--video {way[0]} --dit-steps {way[1]}"


def _time(row: Pace) -> str:
    return f"{short(1000 * row.seconds)} ms, {row.delay} step{'s' if row.delay > 1 else ''}"


def opened(settings: BenchSettings, rate: float) -> tuple[PolicyParts, PacedRobot]:
    """Return the parts of the policy that ``settings`` name, loaded once, and its robot.

    Raises:
        CheckpointError: it cannot be used.
        ConfigError: there is no such device.
    """
    parts = open_parts(settings)
    robot = PacedRobot(
        embodiment=parts.pipeline.embodiment, rate=rate, trained_delay=parts.trained_delay
    )
    return parts, robot


def measured_seconds(
    parts: PolicyParts, settings: BenchSettings, show: Show, *, graphs: bool = False
) -> dict[Way, float]:
    """Return seconds of a plan by every way: the 95th percentile at the slowest place.

    Args:
        parts: Of the policy.
        settings: How it is compiled, and how often it is timed.
        show: Called with how many ways are done.
        graphs: Whether a GPU's work is recorded.

    Raises:
        ConfigError: there is nothing that could be recorded.
    """
    options, found = replace(policy_spec(settings), graphs=graphs), {}
    for number, (video, steps) in enumerate(WAYS):
        show(number, len(WAYS), f"measuring {_flags((video, steps))}")
        policy = DreamZeroPolicy(parts, replace(options, video=video, dit_steps=steps))
        times = chunk_times(policy, settings.repeats)
        slowest = max(float(np.percentile(own, 95)) for own in times.values())
        found[video, steps] = slowest / 1000
    return found
