"""Where the weights of a run come from, and the network they fill: built without memory, laid out, then filled.

A network is never whole in one place: it is built on the meta device, sharded, and every process copies its own part
out of the files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dzrobot.policies.dreamzero.checkpoints.coldstart import Components, cold_start
from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint, open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.fingerprint import fingerprint
from dzrobot.policies.dreamzero.checkpoints.hub import locate
from dzrobot.policies.dreamzero.checkpoints.load import (
    build_network,
    check_weights,
    complete_source,
    expected_shapes,
    fill_network,
)
from dzrobot.policies.dreamzero.checkpoints.lora import (
    MergedSource,
    adapter_scale,
    initialise_adapters,
    inject_adapters,
    trained_with_adapters,
)
from dzrobot.policies.dreamzero.checkpoints.names import DIT
from dzrobot.policies.dreamzero.checkpoints.sources import WeightSource
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.tiny import RandomSource
from dzrobot.training.architecture import METADATA_FILE, base_network
from dzrobot.training.settings import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Start:
    """The weights a run starts from; headers have been read, nothing else."""

    base: NetworkConfig
    """What the files describe, before the run's own horizon and sizes."""

    source: WeightSource
    """Every tensor, under canonical names; adapters of the checkpoint are merged."""

    folder: Path | None
    """Checkpoint folder, for statistics, tokenizer and the files beside the weights."""

    @cached_property
    def fingerprint(self) -> str:
        """Return the hash that tells these weights from others."""
        return fingerprint(self.source, self.source.tensors)

    @property
    def metadata(self) -> Path | None:
        """Return the statistics beside the weights, if any."""
        return None if self.folder is None else self.folder / METADATA_FILE


def open_start(model: ModelConfig, seed: int) -> Start:
    """Return the weights that ``model`` names.

    Raises:
        CheckpointError: Missing, incomplete or foreign files.
    """
    if model.model_path is not None:
        return _from_checkpoint(open_checkpoint(model.model_path, revision=model.revision))
    base = base_network(model, _config_json(model.config_path))
    shapes = expected_shapes(base)
    if model.random_init:
        return Start(base=base, source=RandomSource(shapes, seed, torch.float32), folder=None)
    return Start(base=base, source=cold_start(_components(model), base, shapes, seed=seed).source, folder=None)


def _from_checkpoint(checkpoint: Checkpoint) -> Start:
    network = build_network(checkpoint.config)
    source = complete_source(checkpoint, None, network)
    if checkpoint.has_adapters:
        source = MergedSource(source, adapter_scale(checkpoint.config.head))
    return Start(base=checkpoint.config, source=source, folder=checkpoint.folder)


def _config_json(path: Path | None) -> Mapping[str, Any] | None:
    return None if path is None else json.loads(path.read_text())


def _components(model: ModelConfig) -> Components:
    dit, text, image, vae = (
        locate(str(path))
        for path in (
            model.diffusion_model_pretrained_path, model.text_encoder_pretrained_path,
            model.image_encoder_pretrained_path, model.vae_pretrained_path,
        )
    )  # fmt: skip
    return Components(dit=dit, text=text, image=image, vae=vae)


def empty_network(config: NetworkConfig, *, is_lora: bool) -> WorldActionModel:
    """Return the network on the meta device; what is trained requires gradients, nothing else does."""
    network = build_network(config)
    if is_lora:
        inject_adapters(network.model, config.head)
    network.requires_grad_(requires_grad=False)
    for name, parameter in network.model.named_parameters():
        parameter.requires_grad_(not is_lora or trained_with_adapters(DIT + name))
    return network
