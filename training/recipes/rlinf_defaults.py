"""What RLinf's program does where one of its files says nothing: facts about rlinf 0.3.0.

Files of defaults are read where they lie beside a recipe; these values stand in for missing ones.
"""

from collections.abc import Mapping
from typing import Any

from dzrobot.embodiments.timing import WALK_OFFSETS

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
