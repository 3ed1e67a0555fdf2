"""Which ways of planning keep up with a robot: from the time of a plan to rows and an advice.

A plan takes ``d`` control steps. A robot that waits stands still for them after every ``s`` steps.
One that moves on needs plans of at least ``2 d`` actions: ``d <= s <= H - d``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.generate import step_plan
from dzrobot.policies.dreamzero.network.session import Video
from dzrobot.policies.dreamzero.options import DIT_STEPS, PolicyOptions
from dzrobot.policies.dreamzero.parts import PolicyParts
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.progress import Show
from dzrobot.rollout.asynchronous.execution import (
    ExecutionOptions,
    Latency,
    Schedule,
    schedule,
    steps_of,
)
from dzrobot.training.bench.acting import chunk_times

Way = tuple[Video, int]
"""What is computed of the video, and evaluations of the network."""

WAYS: tuple[Way, ...] = tuple(
    (video, steps) for video in get_args(Video) for steps in (16, DIT_STEPS, 5)
)
"""Those that are looked at: the published one, and what is slower and faster."""

_BEST: tuple[Way, ...] = tuple(
    (video, steps) for video in get_args(Video) for steps in (DIT_STEPS, 5)
)
"""In the order in which they are advised: the published one first, then ever less of the video."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How one way of planning goes with a robot."""

    way: Way
    seconds: float
    """Of a plan: 95th percentile at the slowest place in the memory's window, or a forecast."""

    delay: int
    """Control steps that pass meanwhile, d."""

    still: float
    """Share of time in which a robot that waits for its plans (``sync``) stands still."""

    moving: Schedule | None
    """How one plans that moves on (``naive``, ``rtc``); None: plans take too long for that."""

    trained: bool
    """Whether ``trained`` goes as well: the network was trained to be given as many actions."""

    @property
    def most(self) -> int:
        """Return the most steps from one request to the next for one that moves on, H - d."""
        assert self.moving is not None, "of one that keeps up"
        return self.moving.horizon - self.delay


def measured_seconds(
    parts: PolicyParts, options: PolicyOptions, repeats: int, show: Show
) -> dict[Way, float]:
    """Return the measured time of a plan by every way.

    Args:
        parts: Of the policy, loaded once.
        options: How it acts otherwise.
        repeats: Windows of the memory that are timed.
        show: Called with how many ways are done.
    """
    found: dict[Way, float] = {}
    for number, (video, steps) in enumerate(WAYS):
        show(number, len(WAYS), f"measuring: video {video}, {steps} steps")
        policy = DreamZeroPolicy(parts, options.changed(video=video, dit_steps=steps))
        times = chunk_times(policy, repeats)
        found[video, steps] = max(float(np.percentile(own, 95)) for own in times.values()) / 1000
    return found
