"""Starting from the Wan component files (docs/model.md, section 1.4).

What they lack is newly initialized and listed.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dzrobot.errors import CheckpointError, preview
from dzrobot.policies.dreamzero.checkpoints.names import DIT, IMAGE, TEXT, VAE
from dzrobot.policies.dreamzero.checkpoints.sources import (
    RandomInitSource,
    UnionSource,
    WeightSource,
    open_pickled,
    open_safetensors,
    renamed,
)
from dzrobot.policies.dreamzero.network.config import NetworkConfig

DIT_STEM = "diffusion_pytorch_model"
TEXT_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
IMAGE_FILE = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
VAE_FILES = {"2.1": "Wan2.1_VAE.pth", "2.2": "Wan2.2_VAE.pth"}

_ACTION_MODULES = re.compile(
    r"action_head\.model\.(?:state_encoder|action_encoder|action_decoder)\."
)
_IMAGE_CONDITION = re.compile(
    r"action_head\.model\.(?:img_emb\.|blocks\.\d+\.cross_attn\.(?:k_img|v_img|norm_k_img)\.)"
)


@dataclass(frozen=True, kw_only=True)
class Components:
    """The component files of a Wan video model."""

    dit: Path
    """Folder with ``diffusion_pytorch_model.safetensors`` or its shards and index."""

    text: Path
    image: Path
    vae: Path


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """A full set of weights, part of it newly initialized."""

    source: WeightSource
    initialized: tuple[str, ...]
    """Canonical names of the tensors that no file holds."""


def has_components(folder: Path) -> bool:
    """Return whether ``folder`` holds the transformer of a Wan video model."""
    return any((folder / f"{DIT_STEM}.safetensors{end}").is_file() for end in ("", ".index.json"))


def find_components(folders: Sequence[Path], config: NetworkConfig) -> Components:
    """Return the component files in ``folders``; the image encoder often comes from another one.

    Raises:
        CheckpointError: A file is in none of the folders; says which, and where it is published.
    """
    vae = VAE_FILES[config.vae.version]
    files = {name: _find(folders, name) for name in (TEXT_FILE, IMAGE_FILE, vae)}
    dit = next((folder for folder in folders if has_components(folder)), None)
    lost = [name for name, path in files.items() if path is None] + (
        [f"{DIT_STEM}*.safetensors"] if dit is None else []
    )
    if lost:
        raise CheckpointError(
            f"{', '.join(map(str, folders))} lacks {', '.join(lost)}; download it from Wan-AI on "
            "Hugging Face "
            "(the image encoder is in Wan2.1-I2V-14B-480P) and give its folder as well"
        )
    assert dit is not None
    text, image, autoencoder = (path for path in files.values() if path is not None)
    return Components(dit=dit, text=text, image=image, vae=autoencoder)


def _find(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def cold_start(
    components: Components,
    config: NetworkConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
) -> ColdStart:
    """Return the components' weights under official names, completed by newly initialized tensors.

    Args:
        components: The files.
        config: The network. It decides what may be absent: the state and action modules, and for
            ``ti2v`` the image conditioning that Wan2.2-TI2V-5B does not have.
        shapes: Official name -> shape of every tensor of the network.
        seed: Of the newly initialized tensors. Each has a generator of its own, so none depends on
            which others are missing.

    Raises:
        CheckpointError: A file is damaged or lacks something that may not be newly initialized.
    """
    union = open_components(components)
    absent = new_names(shapes.keys(), union.tensors.keys(), config)
    fresh = NewWeightsSource({name: shapes[name] for name in absent}, seed)
    return ColdStart(source=UnionSource(sources=(union, fresh)), initialized=tuple(sorted(absent)))


def new_names(wanted: Set[str], held: Set[str], config: NetworkConfig) -> Set[str]:
    """Return the canonical names of tensors that are to be newly initialized.

    Raises:
        CheckpointError: One of them is in every published component file of this variant.
    """
    absent = wanted - held
    if lost := {name for name in absent if not _may_be_fresh(name, config)}:
        raise CheckpointError(
            f"the component files lack {preview(lost)}; download them again, for the right variant "
            f"(model_type={config.dit.model_type})"
        )
    return absent


def open_components(components: Components) -> UnionSource:
    """Return the tensors of the component files under official names."""
    return UnionSource(sources=(
        renamed(open_safetensors(components.dit, DIT_STEM), lambda name: DIT + name),
        renamed(open_pickled(components.text), lambda name: TEXT + name),
        renamed(open_pickled(components.image), _image_name),
        renamed(open_pickled(components.vae), lambda name: VAE + name),
    ))  # fmt: skip


def _image_name(name: str) -> str | None:
    return None if name.startswith("textual.") else IMAGE + name


def _may_be_fresh(name: str, config: NetworkConfig) -> bool:
    if _ACTION_MODULES.match(name):
        return True
    return config.dit.model_type == "ti2v" and _IMAGE_CONDITION.match(name) is not None


class NewWeightsSource(RandomInitSource):
    """Fresh tensors: Xavier-uniform matrices, biases 0, norms 1, per-category 0.02 * N(0, 1)."""

    origin = "new initialization"
    key = "cold start/"

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the tensor ``name``."""
        fresh = torch.zeros(shape)
        match name.rpartition(".")[2]:
            case "W":
                fresh.normal_(generator=generator).mul_(0.02)
            case "weight" if len(shape) == 1:
                fresh.fill_(1.0)
            case "weight":
                nn.init.xavier_uniform_(fresh, generator=generator)
            case "b" | "bias":
                pass
            case leaf:
                raise AssertionError(f"no initialization is documented for {leaf}")
        return fresh
