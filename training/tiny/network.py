"""A small DreamZero that learns on a processor: a few million parameters, the 5B's structure.

Unlike :mod:`dzrobot.policies.dreamzero.tiny` it is meant to be trained: its video autoencoder is
fitted to recordings (:mod:`dzrobot.training.tiny.autoencoder`), its transformer by the ordinary
trainer. The prompt and image encoders stay random, as frozen features.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.directory import (
    CONFIG_FILE,
    METADATA_FILE,
    TOKENIZER_FOLDER,
    TRAINING_FILE,
)
from dzrobot.policies.dreamzero.checkpoints.load import expected_shapes
from dzrobot.policies.dreamzero.checkpoints.passport import passport_for, write_passport
from dzrobot.policies.dreamzero.checkpoints.shards import (
    ShardOptions,
    write_json,
    write_weights,
    written_whole,
)
from dzrobot.policies.dreamzero.checkpoints.sources import (
    StateDictSource,
    UnionSource,
    WeightSource,
)
from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    TextConfig,
    VaeConfig,
)
from dzrobot.policies.dreamzero.tiny import TinyWeightsSource, training_config, write_tiny_tokenizer

_VOCABULARY = 768
_TEXT_WIDTH = 64
_IMAGE_WIDTH = 96
_LATENTS = 24

LAST_LAYERS = frozenset(
    f"action_head.model.{name}"
    for name in (
        "head.head.weight",
        "head.head.bias",
        *(f"action_decoder.layer2.{n}" for n in "Wb"),
    )
)
"""What a new network's predictions are multiplied by."""


def mini_config(embodiment: Embodiment) -> NetworkConfig:
    """Return the config of a small 5B-style network that fits ``embodiment``.

    Raises:
        ConfigError: the tiled image is not divided by the autoencoder's and the patch's stride.
    """
    vae = VaeConfig(version="2.2", dim=8, dec_dim=8, z_dim=_LATENTS, num_res_blocks=1)
    height, width = embodiment.image_size
    patch = 2 * vae.spatial_stride
    timing = embodiment.timing
    config = NetworkConfig(
        dit=DiTConfig(
            model_type="ti2v",
            dim=192, ffn_dim=576, freq_dim=64, num_heads=4, num_layers=6, hidden_size=128,
            in_dim=_LATENTS, out_dim=_LATENTS, concat_first_frame_latent=False,
            text_dim=_TEXT_WIDTH, text_len=96, clip_dim=_IMAGE_WIDTH,
            frame_seqlen=(height // patch) * (width // patch),
            max_chunk_size=timing.blocks,
            num_frame_per_block=len(timing.frame_offsets) // vae.temporal_stride,
            num_action_per_block=timing.action_horizon,
        ),
        text=TextConfig(
            vocab=_VOCABULARY, dim=_TEXT_WIDTH, dim_attn=_TEXT_WIDTH, dim_ffn=128, num_heads=4,
            num_layers=2,
        ),
        image=ImageConfig(vision_dim=_IMAGE_WIDTH, vision_heads=4, vision_layers=3, embed_dim=32),
        vae=vae,
        head=HeadConfig(
            action_horizon=timing.action_horizon, num_frames=timing.frames,
            target_video_height=height, target_video_width=width,
        ),
    )  # fmt: skip
    config.check_size(height, width)
    return config


def write_mini_checkpoint(
    target: Path,
    embodiment: Embodiment,
    metadata: Mapping[str, Any],
    weights: WeightSource,
    recipe: Mapping[str, Any],
) -> Path:
    """Write an untrained small checkpoint to the new folder ``target``; returns it.

    Args:
        target: Folder to make.
        embodiment: Robot it is for.
        metadata: Statistics, as ``metadata.json`` holds them.
        weights: Every tensor under its official name.
        recipe: How the weights came about, for the passport.

    Raises:
        CheckpointError: ``target`` exists already.
        StatisticsError: ``metadata`` does not fit the embodiment.
    """
    config = mini_config(embodiment)
    statistics = Statistics.from_metadata(metadata, embodiment)
    with written_whole(target) as folder:
        (folder / METADATA_FILE).parent.mkdir(parents=True)
        write_weights(folder, weights, ShardOptions())
        write_json(folder / CONFIG_FILE, config.to_dict())
        write_json(folder / METADATA_FILE, metadata)
        (folder / TRAINING_FILE).write_text(
            yaml.safe_dump(training_config(embodiment, per_step=statistics.per_step)),
            encoding="utf-8",
        )
        write_tiny_tokenizer(folder / TOKENIZER_FOLDER, embodiment)
        write_passport(folder, passport_for(embodiment, statistics, config, recipe=dict(recipe)))
    return target


def new_weights(embodiment: Embodiment, seed: int) -> UnionSource:
    """Return random float32 weights of a small network for ``embodiment``.

    The last layers are zero, so that the first prediction is no motion at all and early gradients
    stay small.
    """
    shapes = expected_shapes(mini_config(embodiment))
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items() if name in LAST_LAYERS}
    random = TinyWeightsSource(shapes, seed, torch.float32)
    return UnionSource(sources=(random, StateDictSource(values=zeros)))
