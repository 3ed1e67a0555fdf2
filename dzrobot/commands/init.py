"""``dzrobot init``: a small untrained checkpoint whose autoencoder knows the recordings."""

import argparse
import json
from pathlib import Path

import torch

from dzrobot.commands.stats import progress_bar
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.checkpoints.load import official_state
from dzrobot.policies.dreamzero.checkpoints.sources import UnionSource
from dzrobot.policies.dreamzero.checkpoints.writer import StateDictSource
from dzrobot.policies.dreamzero.mini import fresh_weights, mini_config, write_mini_checkpoint
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.autoencoder import AutoencoderPlan, clip_source, fit_autoencoder
from dzrobot.training.data import TrainingData

SUMMARY = "write a small untrained checkpoint, its autoencoder fitted to recordings"
VAE_PREFIX = "action_head.vae."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot init``."""
    parser.add_argument("output", type=Path, help="checkpoint folder to make")
    parser.add_argument("--embodiment", default="libero_mini")
    parser.add_argument("--dataset", nargs="+", type=Path, required=True, metavar="PATH")
    parser.add_argument("--metadata", type=Path, required=True, help="from `dzrobot stats`")
    parser.add_argument("--steps", type=int, default=AutoencoderPlan.steps)
    parser.add_argument("--batch", type=int, default=AutoencoderPlan.batch)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    """Fit the autoencoder and write the checkpoint."""
    embodiment = load_embodiment(arguments.embodiment)
    plan = AutoencoderPlan(
        steps=arguments.steps,
        batch=arguments.batch,
        seed=arguments.seed,
        num_workers=arguments.num_workers,
    )
    source = clip_source(arguments.dataset, embodiment, arguments.metadata)
    data = TrainingData.open([source], seed=arguments.seed)
    with torch.random.fork_rng():
        # The library draws its fresh weights from the global generator.
        torch.manual_seed(arguments.seed)
        network = WorldActionModel(mini_config(embodiment), text_encoder=False)
    with progress_bar("fitting the autoencoder") as advance:
        error = fit_autoencoder(
            network.vae, data, plan, lambda line: advance(line.step, plan.steps)
        )
    state = official_state(network)
    vae = {name: tensor for name, tensor in state.items() if name.startswith(VAE_PREFIX)}
    weights = UnionSource(
        sources=(fresh_weights(embodiment, arguments.seed), StateDictSource(values=vae))
    )
    recipe = {
        "recipe": "dzrobot init",
        "seed": arguments.seed,
        "autoencoder_steps": plan.steps,
        "autoencoder_batch": plan.batch,
        "autoencoder_error": round(error, 5),
    }
    metadata = json.loads(arguments.metadata.read_text(encoding="utf-8"))
    write_mini_checkpoint(arguments.output, embodiment, metadata, weights, recipe)
    print(f"{arguments.output}: mean absolute error of decoded pixels {error:.4f} (range 2)")
    return 0
