"""Plans that continue the one a robot is still executing: real-time chunking.

While a plan is made, the robot executes rows of the last one. The new plan has to begin with them
and to leave them smoothly. ``guided`` steers any network there while it denoises (Black et al.,
arXiv 2506.07339), with the identity in place of the denoiser's Jacobian: the exact one costs two to
three times the work and changes the result little. ``trained`` gives the rows to a network that was
trained with clean first rows (arXiv 2512.05964).

Shapes: B sessions, A actions, M width of an action.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dzrobot.errors import ConfigError

Weights = Literal["linear", "exp"]
"""How what is known of a plan fades where it overlaps the running one."""

Method = Literal["guided", "trained"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Continuation:
    """What the coming plan of one session continues."""

    action_AM: Tensor
    """Normalized rows of the running plan, from the step of the newest frame on."""

    mask_M: Tensor
    """True on the robot's own dimensions."""

    delay: int
    """Rows that are executed before the new plan is there; it repeats them exactly."""

    end: int
    """Rows that the running plan has; from ``delay`` to here it is followed ever more loosely."""

    method: Method = "guided"
    strength: float | None = None
    """Most that the guidance is multiplied by; None: the number of solver steps."""

    weights: Weights = "linear"

    def __post_init__(self) -> None:
        if not 0 < self.delay <= self.end <= self.action_AM.shape[0]:
            raise ConfigError(
                f"delay={self.delay} and end={self.end} of a plan of {self.action_AM.shape[0]} "
                "actions: a plan continues 1 to `end` rows, and has as many as the network makes"
            )


def overlap_weights(horizon: int, delay: int, end: int, shape: Weights = "linear") -> Tensor:
    """Return how much of each row is known, (horizon,): 1 before ``delay``, 0 from ``end`` on."""
    weights = torch.zeros(horizon)
    start = min(delay, end)
    weights[:start] = 1
    for row in range(start, end):
        left = (end - row) / (end - start + 1)
        bent = left * (math.exp(left) - 1) / (math.e - 1)
        weights[row] = left if shape == "linear" else bent
    return weights


def guidance_factor(sigma: float, strength: float) -> float:
    """Return what the guidance is multiplied by at a share ``sigma`` of noise."""
    clean = 1 - sigma
    return min(strength, (sigma**2 + clean**2) / (sigma * clean)) if clean > 0 else strength


@dataclass(frozen=True, eq=False)
class Continuations:
    """The continuations of a batch; sessions without one are left as they are."""

    known_BAM: Tensor
    """Normalized rows of the running plans, float32."""

    weights_BAM: Tensor
    """How closely each number of them is followed."""

    strength_B11: Tensor
    """Most that the guidance is multiplied by."""

    prefix_BA: Tensor
    """True on the rows that are repeated exactly."""

    trained_BA: Tensor
    """True on the rows that the network is given without noise."""

    trained: bool
    """Whether there are such rows, so that rows differ in their timestep."""

    @classmethod
    def of(
        cls, parts: Sequence[Continuation | None], like_BAM: Tensor, solver_steps: int
    ) -> "Continuations":
        """Put them together.

        Args:
            parts: One for each session; None: its plan starts over.
            like_BAM: A batch of actions on the network's device.
            solver_steps: What ``strength`` is if it is not said.
        """
        sessions, horizon, _ = like_BAM.shape
        known_BAM = torch.zeros(like_BAM.shape, device=like_BAM.device)
        weights_BAM = torch.zeros_like(known_BAM)
        strength_B11 = torch.zeros(sessions, 1, 1, device=like_BAM.device)
        prefix_BA = torch.zeros(sessions, horizon, dtype=torch.bool, device=like_BAM.device)
        trained_BA = torch.zeros_like(prefix_BA)
        for index, part in enumerate(parts):
            if part is None:
                continue
            known_BAM[index] = part.action_AM.to(like_BAM.device)
            prefix_BA[index, : part.delay] = True
            if part.method == "trained":
                trained_BA[index, : part.delay] = True
                continue
            weights_A = overlap_weights(horizon, part.delay, part.end, part.weights)
            weights_BAM[index] = (weights_A[:, None] * part.mask_M.cpu()).to(like_BAM.device)
            strength_B11[index] = solver_steps if part.strength is None else part.strength
        trained = any(part is not None and part.method == "trained" for part in parts)
        return cls(known_BAM, weights_BAM, strength_B11, prefix_BA, trained_BA, trained)

    def shown(self, sample_BAM: Tensor, timestep_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the network sees: trained rows are given, and free of noise."""
        if not self.trained:
            return sample_BAM, timestep_BA
        known_BAM = self.known_BAM.to(sample_BAM.dtype)
        given_BAM = torch.where(self.trained_BA[..., None], known_BAM, sample_BAM)
        return given_BAM, timestep_BA.masked_fill(self.trained_BA, 0)

    def guided(self, flow_BAM: Tensor, sample_BAM: Tensor, sigma: float) -> Tensor:
        """Return the velocity that leads to what is known as well.

        Args:
            flow_BAM: Predicted velocity, noise minus action.
            sample_BAM: Sample that it was predicted at.
            sigma: Share of noise in the sample.
        """
        flow_BAM = flow_BAM.float()
        clean_BAM = sample_BAM.float() - sigma * flow_BAM
        factor_B11 = self.strength_B11.clamp(max=guidance_factor(sigma, math.inf))
        return flow_BAM - factor_B11 * self.weights_BAM * (self.known_BAM - clean_BAM)

    def closed(self, sample_BAM: Tensor) -> Tensor:
        """Return the actions, their first rows exactly as known."""
        known_BAM = self.known_BAM.to(sample_BAM.dtype)
        return torch.where(self.prefix_BA[..., None], known_BAM, sample_BAM)
