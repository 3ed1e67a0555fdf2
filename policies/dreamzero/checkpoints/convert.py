"""From any layout to any other; tensors pass unchanged unless a change is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.coldstart import (
    cold_start,
    find_components,
    has_components,
)
from dzrobot.policies.dreamzero.checkpoints.dcp import write_dcp
from dzrobot.policies.dreamzero.checkpoints.directory import (
    TRAINING_META,
    Checkpoint,
    Sidecars,
    as_loose,
    open_checkpoint,
    open_weights,
    read_beside,
    read_metadata,
    write_adapters,
    write_directory,
)
from dzrobot.policies.dreamzero.checkpoints.hub import locate
from dzrobot.policies.dreamzero.checkpoints.load import (
    build_network,
    check_weights,
    complete_source,
    expected_shapes,
    slots,
)
from dzrobot.policies.dreamzero.checkpoints.lora import MergedSource, inject_adapters
from dzrobot.policies.dreamzero.checkpoints.names import (
    adapted_names,
    peft_name,
    without_conditions,
)
from dzrobot.policies.dreamzero.checkpoints.passport import recorded_base
from dzrobot.policies.dreamzero.checkpoints.shards import SHARD_BYTES, ShardOptions, written_whole
from dzrobot.policies.dreamzero.checkpoints.sources import WeightSource, renamed
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.options import LOOSE, LooseWeights

Layout = Literal["directory", "full_weights", "dcp", "peft"]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What is converted how."""

    to: Layout = "directory"
    """Official folder, one ``.pt`` state dict, a distributed checkpoint, or peft's adapters."""

    config_from: str | Path | LooseWeights | None = None
    """What the source is, where it has no config.json or no statistics; a folder has both."""

    base: tuple[str, ...] = ()
    """Base checkpoint or component folders, for a source that holds only what was trained."""

    merge: bool = False
    """Whether to merge adapters into the weights."""

    whole: bool = False
    """Whether to complete what holds only what was trained, adapters merged: an export."""

    dtype: torch.dtype | None = None
    """Dtype to convert to; None keeps each tensor's own."""

    shard_bytes: int = SHARD_BYTES
    """Largest file of an official folder."""

    seed: int = 0
    """Seed of the tensors that Wan component files lack."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    path: Path
    tensors: int
    initialized: tuple[str, ...] = ()
    """Tensors newly initialized because no file holds them."""

    absent: int = 0
    """Tensors that are not written, and come from the base when a policy is opened."""

    base: str | None = None
    """Path or hub id of that base, where the checkpoint names it."""


def convert(sources: Sequence[str | Path], target: Path, options: ConvertOptions) -> Converted:
    """Write the checkpoint in ``sources`` to the new path ``target``.

    Args:
        sources: One checkpoint of any layout, or the folders of Wan component files.
        target: Folder, or ``.pt`` file; appears complete or not at all.
        options: The new layout and what changes on the way.

    Raises:
        CheckpointError: Something does not fit; nothing is written then.
    """
    paths = [locate(source) for source in sources]
    if any(path.is_dir() and has_components(path) for path in paths):
        return _convert_components(paths, target, options)
    if len(paths) != 1:
        raise CheckpointError(
            f"{len(paths)} sources given, none of them with Wan component files; give one "
            "checkpoint"
        )
    weighed = options.merge or options.base or options.whole
    # What a training checkpoint leaves out is said whatever it is turned into.
    known = (paths[0] / TRAINING_META).is_file()
    converted = Converted(path=target, tensors=0)
    if options.to in ("directory", "peft") or weighed or known:
        checkpoint = open_checkpoint(
            paths[0], config_from=options.config_from,
            base=options.base[0] if len(options.base) == 1 else None,
        )  # fmt: skip
        if options.whole:
            options = replace(options, merge=checkpoint.has_adapters)
        weights, complete = _checked(checkpoint, options)
        sayable = checkpoint.adapters.is_plain or not checkpoint.has_adapters
        if not sayable and not (options.merge or options.to == "peft"):
            raise CheckpointError(
                f"{checkpoint.adapters.source} has patterns or exceptions, for which only peft's "
                "format has words; merge the adapters (--merge, with --base), or write them for "
                "peft (--to peft)"
            )
        passport = checkpoint.own_passport
        if passport is not None and complete and weights is not checkpoint.weights:
            passport = replace(passport, base=None)
        sidecars = Sidecars(
            config_json=_config(checkpoint, merged=options.merge), complete=complete,
            metadata=None if checkpoint.statistics is None else checkpoint.metadata,
            copy_from=checkpoint.folder, passport=passport, adapters=checkpoint.described,
            keeps_card=checkpoint.folder == checkpoint.path and weights is checkpoint.weights,
        )  # fmt: skip
        if not complete and options.to != "peft":
            absent = slots(build_network(checkpoint.config)).keys() - weights.tensors.keys()
            converted = replace(converted, absent=len(absent), base=recorded_base(passport))
    else:
        weights, sidecars = open_weights(paths[0]), None
    _write(weights, sidecars, target, options)
    return replace(converted, tensors=len(weights.tensors))


def _convert_components(
    folders: Sequence[Path], target: Path, options: ConvertOptions
) -> Converted:
    if options.config_from is None:
        raise CheckpointError(
            f"{', '.join(map(str, folders))} holds Wan component files, which do not say what "
            f"robot they shall serve: {LOOSE}"
        )
    loose = as_loose(options.config_from)
    folder, config_json = read_beside(folders[0], loose)
    config = NetworkConfig.from_dict(config_json)
    start = cold_start(
        find_components(folders, config), config, expected_shapes(config), seed=options.seed
    )
    check_weights(build_network(config), start.source)
    sidecars = Sidecars(
        config_json=config_json, copy_from=folder,
        metadata=None if loose.metadata is None else read_metadata(Path(loose.metadata)),
    )  # fmt: skip
    _write(start.source, sidecars, target, options)
    return Converted(path=target, tensors=len(start.source.tensors), initialized=start.initialized)


def _checked(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[WeightSource, bool]:
    """Return the weights to write, checked, and whether they are complete."""
    network = build_network(checkpoint.config)
    weights = checkpoint.weights
    lacking = slots(network).keys() - weights.tensors.keys()
    only_trained = checkpoint.has_adapters or checkpoint.passport_base is not None
    if lacking and only_trained and not (options.base or options.merge or options.whole):
        return weights, False
    weights = complete_source(checkpoint, options.base or None, network)
    if options.merge:
        if not checkpoint.has_adapters:
            raise CheckpointError(
                f"{checkpoint.path} holds no adapters; leave the merging out (--merge)"
            )
        weights = MergedSource(weights, checkpoint.adapters)
    elif checkpoint.has_adapters:
        inject_adapters(network.model, checkpoint.adapters)
    # Copying weights needs no other code from one layout to another.
    check_weights(network, renamed(weights, without_conditions))
    return weights, True


def _config(checkpoint: Checkpoint, *, merged: bool) -> dict[str, Any]:
    config = dict(checkpoint.config_json)
    if merged:
        head = config["action_head_cfg"]
        config["action_head_cfg"] = {
            **head,
            "config": {**head["config"], "train_architecture": "full"},
        }
    return config


def _write(
    weights: WeightSource, sidecars: Sidecars | None, target: Path, options: ConvertOptions
) -> None:
    rename = partial(peft_name, adapted=adapted_names(weights.tensors))
    shards = ShardOptions(shard_bytes=options.shard_bytes, dtype=options.dtype, rename=rename)
    if options.to == "directory":
        assert sidecars is not None
        write_directory(target, weights, sidecars, shards)
        return
    if options.to == "peft":
        assert sidecars is not None
        write_adapters(target, weights, sidecars, options.dtype)
        return
    held = {rename(name): name for name in weights.tensors}
    dtypes = {name: options.dtype or info.dtype for name, info in weights.tensors.items()}

    def read(renamed_to: str) -> Tensor:
        name = held[renamed_to]
        ((_, tensor),) = weights.stream([name])
        return tensor.to(dtypes[name], copy=True)

    with written_whole(target) as temporary:
        try:
            if options.to == "dcp":
                shapes = {
                    new: torch.empty(weights.tensors[name].shape, dtype=dtypes[name], device="meta")
                    for new, name in held.items()
                }
                write_dcp(temporary, shapes, read)
            else:
                # torch writes a pickle in one piece: this needs host memory for all weights.
                torch.save({name: read(name) for name in held}, temporary)
        except (RuntimeError, CheckpointException) as error:
            # Torch loses the system's own reason.
            raise CheckpointError(
                f"cannot write {target}: torch's writer stopped half way, as on a full disk; make "
                "room, or choose another path"
            ) from error
