"""How fast a policy plans, and how busy an evaluation keeps its device."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.base import walk_window
from dzrobot.policies.dreamzero.bundled import EMBODIMENT, default_checkpoint
from dzrobot.policies.dreamzero.options import WeightOptions
from dzrobot.policies.dreamzero.parts import PolicyParts, load_parts
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.rollout.evaluation.evaluate import EvalProgress, evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.policy_spec import PolicySpec, load_policy, resolve_policy
from dzrobot.rollout.policy_use import read_uses
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.training.bench.document import BenchSettings, Measurement
from dzrobot.training.bench.stepping import check_simulator

_SESSION = "bench"


def measure_policy(settings: BenchSettings, _: Path) -> tuple[list[Measurement], list[str]]:
    """Return the time of a chunk in the first, middle and last place of the memory's window.

    A chunk is one whole call: observation to tensors, network, actions back on the host.
    With ``compile``, the eager form is timed too, before, and there is one ratio more.
    """
    options, parts = policy_spec(settings), open_parts(settings)
    # Compiling changes the network itself, so the eager form comes first.
    forms = (False, True) if settings.compile else (False,)
    found = [
        chunk_times(DreamZeroPolicy(parts, replace(options, compile=on)), settings.repeats)
        for on in forms
    ]
    measured = _places(found[-1])
    if settings.compile:
        eager, compiled = ([sum(window) for window in zip(*one.values(), strict=True)]
                           for one in found)  # fmt: skip
        ratios = tuple(after / before for before, after in zip(eager, compiled, strict=True))
        measured.append(
            Measurement(name="window, compiled over eager", unit="x", values=ratios, better="less")
        )
    return measured, []


def open_parts(settings: BenchSettings) -> PolicyParts:
    """Return the parts of the policy that ``settings`` name.

    Raises:
        CheckpointError: it cannot be used.
        ConfigError: there is no such device.
    """
    spec = policy_spec(settings)
    return load_parts(
        spec.name,
        embodiment=None if spec.embodiment is None else load_embodiment(spec.embodiment),
        device=settings.device, dtype=None, revision=None, tokenizer=None, weights=WeightOptions(),
    )  # fmt: skip


def policy_spec(settings: BenchSettings) -> PolicySpec:
    """Return the policy that ``settings`` name.

    Raises:
        ConfigError: it is not a checkpoint.
    """
    bundled = settings.checkpoint is None
    spec = PolicySpec(
        name=str(default_checkpoint()) if bundled else str(settings.checkpoint),
        embodiment=settings.embodiment or (EMBODIMENT if bundled else None),
        device=settings.device,
        compile=settings.compile,
    )
    if not spec.is_checkpoint:
        raise ConfigError(
            f"--checkpoint {settings.checkpoint}: give a folder or hub id of weights; what plans "
            "without a network is not measured"
        )
    return spec


def open_specs(specs: Sequence[PolicySpec]) -> list[DreamZeroPolicy]:
    """Return the policies of ``specs``, all in memory at once.

    Raises:
        ConfigError: one of them has no network here.
        CheckpointError: one cannot be used.
    """
    return [
        _network(spec, load_policy(resolve_policy(spec, None)) if spec.is_checkpoint else None)
        for spec in specs
    ]


def _network(spec: PolicySpec, policy: object) -> DreamZeroPolicy:
    if not isinstance(policy, DreamZeroPolicy):
        raise ConfigError(
            f"{spec.name} has no chunks that can be timed here: give a folder or hub id of weights"
        )
    return policy


@dataclass(frozen=True)
class ChunkTime:
    """How long the chunks of one policy take on this machine."""

    ms: float
    ratio: float
    """To those of the first policy, in the same run."""


def compared_chunks(
    policies: Sequence[DreamZeroPolicy], rounds: int
) -> list[ChunkTime] | list[None]:
    """Return how long each policy's chunks take, a mean over the memory's window.

    A round goes through one window of each, in turns, so that what else the machine does meets all
    alike. Medians over the rounds; the round before, which compiles and allocates, does not count.

    Args:
        policies: All of them on one device.
        rounds: How many; 0: nothing is measured, None for each.
    """
    if not rounds:
        return [None] * len(policies)
    totals = np.array([
        [
            statistics.fmean(plan.timing["total_ms"] for _, plan in walk_window(one, _SESSION))
            for one in policies
        ]
        for _ in range(rounds + 1)
    ])[1:]  # fmt: skip
    times, ratios = (np.median(found, axis=0) for found in (totals, totals / totals[:, :1]))
    return [ChunkTime(*both) for both in zip(times.tolist(), ratios.tolist(), strict=True)]


def chunk_times(policy: DreamZeroPolicy, repeats: int) -> dict[int, list[float]]:
    """Return milliseconds of a chunk by the latent frame at which it begins.

    One window more is gone through before: it compiles, allocates and encodes the prompt.
    """
    times: dict[int, list[float]] = {}
    for window in range(repeats + 1):
        for place, plan in walk_window(policy, _SESSION):
            if window:
                times.setdefault(place, []).append(plan.timing["total_ms"])
    policy.evict(_SESSION)
    return times


def _places(times: dict[int, list[float]]) -> list[Measurement]:
    frames = sorted(times)
    chosen = {"first": frames[0]}
    if len(frames) > 2:
        chosen["middle"] = frames[len(frames) // 2]
    if len(frames) > 1:
        chosen["last"] = frames[-1]
    return [
        Measurement(
            name=f"chunk, {place} of the window (frame {frame})", unit="ms",
            values=tuple(times[frame]), better="less",
        )
        for place, frame in chosen.items()
    ]  # fmt: skip


def measure_eval(settings: BenchSettings, folder: Path) -> tuple[list[Measurement], list[str]]:
    """Return episodes per minute of a short evaluation, and how busy the device was meanwhile.

    As many episodes as ``repeats``, one for one; those before, in which simulators and kernels are
    built, do not count. With ``profile``, what an episode consists of instead.
    """
    check_simulator(settings.env)
    if settings.profile:
        from dzrobot.training.bench.episode_cost import measure_episodes

        return measure_episodes(settings, folder)
    ahead = max(1, settings.workers)
    prepared = prepare(
        EvaluationRequest(
            spec=EvalSpec(
                protocol=PROTOCOLS["custom"], env=settings.env, episodes=settings.repeats + ahead
            ),
            policy=policy_spec(settings),
        )
    )
    policy = _network(prepared.plan.request.policy, prepared.policy)
    marks: list[tuple[float, float]] = []

    def mark(far: EvalProgress) -> None:
        if far.record is None:
            return
        if far.record.error is not None:
            raise ConfigError(f"an episode of {settings.env} failed: {far.record.error}")
        marks.append((time.perf_counter(), policy.planning.seconds))

    options = RunOptions(workers=settings.workers, videos="none", predictions=False)
    results = folder / "evaluation"
    evaluate(prepared, results, options, mark)
    return _shares(marks[ahead - 1 :], read_uses(results)[-1].kernel_share)


def _shares(
    marks: list[tuple[float, float]], busy: float | None
) -> tuple[list[Measurement], list[str]]:
    spans = [
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)
    ]
    # Episodes that end at the same moment, of several simulators, have no time of their own.
    spans = [span for span in spans if span[0] > 0]
    found = [
        Measurement(
            name="episodes", unit="/min", values=tuple(60 / wall for wall, _ in spans),
            better="more",
        ),
        Measurement(
            name="policy plans", unit="% of time",
            values=tuple(100 * planning / wall for wall, planning in spans), better="neither",
        ),
    ]  # fmt: skip
    if busy is None:
        return found, [
            "device busy: on a processor there is no device beside it; `policy plans` is the share"
        ]
    found.append(
        Measurement(
            name="device busy", unit="% of time",
            values=tuple(100 * busy * planning / wall for wall, planning in spans),
            better="neither",
        )
    )  # fmt: skip
    return found, []
