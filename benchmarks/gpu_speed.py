"""Speed on a device with random weights, and simulators that draw on it."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from gpu_parts import Outcome, Request, compute_dtype
from gpu_training import (
    PROMPT_ROWS,
    Bench,
    Case,
    attempt,
    device_bytes,
    graph_cases,
    make_bench,
    measure,
    planned_cases,
    recorded_data,
)
from networks import random_network

from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import PromptBatch, prompt_batches
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.recorded_blocks import recordable_devices
from dzrobot.policies.dreamzero.network.session import (
    InferenceRequest,
    Prompt,
    SessionCache,
)
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.bench.learning import loader_rates
from dzrobot.training.bench.measuring import GIB, noise_format, release, timed
from dzrobot.training.data import LoaderOptions
from dzrobot.training.run.parallel import DistributedEnvironment, init_distributed

_STEPS = 3
"""Timed ones of a training case."""

_EPISODES = {"5b": 20, "14b": 8}
"""Timed ones of every form."""

_SIMULATED = 16
_LOADED = 4
"""Samples of a micro-batch where only the loader runs."""


def train_5b(request: Request) -> Outcome:
    """Time steps of the 5B: all weights where they fit, else adapters."""
    return _train(request, "5b")


def train_14b_lora(request: Request) -> Outcome:
    """Time steps of the 14B: adapters trained."""
    return _train(request, "14b")


def train_graphs_5b(request: Request) -> Outcome:
    """Time small micro-batches of the 5B with and without recorded blocks."""
    return _train(request, "5b", graph_cases)


def train_graphs_14b(request: Request) -> Outcome:
    """Time small micro-batches of the 14B with and without recorded blocks."""
    return _train(request, "14b", graph_cases)


def _train(
    request: Request, variant: str,
    choose: Callable[[Bench, float | None], tuple[list[Case], list[str]]] = planned_cases,
) -> Outcome:  # fmt: skip
    world = init_distributed(request.device.type)
    try:
        bench = _bench(request, variant, world)
        cases, refused = choose(bench, device_bytes(request.device))
        for reason in refused:
            request.record(f"does not fit, {reason.partition(':')[0]}", reason)
        if request.device.type == "cpu":
            recordable_devices.add("cpu")
            cases = list(dict.fromkeys(replace(case, compile=False) for case in cases))
        runs: list[tuple[Case, int | None]] = [(case, None) for case in cases]
        if choose is planned_cases:
            # The largest once more, fed by workers: what the loader holds up is in it.
            runs.append((cases[-1], _workers(request)))
        failed = 0
        for case, workers in runs:
            name = case.name if workers is None else f"{case.name}, {workers} workers"
            found = attempt(
                lambda case=case, workers=workers: measure(bench, case, workers), request.device
            )
            if isinstance(found, str):
                failed += 1
                request.record(name, found)
                continue
            for unit, value in found.items():
                request.record(f"{name}, {unit}", value)
    finally:
        dist.destroy_process_group()
    said = f"{bench.config.dit.num_layers} layers, {len(cases)} cases fit, {len(refused)} do not"
    return Outcome("failed" if failed else "measured", f"{said}, {failed} failed")


def _bench(request: Request, variant: str, world: DistributedEnvironment) -> Bench:
    return make_bench(variant if request.size == "true" else f"tiny {variant}", world, _STEPS)


def _workers(request: Request) -> int:
    return len(os.sched_getaffinity(0)) if request.size == "true" else 1


def chunks_5b(request: Request) -> Outcome:
    """Time the chunks of the 5B in every form."""
    return chunks(request, "5b")


def chunks_14b(request: Request) -> Outcome:
    """Time the chunks of the 14B in every form."""
    return chunks(request, "14b")


def chunks(request: Request, variant: str) -> Outcome:
    """Time the chunks of a network's window in every form."""
    world = init_distributed(request.device.type)
    try:
        bench = _bench(request, variant, world)
        count = _EPISODES[variant] if request.size == "true" else 2
        model = random_network(bench.config, request.device, compute_dtype(request.device))
        for form, batches in _forms(request, model):
            release(request.device)
            _time_form(request, form, bench, model, (batches, count))
    finally:
        dist.destroy_process_group()
    said = f"{bench.config.dit.num_layers} layers, {count} episodes a form"
    if request.device.type == "cpu":
        said += "; not compiled, and recorded steps are repeated operator by operator"
    return Outcome("measured", said)


def _forms(request: Request, model: WorldActionModel):
    """Yield name and batches of each form; the network's blocks are compiled on the way."""
    prompts = GenerateOptions().prompts
    yield "eager", None
    yield "graphs", prompt_batches(model.model, prompts, graphs=True)
    if request.device.type == "cpu":
        return
    compile_blocks(model.model.blocks)
    yield "compiled", None
    yield "compiled and graphs", prompt_batches(model.model, prompts, graphs=True)


