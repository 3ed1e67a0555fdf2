"""8-bit weights: what they save, how far the actions go, and what cannot be."""

import numpy as np
import pytest
import torch
from test_policy_sessions import observe
from torch import nn

from dzrobot import cli
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, MissingDependencyError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.checkpoints.load import build_network
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.policies.dreamzero.offload import offload_plans, plan_offload
from dzrobot.policies.dreamzero.options import PolicyOptions, WeightOptions
from dzrobot.policies.dreamzero.parts import load_parts
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.dreamzero.quantize import quantize_block

GIB = 2**30
MINI = load_embodiment("libero_mini")


def opened(quantize=None, **options):
    return DreamZeroPolicy.from_pretrained(
        default_checkpoint(), weights=WeightOptions(quantize=quantize),
        options=PolicyOptions(**options),
    )  # fmt: skip


def parts(quantize=None, memory=None):
    return load_parts(
        default_checkpoint(), embodiment=None, device="cpu", dtype=None, revision=None,
        tokenizer=None, weights=WeightOptions(quantize=quantize, memory=memory),
    )  # fmt: skip


@pytest.fixture(scope="module")
def networks():
    """Return the network as it is, and with its blocks in eight bits."""
    return parts().network, parts("int8").network


def plans(policy):
    """Return the first two plans of an episode, (2, A, M)."""
    policy.reset()
    return np.stack([policy.infer(observe(MINI, 0, step))["actions"] for step in range(2)])


@pytest.fixture(scope="module")
def whole():
    return opened()


@pytest.fixture(scope="module")
def int8():
    return opened("int8")


def test_the_actions_of_a_trained_policy_move_by_less_than_a_hundredth(whole, int8):
    away = np.abs(plans(whole) - plans(int8))
    # Of actions in [-1, 1]; the gripper's is one of two values.
    assert 0 < away[..., :6].max() < 0.05
    assert away[..., :6].mean() < 0.01


@pytest.mark.sampled
@pytest.mark.parametrize("video", ["once", "skip"])
def test_so_do_plans_without_video(video):
    near, exact = (plans(opened(kind, video=video))[..., :6] for kind in ("int8", None))
    np.testing.assert_allclose(near, exact, rtol=0, atol=0.05)
    assert not np.array_equal(near, exact)


def test_the_linear_layers_of_the_blocks_are_quantized_and_nothing_else(networks):
    whole, int8 = networks
    changed = {
        name
        for (name, one), other in zip(whole.named_parameters(), int8.parameters(), strict=True)
        if type(one.data) is not type(other.data)
    }
    linears = {
        f"model.blocks.{name}.weight"
        for name, module in whole.model.blocks.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert changed == linears
    assert len(changed) > 50


def test_what_is_saved_is_what_the_plan_says(networks):
    whole, int8 = networks
    before, after = (sum(map(bytes_of, one.model.blocks.parameters())) for one in (whole, int8))
    plain, lean = (next(offload_plans(whole, torch.float32, kind)) for kind in (None, "int8"))
    assert after < 0.3 * before
    assert plain.device_bytes - lean.device_bytes == before - after


def bytes_of(parameter):
    """Return what a tensor holds, quantized or not."""
    parts = [parameter]
    if hasattr(parameter, "__tensor_flatten__"):
        parts = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
    return sum(part.numel() * part.itemsize for part in parts)


def test_quantized_weights_wait_on_the_host_with_the_same_numbers(int8):
    network = parts("int8").network
    # It counts whether it is read or not.
    network.require_text_encoder()
    least = list(offload_plans(network, torch.float32, "int8"))[-1]
    away = parts("int8", memory=least.device_bytes)
    lean, blocks = DreamZeroPolicy(away), away.network.model.blocks
    linears = [m for m in blocks.modules() if isinstance(m, nn.Linear)]
    assert all(one.weight.isnan().all() for one in linears)
    np.testing.assert_array_equal(plans(lean), plans(int8))


def test_the_card_says_so_and_only_then(whole, int8):
    assert "quantize" not in whole.card
    assert int8.card == {**whole.card, "quantize": "int8"}


def test_14b_moves_half_as_much_on_24_gib():
    network = build_network(preset("14b"))
    plain, lean = (plan_offload(network, torch.bfloat16, 24 * GIB, kind) for kind in (None, "int8"))
    assert 0 < lean.blocks < plain.blocks
    assert lean.moved_bytes < 0.5 * plain.moved_bytes
    with pytest.raises(ConfigError, match=r"1.0 GiB is too little"):
        plan_offload(network, torch.bfloat16, GIB, "int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_layer_is_near_what_it_was_in_every_dtype(dtype):
    layer = nn.Linear(64, 32, dtype=dtype).requires_grad_(requires_grad=False)
    given = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = layer(given)
    block = nn.Sequential(layer)
    quantize_block(block, "int8")
    error = (block(given) - before).float().norm() / before.float().norm()
    assert block(given).dtype == dtype
    assert 0 < error < 0.015


def test_fp8_is_for_gpus_that_multiply_so(monkeypatch, capsys):
    with pytest.raises(ConfigError, match=r"needs a GPU .*choose 'int8'"):
        opened("fp8")
    words = ["--env", "dzrobot/lift-v0", "--quantize", "fp8", "--output", "never"]
    assert cli.main(["eval", *words]) == 2
    assert "Ada, Hopper or newer" in capsys.readouterr().err


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("dzrobot.importing.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"\.\[quantize\]"):
        opened("int8")


def test_a_server_decides_for_its_clients(capsys):
    words = ["--policy", "remote", "--server", "ws://here:1", "--quantize", "int8"]
    assert cli.main(["eval", "--env", "dzrobot/lift-v0", *words]) == 2
    assert "--quantize: the server decides" in capsys.readouterr().err
