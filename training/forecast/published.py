"""Forecasts for the two published networks, beside published figures and our goals."""

from collections.abc import Iterator

import torch

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.network.session import GenerateOptions
from dzrobot.training.cost.accelerators import DEVICES, LAUNCH_S, SHARE_SOURCES, SUSTAINED
from dzrobot.training.cost.plan import ASSUMED_PROMPT
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
from dzrobot.training.forecast.rehearsal import ChunkSetup
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


def profiled_chunks() -> dict[str, ChunkProfile]:
    """Return the rehearsed chunks of both networks."""
    return {name: profile_chunks(chunk_plan(name.lower())) for name in PUBLISHED_RATES}


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
