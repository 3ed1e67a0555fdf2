"""The small policy that ``dzrobot init`` writes: a few million parameters, the 5B's structure.

Unlike :mod:`dzrobot.policies.dreamzero.tiny` it is meant to be trained: its video autoencoder is
fitted to recordings (:mod:`dzrobot.training.tiny.autoencoder`), its transformer by the ordinary
trainer. The prompt and image encoders stay random, as frozen features.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import find
from dzrobot.policies.dreamzero.checkpoints.directory import read_metadata
from dzrobot.policies.dreamzero.checkpoints.load import expected_shapes, official_state
from dzrobot.policies.dreamzero.checkpoints.names import DIT, VAE
from dzrobot.policies.dreamzero.checkpoints.shards import refuse_existing
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
from dzrobot.progress import progress_bar, waiting
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data import (
    EpisodeSelection,
    ReaderOptions,
    SourceSpec,
    TrainingData,
)
from dzrobot.training.run.inputs import training_prompts
from dzrobot.training.run.opening import last_episodes, recorded_anchor
from dzrobot.training.tiny.autoencoder import (
    CLIP,
    STILL,
    AutoencoderData,
    AutoencoderReport,
    FitCheckpoint,
    clip_source,
    fit_autoencoder,
    images_metadata,
    reconstruction_psnr,
)
from dzrobot.training.tiny.fit_plan import SIZES, AutoencoderPlan

_VOCABULARY = 768
_TEXT_WIDTH = 64
_IMAGE_WIDTH = 96


LAST_LAYERS = frozenset(
    DIT + name
    for name in (
        "head.head.weight",
        "head.head.bias",
        *(f"action_decoder.layer2.{n}" for n in "Wb"),
    )
)
"""What a new network's predictions are multiplied by."""


def mini_config(embodiment: Embodiment, size: str = "mini") -> NetworkConfig:
    """Return the config of a small 5B-style network that fits ``embodiment``.

    Raises:
        UnknownNameError: no such size.
        ConfigError: the tiled image is not divided by the autoencoder's and the patch's stride.
    """
    own = find(SIZES, "size", size)
    vae = VaeConfig(
        version="2.2", dim=own.encoder, dec_dim=own.decoder, z_dim=own.latents,
        num_res_blocks=1,
    )  # fmt: skip
    height, width = embodiment.image_size
    patch = 2 * vae.spatial_stride
    timing = embodiment.timing
    config = NetworkConfig(
        dit=DiTConfig(
            model_type="ti2v",
            dim=own.width, ffn_dim=own.ffn, freq_dim=64, num_heads=4, num_layers=own.layers,
            hidden_size=128, in_dim=own.latents, out_dim=own.latents,
            concat_first_frame_latent=False,
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
        image=ImageConfig(
            vision_dim=_IMAGE_WIDTH, vision_heads=4, vision_layers=3, embed_dim=32,
            image_size=own.image,
        ),
        vae=vae,
        head=HeadConfig(
            action_horizon=timing.action_horizon, num_frames=timing.frames,
            target_video_height=height, target_video_width=width,
            use_high_noise_emphasis=own.high_noise,
        ),
    )  # fmt: skip
    config.check_size(height, width)
    return config


def new_weights(config: NetworkConfig, seed: int) -> UnionSource:
    """Return random float32 weights of a small network of ``config``.

    The last layers are zero, so that the first prediction is that nothing moves and early gradients
    stay small.
    """
    shapes = expected_shapes(config)
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items() if name in LAST_LAYERS}
    random = TinyWeightsSource(shapes, seed, torch.float32)
    return UnionSource(sources=(random, StateDictSource(values=zeros)))


@dataclass(frozen=True, kw_only=True)
class FittedTo:
    """What a checkpoint is made for."""

    embodiment: Embodiment
    """Robot of the datasets."""

    datasets: Sequence[Path]
    """LeRobot folders."""

    metadata: Path
    """Statistics, from ``dzrobot stats``."""


