"""AdamW whose moments are kept in eight bits, by torchao.

Numbers of a block share a scale (arXiv 2110.02861). Blocks lie within a row of a weight, so they
are the same however rows are spread over processes, and a checkpoint fits any number of them.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzrobot.training.cost.memory import moment_block
from dzrobot.training.sft_config import OptimConfig

Group = Mapping[str, Any]
"""``params`` and ``weight_decay``, as an optimizer of torch is given them."""


class EightBitAdamW:
    """Updates the part of each parameter that this process holds.

    Args:
        groups: Parameters, plain or sharded by rows.
        lr: Learning rate, a tensor that the schedule writes.
        config: Decays and epsilon.
    """

    def __init__(self, groups: Sequence[Group], lr: Tensor, config: OptimConfig) -> None:
        from torchao.optim import AdamW8bit

        self._pairs = [
            (parameter, local_part(parameter.detach()))
            for group in groups
            for parameter in group["params"]
        ]
        own = {id(parameter): part for parameter, part in self._pairs}
        self._adamw = AdamW8bit(
            [{**group, "params": [own[id(p)] for p in group["params"]]} for group in groups],
            lr=lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps,
        )  # fmt: skip
        self._moments: dict[int, dict[str, Tensor]] = {}
        for parameter, part in self._pairs:
            kept, state = _new_moments(parameter, part)
            self._moments[id(parameter)] = kept
            self._adamw.state[part] = state

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return codes and scales of both moments, or the moments; sharded as the parameter is."""
        return self._moments[id(parameter)]

    def set_updates(self, updates: Tensor) -> None:
        """Take over ``updates`` as the step count of every parameter."""
        for _, part in self._pairs:
            self._adamw.state[part]["step"].copy_(updates)

    def step(self, skipped: Tensor) -> None:
        """Update, unless ``skipped`` is 1: that number is read, since torchao cannot be told."""
        for parameter, part in self._pairs:
            # An empty part has no block, and nothing to update.
            has_some = parameter.grad is not None and part.numel()
            part.grad = local_part(parameter.grad.detach()) if has_some else None  # type: ignore[union-attr]
        on_cpu = self._pairs[0][1].device.type == "cpu"
        # There it would compile every shape, which takes longer than it saves.
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            if not skipped.item():
                self._adamw.step()
        for parameter, part in self._pairs:
            part.grad = parameter.grad = None


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of ``tensor``, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _new_moments(parameter: Tensor, part: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return zero moments as a checkpoint holds them, and as torchao does, in the same memory."""
    from torchao.optim.subclass_8bit import OptimState8bit

    kept: dict[str, Tensor] = {}
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=part.device)}
    block = moment_block(tuple(parameter.shape))
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        if block is None or not part.numel():
            state[name] = torch.zeros_like(part)
        else:
            state[name] = OptimState8bit.zeros(part.shape, signed, block, part.device, part.dtype)
        if block is None:
            kept[name] = _as_sharded(state[name], parameter, tuple(parameter.shape))
            continue
        columns = prod(parameter.shape[1:]) // block
        codes, scale = (
            (state[name].codes, state[name].scale) if part.numel()
            else (torch.zeros_like(part, dtype=torch.uint8), part.new_zeros(0))
        )  # fmt: skip
        kept[f"{name}_codes"] = _as_sharded(codes, parameter, tuple(parameter.shape))
        kept[f"{name}_scale"] = _as_sharded(
            scale.view(len(part), columns), parameter, (len(parameter), columns)
        )
    return kept, state


def _as_sharded(part: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``part`` as this process's part of a tensor of ``shape``, split as ``parameter``."""
    if not isinstance(parameter, DTensor):
        return part
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape),
        stride=strides,
    )  # fmt: skip
