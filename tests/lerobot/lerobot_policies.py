"""Makes and plays policies with LeRobot's own code; runs in LeRobot's Python.

``make KIND FOLDER FEATURES`` writes a policy of random weights with its processors. ``play FOLDER
OBSERVATIONS OUTPUT`` asks ``select_action`` at every step, as ``lerobot_eval`` does.
"""

import json
import sys

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import (
    get_policy_class,
    make_policy_config,
    make_pre_post_processors,
)

from dzrobot.rng import torch_seed

SMALL = {
    "act": {
        "chunk_size": 20, "n_action_steps": 6, "dim_model": 32, "n_heads": 2, "n_encoder_layers": 1,
        "dim_feedforward": 64, "n_vae_encoder_layers": 1, "pretrained_backbone_weights": None,
    },
    "act_ensemble": {
        "chunk_size": 20, "n_action_steps": 1, "dim_model": 32, "n_heads": 2, "n_encoder_layers": 1,
        "dim_feedforward": 64, "n_vae_encoder_layers": 1, "pretrained_backbone_weights": None,
        "temporal_ensemble_coeff": 0.01,
    },
    "diffusion": {
        "horizon": 16, "n_action_steps": 4, "down_dims": (32, 64), "num_inference_steps": 3,
        "pretrained_backbone_weights": None, "crop_shape": None, "drop_n_last_frames": 0,
        "spatial_softmax_num_keypoints": 4,
    },
}  # fmt: skip
"""Kind -> what keeps it small."""


def make(kind, folder, features):
    torch.manual_seed(0)
    given = {
        name: PolicyFeature(FeatureType[type_], tuple(shape))
        for name, (type_, shape) in json.loads(features).items()
    }
    ours = {name: given.pop(name) for name in list(given) if name == "action"}
    config = make_policy_config(
        kind.partition("_")[0], input_features=given, output_features=ours, device="cpu",
        push_to_hub=False, **SMALL[kind],
    )  # fmt: skip
    policy = get_policy_class(config.type)(config)
    draws = np.random.default_rng(0)
    statistics = {name: _statistics(f, draws) for name, f in {**given, **ours}.items()}
    before, after = make_pre_post_processors(config, dataset_stats=statistics)
    for part in (policy, before, after):
        part.save_pretrained(folder)


def _statistics(feature, draws):
    count = feature.shape[0]
    shape = (count, 1, 1) if feature.type is FeatureType.VISUAL else (count,)
    low = draws.uniform(-1, 0, shape).astype(np.float32)
    return {
        "mean": low / 2, "std": draws.uniform(0.5, 1, shape).astype(np.float32),
        "min": low, "max": low + 1,
    }  # fmt: skip


def play(folder, observations, output):
    from lerobot.configs.policies import PreTrainedConfig

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    before, after = make_pre_post_processors(config, pretrained_path=folder)
    policy.eval()
    policy.reset()
    actions, calls = [], 0
    seen = np.load(observations)
    steps = len(seen["observation.state"])
    every = 1 if config.n_obs_steps > 1 or config.type != "act" else config.n_action_steps
    for step in range(steps):
        batch = {"task": [str(seen["task"])]}
        for name in config.input_features:
            value = torch.from_numpy(seen[name][step])
            if value.dtype == torch.uint8:
                value = value.permute(2, 0, 1).contiguous().float() / 255
            batch[name] = value[None]
        if step % every == 0:
            # The seed of the call that this package makes at this step.
            torch.manual_seed(torch_seed("lerobot", 0, 0, calls))
            calls += 1
        with torch.inference_mode():
            actions.append(after(policy.select_action(before(batch)))[0].numpy())
    np.save(output, np.stack(actions))


if __name__ == "__main__":
    {"make": make, "play": play}[sys.argv[1]](*sys.argv[2:])
