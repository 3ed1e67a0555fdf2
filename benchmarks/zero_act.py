r"""Trains the small ACT of `zero.py --world act`, with LeRobot's code and in its Python.

    mkdir -p v30/local && cp -r lift_20 v30/local/lift
    python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id local/lift --root v30 \
        --push-to-hub false
    python benchmarks/zero_act.py v30/local/lift act

``lift_20`` is what `dzrobot collect` recorded, in LeRobot v2.1, which is converted. The policy sees
both views at 64 x 64 (a step of its saved preprocessor makes them so), plans 16 actions and
executes 8. No weights are downloaded. Every 200 steps it is saved, so that it can be looked at
earlier.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor.hil_processor import ImageCropResizeProcessorStep
from torchvision.ops.misc import FrozenBatchNorm2d

CHUNK, EXECUTED, SIDE, BATCH, RATE, SAVE = 16, 8, 64, 16, 3e-4, 200
ACTION = "action"


def config_of(dataset):
    """Return a small ACT for the columns of ``dataset``."""
    features = {}
    for name, feature in dataset.meta.features.items():
        shape = tuple(feature["shape"])
        if name.startswith("observation.images."):
            features[name] = PolicyFeature(FeatureType.VISUAL, (shape[2], *shape[:2]))
        elif name == "observation.state":
            features[name] = PolicyFeature(FeatureType.STATE, shape)
    actions = PolicyFeature(FeatureType.ACTION, tuple(dataset.meta.features[ACTION]["shape"]))
    return ACTConfig(
        input_features=features, output_features={ACTION: actions}, device="cpu",
        push_to_hub=False, pretrained_backbone_weights=None, chunk_size=CHUNK,
        n_action_steps=EXECUTED, dim_model=128, n_heads=4, dim_feedforward=512,
        n_encoder_layers=2, use_vae=False, dropout=0.0,
    )  # fmt: skip


def rows_of(dataset, names, resize):
    """Return all rows (N, ...) by column, images resized, and each episode's number."""
    items = [dataset[number] for number in range(len(dataset))]
    columns = {}
    for name in (*names, ACTION):
        columns[name] = torch.stack([one[name] for one in items])
    images = resize.observation({one: columns[one] for one in columns if "image" in one})
    return {**columns, **images}, np.array([int(one["episode_index"]) for one in items])


def chunks_of(actions, episodes):
    """Return the actions (N, CHUNK, A) from each row on, and where they are beyond the end."""
    last = np.array([np.flatnonzero(episodes == one)[-1] for one in episodes])
    ahead = np.arange(len(actions))[:, None] + np.arange(CHUNK)
    return actions[np.minimum(ahead, last[:, None])], torch.from_numpy(ahead > last[:, None])


def calibrate(policy, batch):
    """Give every frozen normalization of the backbone the statistics of ``batch``.

    Without downloaded weights they are zero and one, and deep layers hardly learn.
    """

    def measured(layer, given):
        layer.running_mean.copy_(given[0].mean((0, 2, 3)))
        layer.running_var.copy_(given[0].var((0, 2, 3)))

    layers = [one for one in policy.modules() if isinstance(one, FrozenBatchNorm2d)]
    hooks = [one.register_forward_pre_hook(measured) for one in layers]
    with torch.no_grad():
        policy(batch)
    for hook in hooks:
        hook.remove()


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=850)
    given = parser.parse_args()
    torch.manual_seed(0)
    dataset = LeRobotDataset("local/lift", root=given.data)
    config = config_of(dataset)
    policy = ACTPolicy(config).train()
    before, after = make_pre_post_processors(config, dataset_stats=dataset.meta.stats)
    resize = ImageCropResizeProcessorStep(resize_size=(SIDE, SIDE))
    normalize = before.steps[-1]
    rows, episodes = rows_of(dataset, config.input_features, resize)
    rows[ACTION], padded = chunks_of(rows[ACTION], episodes)
    before.steps = [*before.steps[:-1], resize, normalize]
    optimizer = torch.optim.AdamW(policy.parameters(), RATE, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * step / given.steps)) / 2,
    )
    few = torch.randperm(len(episodes))[:64]
    batch = before({name: values[few] for name, values in rows.items()})
    calibrate(policy, {**batch, "action_is_pad": padded[few]})
    began, losses = time.monotonic(), []
    for step in range(1, given.steps + 1):
        at = torch.randint(len(episodes), (BATCH,))
        batch = before({name: values[at] for name, values in rows.items()})
        loss, _ = policy({**batch, "action_is_pad": padded[at]})
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % (SAVE // 4) == 0:
            spent = time.monotonic() - began
            recent = float(np.mean(losses[-SAVE // 4 :]))
            sys.stdout.write(f"step {step}: loss {recent:.3f}, {spent:.0f} s\n")
            sys.stdout.flush()
        if step % SAVE == 0 or step == given.steps:
            for part in (policy, before, after):
                part.save_pretrained(given.folder)


if __name__ == "__main__":
    main()
