"""Everything a run is made of, built once from a checked recipe."""

from dataclasses import dataclass, replace

import torch

from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.assembly import (
    Recordings,
    build_prompts,
    choose_prompts,
    lay_out,
    network_config,
    open_recordings,
    recording_prompts,
    sample_cost,
)
from dzrobot.training.features import StoredFeatures, build_features
from dzrobot.training.flops import peak_tflops
from dzrobot.training.metrics import Meter, Rates
from dzrobot.training.optim import Ema, Optimizer
from dzrobot.training.parallel import clean_name
from dzrobot.training.prompts import Prompts
from dzrobot.training.settings import SFTConfig
from dzrobot.training.weights import Start, open_start
from dzrobot.training.world import World


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of."""

    config: SFTConfig
    world: World
    start: Start
    network: NetworkConfig
    recordings: Recordings
    prompts: Prompts
    features: StoredFeatures | None
    model: WorldActionModel
    optimizer: Optimizer
    ema: Ema | None
    meter: Meter


def build_parts(config: SFTConfig, world: World) -> Parts:
    """Open recordings and weights, and lay the network out over the processes."""
    torch.use_deterministic_algorithms(config.runner.deterministic)
    start = open_start(config.model, config.runner.seed)
    network = network_config(config, start)
    recordings = open_recordings(config, start)
    stored = build_prompts(config, network, start, recordings, world)
    model, _ = lay_out(config, network, start, world)
    features = build_features(config, model, recordings.train, world)
    if features is not None:
        recordings = replace(recordings, train=recordings.train.without_pictures())
    trained = {clean_name(n): p for n, p in model.model.named_parameters() if p.requires_grad}
    optimizer = Optimizer(trained.items(), config.optim, config.runner.max_steps)
    longest = stored.longest(recording_prompts(recordings)) if stored else network.dit.text_len
    image_size = recordings.train.sources[0].spec.embodiment.image_size
    rates = Rates(
        cost=sample_cost(config, network, image_size, longest),
        devices=world.size,
        peak_tflops=config.logging.peak_tflops or _peak(world.device),
    )
    return Parts(
        config=config, world=world, start=start, network=network, recordings=recordings,
        prompts=choose_prompts(config, model, start, stored), features=features, model=model,
        optimizer=optimizer,
        ema=Ema(trained, config.optim.ema_decay) if config.optim.ema_decay else None,
        meter=Meter(rates, world.device),
    )  # fmt: skip


def _peak(device: torch.device) -> float | None:
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
