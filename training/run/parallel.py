"""The processes of a run, and how a network is laid out over them: recompute, compile, shard.

Every strategy is the same code over another mesh. ``fsdp`` shards over all ranks, ``hsdp`` within
groups, ``ddp`` is groups of one rank, ``single`` one group of one rank; so mixed precision, the
gradient norm and checkpoints behave alike everywhere. The frozen encoders are sharding roots of
their own, outside the trained network.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.compiling import CompileNotice
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.recorded_blocks import (
    RecordedBlock,
    RecordedBlocks,
    recordable_devices,
)
from dzrobot.policies.dreamzero.quantize import multiplies_fp8
from dzrobot.process import end_with_launcher
from dzrobot.training.sft_config import ParallelConfig, SFTConfig

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class DistributedEnvironment:
    """This process among all processes of the run."""

    rank: int
    """Index among all processes."""

    size: int
    """Processes of the run."""

    local_size: int
    """Processes on this machine."""

    device: torch.device
    """Where this process computes."""

    host_group: dist.ProcessGroup
    """Group for small host-side messages, apart from the gradient traffic."""

    save_group: dist.ProcessGroup
    """Group of the background checkpoint writer, which must not share one with the training loop.
    """

    @property
    def is_main(self) -> bool:
        """Return whether this process writes logs and exports."""
        return self.rank == 0

    def gathered(self, value: _Value) -> list[_Value]:
        """Return the ``value`` of every process, by rank. Collective."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def from_main(self, value: _Value) -> _Value:
        """Return the main process's ``value`` in all processes. Collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        return values[0]


def set_cuda_defaults() -> None:
    """Set what CUDA's libraries read when they start, where the environment does not set it.

    Without segments that grow, fragmentation costs large batches some gigabytes. Without a fixed
    workspace, cuBLAS refuses to give equal bits (``runner.deterministic``).
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def init_distributed(device_type: str | None = None) -> DistributedEnvironment:
    """Join the run that torchrun started, or make one of a single process.

    Args:
        device_type: ``cuda`` or ``cpu``; None for an accelerator where there is one.

    Raises:
        ConfigError: More processes on this machine than accelerators.
    """
    end_with_launcher()
    set_cuda_defaults()
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local_rank} of this machine has no accelerator of its own: there are "
            f"{torch.cuda.device_count()}. Start torchrun with --nproc-per-node "
            f"{torch.cuda.device_count()}."
        )
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    # Offloaded gradients and checkpoints are host tensors, hence gloo next to NCCL.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        # The heartbeat finds a hang: a timeout here would be one of compiling as well.
        dist.init_process_group(backend, timeout=HOST_PATIENCE)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return DistributedEnvironment(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=device,
        host_group=dist.new_group(backend="gloo", timeout=HOST_PATIENCE),
        save_group=dist.new_group(backend="gloo", timeout=HOST_PATIENCE),
    )


HOST_PATIENCE = timedelta(hours=24)
"""Longest time that processes wait for what the main one does alone, such as an export. Gloo's own,
30 minutes, is too short for that. Where the main process has ended, the others see it at once.
"""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_WRAPPED = "_checkpoint_wrapped_module."


def clean_name(name: str) -> str:
    """Return a parameter name without the marks of checkpoint wrappers."""
    return name.replace(_WRAPPED, "")


def parallelize(
    network: nn.Module, blocks: nn.ModuleList, config: ParallelConfig, world: DistributedEnvironment
) -> DeviceMesh:
    """Lay ``network`` out over ``world``; ``blocks`` are its equal transformer blocks.

    Returns:
        The mesh, of dimensions ``replicate`` and ``shard``.
    """
    assert config.compile != "auto", "decided by settle()"
    mesh = build_mesh(config, world)
    if config.float8:
        use_float8(blocks, world.device)
    if config.cuda_graphs == "blocks":
        record_blocks(blocks, config, world.device)
    else:
        checkpoint_activations(blocks, config)
    if config.compile:
        # What is recorded is what a block's compiled code launches.
        compile_blocks(one.block if isinstance(one, RecordedBlock) else one for one in blocks)
    shard(network, list(blocks), config, mesh)
    return mesh


