"""Weights that wait on the host: the same numbers, less memory, and what cannot be."""

import logging
import math

import numpy as np
import pytest
import torch
from test_policy_sessions import observe
from torch import nn

from dzrobot import cli
from dzrobot.commands.options.policy import OFFLOAD_LOG
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.checkpoints.load import build_network
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.policies.dreamzero.offload import (
    Offloader,
    is_offloaded,
    offload_plans,
    plan_offload,
)
from dzrobot.policies.dreamzero.options import PolicyOptions, WeightOptions
from dzrobot.policies.dreamzero.parts import load_parts
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.dreamzero.tiny import TinyOptions, write_tiny_checkpoint

GIB = 2**30
LIBERO = load_embodiment("libero_sim")


@pytest.fixture(scope="module", params=["5b", "14b"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload") / "tiny"
    return write_tiny_checkpoint(folder, LIBERO, TinyOptions(variant=request.param))


def least(network):
    """Return what the network takes with as much as possible on the host."""
    network.require_text_encoder()
    return list(offload_plans(network, torch.float32))[-1]


def opened(checkpoint, memory=None, **options):
    weights = WeightOptions(memory=memory)
    return DreamZeroPolicy.from_pretrained(
        checkpoint, embodiment=LIBERO, weights=weights, options=PolicyOptions(**options)
    )


def parts(checkpoint, memory=None):
    return load_parts(
        checkpoint, embodiment=LIBERO, device="cpu", dtype=None, revision=None, tokenizer=None,
        weights=WeightOptions(memory=memory),
    )  # fmt: skip


def network_of(checkpoint, memory=None):
    network = parts(checkpoint, memory).network
    network.require_text_encoder()
    return network


@pytest.mark.sampled
def test_actions_and_video_are_the_same_to_the_bit(checkpoint):
    whole = parts(checkpoint)
    away = parts(checkpoint, least(whole.network).device_bytes)
    assert is_offloaded(away.network.model)
    plain, lean = DreamZeroPolicy(whole), DreamZeroPolicy(away)
    for step in range(6):
        seen = observe(LIBERO, 0, step)
        one, other = plain.infer(seen), lean.infer(seen)
        np.testing.assert_array_equal(one["actions"], other["actions"])
        np.testing.assert_array_equal(plain.imagine(), lean.imagine())


def test_where_weights_lie_is_told_as_they_are_loaded(checkpoint, caplog):
    plan = least(network_of(checkpoint))
    with caplog.at_level(logging.INFO, logger=OFFLOAD_LOG):
        opened(checkpoint, plan.device_bytes)
    said = [(one.name, one.getMessage()) for one in caplog.records]
    # Where the prompt is new on the machine, the same log says so first.
    assert [one for one in said if "a prompt is new" not in one[1]] == [
        (OFFLOAD_LOG, plan.describe())
    ]


def test_weights_are_there_one_module_at_a_time(checkpoint):
    plain = network_of(checkpoint)
    plan = least(plain)
    lean = network_of(checkpoint, plan.device_bytes)
    waiting = plan.modules(lean)
    assert len(waiting) > 20
    present = []

    def count(*_):
        present.append(sum(not module.weight.isnan().any() for module in waiting))

    for module in waiting:
        module.register_forward_hook(count)
    ids = torch.tensor([[5, 6, 7, 1]])
    lean.text_encoder(ids, torch.ones_like(ids))
    # The hook runs after the one that leaves the weights of its own module.
    assert set(present) == {0}
    assert all(module.weight.isnan().all() for module in waiting)
    assert all(module.weight.untyped_storage().nbytes() < 16 for module in waiting)
    kept = sum(p.untyped_storage().nbytes() for p in lean.parameters())
    whole = sum(p.untyped_storage().nbytes() for p in plain.parameters())
    sizes = [p.nbytes for module in plan.modules(plain) for p in module.parameters(recurse=False)]
    assert whole - kept == pytest.approx(sum(sizes), rel=0.01)
    assert plan.host_bytes == sum(2 ** math.ceil(math.log2(size)) for size in sizes)


def test_the_next_weights_are_copied_while_a_module_runs(checkpoint, monkeypatch):
    """Once the order is known. What was expected and does not come is replaced."""
    events = []
    copied = Offloader._copied

    def copy(self, fetched):
        events.append(("copy", fetched._module))
        return copied(self, fetched)

    monkeypatch.setattr(Offloader, "_copied", copy)
    network = network_of(checkpoint)
    lean = network_of(checkpoint, least(network).device_bytes)
    first, second, third = [m for m in lean.model.blocks.modules() if isinstance(m, nn.Linear)][:3]
    for module in (first, second, third):
        module.register_forward_hook(lambda module, *_: events.append(("run", module)))

    def run(*modules):
        events.clear()
        for module in modules:
            weight = dict(network.model.named_modules())[names[module]]
            given = torch.ones(1, module.in_features)
            assert torch.equal(module(given), weight(given))
        return list(events)

    names = {module: name for name, module in lean.model.named_modules()}
    twice = [("copy", first), ("run", first), ("copy", second), ("run", second)]
    assert run(first, second) == twice
    assert run(first, second) == [
        ("copy", first), ("copy", second), ("run", first), ("copy", first), ("run", second),
    ]  # fmt: skip
    # The first is there, and expects the second; the third is another one.
    assert run(first, third) == [("copy", second), ("run", first), ("copy", third), ("run", third)]


def test_what_waits_on_the_host_is_counted_as_it_is_allocated(published):
    """In powers of two: that is how torch hands out memory that a GPU reads by itself."""
    plans = [plan for plan in offload_plans(published["14b"], torch.bfloat16) if plan.blocks]
    block = plans[1].host_bytes - plans[0].host_bytes
    # Ten products of 5120 x 5120 (50 MiB, 64), two with 13824 (135 MiB, 256), and their biases.
    assert block == 10 * 64 * 2**20 + 2 * 256 * 2**20 + 11 * 2**14 + 2**15
    assert plans[1].moved_bytes - plans[0].moved_bytes < 0.7 * block


def test_a_module_that_raises_leaves_its_weights_on_the_host(checkpoint):
    network = network_of(checkpoint)
    lean = network_of(checkpoint, least(network).device_bytes)
    linear = next(m for m in lean.model.blocks.modules() if isinstance(m, nn.Linear))
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.zeros(1, 3))
    assert linear.weight.isnan().all()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "gib", "encoders", "some_blocks"),
    [("5b", 80, False, False), ("5b", 24, True, False), ("5b", 16, True, True),
     ("14b", 80, False, False), ("14b", 24, True, True)],
)  # fmt: skip
def test_published_networks_on_the_cards_that_people_have(
    published, size, gib, encoders, some_blocks
):
    network = published[size]
    plan = plan_offload(network, torch.bfloat16, gib * GIB)
    assert plan.device_bytes <= gib * GIB
    assert (plan.text_encoder, plan.blocks > 0) == (encoders, some_blocks)
    # The one that moves least: the plan before it does not fit.
    plans = list(offload_plans(network, torch.bfloat16))
    assert all(one.device_bytes > gib * GIB for one in plans[: plans.index(plan)])
    assert plan.moved_bytes <= plan.host_bytes
    assert ("on the host" in plan.describe()) == encoders


@pytest.fixture(scope="module")
def published():
    """Return both published networks, without memory for their weights."""
    return {size: build_network(preset(size)) for size in ("5b", "14b")}


def test_too_little_memory_is_said_with_what_it_takes(published):
    with pytest.raises(ConfigError, match=r"1.0 GiB is too little .* it takes \d+.\d GiB"):
        plan_offload(published["5b"], torch.bfloat16, GIB)


def test_compiled_blocks_cannot_fetch_their_weights(checkpoint):
    memory = least(network_of(checkpoint)).device_bytes
    with pytest.raises(ConfigError, match="give more memory, or leave compile out"):
        opened(checkpoint, memory, compile=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "24GiB"], "give --device cuda, or leave it out"),
        (["--memory", "24GB"], "such as 24 or 24GiB"),
        (["--memory", "0"], "such as 24 or 24GiB"),
        (["--memory", "24", "--policy", "remote", "--server", "ws://here:1"], "to `dzrobot serve`"),
    ],
)  # fmt: skip
def test_at_the_command_line(words, said, tmp_path, capsys):
    words = ["eval", "--env", "dzrobot/point-v0", *words, "--output", str(tmp_path / "out")]
    assert cli.main(words) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert said in err
    assert "Traceback" not in err
