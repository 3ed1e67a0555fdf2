"""Noise levels, the solver and step skipping."""

import numpy as np
import pytest
import torch

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.diffusion import (
    SHIFT,
    TRAIN_STEPS,
    DynamicPlan,
    TrainingSchedule,
    inference_schedule,
    step_plan,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def library_solver(steps, final_noise):
    """Return the solver of ``diffusers``, somebody else's, at the published noise levels."""
    from diffusers import UniPCMultistepScheduler

    solver = UniPCMultistepScheduler(
        num_train_timesteps=TRAIN_STEPS, prediction_type="flow_prediction", use_flow_sigmas=True,
        flow_shift=SHIFT,
    )  # fmt: skip
    solver.set_timesteps(sigmas=np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1])
    if final_noise:
        first = solver.sigmas[0]
        solver.sigmas = solver.sigmas * (first - final_noise) / first + final_noise
        solver.timesteps = (solver.sigmas[:-1] * TRAIN_STEPS).long()
    solver.set_begin_index(0)
    return solver


@pytest.mark.sampled
@pytest.mark.parametrize("final_noise", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 16, 40])
def test_levels_and_coefficients_have_the_bits_of_the_library(steps, final_noise):
    solver = library_solver(steps, final_noise)
    units = torch.eye(steps + 1, dtype=torch.float64)[:, None, None]
    rows, sample = [], units[0]
    for timestep, unit in zip(solver.timesteps, units[1:], strict=True):
        (sample,) = solver.step(unit, timestep, sample, return_dict=False)
        rows.append(sample.flatten())
    own = inference_schedule(steps, final_noise=final_noise)
    assert own.sigmas == tuple(solver.sigmas.tolist())
    assert own.timesteps == tuple(solver.timesteps.tolist())
    assert torch.equal(own.coefficients, torch.stack(rows).float())


@pytest.mark.parametrize("final_noise", [0.0, 0.8])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 16, 40])
def test_the_weighted_sum_is_the_library_solver(steps, final_noise):
    noise, velocities = random(2, 3, 4), random(steps, 2, 3, 4, seed=1)
    schedule = inference_schedule(steps, final_noise=final_noise)
    solver = library_solver(steps, final_noise)
    trajectory, sample = schedule.start(noise), noise.double()
    for velocity, timestep in zip(velocities, solver.timesteps, strict=True):
        (sample,) = solver.step(velocity.double(), timestep, sample, return_dict=False)
        torch.testing.assert_close(trajectory.step(velocity), sample.float(), rtol=1e-5, atol=1e-5)
    assert trajectory.step_index == schedule.steps == steps


@pytest.mark.parametrize("final_noise", [0.0, 0.8])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_euler_goes_the_length_of_each_step(steps, final_noise):
    noise, velocities = random(2, 3, 4), random(steps, 2, 3, 4, seed=1)
    schedule = inference_schedule(steps, final_noise=final_noise, solver="euler")
    usual = inference_schedule(steps, final_noise=final_noise)
    assert (schedule.sigmas, schedule.timesteps) == (usual.sigmas, usual.timesteps)
    trajectory, sample = schedule.start(noise), noise
    for step, velocity in enumerate(velocities):
        sample = sample + (schedule.sigmas[step + 1] - schedule.sigmas[step]) * velocity
        torch.testing.assert_close(trajectory.step(velocity), sample, rtol=1e-5, atol=1e-5)
    if steps == 1:
        torch.testing.assert_close(schedule.coefficients, usual.coefficients)


def test_trajectories_are_independent_and_batching_is_exact():
    schedule = inference_schedule(16)
    noise, velocities = random(4, 3, 5), random(16, 4, 3, 5, seed=1)
    together = schedule.start(noise)
    apart = [schedule.start(noise[i : i + 1]) for i in range(4)]
    for velocity in velocities:
        together.step(velocity)
        for i, trajectory in enumerate(apart):
            trajectory.step(velocity[i : i + 1])
    assert torch.equal(together.sample, torch.cat([trajectory.sample for trajectory in apart]))


def test_half_precision_noise_is_solved_in_float32():
    schedule = inference_schedule(16)
    noise, velocities = random(2, 30).bfloat16(), random(16, 2, 30, seed=1).bfloat16()
    half, full = schedule.start(noise), schedule.start(noise.float())
    for velocity in velocities:
        half.step(velocity)
        full.step(velocity.float())
    assert half.sample.dtype == torch.bfloat16
    assert torch.equal(half.sample, full.sample.bfloat16())


def test_timesteps_survive_whatever_the_default_precision():
    schedule = inference_schedule(16)
    assert all(isinstance(t, int) for t in schedule.timesteps)
    assert schedule.coefficients.dtype == torch.float32
    tables = TrainingSchedule.on("cpu")
    assert {t.dtype for t in (tables.sigmas, tables.timesteps, tables.weights)} == {torch.float32}
    assert tables.timesteps.unique().numel() == 1000


def test_noise_goes_to_the_right_frames():
    tables = TrainingSchedule.on("cpu")
    clean, noise = random(2, 5, 3, 4, 4), random(2, 5, 3, 4, 4, seed=1)
    index = torch.tensor([[0, 999, 500], [3, 3, 0]])
    noisy = tables.add_noise(clean, noise, index, axis=2)
    for b in range(2):
        for f in range(3):
            sigma = tables.sigmas[index[b, f]]
            expected = (1 - sigma) * clean[b, :, f] + sigma * noise[b, :, f]
            torch.testing.assert_close(noisy[b, :, f], expected, rtol=0, atol=0)
    assert torch.equal(noisy[0, :, 0], noise[0, :, 0])


@pytest.mark.parametrize(("steps", "final_noise"), [(0, 0.0), (16, 1.0), (16, -0.1)])
def test_impossible_schedules_are_refused(steps, final_noise):
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        inference_schedule(steps, final_noise=final_noise)


def test_a_plan_runs_as_often_as_it_says_and_starts_with_the_first_step():
    for mode, steps in [(5, 16), (6, 16), ("7", 16), ("8", 16), (16, 16), (4, 4)]:
        due = [step_plan(mode, steps).due(i) for i in range(steps)]
        assert sum(due) == int(mode)
        assert due[0]
    for mode, steps in [(9, 16), (8, 10), ("fast", 16)]:
        with pytest.raises(ConfigError, match="dynamic"):
            step_plan(mode, steps)


def test_the_dynamic_plan_measures_the_angle_between_results():
    a, b = random(2, 3, 4), random(2, 3, 4, seed=1)

    def due(flows):
        plan, flows = DynamicPlan(), iter(flows)
        ran = []
        for step in range(8):
            ran.append(plan.due(step))
            if ran[-1]:
                plan.executed(next(flows))
        return ran

    assert due([a, 2 * a, 3 * a, b, b, b, b, b]) == [1, 1, 0, 0, 0, 0, 1, 0]
    assert due([a, b, a, b, a, b, a, b]) == [1] * 8
