"""The network that a manifest's ``config`` describes, at whatever widths."""

from collections.abc import Mapping
from typing import Any

from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    TextConfig,
    VaeConfig,
)
from golden_kinds.registry import Golden

# Entries of the manifests that say nothing about our network, with the only value they may have.
_FIXED: dict[str, Any] = {
    "shared_pos": False,
    "vision_pool": "token",
    "activation": "gelu",
    "temporal_stride": 4,
}
_DROPPED = {"dropout", "spatial_stride", "patch_size", "kind"}


def dit_config(config: Mapping[str, Any], **more: Any) -> DiTConfig:
    """Return the transformer of a ``dit_*`` manifest."""
    return DiTConfig(**{**config, **more})


def text_config(config: Mapping[str, Any]) -> TextConfig:
    """Return the prompt encoder of a ``umt5_text_encoder`` manifest."""
    return TextConfig(**_sizes(config, _DROPPED))


def image_config(config: Mapping[str, Any]) -> ImageConfig:
    """Return the image encoder of a ``clip_vision`` manifest."""
    return ImageConfig(**_sizes(config, set()))


def vae_config(config: Mapping[str, Any], kind: str) -> VaeConfig:
    """Return the autoencoder of a ``vae21`` or ``vae22`` manifest."""
    sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in _sizes(config, _DROPPED).items()}
    return VaeConfig(version={"vae21": "2.1", "vae22": "2.2"}[kind], **sizes)


def network_config(golden: Golden, **dit: Any) -> NetworkConfig:
    """Return the whole network of a ``head_*`` or ``weights`` manifest."""
    config = golden.manifest["config"]
    weights = golden.companion() if "weights_file" in golden.manifest else golden
    # The manifest leaves out the width of the unused projection; only its weights tell.
    (projection,) = (t for name, t in weights.tensors.items() if name.endswith("visual.head"))
    image = image_config({**config["clip"], "embed_dim": projection.shape[1]})
    return NetworkConfig(
        dit=dit_config(config["dit"], clip_dim=image.vision_dim, **dit),
        text=text_config(config["text"]),
        image=image,
        vae=vae_config(config["vae"], config["vae"]["kind"]),
        head=HeadConfig(**config["head"]),
    )


def _sizes(config: Mapping[str, Any], dropped: set[str]) -> dict[str, Any]:
    """Return the entries that are sizes; entries that must have one value are asserted."""
    for name, value in _FIXED.items():
        assert config.get(name, value) == value, f"{name}={config[name]} is not supported"
    return {k: v for k, v in config.items() if k not in dropped | _FIXED.keys()}
