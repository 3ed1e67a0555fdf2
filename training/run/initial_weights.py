"""The weights that a run starts from: files, and what is drawn for parts that are new."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.checksums import fingerprint, weights_hash
from dzrobot.policies.dreamzero.checkpoints.coldstart import Components, cold_start
from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint, open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.hub import commit_of, locate
from dzrobot.policies.dreamzero.checkpoints.load import (
    SetWeight,
    build_network,
    complete_source,
    expected_shapes,
    load_weights,
    slots,
)
from dzrobot.policies.dreamzero.checkpoints.lora import MergedSource
from dzrobot.policies.dreamzero.checkpoints.names import CONDITIONS, is_adapter
from dzrobot.policies.dreamzero.checkpoints.sources import (
    RandomInitSource,
    UnionSource,
    ValuesSource,
    WeightSource,
)
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.dit import Condition
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.tiny import TinyWeightsSource
from dzrobot.rng import torch_seed
from dzrobot.training.recipes.architecture import METADATA_FILE, base_network, loose_weights
from dzrobot.training.sft_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """The weights a run starts from; only file headers have been read."""

    base: NetworkConfig
    """The network as the files describe it, before the run's own horizon and sizes."""

    source: WeightSource
    """Every tensor, under canonical names; adapters of the checkpoint are merged."""

    folder: Path | None
    """Checkpoint folder, for statistics, tokenizer and the files beside the weights."""

    files: WeightSource
    """What is on the disk: ``source`` before anything was merged into it."""

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the values, at samples of each tensor and in bfloat16."""
        return fingerprint(self.source, self.source.tensors)

    @cached_property
    def hashed(self) -> "Future[str]":
        """Return the hash of every byte; computed beside the training, from the first call on."""
        return ThreadPoolExecutor(1).submit(weights_hash, self.files)

    @cached_property
    def commit(self) -> str:
        """Return the commit of the hub's repository that they came from; empty for others."""
        return "" if self.folder is None else commit_of(self.folder)

    @property
    def metadata(self) -> Path | None:
        """Return the statistics beside the weights, if any."""
        return None if self.folder is None else self.folder / METADATA_FILE


def open_initial_weights(model: ModelConfig, seed: int) -> InitialWeights:
    """Return the weights that ``model`` names.

    Raises:
        CheckpointError: Missing, incomplete or foreign files.
    """
    if model.model_path is not None:
        path = model.model_path
        loose = loose_weights(model, locate(path, model.revision))
        return from_checkpoint(open_checkpoint(path, revision=model.revision, config_from=loose))
    base = base_network(model, model.config_path)
    shapes = expected_shapes(base)
    if model.random_init:
        drawn = TinyWeightsSource(shapes, seed, torch.float32)
        return InitialWeights(base=base, source=drawn, folder=None, files=drawn)
    cold = cold_start(_components(model), base, shapes, seed=seed).source
    return InitialWeights(base=base, source=cold, folder=None, files=cold)


def from_checkpoint(checkpoint: Checkpoint) -> InitialWeights:
    """Return the weights of a checkpoint, its adapters merged.

    Raises:
        CheckpointError: Missing, incomplete or foreign files.
    """
    network = build_network(checkpoint.config)
    source = complete_source(checkpoint, None, network)
    if checkpoint.has_adapters:
        source = MergedSource(source, checkpoint.adapters)
    return InitialWeights(
        base=checkpoint.config, source=source, folder=checkpoint.folder, files=checkpoint.weights
    )


def _components(model: ModelConfig) -> Components:
    dit, text, image, vae = (
        locate(str(path))
        for path in (
            model.diffusion_model_pretrained_path, model.text_encoder_pretrained_path,
            model.image_encoder_pretrained_path, model.vae_pretrained_path,
        )
    )  # fmt: skip
    return Components(dit=dit, text=text, image=image, vae=vae)


def fill(
    network: WorldActionModel, initial: InitialWeights, seed: int,
    setters: Mapping[str, SetWeight],
) -> None:  # fmt: skip
    """Give every tensor of an allocated network its initial value.

    Args:
        network: The network.
        initial: Where its values are.
        seed: What new adapters and encoders are drawn from.
        setters: What takes a tensor that is kept in another form, by its name in the network.

    Raises:
        CheckpointError: The weights are not those of the network.
    """
    load_weights(network, starting_weights(network, initial, seed), setters)


def starting_weights(
    network: WorldActionModel, initial: InitialWeights, seed: int
) -> WeightSource:  # fmt: skip
    """Return the initial weights with the adapters and encoders that are new.

    Args:
        network: The network, with or without memory.
        initial: What it starts from.
        seed: What is new is drawn from it.
    """
    shapes = {name: slot.shape for name, slot in slots(network).items()}
    adapters = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    source = initial.source
    if adapters:
        source = UnionSource(sources=(source, NewAdapters(adapters, seed)))
    new = {name for name in shapes if name.startswith(CONDITIONS)} - initial.source.tensors.keys()
    if new:
        source = UnionSource(sources=(source, NewConditions(network, frozenset(new), seed)))
    return source


class NewAdapters(RandomInitSource):
    """Adapters without effect yet: A is uniform, as the adapter library draws it, B is zero."""

    origin = "newly initialized adapters"
    key = "adapter/"

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the tensor ``name``."""
        tensor = torch.zeros(shape)
        if ".lora_A." in name:
            bound = shape[1] ** -0.5
            tensor.uniform_(-bound, bound, generator=generator)
        return tensor


@dataclass(frozen=True)
class NewConditions(ValuesSource):
    """Encoders of a robot's own modalities, each as its own code initializes it.

    Equal seeds and encoders give equal weights, in every process.
    """

    network: WorldActionModel
    names: frozenset[str]
    """Canonical names of their tensors."""

    seed: int
    origin: str = "newly initialized encoders"
    layout: str = "newly initialized encoders"

    @cached_property
    def values(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """The tensors by name."""
        found: dict[str, Tensor] = {}
        for key, condition in self.network.model.conditions.items():
            if not isinstance(condition, Condition):
                raise TypeError(f"condition {key} is a {type(condition).__name__}")
            # An encoder's constructor draws from torch's global generator, as torch's layers do.
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(torch_seed("condition", self.seed, key))
                made = condition.again()
            found |= {f"{CONDITIONS}{key}.{name}": v for name, v in made.state_dict().items()}
        return {name: found[name].float() for name in self.names}
