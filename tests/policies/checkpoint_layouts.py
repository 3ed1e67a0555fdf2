"""Writes the weights of one tiny checkpoint in every published layout."""

import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from dzrobot.policies.dreamzero.checkpoints.coldstart import (
    DIT_STEM,
    IMAGE_FILE,
    TEXT_FILE,
    VAE_FILES,
)
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.names import DIT, IMAGE, TEXT, VAE
from dzrobot.policies.dreamzero.checkpoints.shards import write_json

NESTINGS = {
    "fsdp_checkpoint.model": lambda state: {"fsdp_checkpoint": {"model": state}},
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model_state_dict": lambda state: {"model_state_dict": state},
    "model": lambda state: {"model": state, "step": 7},
    "module": lambda state: {"module": state},
    "flat": lambda state: state,
    "flat with a prefix": lambda state: {f"fsdp_checkpoint.model.{k}": v for k, v in state.items()},
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of an official folder."""
    weights = open_checkpoint(folder).weights
    return {name: tensor.clone() for name, tensor in weights.stream(weights.tensors)}


def copy_sidecars(origin: Path, target: Path) -> Path:
    """Copy all but the weights."""
    shutil.copytree(origin, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    return target


def as_trainer_saves(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` with the names and shapes of a wrapped, sharded training run."""
    log_scale = "action_head.image_encoder.model.log_scale"
    return OrderedDict(
        (f"_orig_mod.{name}", tensor.reshape(1) if name == log_scale else tensor)
        for name, tensor in state.items()
    )


def write_pickled(origin: Path, target: Path, nesting: str) -> Path:
    """Write ``actor/model_state_dict/full_weights.pt`` of a training run, nested as asked."""
    folder = copy_sidecars(origin, target) / "actor/model_state_dict"
    folder.mkdir(parents=True)
    payload = NESTINGS[nesting](as_trainer_saves(tensors_of(origin)))
    torch.save(payload, folder / "full_weights.pt")
    return target


def write_dcp_run(origin: Path, target: Path) -> Path:
    """Write ``actor/dcp_checkpoint`` of a training run, optimizer state included."""
    folder = copy_sidecars(origin, target) / "actor/dcp_checkpoint"
    state = as_trainer_saves(tensors_of(origin))
    momenta = {name: {"exp_avg": tensor, "step": 3} for name, tensor in list(state.items())[:3]}
    payload = {"fsdp_checkpoint": {"model": state, "optimizers": momenta, "epoch": 1}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(payload, checkpoint_id=folder, no_dist=True)
    return target


def write_components(origin: Path, target: Path) -> Path:
    """Write the Wan files that the network of ``origin`` could have started from, in two shards."""
    state, config = tensors_of(origin), open_checkpoint(origin).config
    held = set(state) - absent_from_components(state, config.dit.model_type)
    target.mkdir()

    def below(prefix: str) -> dict[str, torch.Tensor]:
        return {n.removeprefix(prefix): state[n] for n in sorted(held) if n.startswith(prefix)}

    transformer = list(below(DIT).items())
    shards = {"00001": dict(transformer[:20]), "00002": dict(transformer[20:])}
    files = {part: f"{DIT_STEM}-{part}-of-00002.safetensors" for part in shards}
    for part, tensors in shards.items():
        save_file(tensors, target / files[part])
    weight_map = {name: files[part] for part, tensors in shards.items() for name in tensors}
    write_json(target / f"{DIT_STEM}.safetensors.index.json", {"weight_map": weight_map})
    torch.save(below(TEXT), target / TEXT_FILE)
    torch.save(
        {**below(IMAGE), "textual.token_embedding.weight": torch.ones(3)}, target / IMAGE_FILE
    )
    torch.save(below(VAE), target / VAE_FILES[config.vae.version])
    return target


ACTION_MODULES = ("state_encoder.", "action_encoder.", "action_decoder.")
IMAGE_CONDITION = ("img_emb.", "cross_attn.k_img.", "cross_attn.v_img.", "cross_attn.norm_k_img.")


def absent_from_components(names: Iterable[str], model_type: str) -> set[str]:
    """Return the names that the published component files do not hold."""
    parts = ACTION_MODULES + (IMAGE_CONDITION if model_type == "ti2v" else ())
    return {n for n in names if n.startswith(DIT) and any(part in n for part in parts)}
