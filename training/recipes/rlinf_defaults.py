"""What RLinf's program does where one of its files says nothing: facts about rlinf 0.3.0.

Files of defaults are read where they lie beside a recipe; these values stand in for missing ones.
A network that files describe is compared with the published one that they name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dzrobot.embodiments.timing import WALK_OFFSETS
from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.network.config import HeadConfig, NetworkConfig, preset, values
from dzrobot.training.recipes.hydra_files import leaves
from dzrobot.yaml_values import dotted

VERSION = "0.3.0"
"""Version of rlinf on PyPI that this table describes."""

PROGRAM: Mapping[str, Any] = {
    "data.num_workers": 4,
    "data.prefetch_factor": 4,
    "data.sampling_mode": "multi_anchor",
    "data.video_backend": "pyav",
    "data.video_in_chunk_offsets": list(WALK_OFFSETS),
    "model.relative_action": False,
    "model.relative_action_per_horizon": False,
    "model.tokenizer_path": "google/umt5-xxl",
    "optim.adam_eps": 1e-8,
    "optim.lr_scheduler": "constant",
    "optim.lr_warmup_ratio": 0.0,
    "optim.weight_decay": 1e-2,
    "parallel.activation_checkpointing": "none",
    "parallel.cpu_offload": False,
    "parallel.enable_gradient_accumulation": False,
    "parallel.param_dtype": "fp32",
    "parallel.reshard_after_forward": True,
    "runner.seed": 42,
}
"""Field here -> what RLinf's code takes where neither a recipe nor its files of defaults say it.

Sums over ranks have the dtype of the weights there, where none is given."""

_SIZES = {
    "5b": {"target_video_height": 176, "target_video_width": 320},
    "14b": {"target_video_height": 352, "target_video_width": 640},
}


def _network(preset: str) -> dict[str, Any]:
    return {
        "action_horizon": 24,
        "num_action_per_block": 24,
        "state_horizon": 1,
        **_SIZES[preset],
        "action_head_cfg": {"config": {"diffusion_model_cfg": {"max_chunk_size": 4}}},
    }


_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")

FILES: Mapping[str, Mapping[str, Any]] = {
    "hybrid_engines/fsdp": {
        "strategy": "fsdp",
        "sharding_strategy": "full_shard",
        "gradient_checkpointing": False,
        "cpu_offload": False,
        "reshard_after_forward": True,
        "enable_gradient_accumulation": True,
    },
    "model/dreamzero_5b": _network("5b"),
    "model/dreamzero_14b": _network("14b"),
    **{
        f"env/{name}": {"env_type": "libero", "task_suite_name": name, "reset_gripper_open": True}
        for name in _SUITES
    },
}
"""File of defaults, as ``group/name`` -> what of it has a meaning here."""

ALIASES: Mapping[str, str] = {"actor.model": "rollout.model"}
"""A network's file names its own fields as those of a training run, in an evaluation too."""

PRESETS: Mapping[str, str] = {"model/dreamzero_5b": "5b", "model/dreamzero_14b": "14b"}
"""File of defaults -> network here."""


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