def _time_form(
    request: Request, form: str, bench: Bench, model: WorldActionModel,
    how: tuple[Sequence[PromptBatch] | None, int],
) -> None:  # fmt: skip
    """Keep the first, the median and the 95th percentile of every place, and the memory."""
    batches, count = how
    found = episodes(bench, model, batches)
    first = next(found)
    request.record(f"{form}, first episode, s", sum(first.values()))
    times = list(itertools.islice(found, count))
    for place in first:
        values = [1e3 * one[place] for one in times]
        request.record(f"{form}, frame {place}, p50 ms", statistics.median(values))
        request.record(f"{form}, frame {place}, p95 ms", float(np.percentile(values, 95)))
    if request.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(request.device)
        request.record(f"{form}, GiB", peak / GIB)


def question(bench: Bench, frames: int) -> InferenceRequest:
    """Return one call's question."""
    config = bench.config
    height, width = config.target_size or bench.robot.image_size
    rows = torch.arange(config.dit.text_len)
    prompt, negative = (
        Prompt(torch.full_like(rows, token), rows < min(PROMPT_ROWS, len(rows))) for token in (1, 2)
    )
    return InferenceRequest(
        images_THW3=torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8),
        state_SM=torch.rand(1, config.dit.max_state_dim), prompt=prompt, negative=negative,
    )  # fmt: skip


def episodes(
    bench: Bench, model: WorldActionModel, batches: Sequence[PromptBatch] | None = None
) -> Iterator[dict[int, float]]:
    """Yield the seconds of an episode's chunks, by the latent frame at which each begins.

    An episode ends where its window does. The first one compiles, allocates and encodes prompts.
    """
    options = GenerateOptions()
    window = options.window(model.config.dit)
    prompts = SessionCache().prompts
    while True:
        session, times = SessionCache(prompts=prompts), {}
        asked = question(bench, 1)
        while (start := session.next_start(asked, window)) not in times:
            spent: list[float] = []
            with timed(spent, bench.world.device):
                predict(model, [session], [asked], options, batches)
            times[start] = spent[0]
            asked = question(bench, 4)
        yield times


def loader(request: Request) -> Outcome:
    """Time the loader on all cores, without a step beside it."""
    world = init_distributed("cpu")
    try:
        data = recorded_data(_bench(request, "5b", world))
        workers = _workers(request)
        options = LoaderOptions(num_workers=workers)
        rates = list(loader_rates(data, _LOADED, options, 4 * workers * options.prefetch_factor))
    finally:
        dist.destroy_process_group()
    # Batches of several workers come in bursts: what counts is the time of all of them.
    request.record(
        f"{noise_format()}, {workers} workers, samples/s", statistics.harmonic_mean(rates)
    )
    return Outcome("measured", f"DROID's three views of noise in {noise_format()}")


def render(request: Request) -> Outcome:
    """Draw Lift, and LIBERO where its assets are, through EGL."""
    import gymnasium as gym

    from dzrobot.envs.libero.assets import assets_folder
    from dzrobot.errors import SimulatorError
    from dzrobot.training.bench.stepping import seconds, small_action

    names = ["dzrobot/lift-v0"]
    try:
        assets_folder()
        names.append("dzrobot/libero_object-v0")
        missing = ""
    except SimulatorError:
        missing = "; LIBERO: no assets"
    renderers = set()
    for name in names:
        env = gym.make(name, disable_env_checker=True, max_episode_steps=100_000)
        start = time.perf_counter()
        env.reset(seed=0)
        request.record(f"{name}, reset s", time.perf_counter() - start)
        action = small_action(env)
        seconds(env.step, action, 2)
        request.record(f"{name}, steps/s", float(1 / seconds(env.step, action, _SIMULATED)[0]))
        renderers.add(_renderer())
        env.close()
    drawn = f"drawn by {', '.join(sorted(renderers))} through {os.environ['MUJOCO_GL']}{missing}"
    if any("llvmpipe" in name.lower() or "softpipe" in name.lower() for name in renderers):
        return Outcome("skipped", f"no GPU draws here: {drawn}")
    if request.device.type == "cpu" or os.environ["MUJOCO_GL"] != "egl":
        return Outcome("skipped", f"not EGL on a GPU: {drawn}")
    return Outcome("measured", drawn)


def _renderer() -> str:
    """Return the name of what draws into the current context."""
    from OpenGL import GL

    named = GL.glGetString(GL.GL_RENDERER)
    return named.decode() if named else "unknown"
