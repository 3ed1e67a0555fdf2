"""What a run took of its policy: time, plans, calls of the network; a line per run on disk."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt

from dzrobot import files
from dzrobot.documents import parse_json
from dzrobot.errors import DzrobotError, ProtocolError
from dzrobot.policies.base import Policy, walk_window
from dzrobot.rollout.records import stored_lines, storing

_log = logging.getLogger(__name__)

RUNS_FILE = "runs.jsonl"

_SESSION = "traced"
"""In which the device is traced; see :func:`_traced`."""


class RunUse(BaseModel):
    """What one run of an evaluation took of its policy; of several processes, the main one."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    wall_s: NonNegativeFloat
    """From before the first simulator was opened to the last record."""

    planning_s: NonNegativeFloat
    """In which the policy planned."""

    plans: NonNegativeInt
    calls: NonNegativeInt
    """Calls of the network; plans that are made together share one."""

    kernel_share: NonNegativeFloat | None
    """Share of a plan's time in which the device computes; None: there is no device beside the
    processor, or the run was cut short."""


@contextmanager
def measured(policy: Policy | None, device: str | None, folder: Path) -> Iterator[None]:
    """Add a line to `RUNS_FILE` in ``folder`` of what ``policy`` plans during the block.

    Args:
        policy: Nothing is added for one that does not know, or that plans nothing.
        device: Kind of device that it computes on, such as ``cuda``.
        folder: Of the results.
    """
    totals = None if policy is None else policy.planning
    if policy is None or totals is None:
        yield
        return
    before, began, finished = replace(totals), time.perf_counter(), False
    try:
        yield
        finished = True
    finally:
        wall, after = time.perf_counter() - began, replace(totals)
        if after.plans > before.plans:
            use = RunUse(
                wall_s=wall, planning_s=after.seconds - before.seconds,
                plans=after.plans - before.plans, calls=after.calls - before.calls,
                kernel_share=_kernel_share(policy, device) if finished else None,
            )  # fmt: skip
            with storing(folder):
                files.append_line(folder / RUNS_FILE, json.dumps(use.model_dump()))


def read_uses(folder: Path) -> list[RunUse]:
    """Return the lines of `RUNS_FILE` in ``folder``; a last one that a kill cut short is dropped.

    Raises:
        ProtocolError: the file holds something else.
    """
    path = folder / RUNS_FILE
    return [
        parse_json(line, RunUse, f"{path}:{number}", ProtocolError)
        for number, line in enumerate(stored_lines(path), start=1)
    ]


def shares(uses: Sequence[RunUse]) -> dict[str, float]:
    """Return ``planning_share``, ``plans_per_call`` and, with a device, ``device_busy_share``.

    Shares are of the time of all runs, in [0, 1].
    """
    wall, calls = sum(use.wall_s for use in uses), sum(use.calls for use in uses)
    if not wall or not calls:
        return {}
    found = {
        "planning_share": sum(use.planning_s for use in uses) / wall,
        "plans_per_call": sum(use.plans for use in uses) / calls,
    }
    traced = [(use.kernel_share, use) for use in uses if use.kernel_share is not None]
    if traced:
        busy = sum(share * use.planning_s for share, use in traced)
        found["device_busy_share"] = busy / sum(use.wall_s for _, use in traced)
    return found


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return how much of the line the spans (start, end) cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _kernel_share(policy: Policy, device: str | None) -> float | None:
    """Return the share of a plan's time in which a kernel runs; None without an accelerator.

    An evaluation has too many kernels to trace, and all are of plans, so one window is traced.
    Where that fails it costs no result, and the share is None too.
    """
    if device != "cuda" or not policy.can.serves:
        return None
    try:
        return _traced(policy)
    except (RuntimeError, DzrobotError) as error:
        _log.warning("how busy the device was is not known: %s", error)
        return None


def _traced(policy: Policy) -> float:
    """Plan through one window in a session of its own; return :func:`_kernel_share`."""
    import torch

    wall_us = 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _, plan in walk_window(policy, _SESSION):
            wall_us += 1000 * plan.timing["total_ms"]
    policy.evict(_SESSION)
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or []
        if event.device_type.name == "CUDA"
    ]
    return covered(kernels) / wall_us
