"""Recorded calls: the same numbers from the same tensors, whoever's turn it is.

Without a GPU what was recorded runs operator by operator, from and into the tensors of the
recording; that a GPU launches it as one is what ``benchmarks/gpu.sh --parts graph`` looks at.
"""

from dataclasses import replace

import pytest
import torch
from test_dit_generate import CALLS, FEW, assert_same, only

from dzrobot import cli
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.network.continuation import Continuation
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import Graphs, prompt_batches
from dzrobot.policies.dreamzero.network.session import SessionCache
from dzrobot.policies.dreamzero.network.vae import Decoding
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

# A window, a new one, and its beginning once more: what was recorded in the first serves again.
WINDOWS = (*CALLS, 4, 4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options", [FEW, replace(FEW, cfg_scale=1.0), replace(FEW, dit_steps="dynamic")]
)
def test_recorded_calls_give_the_same_bits(network, ask, options):
    batches = prompt_batches(network.model, options.prompts, graphs=True)
    plain, recorded = SessionCache(), SessionCache()
    for i, count in enumerate(WINDOWS):
        request = ask(count, i)
        expected = predict(network, [plain], [request], options)
        assert_same(predict(network, [recorded], [request], options, batches), expected, 0)


def test_what_recorded_plans_continue_may_change(network, ask):
    batches = prompt_batches(network.model, FEW.prompts, graphs=True)
    shape = network.config.head.action_horizon, network.config.dit.action_dim
    for number, method in enumerate(("guided", "guided", "trained", None)):
        part = method and Continuation(
            action_AM=torch.full(shape, 0.2 * number), mask_M=torch.ones(shape[1]) > 0,
            delay=1 + number % 2, end=3, method=method,
        )  # fmt: skip
        request = ask(1, number, continuation=part)
        expected = predict(network, [SessionCache()], [request], FEW)
        assert_same(predict(network, [SessionCache()], [request], FEW, batches), expected, 0)


def test_recorded_decoding_gives_the_same_bits(network):
    graphs = Graphs(network.model)
    latents = torch.randn(4, 1, network.config.vae.z_dim, 2, 4, 6)
    for turn in range(2):
        plain, recorded = Decoding(network.vae), Decoding(network.vae, graphs)
        for part in latents[turn:]:
            assert torch.equal(recorded.more(part), plain.more(part))


@pytest.mark.long
def test_sessions_take_turns_in_one_recording(network, ask):
    batches = prompt_batches(network.model, 2, graphs=True)
    plain, recorded = ([SessionCache() for _ in range(3)] for _ in range(2))
    for i, count in enumerate(CALLS):
        # The last one's prompt is longer, and has other shapes.
        requests = [ask(count, 10 * n + i, words=(5, 6, 40)[n]) for n in range(3)]
        together = predict(network, recorded, requests, FEW, batches)
        for n in range(3):
            alone = predict(network, [plain[n]], [requests[n]], FEW)
            assert_same(only(together, n), alone, 0)


def test_a_call_is_recorded_once_for_every_place_of_the_window(network, ask, monkeypatch):
    (batch,) = prompt_batches(network.model, 2, graphs=True)
    recorded = []
    original = batch.graphs._record
    monkeypatch.setattr(
        batch.graphs, "_record", lambda *given: recorded.append(1) or original(*given)
    )
    session, counts = SessionCache(), []
    for i, count in enumerate((1, 4, 4, 4, 4, 4, 4, 4)):
        predict(network, [session], [ask(count, i)], FEW, [batch])
        counts.append(len(recorded))
    # All of a call at each of four places; then they are known.
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4]


def test_two_batches_have_recordings_of_their_own(network, ask):
    second = type(network.model)(network.model.config)
    second.load_state_dict(network.model.state_dict())
    plain, recorded = SessionCache(), SessionCache()
    batches = prompt_batches(network.model, 2, second, graphs=True)
    for i, count in enumerate(CALLS[:3]):
        request = ask(count, i)
        expected = predict(
            network, [plain], [request], FEW, prompt_batches(network.model, 2, second)
        )
        assert_same(predict(network, [recorded], [request], FEW, batches), expected, 0)


def test_a_processor_has_nothing_to_record():
    with pytest.raises(ConfigError, match="leave graphs out"):
        DreamZeroPolicy.from_pretrained(default_checkpoint(), options=PolicyOptions(graphs=True))


@pytest.mark.parametrize("command", [["eval", "--env", "dzrobot/lift-v0"], ["serve"]])
def test_at_the_command_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, "--graphs"]) == 2
    assert "leave graphs out" in capsys.readouterr().err
