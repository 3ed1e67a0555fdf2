"""Plans with less of the video, or none: what is computed, what is remembered, what is trained."""

from dataclasses import dataclass, replace

import pytest
import torch

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.attention import (
    AttentionPattern,
    TokenLayout,
    train_attention,
)
from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.continuation import Continuation
from dzrobot.policies.dreamzero.network.diffusion import NoiseShape, draw_noise
from dzrobot.policies.dreamzero.network.dit import TrainForm
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import PromptBatch, prompt_batches
from dzrobot.policies.dreamzero.network.session import (
    InferenceNoise,
    SessionCache,
    noise_shapes,
    seeded_noise,
)
from dzrobot.policies.dreamzero.network.world_action import LossOptions, training_schedule

CPU = torch.device("cpu")
LESS = ("once", "skip")
FULL = GenerateOptions(dit_steps=5)
CALLS = (1, 4, 8, 9)
TOKENS = 6
"""Of a frame."""


def options_of(video):
    return replace(FULL, video=video)


@dataclass(frozen=True, eq=False)
class SpyBatch(PromptBatch):
    """Notes (tokens in the cache, frames of video, actions) of every evaluation."""

    seen: list = None

    def step(self, inputs, cache, contexts):
        actions = 0 if inputs.controls is None else inputs.controls.action_BAM.shape[1]
        self.seen.append((cache.length, inputs.video_BCFYX.shape[2], actions))
        return super().step(inputs, cache, contexts)


def watched(network, prompts=1):
    (batch,) = prompt_batches(network.model, prompts)
    return SpyBatch(batch.number, batch.dit, batch.prompts, None, [])


@pytest.mark.parametrize(
    ("video", "shown"),
    [
        ("full", [(6, 2)] * 5),
        # Two frames of six tokens stay from the first evaluation on.
        ("once", [(6, 2), (18, 0), (18, 0), (18, 0), (18, 0)]),
        ("skip", [(6, 0)] * 5),
    ],
)
def test_what_passes_the_network(network, ask, video, shown):
    options = replace(options_of(video), cfg_scale=1.0)
    batch, session = watched(network), SessionCache()
    predict(network, [session], [ask(1)], options, [batch])
    assert batch.seen == [(0, 1, 0), *((length, frames, 4) for length, frames in shown)]
    # Only what was seen is remembered: the next call reads its block behind the first frame.
    assert session.keys_values[0].length == TOKENS
    batch.seen.clear()
    predict(network, [session], [ask(4, 1)], options, [batch])
    assert batch.seen[:2] == [(6, 2, 0), (18, shown[0][1], 4)]
    assert session.keys_values[0].length == 3 * TOKENS


@pytest.mark.parametrize("video", LESS)
def test_no_video_is_predicted_and_no_negative_prompt_is_needed(network, ask, video):
    request = replace(ask(1), negative=None)
    session = SessionCache()
    found = predict(network, [session], [request], options_of(video))
    assert found.action_BAM.isfinite().all()
    assert [latents.shape[1] for latents in found.videos] == [0]
    assert found.evaluations == (5,)
    assert session.keys_values[0].rows == 1
    full = predict(network, [SessionCache()], [ask(1)], FULL)
    assert not torch.allclose(found.action_BAM, full.action_BAM, rtol=1e-3)


def test_actions_depend_on_the_videos_noise_where_it_is_shown(network, ask):
    one = seeded_noise(noise_shapes(network.config, (4, 6)), 1)
    other = InferenceNoise(one.video_CFYX + 1, one.action_AM)

    def actions(video, noise):
        request = ask(1, noise=noise)
        return predict(network, [SessionCache()], [request], options_of(video)).action_BAM

    assert torch.equal(actions("skip", one), actions("skip", other))
    assert not torch.equal(actions("once", one), actions("once", other))


def test_the_first_evaluation_of_once_is_the_whole_one(network, ask):
    """Up to there, everything is as published; from then on, the video stays as it was."""
    first = {}
    for video in ("full", "once"):
        flows, batch = [], watched(network)
        step = batch.dit.step

        def kept(inputs, cache, contexts, step=step, flows=flows):
            found = step(inputs, cache, contexts)
            flows.append(found[1])
            return found

        batch.dit.step = kept
        try:
            options = replace(options_of(video), cfg_scale=1.0)
            predict(network, [SessionCache()], [ask(1)], options, [batch])
        finally:
            del batch.dit.step
        first[video] = flows[1:]
    assert torch.equal(first["full"][0], first["once"][0])
    assert not torch.equal(first["full"][1], first["once"][1])


@pytest.mark.sampled
@pytest.mark.parametrize("video", LESS)
def test_sessions_in_one_batch_and_recorded_steps_equal_lone_ones(network, ask, video):
    options = options_of(video)
    alone, sessions = [], [SessionCache(), SessionCache()]
    recorded, graphs = SessionCache(), prompt_batches(network.model, 1, graphs=True)
    lone = [SessionCache(), SessionCache()]
    for i, count in enumerate(CALLS):
        requests = [ask(count, 10 * n + i, words=5 + n) for n in range(2)]
        alone = [
            predict(network, [session], [request], options).action_BAM
            for session, request in zip(lone, requests, strict=True)
        ]
        together = predict(network, sessions, requests, options).action_BAM
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
        replayed = predict(network, [recorded], requests[:1], options, graphs).action_BAM
        torch.testing.assert_close(replayed, alone[0], rtol=0, atol=0)