def use_float8(blocks: nn.ModuleList, device: torch.device) -> None:
    """Run the linear layers of ``blocks`` in float8, inputs and weights scaled by row, by torchao.

    Weights, their gradients and the optimizer stay as they are. A processor emulates it.

    Raises:
        ConfigError: The accelerator has no products in float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if device.type != "cpu" and not multiplies_fp8(device):
        raise ConfigError(
            f"parallel.float8: {torch.cuda.get_device_name(device)} has no products in float8, "
            "which came with Ada and Hopper; leave it out"
        )
    rows = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(blocks, config=replace(rows, emulate=device.type == "cpu"))


def device_memory(device: torch.device) -> float:
    """Return the memory of an accelerator in bytes; 0 of a processor, whose memory is shared."""
    if device.type != "cuda":
        return 0.0
    return float(torch.cuda.get_device_properties(device).total_memory)


def compile_notice(
    config: SFTConfig, network: NetworkConfig, world: DistributedEnvironment
) -> CompileNotice:
    """Return what tells the user that a run compiles its network; on the main process alone."""
    dit, parallel, runner = network.dit, config.parallel, config.runner
    return CompileNotice(
        what=f"{dit.num_layers} blocks, {dit.dim} wide, and what encodes images",
        key=repr((network, parallel, config.model.is_lora, runner.micro_batch_size)),
        device=world.device, is_on=world.is_main and parallel.compile is True,
    )  # fmt: skip


def build_mesh(config: ParallelConfig, world: DistributedEnvironment) -> DeviceMesh:
    """Return the (replicate, shard) mesh of ``config.strategy``.

    Raises:
        ConfigError: The strategy does not fit the number of processes.
    """
    match config.strategy:
        case "single" if world.size > 1:
            raise ConfigError(
                f"parallel.strategy='single' but there are {world.size} processes: choose fsdp, "
                "hsdp or ddp"
            )
        case "single" | "ddp":
            width = 1
        case "hsdp":
            width = config.shard_size or world.local_size
        case "fsdp":
            width = world.size
    if world.size % width:
        raise ConfigError(f"parallel.shard_size={width} does not divide {world.size} processes")
    shape = (world.size // width, width)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def checkpoint_activations(blocks: nn.ModuleList, config: ParallelConfig) -> None:
    """Wrap each block so that its backward pass recomputes what ``config`` does not keep."""
    if config.activation_checkpointing == "none":
        return
    extra: dict[str, Any] = {}
    if config.activation_checkpointing == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    # Blocks at the end keep their activations: those are freed first in the backward pass.
    for i in range(len(blocks) - config.kept_blocks):
        # No dropout and no draws inside a block, so there is no random state to restore.
        blocks[i] = checkpoint_wrapper(blocks[i], preserve_rng_state=False, **extra)


def record_blocks(blocks: nn.ModuleList, config: ParallelConfig, device: torch.device) -> None:
    """Let each block that keeps no activations run by a recording, which recomputes it.

    Raises:
        ConfigError: ``device`` records nothing.
    """
    if device.type not in recordable_devices:
        raise ConfigError(
            "parallel.cuda_graphs='blocks' records what a GPU is given to do, and this run is on "
            f"{device.type}; leave it out"
        )
    recorded = RecordedBlocks(device)
    for i in range(len(blocks) - config.kept_blocks):
        blocks[i] = RecordedBlock(blocks[i], recorded)


def _expensive_ops() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset({
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch._higher_order_ops.flex_attention,
    })  # fmt: skip


_EXPENSIVE = _expensive_ops()


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of matrix products and attention; element-wise work is recomputed."""
    return CheckpointPolicy.MUST_SAVE if op in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def shard(
    network: nn.Module, blocks: Sequence[nn.Module], config: ParallelConfig, mesh: DeviceMesh
) -> None:
    """Make each block a sharding unit, then the rest of ``network`` the root unit."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision(config),
        "offload_policy": _offload(config, mesh),
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    # The root is needed first in forward and last in backward: freeing it between would gather it
    # twice.
    fully_shard(network, reshard_after_forward=False, **options)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            # Losses are already divided by the global count: ranks add up. Gloo cannot pre-
            # multiply.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch([block for block in blocks if isinstance(block, FSDPModule)], config.prefetch_blocks)


@contextmanager
def reading_outputs() -> Iterator[None]:
    """Leave out torch's warning about writing into what a sharded network returns.

    Only for a forward pass whose results are read and never written into.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


def precision(config: ParallelConfig) -> MixedPrecisionPolicy:
    """Return weights and products in ``param_dtype``, sums over ranks in ``reduce_dtype``.

    Inputs are never cast: in bfloat16 neighboring timesteps above 256 round to the same value.
    """
    compute = None if config.param_dtype == "fp32" else DTYPES[config.param_dtype]
    return MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=DTYPES[config.reduce_dtype], cast_forward_inputs=False
    )


def _offload(config: ParallelConfig, mesh: DeviceMesh) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    # Pinning needs a driver, which a machine without an accelerator lacks.
    return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")


def _prefetch(blocks: list[FSDPModule], ahead: int) -> None:
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(i - ahead, 0) : i][::-1])


def before_micro_batch(network: nn.Module, config: ParallelConfig, *, is_last: bool) -> None:
    """Set which gradients the next backward pass sums over processes, and what it frees.

    Args:
        network: The sharded network.
        config: Layout; see its ``enable_gradient_accumulation`` and ``reshard_after_backward``.
        is_last: Whether it is the last one of the step.
    """
    if not isinstance(network, FSDPModule):
        raise TypeError(f"a {type(network).__name__} was not laid out by parallelize()")
    network.set_requires_gradient_sync(is_last or config.enable_gradient_accumulation is not True)
    network.set_requires_all_reduce(is_last or config.enable_gradient_accumulation is False)
    network.set_reshard_after_backward(is_last or config.reshard_after_backward)


def shard_frozen(encoder: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shard a frozen encoder as a root of its own; it must be called through ``encoder`` only."""
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(encoder, mesh=mesh, reshard_after_forward=True)


def shard_table(network: nn.Module) -> list[tuple[str, int, int]]:
    """Return (unit, parameters, parameters on this rank) of every sharding unit."""
    rows = []
    for name, module in network.named_modules():
        if not _is_unit(module):
            continue
        inner = [m for m in module.modules() if _is_unit(m) and m is not module]
        taken = {id(p) for unit in inner for p in unit.parameters()}
        own = [p for p in module.parameters() if id(p) not in taken]
        local = sum(_local_numel(p) for p in own)
        rows.append((clean_name(name) or "(root)", sum(p.numel() for p in own), local))
    return rows


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _local_numel(parameter: nn.Parameter) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
