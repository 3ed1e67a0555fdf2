"""Step distillation: the student's target is where its teacher arrives."""

from dataclasses import replace

import pytest
import torch

from dzrobot.policies.dreamzero.network.diffusion import (
    TRAIN_STEPS,
    DiffusionNoise,
    NoiseShape,
    draw_given,
    draw_noise,
    inference_schedule,
)
from dzrobot.policies.dreamzero.network.distillation import StepDistillation
from dzrobot.policies.dreamzero.network.dit import Controls, TrainForm, TrainInputs

FROM, TO = 4, 2


def distillation(network, head=None, steps=(FROM, TO)):
    return StepDistillation(
        teacher=network.model, device=torch.device("cpu"), head=head or network.config.head,
        from_steps=steps[0], to_steps=steps[1], weights="teacher",
    )  # fmt: skip


def drawn(network, prepared, head=None):
    shape = NoiseShape(
        latent=tuple(prepared.latents_BCFYX.shape[1:]), action=tuple(prepared.action_BAM.shape[1:])
    )
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(prepared.action_BAM))]
    return draw_noise(network.config.dit, head or network.config.head, shape, generators, "cpu")


def by_hand(network, prepared, noise, levels):
    """Go two Euler steps of the teacher, frame by frame and action by action.

    Args:
        network: Its transformer is the teacher.
        prepared: The samples.
        noise: Their noise.
        levels: Final noise of the video's solver.

    Returns:
        Where video and actions began, where they arrived, and which of the student's steps it was.
    """
    video_solver, action_solver = (inference_schedule(FROM, final_noise=n) for n in (levels, 0.0))
    block, size = network.config.dit.num_action_per_block, network.config.dit.num_frame_per_block
    frames, actions = noise.frame_index_BF.shape[1], prepared.action_BAM.shape[1]
    step_of_frame = [[int(i) * TO // TRAIN_STEPS for i in row] for row in noise.frame_index_BF]
    step_of_action = [
        [row[1 + size * (a // block)] for a in range(actions)] for row in step_of_frame
    ]
    video, action = prepared.latents_BCFYX.clone(), prepared.action_BAM.clone()
    for b in range(len(video)):
        for f in range(frames):
            sigma = video_solver.sigmas[2 * step_of_frame[b][f]]
            video[b, :, f] = (1 - sigma) * video[b, :, f] + sigma * noise.video_BCFYX[b, :, f]
        for a in range(actions):
            sigma = action_solver.sigmas[2 * step_of_action[b][a]]
            action[b, a] = (1 - sigma) * action[b, a] + sigma * noise.action_BAM[b, a]
    start = (video.clone(), action.clone())
    for half in (0, 1):
        times = [
            [float(video_solver.timesteps[2 * k + half]) for k in row] for row in step_of_frame
        ]
        own = [
            [float(action_solver.timesteps[2 * k + half]) for k in row] for row in step_of_action
        ]
        controls = Controls(
            action_BAM=action, timestep_BA=torch.tensor(own), state_BSM=prepared.state_BSM
        )
        inputs = TrainInputs(
            noisy_BCFYX=video, clean_BCFYX=prepared.latents_BCFYX,
            timestep_BF=torch.tensor(times), controls=controls, prompting=prepared.prompting,
            first_frame_BCFYX=prepared.first_frame_BCFYX,
        )  # fmt: skip
        with torch.no_grad():
            flows = network.model(inputs)
        video, action = video.clone(), action.clone()
        for b in range(len(video)):
            for f in range(frames):
                at = 2 * step_of_frame[b][f] + half
                length = video_solver.sigmas[at + 1] - video_solver.sigmas[at]
                video[b, :, f] += length * flows[0][b, :, f]
            for a in range(actions):
                at = 2 * step_of_action[b][a] + half
                length = action_solver.sigmas[at + 1] - action_solver.sigmas[at]
                action[b, a] += length * flows[1][b, a]
    return start, (video, action), (step_of_frame, step_of_action)


@pytest.mark.parametrize("decoupled", [False, True])
def test_one_step_of_the_student_ends_where_two_of_the_teacher_do(network, make_batch, decoupled):
    """By Euler's method at the levels of acting, where video may keep some noise."""
    head = replace(
        network.config.head, video_noise_beta_alpha=1.0, decouple_video_action_noise=decoupled,
        decouple_inference_noise=decoupled,
    )  # fmt: skip
    final = head.video_inference_final_noise if decoupled else 0.0
    prepared = network.prepare(make_batch([0, 1, 2]))
    noise = drawn(network, prepared, head)
    lesson, student = distillation(network, head).lesson(network, prepared, noise, TrainForm())
    start, end, steps = by_hand(network, prepared, noise, final)
    assert {k for row in steps[0] for k in row} == {0, 1}

    inputs = network.train_inputs(prepared, student, lesson.target.schedule)
    torch.testing.assert_close(inputs.noisy_BCFYX, start[0])
    torch.testing.assert_close(inputs.controls.action_BAM, start[1])
    solvers = [inference_schedule(TO, final_noise=n, solver="euler") for n in (final, 0.0)]
    for b in range(3):
        for f, k in enumerate(steps[0][b]):
            assert inputs.timestep_BF[b, f] == solvers[0].timesteps[k]
            length = solvers[0].sigmas[k + 1] - solvers[0].sigmas[k]
            arrived = start[0][b, :, f] + length * lesson.target.video_BCFYX[b, :, f]
            torch.testing.assert_close(arrived, end[0][b, :, f], rtol=1e-4, atol=1e-5)
        for a, k in enumerate(steps[1][b]):
            assert inputs.controls.timestep_BA[b, a] == solvers[1].timesteps[k]
            length = solvers[1].sigmas[k + 1] - solvers[1].sigmas[k]
            arrived = start[1][b, a] + length * lesson.target.action_BAM[b, a]
            torch.testing.assert_close(arrived, end[1][b, a], rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_distance_to_the_target_at_every_level(network, make_batch):
    """Pure noise, where the first step begins, has no published weight."""
    prepared = network.prepare(make_batch([0, 1]))
    noise = drawn(network, prepared)
    pure = replace(noise, frame_index_BF=torch.zeros_like(noise.frame_index_BF))
    lesson, student = distillation(network, steps=(2, 1)).lesson(
        network, prepared, pure, TrainForm()
    )
    inputs = network.train_inputs(lesson, student, lesson.target.schedule)
    with torch.no_grad():
        video, _ = network.model(inputs)
    losses = network.loss(lesson, student)
    error = (video - lesson.target.video_BCFYX).square().mean()
    assert losses.dynamics_loss.item() == pytest.approx(error.item(), rel=1e-5)
    assert losses.dynamics_loss > 0
    losses.loss.backward()
    assert all(p.grad is not None for p in network.model.parameters())
    # What the teacher computed on the way asks for no gradient.
    assert not lesson.target.video_BCFYX.requires_grad


def test_given_actions_stay_as_they_are(network, make_batch):
    prepared = network.prepare(make_batch([0, 1]))
    noise = drawn(network, prepared)
    generators = [torch.Generator().manual_seed(seed) for seed in (4, 5)]
    given_BA = draw_given(network.config.dit, prepared.action_BAM.shape[1], 3, generators)
    assert given_BA.any()
    given = replace(noise, given_BA=given_BA)
    shown = []
    hook = network.model.register_forward_pre_hook(lambda _, arguments: shown.append(arguments[0]))
    lesson, student = distillation(network).lesson(network, prepared, given, TrainForm())
    hook.remove()
    assert len(shown) == FROM // TO
    for inputs in shown:
        assert torch.equal(inputs.controls.action_BAM[given_BA], prepared.action_BAM[given_BA])
        assert not inputs.controls.timestep_BA[given_BA].any()
        assert inputs.controls.timestep_BA[~given_BA].all()
    assert torch.equal(student.given_BA, given_BA)
    assert not lesson.target.action_BAM[given_BA].any()
    assert lesson.target.action_BAM[~given_BA].any()


def test_the_step_that_is_practiced_follows_the_level_that_was_drawn(network, make_batch):
    prepared = network.prepare(make_batch([0]))
    noise = drawn(network, prepared)
    raw = torch.tensor([[0, 249, 249, 999, 999]])
    at = DiffusionNoise.of(network.config.dit, noise.video_BCFYX, noise.action_BAM, raw)
    _, student = distillation(network, steps=(16, 4)).lesson(network, prepared, at, TrainForm())
    assert student.frame_index_BF.tolist() == [[0, 0, 0, 3, 3]]
    # Levels of actions come after those of the video in the table.
    assert student.action_index_BA.tolist() == [[4] * 4 + [7] * 4]
