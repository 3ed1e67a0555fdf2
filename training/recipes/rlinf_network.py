"""The network that files of RLinf describe, compared with the published one that they name."""

from collections.abc import Iterator, Mapping
from typing import Any

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.network.config import HeadConfig, NetworkConfig, preset, values
from dzrobot.training.recipes.hydra_files import leaves
from dzrobot.yaml_values import dotted

UNKNOWN = "is not a field known here: take it out, or give it as null"

HEAD: Mapping[str, tuple[Any, ...]] = {
    "action_loss_embodiment_ids": (), "add_pos_embed": (), "noise_beta_alpha": (),
    "noise_beta_beta": (), "noise_s": (), "num_inference_timesteps": (),
    "num_timestep_buckets": (), "repa_coeff": (), "repa_layer": (), "vl_self_attention_cfg": (),
    "skip_component_loading": (), "defer_lora_injection": (),
    "backbone_embedding_dim": (0,), "backbone_features_projector_cfg": (None,),
    "expand_batch": (None,), "freeze_decode_layer": (False,), "input_embedding_dim": (1536,),
    "load_pretrained_det_decode_layer_path": (None,), "model_dtype": ("float32",),
    "tile_size_height": (34,), "tile_size_width": (34,), "tile_stride_height": (18,),
    "tile_stride_width": (16,), "tiled": (False,), "tune_diffusion_model": (True,),
    "tune_projector": (True,), "use_gradient_checkpointing": (True, False), "use_vlln": (True,),
    "hidden_size": (64,), "action_dim": (32,), "max_action_dim": (32,), "max_state_dim": (64,),
    "num_frame_per_block": (2,),
}  # fmt: skip
"""Entries of ``action_head_cfg.config`` that no field of :class:`HeadConfig` holds: the values of
both published networks; none where the published code reads no value."""

_SHAPED_BY_RUN = {
    "num_action_per_block", "frame_seqlen", "max_chunk_size", "action_horizon", "num_frames",
    "target_video_height", "target_video_width",
}  # fmt: skip
"""What a recipe decides, and what follows from it."""

_PARTS: Mapping[str, str] = {
    "diffusion_model_cfg": "dit", "vae_cfg": "vae", "text_encoder_cfg": "text",
    "image_encoder_cfg": "image",
}  # fmt: skip
"""Section of ``action_head_cfg.config`` -> part of a network here."""


def network_faults(
    model: Mapping[str, Any], chosen: str, section: str
) -> Iterator[tuple[str, str]]:
    """Yield in what a network of RLinf's files differs from a published one: name, and how.

    Args:
        model: Section with ``action_head_cfg``, its references filled in.
        chosen: Preset, ``5b`` or ``14b``.
        section: Name of ``model`` in the file.
    """
    where = f"{section}.action_head_cfg.config"
    try:
        found, published = NetworkConfig.from_dict(model), preset(chosen)
    except CheckpointError as error:
        yield where, str(error)
        return
    parts = {**{f"{name}.": part for name, part in _PARTS.items()}, "": "head"}
    for prefix, part in parts.items():
        there, here = values(values(found)[part]), values(values(published)[part])
        for name, value in there.items():
            if value != here[name] and name not in _SHAPED_BY_RUN:
                yield f"{where}.{prefix}{name}", _other(value, here[name], chosen)
    for place, value in leaves(model["action_head_cfg"]["config"]):
        entry = dotted(place)
        allowed = _allowed(place, found)
        if allowed is None:
            yield f"{where}.{entry}", UNKNOWN
        elif allowed and value not in allowed:
            yield f"{where}.{entry}", _other(value, allowed[0], chosen)


def _allowed(place: tuple[Any, ...], network: NetworkConfig) -> tuple[Any, ...] | None:
    """Return the values that an entry may have, none for any; None of an unknown entry."""
    top, name = str(place[0]), str(place[-1])
    if name.startswith("_") or name.endswith("_pretrained_path"):
        return ()
    if top in _PARTS:
        return () if name in values(values(network)[_PARTS[top]]) else None
    if top in HEAD:
        return HEAD[top]
    return () if top in HeadConfig.__dataclass_fields__ else None


def _other(value: Any, published: Any, chosen: str) -> str:
    return (
        f"is {value}, the published network {chosen} has {published}: train another one from a "
        "checkpoint, or with model.config_path in a recipe of your own"
    )
