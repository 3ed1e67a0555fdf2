"""What a timed training step is made of: network, batches, one step; and how long it takes."""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.video import draw_augmentation, encode_views
from dzrobot.policies.dreamzero.checkpoints.load import empty_network
from dzrobot.policies.dreamzero.network.config import NetworkConfig, preset
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.world_action import (
    LossCounts,
    PreparedBatch,
    TrainBatch,
    WorldActionModel,
)
from dzrobot.policies.dreamzero.tiny import tiny_config, tiny_metadata
from dzrobot.training.bench.measuring import GIB, record_noise, release, synchronize, timed
from dzrobot.training.cost.flops import (
    SampleCost,
    encoder_flops,
    executed_flops,
    model_flops,
    recomputed_share,
    sample_shape,
)
from dzrobot.training.cost.memory import Setup, count_parameters, plan_memory
from dzrobot.training.cost.plan import most_kept_blocks
from dzrobot.training.cost.speed import device_peak
from dzrobot.training.data import (
    LoaderOptions,
    LoaderPlan,
    SourceSpec,
    TrainingData,
    build_loader,
)
from dzrobot.training.recipes.architecture import run_network
from dzrobot.training.run.inputs import sample_noise
from dzrobot.training.run.optimizer import Optimizer
from dzrobot.training.run.parallel import (
    DTYPES,
    DistributedEnvironment,
    clean_name,
    device_memory,
    parallelize,
)
from dzrobot.training.sft_config import ModelConfig, OptimConfig, ParallelConfig

PROMPT_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    mbs: int
    recompute: str = "full"
    compile: bool = True
    kept: int = 0
    lora: bool = False
    optimizer: bool = True
    graphs: bool = False

    @property
    def name(self) -> str:
        """Return the options in words."""
        parts = [f"mbs {self.mbs}", f"AC {self.recompute}"]
        parts += [f"keep {self.kept}"] if self.kept else []
        parts += ["compile"] if self.compile else ["eager"]
        parts += ["graphs"] if self.graphs else []
        parts += ["LoRA"] if self.lora else []
        parts += [] if self.optimizer else ["no Adam"]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all cases share."""

    variant: str
    robot: Embodiment
    config: NetworkConfig
    world: DistributedEnvironment
    steps: int
    dtype: str

    @property
    def peak(self) -> float | None:
        """Return the dense bf16 peak of the device in TFLOP/s, where it is known."""
        return device_peak(self.world.device)

    def sync(self) -> None:
        """Wait for the device."""
        synchronize(self.world.device)


def parallel_config(bench: Bench, case: Case) -> ParallelConfig:
    return ParallelConfig(
        param_dtype=bench.dtype, activation_checkpointing=case.recompute, compile=case.compile,
        kept_blocks=case.kept, cuda_graphs="blocks" if case.graphs else "none",
    )  # fmt: skip


def make_bench(variant: str, world: DistributedEnvironment, steps: int) -> Bench:
    """Return what the cases of a network share: ``5b``, ``14b``, ``tiny 5b``, ``tiny 14b``."""
    robot = load_embodiment("oxe_droid")
    small, _, size = variant.rpartition(" ")
    config = tiny_config(size, robot) if small else preset(size)
    model = ModelConfig(embodiment_tag=robot.tag)
    dtype = "bf16" if world.device.type == "cuda" else "fp32"
    return Bench(
        variant=variant, robot=robot, config=run_network(config, model, robot), world=world,
        steps=steps, dtype=dtype,
    )  # fmt: skip


def step_setup(bench: Bench, case: Case) -> Setup:
    """Return the training step of a case, to be planned."""
    return Setup(
        network=network_of(bench, case),
        model=ModelConfig(embodiment_tag=bench.robot.tag, is_lora=case.lora),
        parallel=parallel_config(bench, case), image_size=bench.robot.image_size,
        micro_batch=case.mbs, devices=1, averaged=False,
    )  # fmt: skip


def device_bytes(device: torch.device) -> float | None:
    """Return the memory of a device; None for a processor."""
    return device_memory(device) if device.type == "cuda" else None


def planned_bytes(bench: Bench, case: Case) -> float:
    """Return the device memory that a case is planned to need."""
    setup = step_setup(bench, case)
    return plan_memory(setup, count_parameters(setup.network, is_lora=case.lora)).peak


def planned_cases(bench: Bench, memory: float | None) -> tuple[list[Case], list[str]]:
    """Return the cases that fit a device, smaller before larger, and the others with the reason.

    The largest that fits comes again with as many blocks kept as fit too. Where no case of all
    weights fits, adapters are trained.

    Args:
        bench: What the cases share.
        memory: Bytes of the device; None: no limit is known, and one block is kept.
    """
    variant = bench.variant.removeprefix("tiny ")
    sizes = (1, 2) if variant == "14b" else (1, 8, 32)
    if bench.variant != variant:
        sizes = (1, 2)
    refused: list[str] = []
    for lora in (False, True) if variant != "14b" else (True,):
        fitting = []
        for case in (Case(mbs=size, lora=lora) for size in sizes):
            needed = planned_bytes(bench, case)
            if memory is None or needed <= memory:
                fitting.append(case)
            else:
                refused.append(f"{case.name}: {needed / GIB:.0f} of {memory / GIB:.0f} GiB")
        if fitting:
            largest = fitting[-1]
            kept = 1
            if memory is not None:
                kept = most_kept_blocks(step_setup(bench, largest), memory)
            fitting += [replace(largest, kept=kept)] if kept else []
            break
    return fitting, refused


def graph_cases(bench: Bench, memory: float | None) -> tuple[list[Case], list[str]]:
    """Return the two smallest cases in every form that ``parallel.cuda_graphs`` competes with."""
    fitting, refused = planned_cases(bench, memory)
    forms = [
        replace(case, compile=compiled, graphs=graphs)
        for case in [case for case in fitting if not case.kept][:2]
        for compiled in (False, True)
        for graphs in (False, True)
    ]
    cases = []
    for case in forms:
        needed = planned_bytes(bench, case)
        if memory is None or needed <= memory:
            cases.append(case)
        else:
            refused.append(f"{case.name}: {needed / GIB:.0f} of {memory / GIB:.0f} GiB")
    return cases, refused


def network_of(bench: Bench, case: Case) -> NetworkConfig:
    """Return the network with its adapters, where a case has some."""
    if not case.lora:
        return bench.config
    head = replace(bench.config.head, lora_rank=16, lora_alpha=16.0)
    return replace(bench.config, head=head)


def build(bench: Bench, case: Case) -> tuple[WorldActionModel, Optimizer | None]:
    """Return the network with random weights, laid out as a real run lays it out."""
    parallel = parallel_config(bench, case)
    model = empty_network(network_of(bench, case), is_lora=case.lora, text_encoder=False)
    compute = DTYPES[parallel.param_dtype]
    for parameter in model.parameters():
        dtype = torch.float32 if parameter.requires_grad else compute
        parameter.data = parameter.data.to(dtype)
    for buffer_name, buffer in model.named_buffers():
        owner, _, leaf = buffer_name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, buffer.to(compute))
    parallelize(model.model, model.model.blocks, parallel, bench.world)
    model.to_empty(device=bench.world.device)
    randomize(model)
    trained = {clean_name(n): p for n, p in model.model.named_parameters() if p.requires_grad}
    if not case.optimizer:
        return model, None
    return model, Optimizer(trained.items(), OptimConfig(), 1000)


@torch.no_grad()
def randomize(model: WorldActionModel) -> None:
    """Fill weights on the device they lie on: norms one, biases zero, matrices by their width."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if tensor.ndim < 2 and name.endswith("bias"):
            local.zero_()
        elif tensor.ndim < 2:
            local.fill_(1.0)
        else:
            local.normal_(std=float(np.prod(tensor.shape[1:])) ** -0.5)


