"""A whole checkpoint's weights: every name and shape is ours, and nothing changes on the way."""

import torch
from torch import nn

from dzrobot.policies.dreamzero.checkpoints.load import load_weights, official_state
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource
from dzrobot.policies.dreamzero.network.dit import CausalDiT
from dzrobot.policies.dreamzero.network.image import ImageEncoder
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
    load_weights(network, StateDictSource(values=stored))
    written = official_state(network)
    changed = [name for name in stored if not torch.equal(written[name], stored[name])]
    return {
        "names": exact(sorted(written), sorted(stored)),
        "values": exact(changed, []),
    }
