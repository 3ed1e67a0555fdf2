"""Speed on a device beside its forecast, with random weights, and simulators that draw on it."""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import gymnasium as gym
import torch
import torch.distributed as dist
from forecast import calibrate, question, random_network
from gpu_parts import Outcome, Request
from train import make_bench
from train import measure as measure_training
from train_setup import PROMPT_ROWS, Bench, Case, network_of, parallel_config

import dzrobot  # noqa: F401 (registers the environments)
from dzrobot.envs.libero.assets import assets_folder
from dzrobot.errors import SimulatorError
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.session import GenerateOptions, SessionCache
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.bench.measuring import GIB, synchronize, timed
from dzrobot.training.bench.stepping import seconds, small_action
from dzrobot.training.cost.accelerators import DEVICES, Roofline, roofline
from dzrobot.training.cost.memory import Setup, count_parameters, plan_memory
from dzrobot.training.forecast.forecast import forecast, step_seconds
from dzrobot.training.forecast.rehearsal import (
    ChunkSetup,
    StepSetup,
    rehearse_chunks,
    rehearse_step,
)
from dzrobot.training.run.parallel import init_distributed
from dzrobot.training.sft_config import ModelConfig

Numbers = dict[str, float | str | None]

_REPEATS = 3
_STEPS = 16


def speed_5b(request: Request) -> Outcome:
    """Time the 5B: all weights trained, and its chunks."""
    return _speed(request, "5b", Case(mbs=8 if request.size == "true" else 2))


def speed_14b_lora(request: Request) -> Outcome:
    """Time the 14B: adapters trained, and its chunks."""
    return _speed(request, "14b", Case(mbs=1, lora=True))


def _speed(request: Request, variant: str, case: Case) -> Outcome:
    world = init_distributed(request.device.type)
    try:
        name = variant if request.size == "true" else f"tiny {variant}"
        bench = make_bench(name, world, argparse.Namespace(steps=_REPEATS))
        if request.device.type == "cpu":
            case = replace(case, compile=False)
        roof = _roof(request)
        numbers = dict(_training(bench, case, roof))
        _empty(request.device)
        numbers |= dict(_chunks(bench, roof))
    finally:
        dist.destroy_process_group()
    known = "no forecast: this device has no row" if roof is None else f"forecast: {roof.name}"
    return Outcome(
        "measured", f"{bench.config.dit.num_layers} layers, {case.name}; {known}", numbers
    )


def _roof(request: Request) -> Roofline | None:
    """Return the device's row; a processor's is measured."""
    if request.device.type == "cpu":
        return calibrate(_REPEATS)
    name = torch.cuda.get_device_name(request.device)
    return next((roofline(device) for device in DEVICES if device.name in name), None)


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _training(
    bench: Bench, case: Case, roof: Roofline | None
) -> Iterator[tuple[str, float | str | None]]:
    """Yield samples per second and memory, measured and forecast."""
    found = measure_training(bench, case, argparse.Namespace(data="dummy"))
    yield "training, samples/s", found["samples_s"]
    setup = _setup(bench, case)
    if roof is not None:
        rehearsed = rehearse_step(
            StepSetup(setup=setup, robot=bench.robot, prompt_rows=PROMPT_ROWS)
        )
        form = "compiled" if case.compile else "eager"
        expected = case.mbs / step_seconds(rehearsed, roof, form, 1)
        yield "training, forecast", expected
        yield "training, measured over forecast", found["samples_s"] / expected
    for name in ("mfu_pct", "executed_pct"):
        if name in found:
            yield f"training, {name}", found[name]
    if "peak_gib" in found:
        counts = count_parameters(setup.network, is_lora=case.lora)
        yield "training, GiB", found["peak_gib"]
        yield "training, GiB planned", plan_memory(setup, counts).peak / GIB


def _setup(bench: Bench, case: Case) -> Setup:
    return Setup(
        network=network_of(bench, case),
        model=ModelConfig(embodiment_tag=bench.robot.tag, is_lora=case.lora),
        parallel=parallel_config(bench, case), image_size=bench.robot.image_size,
        micro_batch=case.mbs, devices=1, averaged=False,
    )  # fmt: skip


def _chunks(bench: Bench, roof: Roofline | None) -> Iterator[tuple[str, float | str | None]]:
    """Yield milliseconds of a chunk by its place in the window, eager and compiled."""
    device = bench.world.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    plan = ChunkSetup(
        network=bench.config, image_size=bench.robot.image_size, options=GenerateOptions(),
        prompt_rows=PROMPT_ROWS, dtype=dtype,
    )  # fmt: skip
    rehearsed = rehearse_chunks(plan)
    model = random_network(bench, dtype)
    forms = ("eager",) if device.type == "cpu" else ("eager", "compiled")
    for form in forms:
        if form == "compiled":
            compile_blocks(model.model.blocks)
        times = _chunk_times(bench, model, list(rehearsed))
        for place, spent in times.items():
            yield f"chunk at frame {place}, {form}, ms", 1e3 * spent
            if roof is not None:
                expected = forecast(rehearsed[place], roof, form).total
                yield f"chunk at frame {place}, {form}, forecast", 1e3 * expected
    if device.type == "cuda":
        yield "chunks, GiB", torch.cuda.max_memory_allocated(device) / GIB


def _chunk_times(bench: Bench, model: WorldActionModel, places: list[int]) -> dict[int, float]:
    """Return median seconds of the chunks of an episode; one episode more goes before."""
    prompts = SessionCache().prompts
    times: dict[int, list[float]] = {place: [] for place in places}
    for episode in range(_REPEATS + 1):
        session = SessionCache(prompts=prompts)
        for place in places:
            asked, spent = question(bench, 4 if place else 1), []
            with timed(spent, bench.world.device):
                predict(model, [session], [asked], GenerateOptions())
            if episode:
                times[place] += spent
    synchronize(bench.world.device)
    return {place: statistics.median(found) for place, found in times.items()}


def render(request: Request) -> Outcome:
    """Draw Lift, and LIBERO where its assets are, through EGL."""
    names = ["dzrobot/lift-v0"]
    try:
        assets_folder()
        names.append("dzrobot/libero_object-v0")
        missing = ""
    except SimulatorError:
        missing = "; LIBERO: no assets"
    numbers: Numbers = {}
    renderers = set()
    for name in names:
        env = gym.make(name, disable_env_checker=True, max_episode_steps=100_000)
        start = time.perf_counter()
        env.reset(seed=0)
        numbers[f"{name}, reset s"] = time.perf_counter() - start
        action = small_action(env)
        seconds(env.step, action, 2)
        numbers[f"{name}, steps/s"] = 1 / seconds(env.step, action, _STEPS)[0]
        renderers.add(_renderer())
        env.close()
    drawn = f"drawn by {', '.join(sorted(renderers))} through {os.environ['MUJOCO_GL']}{missing}"
    if any("llvmpipe" in name.lower() or "softpipe" in name.lower() for name in renderers):
        return Outcome("skipped", f"no GPU draws here: {drawn}", numbers)
    if request.device.type == "cpu" or os.environ["MUJOCO_GL"] != "egl":
        return Outcome("skipped", f"not EGL on a GPU: {drawn}", numbers)
    return Outcome("measured", drawn, numbers)


def _renderer() -> str:
    """Return the name of what draws into the current context."""
    from OpenGL import GL

    named = GL.glGetString(GL.GL_RENDERER)
    return named.decode() if named else "unknown"