def write_fitted_checkpoint(
    output: Path, target: FittedTo, plan: AutoencoderPlan, size: str = "mini"
) -> dict[str, Any]:
    """Fit an autoencoder to recordings and write it with an untrained network to ``output``.

    Args:
        output: Checkpoint folder to make.
        target: Robot, recordings and statistics.
        plan: How long, and with which seed.
        size: Of the network, one of `SIZES`.

    Returns:
        What was done, with the errors of the autoencoder.

    Raises:
        CheckpointError: ``output`` exists, or a stopped fit is of something else.
        DatasetError: A dataset is unreadable, does not hold the robot, or holds no sample.
        StatisticsError: The statistics do not fit.
        UnknownNameError: No such size.
    """
    refuse_existing(output)
    config = mini_config(target.embodiment, size)
    with waiting("reading the recordings"):
        data = _opened(target, plan)
    with waiting("making the network"), torch.random.fork_rng():
        # The library draws its initial weights from the global generator.
        torch.manual_seed(plan.seed)
        network = WorldActionModel(config, text_encoder=False)
    saves = _saves(output, plan, data.whole, size)
    recipe = _fit(network.vae, data, plan, saves) | {"size": size}
    with waiting("writing the checkpoint"):
        state = official_state(network)
        vae = {name: tensor for name, tensor in state.items() if name.startswith(VAE)}
        weights = UnionSource(sources=(new_weights(config, plan.seed), StateDictSource(values=vae)))
        content = NewCheckpoint(
            config=config,
            metadata=read_metadata(target.metadata),
            weights=weights,
            recipe=recipe,
            prompts=training_prompts(data.whole),
        )
        write_new_checkpoint(output, data.robot, content)
        saves.clear()
    return recipe


@dataclass(frozen=True, kw_only=True)
class _Recordings:
    robot: Embodiment
    """As it was recorded: what is trained on them acts from their anchor."""

    fitted: AutoencoderData
    whole: TrainingData
    """Whole samples of the same episodes."""

    held_out: TrainingData
    """Whole samples of others; of the same where none are held out."""


def _opened(target: FittedTo, plan: AutoencoderPlan) -> _Recordings:
    metadata, catalogs = target.metadata, [DatasetCatalog.open(path) for path in target.datasets]
    anchor = recorded_anchor(catalogs, target.embodiment)
    robot = replace(target.embodiment, action_anchor=anchor)
    last = [last_episodes(catalog, plan.episodes, plan.held_out) for catalog in catalogs]
    fitted = [EpisodeSelection(without=episodes) for episodes in last]
    others = [EpisodeSelection(only=episodes) for episodes in last] if plan.held_out else fitted
    stills, clips = (clip_source(catalogs, robot, metadata, frames) for frames in (STILL, CLIP))
    whole = SourceSpec(paths=catalogs, embodiment=robot, metadata=images_metadata(metadata, robot))
    options = ReaderOptions(damaged=plan.damaged, episodes=plan.episodes)
    opened = [
        TrainingData.open([replace(one, selections=chosen)], seed=plan.seed, options=options)
        for one, chosen in ((stills, fitted), (clips, fitted), (whole, fitted), (whole, others))
    ]
    cut = AutoencoderData(stills=opened[0], clips=opened[1])
    return _Recordings(robot=robot, fitted=cut, whole=opened[2], held_out=opened[3])


def _saves(output: Path, plan: AutoencoderPlan, whole: TrainingData, size: str) -> FitCheckpoint:
    """Return where a stopped fit is kept: beside ``output``, until that is there."""
    identity = {name: str(value) for name, value in asdict(plan).items()} | {"size": size}
    del identity["num_workers"]  # It changes nothing but the time.
    place = output.with_name(f"{output.name}.unfinished")
    return FitCheckpoint(place, {**identity, "recordings": whole.identity()})


def _fit(
    vae: Vae, data: _Recordings, plan: AutoencoderPlan, saves: FitCheckpoint
) -> dict[str, Any]:
    """Train ``vae``; return what was done."""
    steps = plan.still_steps + plan.clip_steps + plan.decoder_steps
    with progress_bar("fitting the autoencoder") as advance:

        def report(line: AutoencoderReport) -> None:
            last = "measuring what was fitted" if line.step == steps else None
            advance(line.step, steps, last)

        error = fit_autoencoder(vae, data.fitted, plan, report, saves)
    return {
        "recipe": "dzrobot init",
        "seed": plan.seed,
        "still_steps": plan.still_steps,
        "still_batch": plan.still_batch,
        "clip_steps": plan.clip_steps,
        "clip_batch": plan.clip_batch,
        "decoder_steps": plan.decoder_steps,
        "dtype": plan.dtype,
        "error": round(error, 5),
        "held_out_episodes": plan.held_out,
        "psnr": round(_psnr(vae, data.held_out, plan), 3),
    }


def _psnr(vae: Vae, data: TrainingData, plan: AutoencoderPlan) -> float:
    with progress_bar("scoring decoded clips") as show:
        return reconstruction_psnr(vae, data, plan, show)
