"""Forecasts for the two published networks, beside published figures and our goals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.network.session import GenerateOptions, Video
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.parts import as_trained, embodiment_of
from dzrobot.training.cost.accelerators import (
    DEVICES,
    LAUNCH_S,
    SHARE_SOURCES,
    SUSTAINED,
    Accelerator,
    roofline,
)
from dzrobot.training.cost.plan import ASSUMED_PROMPT
from dzrobot.training.forecast.forecast import Form, forecast
from dzrobot.training.forecast.profile import (
    ChunkProfile,
    StepProfile,
    chunk_table,
    describe_chunks,
    describe_step,
    profile_chunks,
    profile_step,
    step_table,
)
from dzrobot.training.forecast.rehearsal import ChunkSetup, rehearse_chunks
from dzrobot.training.recipes.architecture import run_network
from dzrobot.training.recipes.read import read_planned

STEPS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "5B, all weights, 8 devices": ("droid_sft_dreamzero_5b", (), 8),
    "5B, all weights, 1 device": ("droid_sft_dreamzero_5b", ("runner.global_batch_size=32",), 1),
    "5B, LoRA, 1 device": (
        "droid_sft_dreamzero_5b",
        ("model.is_lora=true", "runner.micro_batch_size=1", "runner.global_batch_size=1"), 1,
    ),
    "14B, LoRA, 1 device": (
        "droid_sft_dreamzero_14b", ("model.is_lora=true", "runner.global_batch_size=1"), 1,
    ),
    "14B, all weights, 8 devices": ("droid_sft_dreamzero_14b", (), 8),
}  # fmt: skip
"""Name -> recipe, changes, devices."""

PUBLISHED_RATES = {"5B": 4.44, "14B": 0.150}
"""Samples per second and H100, eight of them, DROID with three views."""

PUBLISHED_CHUNKS = {"5B": "150 to 300 ms on one H100", "14B": "3 s on two H100"}

GOAL_RATES = {"5B, all weights": 12.0, "14B, LoRA": 0.30}
"""Samples per second on one H200."""

GOAL_CHUNKS_MS = {"5B": 60, "14B": 1800}
"""Milliseconds on one H200."""

_TAG = "oxe_droid"


def profiled_steps() -> dict[str, StepProfile]:
    """Return the rehearsed steps of :data:`STEPS`."""
    return {
        name: profile_step(*read_planned(recipe, changes, devices), devices)
        for name, (recipe, changes, devices) in STEPS.items()
    }


def chunk_plan(variant: str) -> ChunkSetup:
    """Return the chunks of the published ``5b`` or ``14b`` network on DROID, with its options."""
    robot = load_embodiment(_TAG)
    config, base = read_planned(f"droid_sft_dreamzero_{variant}", (), 8)
    return ChunkSetup(
        network=run_network(base, config.model, robot), image_size=robot.image_size,
        options=GenerateOptions(cfg_scale=robot.cfg_scale), prompt_rows=ASSUMED_PROMPT,
        dtype=torch.bfloat16,
    )  # fmt: skip


def planned(checkpoint: str | None, embodiment: str | None) -> tuple[ChunkSetup, Embodiment, int]:
    """Return the chunks of a network, its robot, and the delay that it was trained for.

    Args:
        checkpoint: ``5B``, ``14B``, or a folder or hub id; None: the published 5B.
        embodiment: Tag of its robot, or module:NAME; None: the one that it names.

    Raises:
        CheckpointError: it cannot be used.
        ConfigError: a published network acts as another robot.
    """
    name = checkpoint or "5B"
    if name.upper() in PUBLISHED_RATES:
        if embodiment not in (None, _TAG):
            raise ConfigError(f"the published {name} acts as {_TAG}: leave --embodiment out")
        return chunk_plan(name.lower()), load_embodiment(_TAG), 0
    found = open_checkpoint(name)
    robot = as_trained(found, embodiment_of(found, embodiment))
    plan = ChunkSetup(
        network=found.config, image_size=robot.image_size,
        options=PolicyOptions().for_robot(robot).generate(), prompt_rows=ASSUMED_PROMPT,
    )  # fmt: skip
    return plan, robot, found.passport.rtc_training_max_delay or 0


def way_seconds(
    plan: ChunkSetup, ways: Iterable[tuple[Video, int]], device: Accelerator, form: Form
) -> dict[tuple[Video, int], float]:
    """Return seconds of a chunk at the slowest place in the memory's window, by way of planning.

    Args:
        plan: The chunks; of its options, ``video`` and ``dit_steps`` are replaced.
        ways: Values of the two.
        device: What it runs on.
        form: How the network is launched.
    """
    return {
        (video, steps): max(
            _totals(plan, replace(plan.options, video=video, dit_steps=steps), device, form)
        )
        for video, steps in ways
    }


def profiled_chunks() -> dict[str, ChunkProfile]:
    """Return the rehearsed chunks of both networks."""
    return {name: profile_chunks(chunk_plan(name.lower())) for name in PUBLISHED_RATES}


def chunk_seconds(
    options: Sequence[PolicyOptions], variant: str, device: Accelerator, form: Form
) -> list[float]:
    """Return the forecast time of a chunk for each way to act, the mean over a window.

    Args:
        options: How a policy acts, on DROID.
        variant: Published network, ``5b`` or ``14b``.
        device: What it runs on.
        form: How the network is launched.
    """
    plan, robot = chunk_plan(variant), load_embodiment(_TAG)
    asked = [own.for_robot(robot).generate() for own in options]
    found = {own: fmean(_totals(plan, own, device, form)) for own in set(asked)}
    return [found[own] for own in asked]


def _totals(
    plan: ChunkSetup, options: GenerateOptions, device: Accelerator, form: Form
) -> list[float]:
    """Return seconds of the chunks of ``plan`` with other options, one for each place."""
    chunks = rehearse_chunks(replace(plan, options=options)).values()
    return [forecast(chunk, roofline(device), form).total for chunk in chunks]


def forecast_tables() -> Iterator[str]:
    """Yield everything that is known beforehand of the speed of both networks."""
    steps, chunks = profiled_steps(), profiled_chunks()
    yield "Forecasts, not measurements: operators of a rehearsal on rooflines."
    yield from _assumptions()
    yield "\nTraining, DROID with three views"
    yield from step_table(list(steps.items()))
    for name, rate in PUBLISHED_RATES.items():
        yield f"published {name}: {rate:g} samples/s per H100"
    for name, rate in GOAL_RATES.items():
        yield f"goal {name}: {rate:g} samples/s on an H200"
    yield "\nActing, DROID, by the latent frame at which a chunk begins; `prompt`: a new text"
    for name, profile in chunks.items():
        yield from chunk_table(name, profile)
        yield f"published {name}: {PUBLISHED_CHUNKS[name]}; goal: {GOAL_CHUNKS_MS[name]} ms, H200"
    for name, step in steps.items():
        yield f"\n{name}: {describe_step(step, DEVICES[0], table=False)}"
    for name, profile in chunks.items():
        yield ""
        yield from describe_chunks(name, profile, DEVICES[0])


def _assumptions() -> Iterator[str]:
    yield f"{1e6 * LAUNCH_S:g} us of the host per operator. Shares of the peaks:"
    for kind, share in SUSTAINED.items():
        yield f"  {kind:<12}{share:>4.0%}  {SHARE_SOURCES[kind]}"
    yield "`compiled`: transformer blocks, and of the encoders all but convolutions; `graph`:"
    yield "compiled, and a chunk launched as one; `floor`: the kernels of `compiled` at the full"
    yield "peaks, launched for nothing."
    yield f"\n{'device':<10}{'TFLOP/s':>9}{'GB/s':>7}{'GB':>5}  source"
    for device in DEVICES:
        yield (
            f"{device.name:<10}{device.half_tflops:>9g}{device.memory_gbs:>7g}"
            f"{device.memory_gb:>5g}  {device.source}"
        )
