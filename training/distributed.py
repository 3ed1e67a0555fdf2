"""The processes of one run: ranks, devices, process groups."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dzrobot.errors import ConfigError


@dataclass(frozen=True)
class DistributedEnvironment:
    """This process among all processes of the run."""

    rank: int
    """Index among all processes."""

    size: int
    """Processes of the run."""

    local_rank: int
    """Index on this machine."""

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


def set_cuda_defaults() -> None:
    """Set what CUDA's libraries read when they start, where the environment does not say it.

    Without segments that grow, fragmentation costs large batches some gigabytes. Without a fixed
    workspace, cuBLAS refuses to give equal bits (``runner.deterministic``).
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def indexed(device: torch.device) -> torch.device:
    """Return ``device`` as its tensors name it: ``cuda`` is one of several, ``cuda:0`` is one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def init_distributed(device_type: str | None = None) -> DistributedEnvironment:
    """Join the run that torchrun started, or make one of a single process.

    Args:
        device_type: ``cuda`` or ``cpu``; None for an accelerator where there is one.

    Raises:
        ConfigError: More processes on this machine than accelerators.
    """
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
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return DistributedEnvironment(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=device,
        host_group=dist.new_group(backend="gloo"),
        save_group=dist.new_group(backend="gloo"),
    )
