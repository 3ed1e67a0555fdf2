"""Step distillation: one solver step of a student does what several of its teacher do.

Progressive distillation (Salimans and Ho, arXiv 2202.00512), with Euler's method in place of DDIM,
which it is for a flow. A sample is noised to a level at which the student's solver stands. The
teacher goes from there to the student's next level in steps of its own, and the student learns the
mean of the velocities on the way: one step with it ends where the teacher ended. Video and actions
go together, as they do when acting.

Shapes: B batch, F latent frames, A actions.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from dzrobot.policies.dreamzero.network.config import HeadConfig
from dzrobot.policies.dreamzero.network.diffusion import (
    TRAIN_STEPS,
    DiffusionNoise,
    TrainingSchedule,
)
from dzrobot.policies.dreamzero.network.dit import TrainForm, TrainInputs
from dzrobot.policies.dreamzero.network.generate import schedules
from dzrobot.policies.dreamzero.network.world_action import (
    FlowTarget,
    PreparedBatch,
    WorldActionModel,
)


@dataclass(frozen=True, eq=False)
class SolverLevels:
    """Noise levels at which solver steps begin and end.

    First come all of the video's, then all of the actions', so that one table serves both.
    """

    schedule: TrainingSchedule
    """Levels, (2 * steps,); every weight is 1: published weights leave pure noise out, and there a
    student's first step begins."""

    ends: Tensor
    """Share of noise after each step, (2 * steps,)."""

    @classmethod
    def of(cls, head: HeadConfig, steps: int, device: torch.device) -> "SolverLevels":
        """Return the levels of solvers with ``steps`` steps."""
        both = schedules(head, steps)
        sigmas, ends, timesteps = (
            torch.tensor(values, dtype=torch.float32, device=device)
            for values in (
                [sigma for one in both for sigma in one.sigmas[:-1]],
                [sigma for one in both for sigma in one.sigmas[1:]],
                [timestep for one in both for timestep in one.timesteps],
            )
        )
        schedule = TrainingSchedule(sigmas, timesteps, torch.ones_like(sigmas))
        return cls(schedule, ends)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepDistillation:
    """A frozen teacher, and the steps of it and of its student."""

    teacher: nn.Module
    """A :class:`.dit.CausalDiT`, plain or sharded."""

    device: torch.device
    head: HeadConfig
    from_steps: int
    to_steps: int
    weights: str
    """Fingerprint of the teacher."""

    @property
    def identity(self) -> str:
        """Return what a resumed run has to share."""
        return f"{self.from_steps} to {self.to_steps} steps of {self.weights}"

    @cached_property
    def _levels(self) -> tuple[SolverLevels, SolverLevels]:
        """Return the levels of teacher and student."""
        teacher, student = (
            SolverLevels.of(self.head, steps, self.device)
            for steps in (self.from_steps, self.to_steps)
        )
        return teacher, student

    @torch.no_grad()
    def lesson(
        self,
        model: WorldActionModel,
        prepared: PreparedBatch,
        noise: DiffusionNoise,
        form: TrainForm,
    ) -> tuple[PreparedBatch, DiffusionNoise]:
        """Return a micro-batch with what the student is to predict, and noise at its levels.

        Args:
            model: The student; nothing of it is run.
            prepared: The samples.
            noise: As drawn for training: where a level is drawn decides which step is practiced.
            form: Of the teacher's forward pass.
        """
        fine, coarse = self._levels
        step_BF = noise.frame_index_BF * self.to_steps // TRAIN_STEPS
        # Actions take the step of their block's video, whatever the levels of both are.
        drawn = DiffusionNoise.of(model.config.dit, noise.video_BCFYX, noise.action_BAM, step_BF)
        student = replace(
            drawn,
            action_index_BA=drawn.action_index_BA + self.to_steps,
            given_BA=noise.given_BA,
        )
        inputs = model.train_inputs(prepared, student, coarse.schedule)
        ratio = self.from_steps // self.to_steps
        at_BF, at_BA = step_BF * ratio, drawn.action_index_BA * ratio + self.from_steps
        arrived = inputs
        for step in range(ratio):
            arrived = self._stepped(arrived, at_BF + step, at_BA + step, noise.given_BA, form)
        whole_BF = fine.ends[at_BF + ratio - 1] - fine.schedule.sigmas[at_BF]
        whole_BA = fine.ends[at_BA + ratio - 1] - fine.schedule.sigmas[at_BA]
        way_BCFYX = arrived.noisy_BCFYX - inputs.noisy_BCFYX
        way_BAM = arrived.controls.action_BAM - inputs.controls.action_BAM
        target = FlowTarget(
            schedule=coarse.schedule,
            video_BCFYX=way_BCFYX / whole_BF[:, None, :, None, None],
            action_BAM=way_BAM / whole_BA[..., None],
        )
        return replace(prepared, target=target), student

    def _stepped(
        self,
        inputs: TrainInputs,
        at_BF: Tensor,
        at_BA: Tensor,
        given_BA: Tensor | None,
        form: TrainForm,
    ) -> TrainInputs:
        """Return ``inputs`` after the teacher's steps ``at_BF`` and ``at_BA``."""
        fine, _ = self._levels
        length_BF, length_BA = (fine.ends[at] - fine.schedule.sigmas[at] for at in (at_BF, at_BA))
        timestep_BA = fine.schedule.timesteps[at_BA]
        if given_BA is not None:
            # Without noise already, they stay as they are.
            timestep_BA = timestep_BA.masked_fill(given_BA, 0)
            length_BA = length_BA.masked_fill(given_BA, 0)
        controls = replace(inputs.controls, timestep_BA=timestep_BA)
        shown = replace(inputs, timestep_BF=fine.schedule.timesteps[at_BF], controls=controls)
        flow_BCFYX, flow_BAM = self.teacher(shown, form)
        video_BCFYX = inputs.noisy_BCFYX.clone()
        rows, columns = flow_BCFYX.shape[-2:]
        moved_BCFYX = length_BF[:, None, :, None, None] * flow_BCFYX.float()
        video_BCFYX[..., :rows, :columns] += moved_BCFYX
        action_BAM = controls.action_BAM + length_BA[..., None] * flow_BAM.float()
        return replace(
            inputs,
            noisy_BCFYX=video_BCFYX,
            controls=replace(controls, action_BAM=action_BAM),
        )
