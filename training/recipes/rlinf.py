"""Field names of RLinf and other trainers, and their counterparts in our recipes.

Every recipe is read through :func:`translate`: a foreign name is reported with its counterpart
here, before any name is suggested by its spelling. ``rlinf_import`` reads whole files with the
same tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dzrobot.configuration import GIVEN, RawConfig, place_of
from dzrobot.importing import install
from dzrobot.training.recipes.rlinf_files import OPEN, PRESETS, leaves, listed_defaults, put
from dzrobot.yaml_values import Place, dotted

SECTIONS: Mapping[str, str] = {
    "actor.model": "model",
    "actor.optim": "optim",
    "actor.fsdp_config": "parallel",
    "parallel.mixed_precision": "parallel",
    "model.action_head_cfg.config.diffusion_model_cfg": "model",
    "model.action_head_cfg.config": "model",
    "model.action_head_cfg": "model",
}
"""Foreign section -> section here; tried in this order until none fits."""

RENAMED: Mapping[str, str] = {
    "actor.micro_batch_size": "runner.micro_batch_size",
    "actor.global_batch_size": "runner.global_batch_size",
    "actor.seed": "runner.seed",
    "actor.enable_gradient_accumulation": "parallel.enable_gradient_accumulation",
    "actor.enable_cuda_graph": "parallel.cuda_graphs",
    "actor.enable_torch_compile": "parallel.compile",
    "model.enable_cuda_graph": "parallel.cuda_graphs",
    "model.enable_torch_compile": "parallel.compile",
    "parallel.cuda_graph": "parallel.cuda_graphs",
    "parallel.enable_cuda_graph": "parallel.cuda_graphs",
    "actor.enable_offload": "parallel.cpu_offload",
    "data.seed": "runner.seed",
    "model.dreamzero_preset": "model.preset",
    "train_backend": "parallel.strategy",
    "parallel.train_backend": "parallel.strategy",
    "parallel.sharding_strategy": "parallel.strategy",
    "parallel.gradient_checkpointing": "parallel.activation_checkpointing",
    "parallel.recompute": "parallel.activation_checkpointing",
    "model.gradient_checkpointing": "parallel.activation_checkpointing",
    "parallel.fsdp_size": "parallel.shard_size",
    "parallel.offload": "parallel.cpu_offload",
    "optim.clip_grad_norm": "optim.clip_grad",
    "optim.lr_warmup_steps_ratio": "optim.lr_warmup_ratio",
    "optim.min_lr_rate": "optim.min_lr_ratio",
    "data.sampling_strategy": "data.sampling_mode",
    "runner.log_interval": "logging.log_interval",
    "runner.save_interval": "checkpoint.save_interval",
    "runner.val_check_interval": "runner.eval_interval",
    "runner.logger.log_path": "runner.output_dir",
    "runner.log_path": "runner.output_dir",
    "log_path": "runner.output_dir",
}
"""Foreign field, after its section was translated -> field here with the same meaning."""

VALUES: Mapping[str, Mapping[str | bool | int, Mapping[str, Any]]] = {
    "parallel.strategy": {
        "full_shard": {"parallel.strategy": "fsdp"},
        "fsdp2": {"parallel.strategy": "fsdp"},
        "zero3": {"parallel.strategy": "fsdp"},
        "hybrid_shard": {"parallel.strategy": "hsdp"},
        "no_shard": {"parallel.strategy": "ddp"},
        "shard_grad_op": {"parallel.strategy": "fsdp", "parallel.reshard_after_forward": False},
        "zero2": {"parallel.strategy": "fsdp", "parallel.reshard_after_forward": False},
    },
    "parallel.activation_checkpointing": {
        True: {"parallel.activation_checkpointing": "full"},
        False: {"parallel.activation_checkpointing": "none"},
    },
    "parallel.cuda_graphs": {
        True: {"parallel.cuda_graphs": "blocks"},
        False: {"parallel.cuda_graphs": "none"},
    },
    "parallel.param_dtype": {
        "bfloat16": {"parallel.param_dtype": "bf16"},
        "float32": {"parallel.param_dtype": "fp32"},
    },
    "parallel.reduce_dtype": {
        "bfloat16": {"parallel.reduce_dtype": "bf16"},
        "float32": {"parallel.reduce_dtype": "fp32"},
    },
    # Minus one says there that nothing is given.
    "optim.lr_warmup_steps": {-1: {"optim.lr_warmup_steps": None}},
    "runner.eval_interval": {-1: {"runner.eval_interval": None}},
    "model.preset": {
        "dreamzero_5b": {"model.preset": "5b"},
        "dreamzero_14b": {"model.preset": "14b"},
    },
}
"""Field here -> foreign value -> fields and values here."""

_BY_BLOCK = "each transformer block is sharded by itself"
_PIECEWISE = "weights are always read piece by piece onto their device"
_TRANSFORMER = ("transformer", "transformer_based_wrap", "TRANSFORMER_BASED_WRAP")
_BLOCKS = ("CausalWanAttentionBlock", "WanAttentionBlock", "Block")

TAKEN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "parallel.auto_wrap_policy": (_TRANSFORMER, _BY_BLOCK),
    "parallel.cpu_ram_efficient_loading": ((True,), _PIECEWISE),
    "parallel.root_only": ((False,), _BY_BLOCK),
    "parallel.transformer_layer_cls_to_wrap": (
        (*_BLOCKS, *([name] for name in _BLOCKS)), f"{_BY_BLOCK}, its class is Block",
    ),
    "parallel.use_orig_params": ((True,), "FSDP2 always has them"),
    "parallel.wrap_policy": (_TRANSFORMER, _BY_BLOCK),
}  # fmt: skip
"""Field without a counterpart -> the values of it that say what is done here anyway, and what that
is: such a value is accepted and told."""

NOT_HERE: Mapping[str, Mapping[Any, str]] = {
    "parallel.strategy": {
        "deepspeed": "there is no DeepSpeed here: its ZeRO stage 2 is parallel.strategy=zero2, "
        "stage 3 is fsdp, and its offloading parallel.cpu_offload=true",
        "fsdp1": "there is FSDP2 alone: write parallel.strategy=fsdp",
        "megatron": "there is no tensor parallelism here: choose fsdp, hsdp or ddp",
    },
    "data.video_backend": {
        "decord": "decord is not used: pyav, which is installed, or torchcodec "
        f"({install('video')}) read the same frames",
    },
}
"""Field here -> values of other trainers that cannot be had, and what comes nearest."""

DROPPED: Mapping[str, str] = {
    "actor": "sections are model, data, optim, parallel, checkpoint, logging and runner",
    "actor.eval_batch_size": "open-loop evaluations take runner.eval_windows samples; drop it",
    "actor.fsdp_config.strategy": "it is always FSDP2; parallel.strategy says what is sharded",
    "actor.group_name": "names processes of Ray; drop it",
    "actor.training_backend": "it is always FSDP2; parallel.strategy says what is sharded",
    "algorithm": "is of reinforcement learning; drop it",
    "cluster": "torchrun says how many machines and processes: --nnodes, --nproc-per-node",
    "critic": "is of reinforcement learning; drop it",
    "data.dataset_type": "the format is read from meta/info.json; drop it",
    "data.lazy_load": "every read is lazy; drop it",
    "data.multi_anchor_resample_attempts": "only rows with a whole sample are drawn; drop it",
    "data.parquet_cache_size": "numbers are mapped from disk; drop it",
    "data.transform_on_gpu": "images are prepared by the reader processes; drop it",
    "data.val_data_paths": "an open-loop evaluation is data.holdout_episodes and "
    "runner.eval_interval",
    "data.video_tolerance_s": "frames are found by their number; drop it",
    "defaults": "recipes are whole files; the network is model.preset (5b or 14b)",
    "env": "an evaluation is `dzrobot eval --suite libero_spatial --max-steps 480`",
    "hydra": "there is no Hydra; drop it",
    "model._": "is of Hydra; drop it",
    "model.action_dim": "the network's config.json says it; drop it",
    "model.action_head_cfg": "max_chunk_size is model.max_chunk_size; the rest is in the "
    "checkpoint's config.json",
    "model.action_loss_embodiment_ids": "the network has one set of action modules; drop it",
    "model.always_use_default_instruction": "every sample has its own instruction; drop it",
    "model.architectures": "there is one kind of model; drop it",
    "model.backbone_cfg": "there is one kind of model; drop it",
    "model.default_instruction": "every sample has its own instruction; drop it",
    "model.droid_view_height": "the embodiment's View.size says it; drop it",
    "model.droid_view_width": "the embodiment's View.size says it; drop it",
    "model.embodiment_tag_mapping": "projector ids never reach the network; drop it",
    "model.language_dropout_prob": "every sample has its own instruction; drop it",
    "model.load_to_device": "weights are read onto their device; drop it",
    "model.lora_path": "continue from a checkpoint with model.model_path",
    "model.max_action_dim": "the network's config.json says it; drop it",
    "model.max_seq_len": "the network's config.json says it; drop it",
    "model.max_state_dim": "the network's config.json says it; drop it",
    "model.model_type": "there is one kind of model; drop it",
    "model.num_action_chunks": "how many actions of a plan are executed is `dzrobot eval "
    "--execute K`; drop it",
    "model.num_action_per_block": "it equals model.action_horizon; set that",
    "model.num_frames": "it is 8 x model.max_chunk_size + 1; drop it",
    "model.precision": "master weights are float32; parallel.param_dtype sets the rest",
    "model.state_horizon": "there is one state per block; drop it",
    "optim.num_cycles": "a cosine is half a wave; drop it",
    "optim.optimizer": "AdamW is used; drop it",
    "parallel.amp": "parallel.param_dtype sets what is computed in; drop it",
    "parallel.amp_autocast": "parallel.param_dtype sets what is computed in; drop it",
    "parallel.backward_prefetch": "is of FSDP1; parallel.prefetch_blocks gathers ahead",
    "parallel.buffer_dtype": "buffers have the dtype of the weights, parallel.param_dtype; drop it",
    "parallel.cast_model_to_bf16_backends": "master weights are float32; parallel.param_dtype sets "
    "what is computed in; drop it",
    "parallel.cpu_ram_efficient_loading": "weights are always read piece by piece onto their "
    "device; drop it",
    "parallel.forward_prefetch": "is of FSDP1; parallel.prefetch_blocks gathers ahead",
    "parallel.grad_scaler": "bfloat16 needs none; drop it",
    "parallel.gradient_checkpointing_use_reentrant": "gives the same numbers; drop it",
    "parallel.limit_all_gathers": "is of FSDP1; parallel.prefetch_blocks gathers ahead",
    "parallel.offload_pin_memory": "parallel.cpu_offload pins what it moves; drop it",
    "parallel.save_full_model_weights": "checkpoint.export writes whole weights at the end, "
    "`dzrobot convert` those of any checkpoint",
    "parallel.auto_wrap_policy": f"{_BY_BLOCK}, and no other layout is offered; drop it",
    "parallel.root_only": f"{_BY_BLOCK}: as one unit, the whole network would be gathered on every "
    "device at once; drop it, or choose parallel.strategy=ddp",
    "parallel.transformer_layer_cls_to_wrap": f"{_BY_BLOCK}, and no other layer; drop it",
    "parallel.use_liger_kernel": "has no kernels for this network; drop it",
    "parallel.use_orig_params": "FSDP2 always has them; drop it",
    "parallel.wrap_policy": f"{_BY_BLOCK}, and no other layout is offered; drop it",
    "rollout": "an evaluation is `dzrobot eval`; drop it",
    "reward": "is of reinforcement learning; drop it",
    "robot_ip": "the workcell file says it, as `address`: `dzrobot init-workcell cell.yaml`",
    "camera_serials": "the workcell file says them, below `cameras`: `dzrobot init-workcell "
    "cell.yaml`",
    "runner.ckpt_path": "a policy is given to `dzrobot eval --checkpoint PATH --preset 5b "
    "--metadata FILE --embodiment TAG`, "
    "a run to resume to runner.resume_dir",
    "ckpt_path": "a policy is given to `dzrobot eval --checkpoint PATH --preset 5b "
    "--metadata FILE --embodiment TAG`, "
    "a run to resume to runner.resume_dir",
    "runner.early_stop": "a run ends at runner.max_steps; drop it",
    "runner.logger": "the folder is runner.output_dir; see the section logging",
    "runner.max_epochs": "give runner.max_steps",
    "runner.max_steps_per_rollout_epoch": "it is `dzrobot eval --max-steps`; drop it",
    "runner.only_eval": "an evaluation is `dzrobot eval`; drop it",
    "runner.per_worker_log": "every rank writes a log of its own; drop it",
    "runner.task_type": "there is one kind of run; drop it",
}
"""Fields without a counterpart, and what to do instead; a name includes all below it."""

MEANT: Mapping[str, tuple[Any, ...]] = {
    "actor.training_backend": ("fsdp",),
    "actor.fsdp_config.strategy": ("fsdp", "fsdp2"),
    "algorithm": (),
    "critic": (),
    "data.val_data_paths": (),
    "model.action_dim": (32,),
    "model.always_use_default_instruction": (False,),
    "model.language_dropout_prob": (0, 0.0),
    "model.lora_path": (),
    "model.max_action_dim": (32,),
    "model.max_seq_len": (512,),
    "model.max_state_dim": (64,),
    "model.model_type": ("dreamzero",),
    "model.precision": ("fp32", "32", "32-true", 32),
    "model.state_horizon": (1,),
    "optim.num_cycles": (0.5,),
    "optim.optimizer": ("adam", "adamw", "AdamW"),
    "parallel.amp_autocast.enabled": (False,),
    "parallel.grad_scaler.enabled": (False,),
    "reward": (),
    "runner.early_stop": (),
    "runner.only_eval": (False,),
    "runner.task_type": ("sft",),
}
"""Dropped field -> the values that say what is done here anyway. With any other, a run of RLinf
would train in another way, and its file is not imported."""


@dataclass(frozen=True)
class Translation:
    """A recipe under our names, and the changes that were made."""

    raw: RawConfig
    """The values, with the places of both names."""

    renamed: list[tuple[str, str]] = field(default_factory=list)
    """(name as written, its name here)."""

    dropped: list[tuple[str, str]] = field(default_factory=list)
    """(name as written, what to do instead)."""

    read_as: list[tuple[str, str]] = field(default_factory=list)
    """(``field=value`` as written, its form here)."""

    @property
    def faults(self) -> list[tuple[str, str]]:
        """Return what the author of a recipe has to change."""
        return [
            *((theirs, f"is called {ours} here") for theirs, ours in self.renamed),
            *self.dropped,
        ]


def translate(raw: RawConfig) -> Translation:
    """Return ``raw`` under our names; names in none of the tables stay as they are."""
    done = Translation(RawConfig({}, dict(raw.origins)))
    origins: dict[Place, str] = dict(raw.origins)
    moved: list[tuple[Place, str, Any]] = []
    for place, value in leaves(raw.values):
        theirs = dotted(place)
        if place == ("defaults",):
            named = [PRESETS[name] for name, _ in listed_defaults(value) if name in PRESETS]
            moved += [(place, "model.preset", name) for name in named]
        if value == OPEN or _settled(done, theirs, value):
            continue
        ours = name_here(theirs)
        if ours == theirs:
            put(done.raw.values, place, value)
        else:
            done.renamed.append((theirs, ours))
            moved.append((place, ours, value))
    for place, ours, value in moved:
        target: Place = place_of(ours)
        # A value under our own name has precedence.
        if put(done.raw.values, target, value, over=False):
            origins[target] = raw.where(place)
        elif raw.where(place).startswith(GIVEN) and not raw.where(target).startswith(GIVEN):
            # What a recipe says is not a second answer to the command line.
            continue
        else:
            done.renamed.remove((dotted(place), ours))
            done.dropped.append(
                (
                    dotted(place),
                    f"is called {ours} here, and {ours} is set too: use that name alone",
                )
            )
    _read_values(done, origins)
    return Translation(
        RawConfig(done.raw.values, origins), done.renamed, done.dropped, done.read_as
    )


def _settled(done: Translation, theirs: str, value: Any) -> bool:
    """Note what a foreign field has no counterpart for; return whether that settles it."""
    if isinstance(value, str) and "${" in value:
        done.dropped.append((theirs, f"{value} refers to another value; write it out"))
    elif said := done_anyway(theirs, value):
        done.read_as.append((f"{theirs}={value}", said))
    elif isinstance(value, str) and value in NOT_HERE.get(name_here(theirs), {}):
        done.dropped.append((theirs, NOT_HERE[name_here(theirs)][value]))
    elif reason := why_dropped(theirs):
        done.dropped.append((theirs, reason))
    else:
        return False
    return True


def _read_values(done: Translation, origins: dict[Place, str]) -> None:
    """Translate foreign values, and note each of them."""
    for name, meanings in VALUES.items():
        section, _, leaf = name.partition(".")
        holder = done.raw.values.get(section)
        value = holder.get(leaf) if isinstance(holder, dict) else None
        # 1 is not true.
        known = [key for key in meanings if type(key) is type(value) and key == value]
        if not isinstance(holder, dict) or not known:
            continue
        del holder[leaf]
        meaning = meanings[known[0]]
        for ours, becomes in meaning.items():
            target: Place = place_of(ours)
            if put(done.raw.values, target, becomes, over=False):
                origins[target] = origins.get((section, leaf), "")
        translated = ", ".join(f"{ours}={becomes}" for ours, becomes in meaning.items())
        done.read_as.append((f"{name}={value}", translated))


def name_here(theirs: str) -> str:
    """Return the name here of a foreign field; the name itself, if it has no counterpart."""
    name = theirs
    for section, ours in SECTIONS.items():
        if name.startswith(f"{section}."):
            inner = f"{ours}{name.removeprefix(section)}"
            # Only one of the network's own fields is also a field of a recipe.
            if "action_head_cfg" in section and not inner.endswith(".max_chunk_size"):
                continue
            name = inner
    return RENAMED.get(name, name)


def done_anyway(theirs: str, value: Any) -> str | None:
    """Return what is done here where ``value`` of a foreign field asks for just that; else None."""
    values, said = TAKEN.get(name_here(theirs), ((), ""))
    # 1 is not true.
    return said if any(type(one) is type(value) and one == value for one in values) else None


def why_dropped(theirs: str) -> str | None:
    """Return why a foreign field has no counterpart, and what to do; None if it has one."""
    if theirs in DROPPED:
        return DROPPED[theirs]
    entry = dropped_by(name_here(theirs))
    return None if entry is None else DROPPED[entry]


def dropped_by(name: str) -> str | None:
    """Return the entry of :data:`DROPPED` that ``name`` is or lies below; None of none."""
    parts = name.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((entry for entry in above if entry in DROPPED), None)
