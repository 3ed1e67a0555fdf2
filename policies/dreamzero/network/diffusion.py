"""Diffusion: noise levels, noise of training samples, the solver and which steps run the network.

Source: docs/model.md, sections 3.2 and 4.2. A generator per sample makes a sample's noise
independent of what else is in the batch. Timesteps and noise levels stay in float32 or exact
integers whatever the network computes in: in bf16 neighboring timesteps above 256 round to the same
value.

Shapes: B batch, C latent channels, F latent frames, Y latent rows, X latent columns, A actions, M
width of an action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import DiTConfig, HeadConfig, Solver

TRAIN_STEPS = 1000
SHIFT = 5.0
INFERENCE_STEPS = 16

DYNAMIC = "dynamic"
_STATIC_STEPS: dict[int, frozenset[int]] = {
    5: frozenset({0, 1, 2, 7, 12}),
    6: frozenset({0, 1, 5, 10, 14, 15}),
    7: frozenset({0, 1, 2, 6, 10, 14, 15}),
    8: frozenset({0, 1, 2, 6, 10, 13, 14, 15}),
}
_STATIC_TOTAL = 16
_SKIPS = ((0.95, 4), (0.93, 2))
"""Above this cosine between the last two results, skip so many steps."""


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
    """A solver for fixed noise levels; see :func:`inference_schedule`.

    UniPC (order 2, bh2) is linear: the sample after step k is a fixed combination of the starting
    noise and of the velocities predicted so far. The solver is run once on unit vectors to read the
    coefficients off. A step then costs one weighted sum in float32, without transfers
    between devices and without any state but the :class:`Trajectory`'s (docs/model.md, section
    4.2).
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
        return Trajectory(_on(self, noise.device), noise)


# Never dropped: recorded work reads them by address.
@cache
def _on(schedule: InferenceSchedule, device: torch.device) -> Tensor:
    """Return the solver's coefficients on ``device``, sent there once."""
    # Kept tables may first be asked for in inference mode and later be needed in training.
    with torch.inference_mode(mode=False):
        return schedule.coefficients.to(device)


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
    steps: int = INFERENCE_STEPS,
    *,
    final_noise: float = 0.0,
    solver: Solver = "unipc",
) -> InferenceSchedule:
    """Return the solver with ``steps`` steps.

    Args:
        steps: Solver steps.
        final_noise: Noise share at which the solution stops; above zero for video that is only to
            be denoised in part (docs/model.md, section 4.1, decoupled inference).
        solver: Which one; both have the same levels.

    Raises:
        ConfigError: ``steps`` or ``final_noise`` is out of range.
    """
    if steps < 1 or not 0 <= final_noise < 1:
        raise ConfigError(
            f"steps={steps}, final_noise={final_noise}: steps must be at least 1 and final_noise "
            f"in [0, 1); the published values are {INFERENCE_STEPS} and 0 or 0.8"
        )
    sigmas, timesteps = _levels(steps, final_noise)
    coefficients = _euler(sigmas) if solver == "euler" else _unipc(sigmas)
    return InferenceSchedule(
        sigmas=tuple(sigmas.tolist()),
        timesteps=tuple(timesteps.tolist()),
        coefficients=coefficients.float(),
    )


def _unipc(sigmas: Tensor) -> Tensor:
    """Return UniPC's coefficients; what it does is done to unit vectors, in float64."""
    steps = len(sigmas) - 1
    units = torch.eye(steps + 1, dtype=torch.float64, device="cpu")
    rows, clean = [], list[Tensor]()
    before, sample, order = units[0], units[0], 0
    for k in range(steps):
        found = sample - sigmas[k] * units[k + 1]
        if k:
            sample = _unipc_step(sigmas[: k + 1], before, clean, order, found)
        clean.append(found)
        # The first step has nothing before it, and the last one takes no risk.
        order = min(2, steps - k, k + 1)
        before = sample
        sample = _unipc_step(sigmas[: k + 2], before, clean, order)
        rows.append(sample)
    return torch.stack(rows)


