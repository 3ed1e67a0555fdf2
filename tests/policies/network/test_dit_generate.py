"""Generation: sessions that do not touch each other, reset rules, equal results of all forms."""

import functools
from dataclasses import replace

import pytest
import torch

from dzrobot.errors import ConfigError, ModalityError
from dzrobot.policies.dreamzero.network import attention
from dzrobot.policies.dreamzero.network import session as sessions_module
from dzrobot.policies.dreamzero.network.config import GenerateOptions
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.session import (
    InferenceNoise,
    SessionCache,
    noise_shapes,
    seeded_noise,
)

FEW = GenerateOptions(dit_steps=5)
# Frames of the calls of one episode: a fresh start, then blocks of history.
CALLS = (1, 4, 8, 9)


def episode(network, ask, number, options=FEW, calls=CALLS):
    """Return the predictions of one episode run alone."""
    session = SessionCache()
    return [
        predict(network, [session], [ask(count, 10 * number + i, words=5 + number)], options)
        for i, count in enumerate(calls)
    ]


def assert_same(actual, expected, tolerance):
    pairs = [
        (actual.action_BAM, expected.action_BAM),
        *zip(actual.videos, expected.videos, strict=True),
    ]
    for a, b in pairs:
        assert a.shape == b.shape
        # The square of a small difference may be 0.
        assert (a - b).norm() <= tolerance * b.norm() if tolerance else torch.equal(a, b)


def test_interleaved_sessions_are_bit_equal_to_lone_ones(network, ask):
    alone = [episode(network, ask, number) for number in range(2)]
    sessions = [SessionCache(), SessionCache()]
    before = {name: id(value) for name, value in vars(network.model).items()}
    for i, count in enumerate(CALLS):
        for number, session in enumerate(sessions):
            request = ask(count, 10 * number + i, words=5 + number)
            assert_same(predict(network, [session], [request], FEW), alone[number][i], 0)
    assert {name: id(value) for name, value in vars(network.model).items()} == before


def test_sessions_in_one_batch_equal_lone_ones(network, ask):
    alone = [episode(network, ask, number) for number in range(3)]
    sessions = [SessionCache() for _ in range(3)]
    for i, count in enumerate(CALLS):
        requests = [ask(count, 10 * n + i, words=5 + n) for n in range(3)]
        together = predict(network, sessions, requests, FEW)
        for n in range(3):
            expected = alone[n][i]
            assert_same(only(together, n), expected, 1e-5)
            assert together.starts[n] == expected.starts[0]
    # From a batch back to alone: the caches hold the same.
    last = predict(network, [sessions[1]], [ask(4, 99, words=6)], FEW)
    lone = SessionCache()
    for i, count in enumerate(CALLS):
        predict(network, [lone], [ask(count, 10 + i, words=6)], FEW)
    assert_same(last, predict(network, [lone], [ask(4, 99, words=6)], FEW), 1e-5)


def only(prediction, n):
    return replace(
        prediction,
        action_BAM=prediction.action_BAM[n : n + 1],
        videos=prediction.videos[n : n + 1],
    )


def test_only_calls_of_one_session_may_use_a_kernel_with_a_plan_for_every_shape(
    network, ask, monkeypatch
):
    allowed, attend = [], attention.scaled_dot_product_attention

    def seen(*given, **named):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*given, **named)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", seen)
    for sessions in (1, 3, 1):
        allowed.clear()
        asked = [ask(1, number) for number in range(sessions)]
        predict(network, [SessionCache() for _ in asked], asked, FEW)
        assert set(allowed) == {sessions == 1}


def test_sessions_at_different_frames_share_a_call(network, ask):
    old, new = SessionCache(), SessionCache()
    predict(network, [old], [ask(1, 0)], FEW)
    mixed = predict(network, [new, old], [ask(1, 5), ask(4, 1)], FEW)
    assert mixed.starts == (0, 3)
    assert [video.shape[1] for video in mixed.videos] == [3, 2]
    lone = SessionCache()
    predict(network, [lone], [ask(1, 0)], FEW)
    assert_same(only(mixed, 1), predict(network, [lone], [ask(4, 1)], FEW), 1e-5)


def test_reset_rules(network, ask):
    session = SessionCache()

    def start(count, **more):
        return predict(network, [session], [ask(count, **more)], FEW).starts[0]

    assert start(4) == 0  # nothing seen yet
    assert [start(4), start(8), start(9)] == [3, 5, 7]
    assert start(4) == 0  # the window of nine latent frames is full
    assert start(4) == 3
    assert start(4, words=9) == 0  # another instruction
    assert start(4, words=9) == 3
    assert start(1, words=9) == 0  # a single frame
    assert start(4, words=9) == 3


def test_without_history_every_call_starts_from_the_newest_frame(network, ask):
    session, options = SessionCache(), replace(FEW, history="off")
    for count in (1, 4, 9):
        request = ask(count, count)
        prediction = predict(network, [session], [request], options)
        newest = replace(request, images_THW3=request.images_THW3[-1:])
        assert_same(prediction, predict(network, [SessionCache()], [newest], FEW), 0)
        assert not session.keys_values


def test_guidance_of_one_needs_no_negative_prompt(network, ask):
    off = replace(FEW, cfg_scale=1.0)
    sessions = [SessionCache(), SessionCache()]
    for count in (1, 4):
        request = ask(count, count)
        plain = predict(network, sessions[:1], [replace(request, negative=None)], off)
        nearly = predict(network, sessions[1:], [request], replace(FEW, cfg_scale=1.0 + 1e-9))
        assert_same(plain, nearly, 1e-5)
    assert sessions[0].keys_values[0].rows == 1
    with pytest.raises(ConfigError, match="negative prompt"):
        predict(network, [SessionCache()], [replace(ask(1), negative=None)], FEW)
    with pytest.raises(ConfigError, match="new session"):
        predict(network, sessions[:1], [ask(4)], FEW)


