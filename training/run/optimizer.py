"""AdamW with a device-side schedule, a true global gradient norm and one collective skip decision.

Nothing here reads a device value on the host: the count of applied updates, the learning rate, the
clipping factor and the decision to skip a non-finite step all stay on the device, so a step never
waits for its numbers. Moments in eight bits are the exception.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzrobot.errors import ConfigError
from dzrobot.training.cost.memory import moment_block
from dzrobot.training.sft_config import OptimConfig

Group = Mapping[str, Any]
"""``params`` and ``weight_decay``, as an optimizer of torch is given them."""


class EightBitAdamW:
    """AdamW whose moments are kept in eight bits, by torchao, of what this process holds.

    Numbers of a block share a scale (arXiv 2110.02861). Blocks lie within a row of a weight, so
    they are the same however rows are spread over processes, and a checkpoint fits any number.

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
        columns = math.prod(parameter.shape[1:]) // block
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


_UNDECAYED_NAMES = frozenset({"bias", "b", "modulation"})


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: matrices only; no norm, bias or modulation table."""
    return parameter.ndim > 1 and name.rpartition(".")[2] not in _UNDECAYED_NAMES


def schedule_factor(updates: Tensor, config: OptimConfig, max_steps: int) -> Tensor:
    """Return the factor on the peak learning rate after ``updates`` applied updates, float32.

    Linear warm-up, then constant, or a half cosine down to ``config.min_lr_ratio`` at the end of
    the schedule, which a run of ``max_steps`` need not reach.
    """
    warmup = config.warmup_updates(max_steps)
    total_updates = config.schedule_updates(max_steps)
    rise = ((updates + 1) / max(warmup, 1)).clamp(max=1.0)
    if config.lr_scheduler == "constant":
        return rise
    share = ((updates - warmup) / max(total_updates - warmup, 1)).clamp(0.0, 1.0)
    cosine = 0.5 * (1 + torch.cos(math.pi * share))
    return rise * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did; every field is a 0-d float32 tensor on the device."""

    grad_norm: Tensor
    """Global L2 norm of the gradient before clipping."""

    skipped: Tensor
    """1 where the gradient was not finite and nothing was updated, else 0."""

    lr: Tensor
    """Learning rate of this step."""


class _FusedAdamW:
    """torch's AdamW, which skips a step on the device."""

    def __init__(self, groups: Sequence[Group], lr: Tensor, config: OptimConfig) -> None:
        # Fused is the implementation that skips on the device when `found_inf` is set.
        self._adamw = torch.optim.AdamW(
            [dict(group) for group in groups],
            lr=lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for group in groups:
            for parameter in group["params"]:
                # Made now, so that memory does not jump at the first step and a checkpoint can
                # fill it.
                self._adamw.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {key: self._adamw.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}

    def set_updates(self, updates: Tensor) -> None:
        for state in self._adamw.state.values():
            state["step"].copy_(updates)

    def step(self, skipped: Tensor) -> None:
        # What a gradient scaler sets; the fused kernel then leaves weights and moments alone. Not a
        # public name: torch/optim/adam.py, Adam.step reads `getattr(self, "found_inf", None)`
        # (torch 2.13, line 268), and AdamW inherits it.
        vars(self._adamw).update(grad_scale=None, found_inf=skipped)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


class Optimizer:
    """AdamW over named parameters, plain or sharded, that must share one device."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        total_updates: int,
    ) -> None:
        self._config = config
        self._total = total_updates
        self.named = dict(parameters)
        if not self.named:
            raise ConfigError("there is nothing to train: every parameter is frozen")
        device = next(iter(self.named.values())).device
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        # One tensor shared by all groups: the schedule writes it in place.
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        decayed = [p for name, p in self.named.items() if is_decayed(name, p)]
        plain = [p for name, p in self.named.items() if not is_decayed(name, p)]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        rule = _FusedAdamW if config.moments == "fp32" else EightBitAdamW
        self._rule = rule([group for group in groups if group["params"]], self._lr, config)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return both moments of every parameter, by name; the optimizer's own tensors."""
        return {name: self._rule.moments(p) for name, p in self.named.items()}

    def set_updates(self) -> None:
        """Take over ``updates`` as the step count of every parameter, after it was restored."""
        self._rule.set_updates(self.updates)

    def step(self) -> StepOutcome:
        """Clip, update unless the gradient is not finite anywhere, and clear the gradients."""
        norm = global_norm(self._gradients())
        torch.nn.utils.clip_grads_with_norm_(self.named.values(), self._config.clip_grad, norm)
        skipped = 1.0 - torch.isfinite(norm).float()
        self._lr.copy_(self._config.lr * schedule_factor(self.updates, self._config, self._total))
        self._rule.step(skipped)
        self.updates += 1.0 - skipped
        return StepOutcome(grad_norm=norm.detach(), skipped=skipped, lr=self._lr.clone())

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self.named.values():
            if parameter.grad is not None:
                yield parameter.grad


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm over all shards of all gradients, 0-d float32, equal on every rank.

    A NaN on one rank is a NaN on all, which is what makes the decision to skip a step collective.
    """
    # Squares of bfloat16 would lose the norm; master weights are float32, adapters on request too.
    norm = torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Ema:
    """Exponential moving average of parameters, shard by shard.

    Steps that were skipped leave the average as it is.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = parameters
        self.average = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Move the average towards the parameters; by nothing where ``skipped`` is 1."""
        weight = (1.0 - self.decay) * (1.0 - skipped)
        for name, average in self.average.items():
            # In place and one by one: a foreach version would hold a second copy of the model.
            local_part(average).lerp_(local_part(self._parameters[name].detach()), weight)
