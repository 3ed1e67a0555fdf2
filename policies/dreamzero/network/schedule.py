"""Noise levels: the training tables and the solver that takes noise to samples.

Timesteps and noise levels stay in float32 or exact integers here whatever the network computes in:
in bf16 neighbouring timesteps above 256 round to the same value.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from dzrobot.errors import ConfigError

TRAIN_STEPS = 1000
SHIFT = 5.0
INFERENCE_STEPS = 16


@dataclass(frozen=True)
class TrainingSchedule:
    """Noise levels by index, 0 pure noise; float32 (docs/model.md, sections 3.2 and 3.3)."""

    sigmas: Tensor
    """Share of noise, (1000,), from 1 down."""

    timesteps: Tensor
    """What the transformer is told, (1000,), 1000 times the share of noise."""

    weights: Tensor
    """Weight of a frame's or action's loss, (1000,), summing to 1000."""

    @classmethod
    def on(cls, device: torch.device | str) -> "TrainingSchedule":
        """Return the tables on ``device``."""
        # In float32, step by step: one last digit of a timestep moves the time embedding by 1e-5,
        # and these are the values that published networks were trained with.
        linear = torch.linspace(1, 0, TRAIN_STEPS + 1, device="cpu")[:-1]
        sigmas = SHIFT * linear / (1 + (SHIFT - 1) * linear)
        timesteps = sigmas * TRAIN_STEPS
        bell = torch.exp(-2 * ((timesteps - TRAIN_STEPS / 2) / TRAIN_STEPS) ** 2)
        weights = bell - bell.min()
        weights = weights * (TRAIN_STEPS / weights.sum())
        return cls(*(table.float().to(device) for table in (sigmas, timesteps, weights)))

    def add_noise(self, clean: Tensor, noise: Tensor, index: Tensor, *, axis: int) -> Tensor:
        """Return (1 - sigma) clean + sigma noise, in the dtype of ``clean``.

        Args:
            clean: Batch first, frames or steps along ``axis``.
            noise: As ``clean``.
            index: Noise level of each frame or step, (B, length of ``axis``) int64.
            axis: 2 for latents (B, C, F, h, w), 1 for actions (B, T, A).
        """
        shape = [1] * clean.ndim
        shape[0], shape[axis] = clean.shape[0], clean.shape[axis]
        sigma = self.sigmas[index].view(shape).to(clean.dtype)
        return (1 - sigma) * clean + sigma * noise


def velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """Return what the network learns to predict."""
    return noise - clean


@dataclass(frozen=True, eq=False)
class InferenceSchedule:
    """The UniPC solver (order 2, bh2) for fixed noise levels; see :func:`inference_schedule`.

    The solver is linear: the sample after step k is a fixed combination of the starting noise and
    of the velocities predicted so far. The library's solver is run once on unit vectors to read the
    coefficients off. A step then costs one weighted sum in float32, without transfers between
    devices and without any state but the :class:`Trajectory`'s (docs/model.md, section 4.2).
    """

    sigmas: tuple[float, ...]
    """Share of noise before each step and after the last."""

    timesteps: tuple[int, ...]
    """What the transformer is told at each step."""

    coefficients: Tensor
    """(steps, steps + 1) float32: sample after a step from the noise and all velocities."""

    @property
    def steps(self) -> int:
        """Return the number of solver steps."""
        return len(self.timesteps)

    def start(self, noise: Tensor) -> "Trajectory":
        """Return a new trajectory from ``noise`` (batch first, any shape)."""
        return Trajectory(self.coefficients.to(noise.device), noise)


class Trajectory:
    """One solution in the making: everything a solver remembers between its steps."""

    def __init__(self, coefficients: Tensor, noise: Tensor) -> None:
        """Start at ``noise``; see :meth:`InferenceSchedule.start`."""
        self._coefficients = coefficients
        self._terms = [noise.float()]
        self.sample = noise
        """The current sample, in the dtype of the noise."""

    @property
    def step_index(self) -> int:
        """Return the number of steps taken."""
        return len(self._terms) - 1

    def step(self, velocity: Tensor) -> Tensor:
        """Take the predicted ``velocity`` at the current sample; return the next sample."""
        row = self._coefficients[self.step_index]
        self._terms.append(velocity.float())
        sample = row[0] * self._terms[0]
        for i, term in enumerate(self._terms[1:], start=1):
            # Term by term, so that the result does not depend on how many samples share the batch.
            sample = torch.addcmul(sample, row[i], term)
        self.sample = sample.to(self.sample.dtype)
        return self.sample


@lru_cache(maxsize=16)
def inference_schedule(
    steps: int = INFERENCE_STEPS, *, shift: float = SHIFT, final_noise: float = 0.0
) -> InferenceSchedule:
    """Return the solver with ``steps`` steps.

    Args:
        steps: Solver steps, at least 2.
        shift: How strongly noise levels crowd near pure noise.
        final_noise: Noise share at which the solution stops; above zero for video that is only to
            be denoised in part (docs/model.md, section 4.1, decoupled inference).

    Raises:
        ConfigError: ``steps`` or ``final_noise`` is out of range.
    """
    if steps < 2 or not 0 <= final_noise < 1:
        raise ConfigError(
            f"steps={steps}, final_noise={final_noise}: steps must be at least 2 and final_noise "
            f"in [0, 1); the published values are {INFERENCE_STEPS} and 0 or 0.8"
        )
    solver = _library_solver(steps, shift, final_noise)
    units = torch.eye(steps + 1, dtype=torch.float64, device="cpu")[:, None, None]
    rows, sample = [], units[0]
    for timestep, unit in zip(solver.timesteps, units[1:], strict=True):
        (sample,) = solver.step(unit, timestep, sample, return_dict=False)
        rows.append(sample.flatten())
    return InferenceSchedule(
        sigmas=tuple(solver.sigmas.tolist()),
        timesteps=tuple(solver.timesteps.tolist()),
        coefficients=torch.stack(rows).float(),
    )


def _library_solver(steps: int, shift: float, final_noise: float) -> UniPCMultistepScheduler:
    """Return the library's solver at the published noise levels."""
    solver = UniPCMultistepScheduler(
        num_train_timesteps=TRAIN_STEPS,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
    )
    # The library's own levels start at 1.0; the published ones at the float32 value of 0.999.
    solver.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1])
    if final_noise:
        first = solver.sigmas[0]
        solver.sigmas = solver.sigmas * (first - final_noise) / first + final_noise
        solver.timesteps = (solver.sigmas[:-1] * TRAIN_STEPS).long()
    solver.set_begin_index(0)
    return solver