@pytest.mark.parametrize("steps", [5, 6, 7, 8, 16])
def test_steps_of_the_transformer(network, ask, steps):
    prediction = predict(network, [SessionCache()], [ask(1)], GenerateOptions(dit_steps=steps))
    assert prediction.evaluations == (steps,)


def test_dynamic_steps_are_each_sessions_own(network, ask):
    options = GenerateOptions(dit_steps="dynamic")
    requests = [ask(1, seed) for seed in range(3)]
    together = predict(network, [SessionCache() for _ in requests], requests, options)
    for n, request in enumerate(requests):
        alone = predict(network, [SessionCache()], [request], options)
        assert_same(only(together, n), alone, 0)
        assert 2 <= alone.evaluations[0] < 16
        assert alone.evaluations[0] == together.evaluations[n]


def test_noise_is_the_seeds_or_the_callers(network, ask):
    def actions(options=FEW, **more):
        return predict(network, [SessionCache()], [ask(1, **more)], options).action_BAM

    first = actions()
    assert torch.equal(first, actions())
    assert not torch.equal(first, actions(replace(FEW, seed=1)))
    same = seeded_noise(noise_shapes(network.config, (4, 6)), FEW.seed)
    assert torch.equal(first, actions(noise=same))
    other = InferenceNoise(same.video_CFYX, same.action_AM + 1)
    assert not torch.equal(first, actions(noise=other))


def test_latents_can_stand_for_seen_frames(network, ask):
    told, seen = SessionCache(), SessionCache()
    for session in (told, seen):
        predict(network, [session], [ask(1)], FEW)
    request = ask(4, 3)
    clip = sessions_module.clip_of_block(request.images_THW3, 2)
    with torch.no_grad():
        latents = network.vae.encode(network.pixels(clip[None]))[0]
    by_latents = predict(network, [told], [replace(request, latent_video_CFYX=latents)], FEW)
    assert_same(by_latents, predict(network, [seen], [request], FEW), 0)


def test_embedded_prompts_equal_tokenized_ones(network, ask):
    request = ask(1)

    def embedded(prompt):
        rows = network.embed_prompts(prompt.ids_N[None], prompt.mask_N[None]).rows_BNE[0]
        return replace(prompt, rows_NE=rows)

    given = replace(request, prompt=embedded(request.prompt), negative=embedded(request.negative))
    plain = predict(network, [SessionCache()], [request], FEW)
    assert_same(predict(network, [SessionCache()], [given], FEW), plain, 0)


@pytest.mark.parametrize("kind", ["5b"])
def test_calls_compile_whole_and_only_once(network, ask):
    request = ask(1)
    plain = predict(network, [SessionCache()], [request], FEW)
    compiled = type(network)(network.config).eval()
    compiled.load_state_dict(network.state_dict())
    torch.compiler.reset()
    for block in compiled.model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    assert_same(predict(compiled, [SessionCache()], [request], FEW), plain, 1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(predict(compiled, [SessionCache()], [request], FEW), plain, 1e-5)
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["5b"])
def test_the_second_turn_of_the_window_compiles_nothing_new(network, ask, monkeypatch):
    traced = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    compiled = type(network)(network.config).eval()
    compiled.load_state_dict(network.state_dict())
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(compiled.model.blocks)
    session, options, graphs = SessionCache(), replace(FEW, dit_steps=2, solver_steps=2), []
    for number in range(8):
        made = predict(compiled, [session], [ask(4, number)], options)
        assert made.starts == ((0, 3, 5, 7)[number % 4],)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    # One that reads frames and one that denoises, at each place.
    assert graphs == [2, 4, 6, 8, 8, 8, 8, 8]


def test_video_may_stop_at_some_noise(network, ask):
    head = replace(network.config.head, decouple_inference_noise=True)
    plain = predict(network, [SessionCache()], [ask(1)], FEW)
    network.config = replace(network.config, head=head)
    try:
        noisy = predict(network, [SessionCache()], [ask(1)], FEW)
    finally:
        network.config = replace(network.config, head=replace(head, decouple_inference_noise=False))
    # The first frame is the observed one in both.
    assert torch.equal(noisy.videos[0][:, :1], plain.videos[0][:, :1])
    assert not torch.allclose(noisy.videos[0][:, 1:], plain.videos[0][:, 1:], rtol=0.1)


def test_half_precision_stays_near(network, ask):
    exact = predict(network, [SessionCache()], [ask(1)], FEW)
    half = type(network)(network.config).eval()
    half.load_state_dict(network.state_dict())
    half = half.bfloat16()
    latent = seeded_noise(noise_shapes(network.config, (4, 6)), FEW.seed)
    rounded = predict(half, [SessionCache()], [ask(1, noise=latent)], FEW)
    assert rounded.videos[0].isfinite().all()
    assert_same(replace(rounded, videos=()), replace(exact, videos=()), 0.1)


@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 10])
def test_other_numbers_of_frames_are_refused(network, ask, count):
    session = SessionCache()
    predict(network, [session], [ask(1)], FEW)
    with pytest.raises(ModalityError, match="4, 8, 9"):
        predict(network, [session], [ask(count)], FEW)


def test_frames_of_another_size_are_refused(network, ask, kind):
    request = ask(1)
    half = request.images_THW3[:, : request.images_THW3.shape[1] // 2]
    with pytest.raises(ConfigError, match="frame"):
        predict(network, [SessionCache()], [replace(request, images_THW3=half)], FEW)
