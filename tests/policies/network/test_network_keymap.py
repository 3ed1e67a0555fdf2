"""Names of weights: exactly those of published checkpoints, loaded all or not at all."""

import json
import math

import pytest
import torch
from torch import nn

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.network.config import ImageConfig, TextConfig, VaeConfig, preset
from dzrobot.policies.dreamzero.network.dit import CausalDiT
from dzrobot.policies.dreamzero.network.image import ImageEncoder
from dzrobot.policies.dreamzero.network.keymap import (
    PREFIXES,
    load_official,
    official_state_dict,
    official_state_dict_shapes,
)
from dzrobot.policies.dreamzero.network.prompt import TextEncoder
from dzrobot.policies.dreamzero.network.vae import Vae

SMALL = {
    "text_encoder": lambda: TextEncoder(
        TextConfig(vocab=20, dim=8, dim_attn=8, dim_ffn=8, num_heads=2, num_layers=2)
    ),
    "image_encoder": lambda: ImageEncoder(
        ImageConfig(vision_dim=8, vision_heads=2, vision_layers=3, embed_dim=6)
    ),
    "vae21": lambda: Vae(VaeConfig(version="2.1", dim=2, z_dim=3)),
    "vae22": lambda: Vae(VaeConfig(version="2.2", dim=2, z_dim=3, dec_dim=4)),
}


@pytest.fixture(params=SMALL)
def build(request):
    """Return a function that builds one component, with fresh random weights."""

    def built():
        module = SMALL[request.param]()
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.uniform_(-1, 1)
        return module

    return built


@pytest.mark.parametrize("name", ["5b", "14b"])
def test_names_and_shapes_of_the_published_checkpoints(contract, name):
    listing = json.loads((contract / f"dreamzero_{name}_state_dict.json").read_text())
    config = preset(name)
    with torch.device("meta"):
        network = nn.ModuleDict(
            {
                "model": CausalDiT(config.dit),
                "text_encoder": TextEncoder(config.text),
                "image_encoder": ImageEncoder(config.image),
                "vae": Vae(config.vae),
            }
        )
    shapes = official_state_dict_shapes(network)

    assert shapes == {key: tuple(entry["shape"]) for key, entry in listing["tensors"].items()}
    counts = {
        prefix: sum(math.prod(shape) for key, shape in shapes.items() if key.startswith(prefix))
        for prefix in PREFIXES.values()
    }
    assert counts == listing["param_counts"]


def test_weights_written_are_the_weights_loaded(build):
    source, target = build(), build()
    official = official_state_dict(source)
    load_official(target, official)

    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    for name, tensor in official_state_dict(target).items():
        assert torch.equal(official[name], tensor), name


def test_a_network_built_without_memory_takes_the_tensors_themselves(build):
    source = build()
    with torch.device("meta"):
        target = build()
    official = {name: t.bfloat16() for name, t in official_state_dict(source).items()}
    load_official(target, official, assign=True)

    left = [*target.named_parameters(), *target.named_buffers()]
    assert {(t.device.type, t.dtype) for _, t in left} == {("cpu", torch.bfloat16)}


@pytest.mark.parametrize("fault", ["missing", "unexpected", "misshapen"])
def test_weights_that_do_not_fit_change_nothing(build, fault):
    target = build()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    official = official_state_dict(build())
    # A name in the middle: everything before it fits.
    name = sorted(official)[len(official) // 2]
    match fault:
        case "missing":
            del official[name]
        case "unexpected":
            official[name + ".lora_A"] = torch.zeros(1)
        case "misshapen":
            official[name] = torch.zeros(3, *official[name].shape)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_official(target, official)

    for key, tensor in before.items():
        assert torch.equal(target.state_dict()[key], tensor)


def test_a_scalar_stored_with_one_axis_is_accepted():
    encoder = SMALL["image_encoder"]()
    official = official_state_dict(encoder)
    load_official(encoder, official | {"log_scale": torch.tensor([2.5])})
    assert encoder.log_scale.shape == ()
    assert encoder.log_scale.item() == 2.5
