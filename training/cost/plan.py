"""What a run will need and whether it fits, and the smallest run that does."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.training.cost.flops import sample_cost
from dzrobot.training.cost.memory import (
    GIB,
    Counts,
    MemoryPlan,
    Setup,
    count_parameters,
    plan_memory,
    shards_of,
)
from dzrobot.training.cost.speed import Setting, Speed, known_speed
from dzrobot.training.recipes.architecture import run_network, source_plans
from dzrobot.training.sft_config import (
    GradientAccumulation,
    ModelConfig,
    ParallelConfig,
    SFTConfig,
)

ASSUMED_PROMPT = 100
"""Prompt rows that are not padding, assumed before recordings are opened."""

_DEVICE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class RunPlan:
    """The plan of one configuration."""

    setup: Setup
    counts: Counts
    memory: MemoryPlan


def plan_run(config: SFTConfig, base: NetworkConfig, devices: int) -> RunPlan:
    """Return the plan of ``config`` on ``devices`` devices.

    Args:
        config: The recipe.
        base: Network it starts from.
        devices: Processes, one device each.
    """
    setup, _ = run_setup(config, base, devices)
    counts = count_parameters(setup.network, is_lora=config.model.is_lora)
    return RunPlan(setup, counts, plan_memory(setup, counts))


def run_speed(config: SFTConfig, base: NetworkConfig, devices: int, peak_tflops: float) -> Speed:
    """Return what is known of the speed of ``config``.

    Args:
        config: The recipe.
        base: Network it starts from.
        devices: Processes, one device each.
        peak_tflops: Dense bf16 peak of one device in TFLOP/s.
    """
    setup, robot = run_setup(config, base, devices)
    cost = sample_cost(config, setup.network, robot.image_size, ASSUMED_PROMPT)
    setting = Setting(devices=devices, peak_tflops=peak_tflops, robot=robot.tag)
    return known_speed(config, setup.network.dit, cost, setting)


def run_setup(config: SFTConfig, base: NetworkConfig, devices: int) -> tuple[Setup, Embodiment]:
    """Return what a run of ``config`` trains on each device, and the robot of its longest samples.

    Args:
        config: The recipe.
        base: Network it starts from.
        devices: Processes, one device each.
    """
    sources = source_plans(config)
    longest = max(sources, key=lambda plan: plan.embodiment.timing.action_horizon).embodiment
    setup = Setup(
        network=run_network(base, config.model, longest), model=config.model,
        parallel=config.parallel, image_size=longest.image_size,
        micro_batch=config.runner.micro_batch_size, devices=devices,
        parts=config.accumulation(devices),
        averaged=config.optim.ema_decay is not None, eight_bit=config.optim.moments == "8bit",
        teacher_steps=config.distill.teacher_steps,
    )  # fmt: skip
    return setup, longest


def settle(config: SFTConfig, base: NetworkConfig, devices: int, device_bytes: float) -> SFTConfig:
    """Return ``config`` with what it leaves to the devices decided.

    That is: whether to compile, how many blocks keep their activations, and when gradients are
    summed over processes.

    Args:
        config: The recipe.
        base: Network it starts from.
        devices: Processes, one device each.
        device_bytes: Memory of one device; 0 for a CPU, whose memory is not planned: only what
            needs no more memory is chosen.

    Raises:
        ConfigError: ``parallel.fill_memory`` on a CPU.
    """
    setup, _ = run_setup(config, base, devices)
    if setup.parallel.compile == "auto":
        setup = _changed(setup, compile=device_bytes > 0)
    if setup.parallel.fill_memory:
        if not device_bytes:
            raise ConfigError(
                "parallel.fill_memory plans the memory of an accelerator, and this run has none: "
                "give parallel.kept_blocks a number"
            )
        setup = _changed(setup, kept_blocks=most_kept_blocks(setup, device_bytes))
    if setup.parallel.enable_gradient_accumulation == "auto":
        choice = most_accumulation(setup, device_bytes)
        setup = _changed(setup, enable_gradient_accumulation=choice)
    return config.model_copy(update={"parallel": setup.parallel})


def _changed(setup: Setup, **parallel: object) -> Setup:
    return replace(setup, parallel=setup.parallel.model_copy(update=parallel))


def most_accumulation(setup: Setup, device_bytes: float) -> GradientAccumulation:
    """Return what ``enable_gradient_accumulation: auto`` stands for on devices of that memory."""
    if setup.parts == 1 or setup.parallel.reduce_dtype == "bf16":
        return False
    without, whole = (
        _plan(_changed(setup, enable_gradient_accumulation=choice)).peak for choice in (False, True)
    )
    if whole <= max(without, device_bytes):
        return True
    return "replicas" if shards_of(setup) < setup.devices else False


def most_kept_blocks(setup: Setup, device_bytes: float) -> int:
    """Return how many blocks can keep their activations in the memory of a device; 0: none can."""
    counts = count_parameters(setup.network, is_lora=setup.model.is_lora)
    for blocks in range(setup.network.dit.num_layers, 0, -1):
        if plan_memory(_changed(setup, kept_blocks=blocks), counts).peak <= device_bytes:
            return blocks
    return 0


def describe_accumulation(parts: int, choice: GradientAccumulation) -> str:
    """Return when the gradients of ``parts`` micro-batches are summed over processes, as text."""
    if parts == 1:
        return "1 micro-batch a step"
    when = {
        True: "with the last", False: "with each",
        "replicas": "with each within a copy, with the last over copies",
    }  # fmt: skip
    return f"{parts} micro-batches a step, gradients summed over processes {when[choice]}"


def describe_plan(plan: RunPlan) -> str:
    """Return the plan as text."""
    counts, setup, memory = plan.counts, plan.setup, plan.memory
    lines = [
        f"trained parameters   {counts.trained / 1e9:8.3f} B",
        f"frozen transformer   {counts.frozen / 1e9:8.3f} B",
        f"encoders             {(counts.text + counts.images) / 1e9:8.3f} B"
        + (" (prompt encoder freed after start)" if setup.model.cache_prompts else ""),
        f"one device of {setup.devices}, {setup.parallel.strategy}, micro-batch "
        f"{setup.micro_batch}, activation checkpointing {setup.parallel.activation_checkpointing}"
        + (f" but for {kept} blocks" if (kept := setup.parallel.kept_blocks) else ""),
        f"{describe_accumulation(setup.parts, setup.parallel.enable_gradient_accumulation)}:",
    ]
    for item in memory.items:
        where = "  (host memory)" if item.on_host else ""
        lines.append(f"  {item.name:<36}{item.bytes_ / GIB:8.1f} GiB{where}")
    lines.append(f"  {'expected peak, waste included':<36}{memory.peak / GIB:8.1f} GiB")
    return "\n".join(lines)


def check_fits(plan: RunPlan, memory_gib: float) -> None:
    """Check that the plan fits devices of ``memory_gib``.

    Raises:
        ConfigError: It does not; names the smallest changes that make it fit.
    """
    if plan.memory.peak <= memory_gib * GIB:
        return
    ways = [text for text in _ways_out(plan.setup, memory_gib) if text]
    raise ConfigError(
        f"{plan.memory.peak / GIB:.1f} GiB are needed on each of {plan.setup.devices} devices, "
        f"there are {memory_gib:g}. What fits:\n  "
        + "\n  ".join(ways or ["nothing of these: use devices with more memory"])
    )


def _ways_out(setup: Setup, memory_gib: float) -> Iterator[str]:
    frugal = replace(setup, parallel=_frugal(setup.parallel))
    if size := _largest_batch(frugal, memory_gib):
        asked = setup.parallel.enable_gradient_accumulation is True and setup.parts > 1
        yield (
            f"on {setup.devices} devices: runner.micro_batch_size={size} "
            f"parallel.activation_checkpointing=full parallel.strategy={frugal.parallel.strategy}"
            + (" parallel.enable_gradient_accumulation=false" if asked else "")
        )
    least = replace(frugal, micro_batch=1)
    for devices in _DEVICE_COUNTS:
        if devices > setup.devices and _fits(replace(least, devices=devices), memory_gib):
            yield f"{devices} devices of {memory_gib:g} GiB: parallel.strategy=fsdp, micro-batch 1"
            break
    eight_bit = replace(least, eight_bit=True)
    if not (setup.eight_bit or setup.parallel.cpu_offload) and _fits(eight_bit, memory_gib):
        yield f"on {setup.devices} devices: optim.moments=8bit, micro-batch 1"
    if not setup.model.is_lora:
        lora = replace(least, model=_with_lora(setup.model), network=_lora_network(setup))
        if _fits(lora, memory_gib):
            yield f"on {setup.devices} devices: model.is_lora=true, micro-batch 1"
    elif setup.model.lora_base == "full":
        smaller = setup.model.model_copy(update={"lora_base": "nf4"})
        if _fits(replace(least, model=smaller), memory_gib):
            yield f"on {setup.devices} devices: model.lora_base=nf4, micro-batch 1"
    elsewhere = least.parallel.model_copy(update={"cpu_offload": True})
    offloaded = replace(least, parallel=elsewhere, eight_bit=False)
    if not setup.parallel.cpu_offload and _fits(offloaded, memory_gib):
        host = _plan(offloaded).host / GIB
        yield (
            f"on {setup.devices} devices: parallel.cpu_offload=true, micro-batch 1 "
            f"({host:.0f} GiB of host memory per process)"
        )


def _frugal(parallel: ParallelConfig) -> ParallelConfig:
    strategy = parallel.strategy if parallel.strategy == "hsdp" else "fsdp"
    changes = {
        "activation_checkpointing": "full", "kept_blocks": 0, "fill_memory": False,
        "strategy": strategy, "reshard_after_forward": True, "reshard_after_backward": True,
        "enable_gradient_accumulation": False,
    }  # fmt: skip
    return parallel.model_copy(update=changes)


def _with_lora(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"is_lora": True})


def _lora_network(setup: Setup) -> NetworkConfig:
    head = replace(setup.network.head, train_architecture="lora")
    return replace(setup.network, head=head)


def _largest_batch(setup: Setup, memory_gib: float) -> int | None:
    """Return the largest power of two that fits, at most what was asked for."""
    sizes = [2**i for i in range(10) if 2**i <= setup.micro_batch]
    counts = count_parameters(setup.network, is_lora=setup.model.is_lora)
    limit = memory_gib * GIB
    fitting = [
        size
        for size in sizes
        if plan_memory(replace(setup, micro_batch=size), counts).peak <= limit
    ]
    return max(fitting, default=None)


def _plan(setup: Setup) -> MemoryPlan:
    return plan_memory(setup, count_parameters(setup.network, is_lora=setup.model.is_lora))


def _fits(setup: Setup, memory_gib: float) -> bool:
    return _plan(setup).peak <= memory_gib * GIB
