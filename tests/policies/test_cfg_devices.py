"""A policy whose negative prompt runs on a second device, and what is refused."""

import numpy as np
import pytest
import torch
from test_policy_sessions import observe

from dzrobot import cli
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.offload import offload_plans
from dzrobot.policies.dreamzero.options import PolicyOptions, WeightOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

MINI = load_embodiment("libero_mini")


def opened(scale=5.0, **weights):
    return DreamZeroPolicy.from_pretrained(
        default_checkpoint(),
        options=PolicyOptions(cfg_scale=scale),
        weights=WeightOptions(**weights),
    )


@pytest.fixture(scope="module")
def one():
    return opened()


def test_the_actions_are_those_of_one_device(one):
    two = opened(cfg_device="cpu")
    for step in range(3):
        seen = observe(MINI, 0, step)
        expected, found = (policy.infer(seen)["actions"] for policy in (one, two))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert two.card == {**one.card, "cfg_devices": 2}
    # The memory of a session is that of one batch, in two halves.
    assert two.footprint("default").session == one.footprint("default").session


def test_without_guidance_there_is_nothing_to_share_out():
    with pytest.raises(ConfigError, match="leave cfg_device out"):
        opened(scale=1.0, cfg_device="cpu")


def test_weights_that_wait_on_the_host_are_not_copied(one):
    network = one._network
    # It counts whether it is read or not.
    network.require_text_encoder()
    least = list(offload_plans(network, torch.float32))[-1]
    with pytest.raises(ConfigError, match="give more memory, or leave cfg_device out"):
        opened(cfg_device="cpu", memory=least.device_bytes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cfg-devices", "cuda:0,cuda:1", "--device", "cpu"], "leave --device cpu out"),
        (["--cfg-devices", "cuda:0,cuda:0"], "two different devices, such as cuda:0,cuda:1"),
        (["--cfg-devices", "cuda"], "two different devices, such as cuda:0,cuda:1"),
        (["--cfg-devices", "cpu,cuda:7"], "device 'cuda:7'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["eval", "serve"])
def test_at_the_command_line(command, words, said, tmp_path, capsys):
    if command == "eval":
        words = ["--env", "dzrobot/lift-v0", *words, "--output", str(tmp_path / "out")]
    assert cli.main([command, *words]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert said in err
    assert "Traceback" not in err


def test_a_server_decides_for_its_clients(capsys):
    words = ["--policy", "remote", "--server", "ws://here:1", "--cfg-devices", "cuda:0,cuda:1"]
    assert cli.main(["eval", "--env", "dzrobot/point-v0", *words]) == 2
    assert "--cfg-devices: the server decides" in capsys.readouterr().err
