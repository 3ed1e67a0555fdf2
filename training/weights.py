"""Where the weights of a run come from, and the network they fill.

A network is never whole in one place: it is built on the meta device, sharded, and every process
copies its own part out of the files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.coldstart import Components, cold_start
from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint, open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.drawn import DrawnSource
from dzrobot.policies.dreamzero.checkpoints.fingerprint import fingerprint
from dzrobot.policies.dreamzero.checkpoints.hub import locate
from dzrobot.policies.dreamzero.checkpoints.load import (
    build_network,
    check_weights,
    complete_source,
    expected_shapes,
    fill_network,
    slots,
)
from dzrobot.policies.dreamzero.checkpoints.lora import (
    MergedSource,
    adapter_scale,
    inject_adapters,
    trained_with_adapters,
)
from dzrobot.policies.dreamzero.checkpoints.names import DIT, TEXT, canonical, is_adapter
from dzrobot.policies.dreamzero.checkpoints.sources import UnionSource, WeightSource
from dzrobot.policies.dreamzero.network.config import NetworkConfig, TextConfig
from dzrobot.policies.dreamzero.network.keymap import entries
from dzrobot.policies.dreamzero.network.text import TextEncoder
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
    return Start(
        base=base,
        source=cold_start(_components(model), base, shapes, seed=seed).source,
        folder=None,
    )


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


def empty_network(config: NetworkConfig, *, is_lora: bool, text_encoder: bool) -> WorldActionModel:
    """Return the network on the meta device; only what is trained requires gradients."""
    network = build_network(config, text_encoder=text_encoder)
    if is_lora:
        inject_adapters(network.model, config.head)
    network.requires_grad_(requires_grad=False)
    for name, parameter in network.model.named_parameters():
        parameter.requires_grad_(not is_lora or trained_with_adapters(canonical(DIT + name)))
    return network.eval()


def fill(network: WorldActionModel, start: Start, seed: int) -> None:
    """Give every tensor of a network that has its memory its starting value.

    Raises:
        CheckpointError: The weights are not those of the network.
    """
    adapters = {name: slot.shape for name, slot in slots(network).items() if is_adapter(name)}
    source = start.source
    if adapters:
        source = UnionSource(sources=(source, FreshAdapters(adapters, seed)))
    check_weights(network, source)
    fill_network(network, source)


class FreshAdapters(DrawnSource):
    """Adapters that change nothing yet: A uniform as the adapter library draws it, B zero."""

    origin = "fresh adapters"
    key = "adapter/"

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the tensor ``name``."""
        fresh = torch.zeros(shape)
        if ".lora_A." in name:
            bound = shape[1] ** -0.5
            fresh.uniform_(-bound, bound, generator=generator)
        return fresh


def load_text_encoder(
    config: TextConfig, source: WeightSource, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """Return the frozen prompt encoder alone."""
    with torch.device("meta"):
        encoder = TextEncoder(config)
    encoder.to(dtype).to_empty(device=device)
    table = {TEXT + entry.official: entry for entry in entries(encoder)}
    state = encoder.state_dict()
    with torch.no_grad():
        for name, tensor in source.stream(table):
            for target, piece in table[name].split(tensor):
                state[target].copy_(piece)
    return encoder.eval().requires_grad_(requires_grad=False)
