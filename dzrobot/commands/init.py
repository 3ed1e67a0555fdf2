"""``dzrobot init``: a small untrained checkpoint whose autoencoder knows the recordings."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dzrobot.commands import flags
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.checkpoints.directory import read_metadata
from dzrobot.policies.dreamzero.checkpoints.load import official_state
from dzrobot.policies.dreamzero.checkpoints.sources import UnionSource
from dzrobot.policies.dreamzero.checkpoints.writer import StateDictSource, refuse_existing
from dzrobot.policies.dreamzero.mini import fresh_weights, mini_config, write_mini_checkpoint
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.progress import progress_bar
from dzrobot.training.autoencoder import (
    AutoencoderPlan,
    clip_source,
    fit_autoencoder,
    fit_decoder,
)
from dzrobot.training.data import SourceSpec, TrainingData
from dzrobot.training.saves import Saves

SUMMARY = "write a small untrained checkpoint, its autoencoder fitted to recordings"
VAE_PREFIX = "action_head.vae."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot init``."""
    parser.add_argument("output", type=flags.path, help="checkpoint folder to make")
    parser.add_argument("--embodiment", type=flags.text, default="libero_mini")
    parser.add_argument("--dataset", nargs="+", type=Path, required=True, metavar="PATH")
    parser.add_argument("--metadata", type=Path, required=True, help="from `dzrobot stats`")
    parser.add_argument("--steps", type=flags.whole(1), default=AutoencoderPlan.steps)
    parser.add_argument(
        "--decoder-steps", type=flags.whole(1), default=AutoencoderPlan.decoder_steps
    )
    parser.add_argument("--batch", type=flags.whole(1), default=AutoencoderPlan.batch)
    parser.add_argument("--seed", type=flags.seed, default=0)
    parser.add_argument("--num-workers", type=flags.whole(0, 1024), default=0)


def run(arguments: argparse.Namespace) -> int:
    """Fit the autoencoder and write the checkpoint."""
    refuse_existing(arguments.output)
    embodiment = load_embodiment(arguments.embodiment)
    plan = AutoencoderPlan(
        steps=arguments.steps,
        batch=arguments.batch,
        decoder_steps=arguments.decoder_steps,
        seed=arguments.seed,
        num_workers=arguments.num_workers,
    )
    clips = clip_source(arguments.dataset, embodiment, arguments.metadata)
    whole = SourceSpec(paths=arguments.dataset, embodiment=embodiment, metadata=arguments.metadata)
    data = [TrainingData.open([source], seed=arguments.seed) for source in (clips, whole)]
    with torch.random.fork_rng():
        # The library draws its fresh weights from the global generator.
        torch.manual_seed(arguments.seed)
        network = WorldActionModel(mini_config(embodiment), text_encoder=False)
    saves = _saves(arguments.output, plan, data)
    recipe = _fit(network.vae, data, plan, saves)
    state = official_state(network)
    vae = {name: tensor for name, tensor in state.items() if name.startswith(VAE_PREFIX)}
    weights = UnionSource(
        sources=(fresh_weights(embodiment, arguments.seed), StateDictSource(values=vae))
    )
    metadata = read_metadata(arguments.metadata)
    write_mini_checkpoint(arguments.output, embodiment, metadata, weights, recipe)
    saves.clear()
    print(
        f"{arguments.output}: mean absolute error of decoded pixels "
        f"{recipe['autoencoder_error']:.4f} in short clips, "
        f"{recipe['decoder_error']:.4f} in whole samples (range 2)"
    )
    return 0


def _saves(output: Path, plan: AutoencoderPlan, data: list[TrainingData]) -> Saves:
    """Return where a stopped fit is kept: beside ``output``, until that is there."""
    identity = {name: str(value) for name, value in asdict(plan).items()}
    del identity["num_workers"]  # It changes nothing but the time.
    place = output.with_name(f"{output.name}.unfinished")
    return Saves(place, {**identity, "recordings": data[1].identity()})


def _fit(vae: Vae, data: list[TrainingData], plan: AutoencoderPlan, saves: Saves) -> dict[str, Any]:
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