class Batches:
    """Endless micro-batches: the same noise again and again, or recordings read by workers.

    Args:
        bench: What the cases share.
        mbs: Samples of one.
        workers: Processes that read; None: no recordings.
    """

    def __init__(self, bench: Bench, mbs: int, workers: int | None = None) -> None:
        self._bench, self._mbs = bench, mbs
        self._views = dummy_views(bench, mbs)
        # Made once: a real run reads it from its store, which costs next to nothing.
        self.prompt = prompt(bench, mbs)
        self._loader = None if workers is None else loader_batches(bench, mbs, workers)
        self.waited = 0.0

    def next(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return views and vectors."""
        timing, dit = self._bench.robot.timing, self._bench.config.dit
        if self._loader is not None:
            before = time.perf_counter()
            batch = next(self._loader)
            self.waited += time.perf_counter() - before
            return batch["views"][0], batch
        state = torch.rand(self._mbs, timing.blocks, dit.max_state_dim) * 2 - 1
        action = torch.rand(self._mbs, timing.actions, dit.action_dim) * 2 - 1
        mask = torch.ones_like(action, dtype=torch.bool)
        real = torch.ones(self._mbs, dtype=torch.bool)
        return self._views, {
            "state": state, "action": action, "action_mask": mask, "has_real_action": real,
        }  # fmt: skip


def dummy_views(bench: Bench, mbs: int) -> dict[str, Tensor]:
    frames = bench.robot.timing.frames
    generator = torch.Generator().manual_seed(0)
    views = {}
    for view in bench.robot.views:
        size = (mbs, frames, *view.resolution, 3)
        noise = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        views[view.key] = noise.pin_memory() if bench.world.device.type == "cuda" else noise
    return views


def prompt(bench: Bench, mbs: int) -> PromptEmbedding:
    dit = bench.config.dit
    length = min(PROMPT_ROWS, dit.text_len)
    rows = torch.zeros(mbs, dit.text_len, dit.text_dim, dtype=DTYPES[bench.dtype])
    rows[:, :length].normal_()
    return PromptEmbedding(rows.to(bench.world.device), (length,) * mbs)


@dataclass(frozen=True)
class Running:
    """What a step works on."""

    model: WorldActionModel
    optimizer: Optimizer | None
    batches: Batches


def recorded_data(bench: Bench) -> TrainingData:
    """Record a small dataset of noise and open it, statistics included."""
    robot = replace(bench.robot, language_features=())
    root = Path(tempfile.mkdtemp(prefix="train-bench-"))
    os.environ["DZROBOT_CACHE"] = str(root / "cache")
    record_noise(root / "data", robot, episodes=6, frames=200)
    spec = SourceSpec(paths=[root / "data"], embodiment=robot, metadata=tiny_metadata(robot))
    return TrainingData.open([spec], seed=0)


def loader_batches(bench: Bench, mbs: int, workers: int) -> Iterator[Any]:
    """Return the batches of a recording, read by ``workers`` processes."""
    plan = LoaderPlan(global_batch=mbs, micro_batch=mbs, stop_step=10_000)
    pinned = bench.world.device.type == "cuda"
    options = LoaderOptions(num_workers=workers, pin_memory=pinned)
    return iter(build_loader(recorded_data(bench), plan, options))


def one_step(
    bench: Bench, running: Running, step: int, stages: dict[str, float] | None = None
) -> None:
    """Do one optimizer step; with ``stages``, time its parts, which costs their overlap."""
    model, optimizer = running.model, running.optimizer
    device = bench.world.device

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        if stages is None:
            yield
            return
        spent: list[float] = []
        with timed(spent, device):
            yield
        stages[name] = spent[0] * 1e3

    views, vectors = running.batches.next()
    mbs = len(vectors["state"])
    with stage("augment"):
        moved = {key: frames.to(device, non_blocking=True) for key, frames in views.items()}
        draws = [draw_augmentation(0, i) for i in range(mbs)]
        images = encode_views(moved, bench.robot, draws)
    with stage("encoders"):
        prepared = prepare(model, images, vectors, running.batches.prompt)
    with stage("forward"):
        noise = sample_noise(bench.config, prepared, 0, step, range(mbs))
        counts = LossCounts(samples=float(mbs), actions=float(mbs))
        losses = model.loss(prepared, noise, counts)
    with stage("backward"):
        losses.loss.backward()
    with stage("optimizer"):
        if optimizer is not None:
            optimizer.step()
        else:
            model.model.zero_grad(set_to_none=True)


def prepare(
    model: WorldActionModel, images: Tensor, vectors: dict[str, Tensor], given: PromptEmbedding
) -> PreparedBatch:
    device = images.device
    return model.prepare(
        TrainBatch(
            images=images,
            state_BSM=vectors["state"].to(device, non_blocking=True),
            action_BAM=vectors["action"].to(device, non_blocking=True),
            action_mask_BAM=vectors["action_mask"].to(device, non_blocking=True),
            has_real_action_B=vectors["has_real_action"].to(device, non_blocking=True),
            prompt=given,
        )
    )


def attempt(run: Callable[[], Any], device: torch.device) -> Any:
    """Return the result, or what went wrong; the next case starts with empty memory."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error).splitlines()[0][:70]}"
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        # A benchmark reports every case: one that cannot run must not hide the others.
        logging.getLogger(__name__).exception("case failed")
        return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    finally:
        release(device)


def measure(bench: Bench, case: Case, workers: int | None = None) -> dict[str, float]:
    """Return samples/s, milliseconds per stage and peak memory of one case.

    Args:
        bench: What the cases share.
        case: The case.
        workers: Processes that read recordings; None: the same noise again and again.
    """
    batches = Batches(bench, case.mbs, workers)
    running = Running(*build(bench, case), batches)
    stages: dict[str, float] = {}
    # The first step compiles, the second still allocates.
    for step in range(2):
        one_step(bench, running, step)
    bench.sync()
    batches.waited, start = 0.0, time.perf_counter()
    for step in range(bench.steps):
        one_step(bench, running, step)
    bench.sync()
    seconds = (time.perf_counter() - start) / bench.steps
    waited = batches.waited / bench.steps
    one_step(bench, running, 0, stages)
    cost = sample_cost(bench, case)
    rate = case.mbs / seconds
    result = {"samples_s": rate, "step_ms": seconds * 1e3, "wait_pct": 100 * waited / seconds}
    result |= {f"{name}_ms": ms for name, ms in stages.items()}
    if bench.world.device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    if bench.peak:
        result["mfu_pct"] = 100 * cost.model * rate / (bench.peak * 1e12)
        result["executed_pct"] = 100 * cost.executed * rate / (bench.peak * 1e12)
    return {name: round(value, 2) for name, value in result.items()}


def sample_cost(bench: Bench, case: Case) -> SampleCost:
    config = bench.config
    shape = sample_shape(config.dit, config.head.num_frames)
    return SampleCost(
        model_forward=model_flops(config.dit, shape),
        executed_forward=executed_flops(config.dit, shape, min(128, config.dit.text_len)),
        encoders=encoder_flops(config, bench.robot.image_size, 0),
        recomputed_share=recomputed_share(parallel_config(bench, case), config.dit.num_layers),
    )