@pytest.mark.parametrize("method", ["guided", "trained"])
@pytest.mark.parametrize("video", LESS)
def test_a_running_plan_is_continued(network, ask, video, method):
    rows = torch.linspace(-0.5, 0.5, 4)[:, None].expand(-1, 7).contiguous()
    mask = torch.ones(7, dtype=torch.bool)
    running = Continuation(action_AM=rows, mask_M=mask, delay=2, end=4, method=method)
    plain, continued = (
        predict(network, [SessionCache()], [ask(1, continuation=part)], options_of(video))
        for part in (None, running)
    )
    assert torch.equal(continued.action_BAM[0, :2], rows[:2])
    assert not torch.equal(continued.action_BAM[0, 2:], plain.action_BAM[0, 2:])


@pytest.mark.parametrize("video", LESS)
def test_steps_by_the_change_of_a_video_that_is_not_there_are_refused(video):
    with pytest.raises(ConfigError, match=f"'dynamic' .*video='{video}' predicts none"):
        GenerateOptions(dit_steps="dynamic", video=video)


LAYOUT = TokenLayout(
    frames=5, rows=2, columns=3, block_frames=2, block_actions=4, block_states=1, actions=8,
    states=2, clean_frames=3,
)  # fmt: skip


@pytest.mark.parametrize("noisy_only", [False, True])
def test_hidden_video_is_hidden_from_the_actions_of_its_samples_in_both_forms(noisy_only):
    pattern = AttentionPattern(LAYOUT, 4, hides_video=True)
    hidden = torch.tensor([False, True])
    generator = torch.Generator().manual_seed(3)
    q, k, v, cotangent = torch.randn(4, 2, LAYOUT.length, 2, 8, generator=generator)
    first = len(LAYOUT.clean) if noisy_only else 0
    outcomes = []
    for backend in ("dense", "packed"):
        attention = train_attention(
            pattern, backend, CPU, noisy_only=noisy_only, hides_video_B=hidden
        )
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(leaves[0][:, first:], *leaves[1:])
        actions = LAYOUT.action_span(0, 8).slice
        inner = slice(actions.start - first, actions.stop - first)
        (out[:, inner] * cotangent[:, actions]).sum().backward()
        outcomes.append([out, *(leaf.grad for leaf in leaves)])
        video = LAYOUT.video.slice
        # Frame 0 stands alone; the others are what actions see, or not.
        seen = leaves[2].grad[:, video][:, TOKENS:].flatten(1).abs().sum(dim=1)
        assert seen[0] > 0
        assert seen[1] == 0
    for dense, packed in zip(*outcomes, strict=True):
        torch.testing.assert_close(packed, dense, rtol=1e-5, atol=1e-5)
    # Without hidden samples it is the published pattern.
    plain = train_attention(AttentionPattern(LAYOUT, 4), "dense", CPU)(q, k, v)
    shown = train_attention(pattern, "dense", CPU, hides_video_B=torch.tensor([False, False]))
    assert torch.equal(shown(q, k, v), plain)


def noise_for(network, prepared, samples):
    shape = NoiseShape(
        latent=tuple(prepared.latents_BCFYX.shape[1:]), action=tuple(prepared.action_BAM.shape[1:])
    )
    generators = [torch.Generator().manual_seed(sample) for sample in samples]
    return draw_noise(network.config.dit, network.config.head, shape, generators, "cpu")


def gradients(network, loss):
    network.zero_grad()
    loss.backward()
    return {
        name: None if one.grad is None else one.grad.clone()
        for name, one in network.model.named_parameters()
    }


@pytest.mark.parametrize("backend", ["packed", "dense"])
def test_a_sample_without_video_has_no_loss_of_it_and_teaches_its_actions_without_it(
    network, make_batch, backend
):
    prepared = network.prepare(make_batch([0, 1]))
    noise = noise_for(network, prepared, [0, 1])
    options = LossOptions(form=TrainForm(backend=backend))
    plain = network.loss(prepared, noise, options=options)
    hidden = replace(noise, hides_video_B=torch.tensor([False, True]))
    found = network.loss(prepared, hidden, options=options)
    assert found.dynamics_B[1] == 0
    torch.testing.assert_close(found.dynamics_B[0], plain.dynamics_B[0])
    torch.testing.assert_close(found.action_B[0], plain.action_B[0])
    assert abs(found.action_B[1] - plain.action_B[1]) > 1e-4
    torch.testing.assert_close(found.dynamics_loss, found.dynamics_B.mean())

    # The second sample's noisy video reaches nothing: neither a loss nor a gradient.
    other = replace(hidden, video_BCFYX=hidden.video_BCFYX.clone())
    other.video_BCFYX[1] += 1
    again = network.loss(prepared, other, options=options)
    torch.testing.assert_close(again.action_B, found.action_B, rtol=0, atol=0)
    torch.testing.assert_close(again.dynamics_B, found.dynamics_B, rtol=0, atol=0)
    one, two = gradients(network, found.loss), gradients(network, again.loss)
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(two[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_where_all_samples_are_without_video_its_head_learns_nothing(network, make_batch):
    prepared = network.prepare(make_batch([0, 1]))
    noise = replace(noise_for(network, prepared, [0, 1]), hides_video_B=torch.tensor([True, True]))
    found = gradients(network, network.loss(prepared, noise).loss)
    assert not found["head.head.weight"].any()
    assert found["action_decoder.layer2.W"].any()
    # Of the clean video, which the cache holds later, actions do learn to read.
    assert found["patch_embedding.weight"].any()


def test_pure_noise_has_no_loss_of_the_video():
    """So samples of ``once`` need no rule of their own."""
    assert training_schedule(CPU).weights[0] == 0
