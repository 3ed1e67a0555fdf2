"""A whole checkpoint's weights: every name and shape is ours, and nothing changes on the way."""

import torch
from torch import nn

from dzrobot.policies.dreamzero.network.dit import CausalDiT
from dzrobot.policies.dreamzero.network.image import ImageEncoder
from dzrobot.policies.dreamzero.network.keymap import load_official, official_state_dict
from dzrobot.policies.dreamzero.network.prompt import TextEncoder
from dzrobot.policies.dreamzero.network.vae import Vae
from golden_kinds.configs import network_config
from golden_kinds.registry import Golden, Results, checker, exact


@checker("weights")
def weights(golden: Golden) -> Results:
    config = network_config(golden)
    network = nn.ModuleDict(
        {
            "model": CausalDiT(config.dit),
            "text_encoder": TextEncoder(config.text),
            "image_encoder": ImageEncoder(config.image),
            "vae": Vae(config.vae),
        }
    )
    stored = {name: golden[name] for name in golden.tensors}
    load_official(network, stored)
    written = official_state_dict(network)
    changed = [name for name in stored if not torch.equal(written[name], stored[name])]
    return {
        "names": exact(sorted(written), sorted(stored)),
        "values": exact(changed, []),
    }
