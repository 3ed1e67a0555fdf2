"""Names of weights: exactly those of published checkpoints, loaded all or not at all."""

import pytest
import torch

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.load import load_weights, official_state
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource
from dzrobot.policies.dreamzero.network.config import ImageConfig, TextConfig, VaeConfig
from dzrobot.policies.dreamzero.network.image import ImageEncoder
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
    """Return a function that builds one component, with new random weights."""

    def built():
        module = SMALL[request.param]()
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.uniform_(-1, 1)
        return module

    return built


def test_weights_written_are_the_weights_loaded(build):
    source, target = build(), build()
    official = official_state(source)
    load_weights(target, StateDictSource(values=official))

    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    for name, tensor in official_state(target).items():
        assert torch.equal(official[name], tensor), name


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["missing", "unexpected", "misshapen"])
def test_weights_that_do_not_fit_change_nothing(build, fault):
    target = build()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    official = dict(official_state(build()))
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
        load_weights(target, StateDictSource(values=official))

    for key, tensor in before.items():
        assert torch.equal(target.state_dict()[key], tensor)


def test_a_scalar_stored_with_one_axis_is_accepted():
    encoder = SMALL["image_encoder"]()
    official = official_state(encoder)
    load_weights(encoder, StateDictSource(values={**official, "log_scale": torch.tensor([2.5])}))
    assert encoder.log_scale.shape == ()
    assert encoder.log_scale.item() == 2.5