def _unipc_step(
    sigmas: Tensor, x: Tensor, clean: list[Tensor], order: int, found: Tensor | None = None
) -> Tensor:
    """Return the sample at the last of ``sigmas`` from the one before, ``x``.

    Args:
        sigmas: Noise levels so far, float32; logarithms of their ratios are in float32 as well.
        x: Sample at the last level but one.
        clean: Clean samples that were predicted at the levels before the last.
        order: 1 or 2.
        found: The one predicted at the last level, to correct the sample there; None: predict it.
    """

    def level(place: int) -> Tensor:
        return torch.log(1 - sigmas[place]) - torch.log(sigmas[place])

    newest = clean[-1]
    h = level(-1) - level(-2)
    base = torch.expm1(-h)
    curve: Tensor | int = 0
    weights = torch.full((2,), 0.5, dtype=x.dtype, device="cpu")
    if order == 2:
        ratio = (level(-3) - level(-2)) / h
        curve = (clean[-2] - newest) / ratio
        if found is not None:
            one = torch.ones((), device="cpu")
            powers = torch.stack([torch.stack([one, one]), torch.stack([ratio, one])])
            first = base / -h - 1
            second = first / -h - 0.5
            wanted = torch.stack([first / base, second * 2 / base])
            weights = torch.linalg.solve(powers, wanted).to(x.dtype)
    change = weights[0] * curve
    if found is not None:
        change = change + weights[1] * (found - newest)
    alpha = 1 - sigmas[-1]
    moved = sigmas[-1] / sigmas[-2] * x - alpha * base * newest
    return moved - alpha * base * change


def _euler(sigmas: Tensor) -> Tensor:
    lengths = sigmas.double().diff()
    taken = lengths.expand(len(lengths), -1).tril()
    return torch.cat([torch.ones_like(taken[:, :1]), taken], dim=1)


def _levels(steps: int, final_noise: float) -> tuple[Tensor, Tensor]:
    """Return the published noise levels (steps + 1,) float32, and timesteps (steps,) int64."""
    # The first level is the float32 value of 0.999.
    linear = np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1]
    shifted = SHIFT * linear / (1 + (SHIFT - 1) * linear)
    # At 1 a logarithm would be infinite.
    shifted[0] -= 1e-6 if abs(shifted[0] - 1) < 1e-6 else 0
    sigmas = torch.from_numpy(np.append(shifted, 0).astype(np.float32))
    timesteps = torch.from_numpy(shifted * TRAIN_STEPS).long()
    if final_noise:
        sigmas = sigmas * (sigmas[0] - final_noise) / sigmas[0] + final_noise
        timesteps = (sigmas[:-1] * TRAIN_STEPS).long()
    return sigmas, timesteps


@dataclass(frozen=True, eq=False, kw_only=True)
class DiffusionNoise:
    """What is random about the training samples of a batch."""

    video_BCFYX: Tensor
    frame_index_BF: Tensor
    """Noise level of every frame, int64, 0 pure noise to 999; equal inside a block."""

    action_BAM: Tensor
    action_index_BA: Tensor
    """Noise level of every action, int64."""

    given_BA: Tensor | None = None
    """True on actions that the network sees without noise and is not asked for; None: none."""

    hides_video_B: Tensor | None = None
    """True for samples whose actions do not see the noisy video, which is not asked for then;
    None: none."""

    @classmethod
    def of(
        cls,
        config: DiTConfig,
        video_BCFYX: Tensor,
        action_BAM: Tensor,
        frame_index_BF: Tensor,
        action_index_BA: Tensor | None = None,
    ) -> "DiffusionNoise":
        """Return noise from raw draws: the first frame of a block speaks for the block.

        Args:
            config: The transformer.
            video_BCFYX: Standard normal.
            action_BAM: Standard normal.
            frame_index_BF: One raw index per frame.
            action_index_BA: One index per action; None to take over that of the block's video.
        """
        first_BN = frame_index_BF[:, 1 :: config.num_frame_per_block]
        shared_BF = torch.cat(
            [
                frame_index_BF[:, :1],
                first_BN.repeat_interleave(config.num_frame_per_block, dim=1),
            ],
            dim=1,
        )
        if action_index_BA is None:
            action_index_BA = first_BN.repeat_interleave(config.num_action_per_block, dim=1)
        return cls(
            video_BCFYX=video_BCFYX,
            frame_index_BF=shared_BF,
            action_BAM=action_BAM,
            action_index_BA=action_index_BA,
        )


@dataclass(frozen=True)
class NoiseShape:
    """Sizes of one sample."""

    latent: tuple[int, int, int, int]
    """(C, F, Y, X)."""

    action: tuple[int, int]
    """(A, M)."""


def draw_noise(
    dit: DiTConfig,
    head: HeadConfig,
    shape: NoiseShape,
    generators: Sequence[torch.Generator],
    device: torch.device | str,
) -> DiffusionNoise:
    """Return float32 noise on ``device``, sample b drawn from ``generators[b]`` alone.

    Order of the draws: video noise, frame indices, action noise, action indices if decoupled.
    """
    draws = [_draw(head, shape, generator) for generator in generators]
    video, frames, action, actions = (
        torch.stack(parts).to(device, non_blocking=True) for parts in zip(*draws, strict=True)
    )
    decoupled = head.decouple_video_action_noise
    return DiffusionNoise.of(dit, video, action, frames, actions if decoupled else None)


