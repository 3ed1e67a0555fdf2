"""Training: encoders run once, noise keyed by sample, losses that do not depend on the batch."""

from dataclasses import replace

import pytest
import torch

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.diffusion import (
    TRAIN_STEPS,
    DiffusionNoise,
    NoiseShape,
    draw_given,
    draw_noise,
    velocity,
)
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.world_action import (
    LossCounts,
    LossOptions,
    TrainForm,
    WorldActionModel,
    training_schedule,
)

PADDED, MASKED = LossOptions(), LossOptions(action_loss_norm="masked")


def noise_for(network, prepared, samples, head=None):
    shape = NoiseShape(
        latent=tuple(prepared.latents_BCFYX.shape[1:]), action=tuple(prepared.action_BAM.shape[1:])
    )
    generators = [torch.Generator().manual_seed(sample) for sample in samples]
    return draw_noise(network.config.dit, head or network.config.head, shape, generators, "cpu")


def losses_of(network, make_batch, samples, counts=None, options=PADDED):
    prepared = network.prepare(make_batch(samples))
    return network.loss(prepared, noise_for(network, prepared, samples), counts, options)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [PADDED, MASKED])
def test_loss_of_a_batch_is_the_mean_of_its_samples(network, make_batch, options):
    """Prompts of different lengths, samples with and without actions: nothing leaks."""
    samples = [0, 1, 2, 3]
    together = losses_of(network, make_batch, samples, options=options)
    counted = together.counted_action_B.sum().item()
    alone = [losses_of(network, make_batch, [sample], options=options) for sample in samples]
    torch.testing.assert_close(
        together.dynamics_loss, torch.stack([x.dynamics_loss for x in alone]).mean(),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    torch.testing.assert_close(
        together.action_loss, torch.stack([x.action_B[0] for x in alone]).sum() / counted,
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    assert counted == (4 if options != MASKED else 3)
    assert together.action_B[3] == 0
    torch.testing.assert_close(together.loss, together.dynamics_loss + together.action_loss)


def test_accumulated_gradients_equal_those_of_the_whole_batch(network, make_batch):
    for options in (PADDED, MASKED):
        network.zero_grad()
        whole = losses_of(network, make_batch, [0, 1, 2, 3], options=options)
        whole.loss.backward()
        expected = [p.grad.clone() for p in network.model.parameters()]
        network.zero_grad()
        counts = LossCounts(samples=4, actions=whole.counted_action_B.sum())
        total = 0.0
        for part in ([3], [0, 2], [1]):
            loss = losses_of(network, make_batch, part, counts, options).loss
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(whole.loss.item(), rel=1e-6)
        for parameter, gradient in zip(network.model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_masked_norm_ignores_padding_where_padded_dilutes(network, make_batch):
    padded = losses_of(network, make_batch, [0], options=PADDED)
    masked = losses_of(network, make_batch, [0], options=MASKED)
    width = network.config.dit.action_dim
    assert masked.action_B[0].item() == pytest.approx(
        padded.action_B[0].item() * width / 3, rel=1e-5
    )
    assert masked.dynamics_loss == padded.dynamics_loss


def test_only_the_transformer_learns(network, make_batch):
    losses_of(network, make_batch, [0, 1]).loss.backward()
    for name, parameter in network.named_parameters():
        assert (parameter.grad is not None) == name.startswith("model."), name


def test_the_video_is_encoded_once_and_conditioning_only_where_it_is_used(
    network, kind, make_batch
):
    batch, encoded = make_batch([0, 1]), []
    hook = network.vae.coder.encoder.conv_in.register_forward_pre_hook(
        lambda _, arguments: encoded.append(arguments[0].shape)
    )
    prepared = network.prepare(batch)
    hook.remove()
    assert sum(shape[2] for shape in encoded) == 17
    if kind == "5b":
        assert prepared.first_frame_BCFYX is None
    else:
        first = prepared.first_frame_BCFYX
        # Both clips of a sample are one batch.
        assert {shape[0] for shape in encoded} == {4}
        video = network.pixels(batch.images)
        alone = network.vae.encode(video), network.first_frame(video[:, :, 0], 17)
        for one, other in zip((prepared.latents_BCFYX, first), alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert first[:, :4, 0].eq(1).all()
        assert first[:, :4, 1:].eq(0).all()
        torch.testing.assert_close(first[:, 4:, 0], prepared.latents_BCFYX[:, :, 0])


def test_network_without_prompt_encoder_takes_embeddings(network, make_batch):
    batch = make_batch([0, 1])
    bare = WorldActionModel(network.config, text_encoder=False).eval()
    state = {k: v for k, v in network.state_dict().items() if not k.startswith("text_encoder.")}
    bare.load_state_dict(state)
    results = []
    for model in (network, bare):
        prepared = model.prepare(batch)
        results.append(model.loss(prepared, noise_for(model, prepared, [0, 1])).loss)
    assert results[0] == results[1]
    with pytest.raises(ConfigError, match="text_encoder=True"):
        bare.embed_prompts(torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4))
    with pytest.raises(ValueError, match="lengths"):
        PromptEmbedding(batch.prompt.rows_BNE, (1,))


def test_noise_depends_on_the_sample_alone(network, make_batch):
    prepared = network.prepare(make_batch([0, 1]))
    options = replace(network.config.head, decouple_video_action_noise=True)
    for head in (network.config.head, options):
        both = noise_for(network, prepared, [5, 9], head)
        alone = noise_for(network, prepared, [9], head)
        for name in ("video_BCFYX", "frame_index_BF", "action_BAM", "action_index_BA"):
            assert torch.equal(getattr(both, name)[1:], getattr(alone, name))


def test_a_block_shares_its_noise_level(dit_config):
    raw = torch.tensor([[7, 1, 2, 3, 4]])
    video, action = torch.zeros(1, 2, 5, 4, 6), torch.zeros(1, 8, 7)
    noise = DiffusionNoise.of(dit_config, video, action, raw)
    assert noise.frame_index_BF.tolist() == [[7, 1, 1, 3, 3]]
    assert noise.action_index_BA.tolist() == [[1, 1, 1, 1, 3, 3, 3, 3]]
    own = torch.arange(8)[None]
    assert torch.equal(DiffusionNoise.of(dit_config, video, action, raw, own).action_index_BA, own)


@pytest.mark.parametrize(
    ("change", "video_mean", "coupled"),
    [
        ({}, 0.5, True),
        ({"use_high_noise_emphasis": True}, 0.25, True),
        ({"decouple_video_action_noise": True, "video_noise_beta_alpha": 4.0}, 0.2, False),
    ],
)
def test_noise_levels_follow_their_distribution(network, change, video_mean, coupled):
    head = replace(network.config.head, **change)
    shape = NoiseShape(latent=(1, 5, 1, 1), action=(8, 1))
    generators = [torch.Generator().manual_seed(i) for i in range(1500)]
    noise = draw_noise(network.config.dit, head, shape, generators, "cpu")
    frames, actions = noise.frame_index_BF / TRAIN_STEPS, noise.action_index_BA / TRAIN_STEPS
    # Beta(a, 1) has mean a / (a + 1); index 0 is pure noise.
    assert frames.mean().item() == pytest.approx(video_mean, abs=0.02)
    assert actions.mean().item() == pytest.approx(video_mean if coupled else 0.5, abs=0.02)
    assert noise.frame_index_BF.min() >= 0
    assert noise.frame_index_BF.max() < TRAIN_STEPS
    same = (noise.action_index_BA[:, ::4] == noise.frame_index_BF[:, 1::2]).all().item()
    assert same == coupled


def test_an_undrawable_distribution_is_refused(network):
    head = replace(network.config.head, decouple_video_action_noise=True, video_noise_beta_beta=2.0)
    with pytest.raises(ConfigError, match="video_noise_beta_alpha"):
        draw_noise(
            network.config.dit, head, NoiseShape((1, 3, 1, 1), (4, 1)), [torch.Generator()], "cpu"
        )


def test_pixels_are_resized_only_to_another_size(network, frames):
    images = frames(5, 0)[None]
    video = network.pixels(images)
    assert video.shape == (1, 3, 5, *images.shape[2:4])
    assert torch.equal(((video.permute(0, 2, 3, 4, 1) * 0.5 + 0.5) * 255).round().byte(), images)
    size = (32, 32)
    head = replace(network.config.head, target_video_height=size[0], target_video_width=size[1])
    with torch.device("meta"):
        other = WorldActionModel(replace(network.config, head=head), text_encoder=False)
    assert other.pixels(images).shape == (1, 3, 5, *size)


def test_given_actions_are_seen_clean_and_are_no_part_of_the_loss(network, make_batch):
    """Each block its own number of them; what is said of them, and their targets, count nothing."""
    prepared = network.prepare(make_batch([0, 1]))
    noise = noise_for(network, prepared, [0, 1])
    generators = [torch.Generator().manual_seed(seed) for seed in (4, 5)]
    given_BA = draw_given(network.config.dit, prepared.action_BAM.shape[1], 3, generators)
    assert 0 < given_BA.sum() < given_BA.numel()
    blocks = given_BA.unflatten(1, (-1, network.config.dit.num_action_per_block))
    # The first ones of a block, and never all.
    assert (blocks[..., 1:] <= blocks[..., :-1]).all()
    assert not blocks[..., -1].any()

    noise = replace(noise, given_BA=given_BA)
    inputs = network.train_inputs(prepared, noise, training_schedule(torch.device("cpu")))
    assert torch.equal(inputs.controls.action_BAM[given_BA], prepared.action_BAM[given_BA])
    assert not inputs.controls.timestep_BA[given_BA].any()
    # Other noise on them is neither seen nor asked for.
    other = noise.action_BAM.masked_fill(given_BA[..., None], 9.0)
    one, two = (
        network.loss(prepared, replace(noise, action_BAM=value)).action_B
        for value in (noise.action_BAM, other)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, network.loss(prepared, replace(noise, given_BA=None)).action_B)


def test_weights_and_given_actions_are_those_of_a_plain_loop(network, make_batch):
    """Losses and gradients; a sample whose every action is given trains its video alone."""
    prepared = network.prepare(make_batch([0, 1, 2]))
    noise = noise_for(network, prepared, [0, 1, 2])
    block = network.config.dit.num_action_per_block
    actions = prepared.action_BAM.shape[1]
    weight_BA = torch.ones(3, actions)
    weight_BA[0, :block] = torch.tensor([0.0, 0.0, 0.6, 1.0])
    weight_BA[1] = 0
    given_BA = weight_BA == 0
    # Seen with noise and not asked for, after one that is.
    weight_BA[0, block + 1], given_BA[0, block + 1] = 0, False
    real_B = torch.tensor([True, False, True])
    prepared = replace(prepared, has_real_action_B=real_B, action_weight_BA=weight_BA)
    noise = replace(noise, given_BA=given_BA)

    schedule = training_schedule(torch.device("cpu"))
    _, action_BAM = network.model(network.train_inputs(prepared, noise, schedule), TrainForm())
    target_BAM = velocity(prepared.action_BAM, noise.action_BAM)
    plain = torch.zeros(())
    for sample in (0, 2):
        asked = [row for row in range(actions) if not given_BA[sample, row]]
        for row in asked:
            error_M = (action_BAM[sample, row] - target_BAM[sample, row]).square()
            error = (error_M * prepared.action_mask_BAM[sample, row]).sum() / len(error_M)
            level = schedule.weights[noise.action_index_BA[sample, row]]
            plain = plain + weight_BA[sample, row] * level * error / len(asked) / 3
    found = network.loss(prepared, noise)
    torch.testing.assert_close(found.action_loss, plain.detach())
    assert found.action_B[1] == 0
    # Of the video, which all samples train: what is left where no action counts.
    video = network.loss(replace(prepared, action_weight_BA=torch.zeros(3, actions)), noise)
    assert video.action_loss == 0
    torch.testing.assert_close(video.loss, found.dynamics_loss)
    assert (found.dynamics_B > 0).all()
    parameters = [one for one in network.model.parameters() if one.requires_grad]
    mine, theirs = (
        torch.autograd.grad(loss, parameters, allow_unused=True)
        for loss in (found.loss, plain + video.loss)
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    # The masked norm divides by the samples that have an action to predict.
    assert network.loss(prepared, noise, options=MASKED).counted_action_B.tolist() == [1, 0, 1]


def test_a_whole_block_cannot_be_given(dit_config):
    with pytest.raises(ConfigError, match="rtc_training_max_delay=4 of 4"):
        draw_given(dit_config, 8, 4, [torch.Generator()])
