"""From recordings to the checkpoint that ``dzrobot init`` writes; a stopped fit resumes."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dzrobot.embodiments.spec import Embodiment
from dzrobot.policies.dreamzero.checkpoints.directory import read_metadata
from dzrobot.policies.dreamzero.checkpoints.load import official_state
from dzrobot.policies.dreamzero.checkpoints.shards import refuse_existing
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource, UnionSource
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.progress import progress_bar
from dzrobot.training.data import SourceSpec, TrainingData
from dzrobot.training.tiny.autoencoder import (
    AutoencoderPlan,
    clip_source,
    fit_autoencoder,
    fit_decoder,
    images_metadata,
)
from dzrobot.training.tiny.network import mini_config, new_weights, write_mini_checkpoint
from dzrobot.training.tiny.saves import FitCheckpoint

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
        DatasetError: A dataset is unreadable or does not hold the robot.
        StatisticsError: ``metadata`` does not fit.
    """
    refuse_existing(output)
    clips = clip_source(list(datasets), embodiment, metadata)
    whole = SourceSpec(
        paths=datasets, embodiment=embodiment, metadata=images_metadata(metadata, embodiment)
    )
    data = [TrainingData.open([source], seed=plan.seed) for source in (clips, whole)]
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
    write_mini_checkpoint(output, embodiment, statistics, weights, recipe)
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