def draw_given(
    dit: DiTConfig, actions: int, most: int, generators: Sequence[torch.Generator]
) -> Tensor:
    """Return which actions are given, (B, actions): the first of every block, 0 to ``most``.

    Raises:
        ConfigError: no action of a block would be left to predict.
    """
    block = dit.num_action_per_block
    if not 0 < most < block:
        raise ConfigError(
            f"rtc_training_max_delay={most} of {block} actions in a block: choose 1 to {block - 1}"
        )
    counts = [
        torch.randint(most + 1, (actions // block, 1), generator=generator, device=generator.device)
        for generator in generators
    ]
    rows = torch.arange(block, device=counts[0].device)
    return torch.stack([(rows < count).flatten() for count in counts])


def _draw(
    head: HeadConfig, shape: NoiseShape, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return video noise, frame indices, action noise and action indices of one sample."""
    device = generator.device
    video = torch.randn(shape.latent, generator=generator, device=device)
    frames = _frame_indices(head, shape.latent[1], generator)
    action = torch.randn(shape.action, generator=generator, device=device)
    if not head.decouple_video_action_noise:
        return video, frames, action, frames
    count = (shape.action[0],)
    actions = torch.randint(TRAIN_STEPS, count, generator=generator, device=device)
    return video, frames, action, actions


def _frame_indices(head: HeadConfig, frames: int, generator: torch.Generator) -> Tensor:
    """Return one raw noise index per frame."""
    if head.decouple_video_action_noise:
        if head.video_noise_beta_beta != 1:
            raise ConfigError(
                f"video_noise_beta_beta={head.video_noise_beta_beta}: only 1, the published value, "
                "can be drawn; change video_noise_beta_alpha instead"
            )
        alpha = head.video_noise_beta_alpha
    elif head.use_high_noise_emphasis:
        alpha = head.high_noise_beta_alpha
    else:
        return torch.randint(TRAIN_STEPS, (frames,), generator=generator, device=generator.device)
    uniform = torch.rand(frames, generator=generator, device=generator.device)
    # The inverse of the distribution function of Beta(alpha, 1).
    index = ((1 - uniform ** (1 / alpha)) * TRAIN_STEPS).long()
    return index.clamp(0, TRAIN_STEPS - 1)


class StepPlan(Protocol):
    """Decides step by step whether the transformer runs."""

    def due(self, step: int) -> bool:
        """Return whether the transformer runs at ``step``."""

    def executed(self, video_velocity: Tensor) -> None:
        """Take note of the guided video velocity (B, ...) of a step that was due."""


def step_plan(mode: str | int, steps: int = _STATIC_TOTAL) -> StepPlan:
    """Return a fresh plan.

    Args:
        mode: Number of transformer evaluations, or ``"dynamic"``.
        steps: Solver steps.

    Raises:
        ConfigError: There is no plan with so many evaluations.
    """
    if mode == DYNAMIC:
        return DynamicPlan()
    allowed = [*(sorted(_STATIC_STEPS) if steps == _STATIC_TOTAL else ()), steps]
    if str(mode) not in map(str, allowed):
        raise ConfigError(
            f"no plan runs {mode!r} of {steps} steps; choose {', '.join(map(str, allowed))} "
            f"or {DYNAMIC!r}"
        )
    return StaticPlan(_STATIC_STEPS.get(int(mode), frozenset(range(steps))))


class StaticPlan:
    """Runs fixed steps."""

    def __init__(self, run: frozenset[int]) -> None:
        """Run the steps of ``run``."""
        self._run = run

    def due(self, step: int) -> bool:
        """Return whether ``step`` is one of the fixed steps."""
        return step in self._run

    def executed(self, video_velocity: Tensor) -> None:
        """Ignore the result."""


class DynamicPlan:
    """Skips steps while the results hardly change."""

    def __init__(self) -> None:
        """Start a call."""
        self._last: Tensor | None = None
        self._similarity: float | None = None
        self._resume = 0
        self._skipped = False

    def due(self, step: int) -> bool:
        """Return whether the transformer runs at ``step``: always twice, then as results change."""
        if step < self._resume:
            return False
        if self._skipped or self._similarity is None:
            self._skipped = False
            return True
        for threshold, length in _SKIPS:
            if self._similarity > threshold:
                self._resume, self._skipped = step + length, True
                return False
        return True

    def executed(self, video_velocity: Tensor) -> None:
        """Compare the result with the one before: mean over the batch of the cosines."""
        flat = video_velocity.flatten(1).float()
        if self._last is not None:
            self.compare(functional.cosine_similarity(self._last, flat, dim=1).mean().item())
        self._last = flat

    def compare(self, similarity: float) -> None:
        """Set the cosine between the last two results."""
        self._similarity = similarity
