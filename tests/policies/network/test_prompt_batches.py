"""Guidance on two devices: the numbers of one batch, each prompt on its own copy of the network."""

import copy
from dataclasses import replace

import pytest
import torch
from test_dit_generate import CALLS, FEW, assert_same, only
from torch._subclasses.fake_tensor import FakeTensorMode

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import prompt_batches
from dzrobot.policies.dreamzero.network.session import (
    InferenceNoise,
    Prompt,
    SessionCache,
    noise_shapes,
)


def split(network, second):
    """Return a batch for each prompt."""
    return prompt_batches(network.model, 2, second)


@pytest.fixture
def second(network):
    """Return a copy of the transformer."""
    return copy.deepcopy(network.model)


def test_two_copies_give_the_numbers_of_one_batch(network, second, ask):
    together, apart = SessionCache(), SessionCache()
    for i, count in enumerate(CALLS):
        request = ask(count, i)
        expected = predict(network, [together], [request], FEW)
        found = predict(network, [apart], [request], FEW, split(network, second))
        assert_same(found, expected, 1e-5)
    assert {number: kept.rows for number, kept in apart.keys_values.items()} == {0: 1, 1: 1}
    assert apart.keys_values[1].length == together.keys_values[0].length


def test_sessions_that_share_a_call_keep_a_past_in_every_lane(network, second, ask):
    lone, shared = [SessionCache() for _ in range(2)], [SessionCache() for _ in range(2)]
    for i, count in enumerate(CALLS):
        requests = [ask(count, 10 * n + i, words=5 + n) for n in range(2)]
        both = predict(network, shared, requests, FEW, split(network, second))
        for n in range(2):
            alone = predict(network, [lone[n]], [requests[n]], FEW, split(network, second))
            assert_same(only(both, n), alone, 1e-5)


def test_the_copy_runs_the_negative_prompt_and_only_that(network, second, ask):
    ran = {"first": [], "second": []}
    handles = [
        part.blocks[0].register_forward_pre_hook(
            lambda _, given, name=name: ran[name].append(len(given[0]))
        )
        for name, part in (("first", network.model), ("second", second))
    ]
    expected = predict(network, [SessionCache()], [ask(1)], FEW)
    ran["first"].clear()
    with torch.no_grad():
        for parameter in second.head.parameters():
            parameter.zero_()
    changed = predict(network, [SessionCache()], [ask(1)], FEW, split(network, second))
    for handle in handles:
        handle.remove()
    # A row for the prompt on the one, a row for the negative prompt on the other.
    assert ran["first"] == ran["second"] == [1] * 6
    assert (changed.videos[0] - expected.videos[0]).norm() > 0.1 * expected.videos[0].norm()


def test_an_episode_stays_with_its_batches(network, second, ask):
    session = SessionCache()
    predict(network, [session], [ask(1)], FEW, split(network, second))
    with pytest.raises(ConfigError, match=r"second device.*start a new session"):
        predict(network, [session], [ask(4)], FEW)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_computed_from_two_devices_at_once(network, second, ask):
    """Fake tensors take two processors for two devices, and refuse to mix them."""
    requests = [ask(count, count) for count in (1, 4)]
    # Tables that are made once and kept have to hold numbers.
    predict(network, [SessionCache()], requests[:1], FEW, split(network, second))
    on_first, on_second = (copy.deepcopy(one).to("meta") for one in (network, second))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        on_first.to_empty(device="cpu")
        on_second.to_empty(device="cpu:1")
        session = SessionCache()
        for request in requests:
            given = _placed(request, network.config, fake)
            made = predict(on_first, [session], [given], FEW, split(on_first, on_second))
    assert made.action_BAM.device == torch.device("cpu")
    assert session.keys_values[0].data.device == torch.device("cpu")
    assert session.keys_values[1].data.device == torch.device("cpu:1")


class _ReadPrompt(Prompt):
    """A prompt whose tokens are known: fake tensors hold none."""

    key = (5, 6, 7)


def _placed(request, config, fake):
    rows = torch.empty(config.dit.text_len, config.dit.text_dim, device="cpu")
    height, width = request.images_THW3.shape[1:3]
    stride = 8 if config.vae.version == "2.1" else 16
    video, action = noise_shapes(config, (height // stride, width // stride))
    noise = InferenceNoise(torch.empty(video, device="cpu"), torch.empty(action, device="cpu"))
    return replace(
        request,
        images_THW3=fake.from_tensor(request.images_THW3),
        state_SM=fake.from_tensor(request.state_SM),
        prompt=_ReadPrompt(request.prompt.ids_N, request.prompt.mask_N, rows),
        negative=_ReadPrompt(request.negative.ids_N, request.negative.mask_N, rows),
        noise=noise,
    )
