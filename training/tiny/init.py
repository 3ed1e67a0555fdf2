"""The small policy that ``dzrobot init`` writes: a few million parameters, the 5B's structure.

Unlike :mod:`dzrobot.policies.dreamzero.tiny` it is meant to be trained: its video autoencoder is
fitted to recordings (:mod:`dzrobot.training.tiny.autoencoder`), its transformer by the ordinary
trainer. The prompt and image encoders stay random, as frozen features.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dzrobot.embodiments.spec import Embodiment
from dzrobot.policies.dreamzero.checkpoints.directory import (
    read_metadata,
)
from dzrobot.policies.dreamzero.checkpoints.load import expected_shapes, official_state
from dzrobot.policies.dreamzero.checkpoints.shards import (
    refuse_existing,
)
from dzrobot.policies.dreamzero.checkpoints.sources import (
    StateDictSource,
    UnionSource,
)
from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    TextConfig,
    VaeConfig,
)
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.tiny import NewCheckpoint, TinyWeightsSource, write_new_checkpoint
from dzrobot.progress import progress_bar
from dzrobot.training.data import ReaderOptions, SourceSpec, TrainingData
from dzrobot.training.tiny.autoencoder import (
    AutoencoderPlan,
    clip_source,
    fit_autoencoder,
    fit_decoder,
    images_metadata,
)
from dzrobot.training.tiny.fit_checkpoint import FitCheckpoint

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


def new_weights(embodiment: Embodiment, seed: int) -> UnionSource:
    """Return random float32 weights of a small network for ``embodiment``.

    The last layers are zero, so that the first prediction is no motion at all and early gradients
    stay small.
    """
    shapes = expected_shapes(mini_config(embodiment))
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items() if name in LAST_LAYERS}
    random = TinyWeightsSource(shapes, seed, torch.float32)
    return UnionSource(sources=(random, StateDictSource(values=zeros)))


_VAE_PREFIX = "action_head.vae."


def write_fitted_checkpoint(
    output: Path,
    embodiment: Embodiment,
    datasets: Sequence[Path],
    metadata: Path,
    plan: AutoencoderPlan,
) -> dict[str, Any]:
    """Fit an autoencoder to ``datasets`` and write it with an untrained network to ``output``.

    Args:
        output: Checkpoint folder to make.
        embodiment: Robot of the datasets.
        datasets: LeRobot folders.
        metadata: Statistics, from ``dzrobot stats``.
        plan: How long, and with which seed.

    Returns:
        What was done, with the errors of the autoencoder.

    Raises:
        CheckpointError: ``output`` exists, or a stopped fit is of something else.
        DatasetError: A dataset is unreadable, does not hold the robot, or holds no sample.
        StatisticsError: ``metadata`` does not fit.
    """
    refuse_existing(output)
    clips = clip_source(list(datasets), embodiment, metadata)
    whole = SourceSpec(
        paths=datasets, embodiment=embodiment, metadata=images_metadata(metadata, embodiment)
    )
    options = ReaderOptions(episodes=plan.episodes)
    data = [TrainingData.open([one], seed=plan.seed, options=options) for one in (clips, whole)]
    with torch.random.fork_rng():
        # The library draws its initial weights from the global generator.
        torch.manual_seed(plan.seed)
        network = WorldActionModel(mini_config(embodiment), text_encoder=False)
    saves = _saves(output, plan, data)
    recipe = _fit(network.vae, data, plan, saves)
    state = official_state(network)
    vae = {name: tensor for name, tensor in state.items() if name.startswith(_VAE_PREFIX)}
    weights = UnionSource(sources=(new_weights(embodiment, plan.seed), StateDictSource(values=vae)))
    statistics = read_metadata(metadata)
    content = NewCheckpoint(
        config=network.config, metadata=statistics, weights=weights, recipe=recipe
    )
    write_new_checkpoint(output, embodiment, content)
    saves.clear()
    return recipe


def _saves(output: Path, plan: AutoencoderPlan, data: list[TrainingData]) -> FitCheckpoint:
    """Return where a stopped fit is kept: beside ``output``, until that is there."""
    identity = {name: str(value) for name, value in asdict(plan).items()}
    del identity["num_workers"]  # It changes nothing but the time.
    place = output.with_name(f"{output.name}.unfinished")
    return FitCheckpoint(place, {**identity, "recordings": data[1].identity()})


def _fit(
    vae: Vae, data: list[TrainingData], plan: AutoencoderPlan, saves: FitCheckpoint
) -> dict[str, Any]:
    """Train ``vae`` on short clips, its decoder on whole samples; return what was done."""
    with progress_bar("fitting the autoencoder") as advance:
        error = fit_autoencoder(
            vae, data[0], plan, lambda line: advance(line.step, plan.steps), saves
        )
    with progress_bar("fitting the decoder") as advance:
        whole_error = fit_decoder(
            vae, data[1], plan, lambda line: advance(line.step, plan.decoder_steps), saves
        )
    return {
        "recipe": "dzrobot init",
        "seed": plan.seed,
        "autoencoder_steps": plan.steps,
        "autoencoder_batch": plan.batch,
        "autoencoder_error": round(error, 5),
        "decoder_steps": plan.decoder_steps,
        "decoder_error": round(whole_error, 5),
    }
