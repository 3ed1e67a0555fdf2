"""Everything about a recipe that can be known to be wrong before anything is loaded.

Each check yields faults: a dotted field, what is wrong and what to do. All checks run, so one start shows every
mistake. Only small text files are read and torch is not imported.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dzrobot.errors import DzrobotError, preview, suggest
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.training.architecture import (
    CONFIG_FILE,
    METADATA_FILE,
    SourcePlan,
    base_network,
    run_network,
    source_plans,
)
from dzrobot.training.settings import ModelConfig, SFTConfig, SourceConfig


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    field: str
    """Dotted name in the recipe."""

    message: str


def find_faults(config: SFTConfig, world_size: int) -> list[Fault]:
    """Return everything that is wrong with a run of ``config`` on ``world_size`` processes."""
    faults = [
        *_batch(config, world_size),
        *_schedule(config),
        *_layout(config, world_size),
        *_weights(config.model),
        *_adapters(config.model),
        *_evaluation(config),
        *_resume(config),
        *_mixture(config),
    ]
    try:
        sources = source_plans(config)
    except DzrobotError as error:
        return [*faults, Fault("model.embodiment_tag", str(error))]
    faults += [*_sources(config, sources), *_relative(config.model, sources)]
    return [*faults, *_network(config, sources)]


def _batch(config: SFTConfig, world_size: int) -> Iterator[Fault]:
    at_once = config.runner.micro_batch_size * world_size
    size = config.runner.global_batch_size
    if size % at_once:
        near = max(at_once, round(size / at_once) * at_once)
        yield Fault(
            "runner.global_batch_size",
            f"{size} is no multiple of micro_batch_size x processes = {config.runner.micro_batch_size} x {world_size}; "
            f"the nearest that is: {near}",
        )


def _schedule(config: SFTConfig) -> Iterator[Fault]:
    steps, optim = config.runner.max_steps, config.optim
    warmup = optim.warmup_updates(steps)
    if warmup >= steps:
        field = (
            "optim.lr_warmup_ratio" if optim.lr_warmup_steps is None else "optim.lr_warmup_steps"
        )
        yield Fault(
            field,
            f"{warmup} warm-up steps leave none of runner.max_steps={steps} at full rate; lower it",
        )
    if optim.lr_scheduler == "constant" and optim.min_lr_ratio > 0:
        yield Fault(
            "optim.min_lr_ratio",
            "has no meaning for lr_scheduler='constant'; leave it out or choose 'cosine'",
        )


def _layout(config: SFTConfig, world_size: int) -> Iterator[Fault]:
    parallel = config.parallel
    if parallel.strategy == "single" and world_size > 1:
        yield Fault(
            "parallel.strategy", f"'single' on {world_size} processes; choose fsdp, hsdp or ddp"
        )
    if parallel.shard_size is not None and parallel.strategy != "hsdp":
        yield Fault(
            "parallel.shard_size",
            f"only 'hsdp' has it, strategy is {parallel.strategy!r}; leave one out",
        )
    if parallel.shard_size is not None and world_size % parallel.shard_size:
        yield Fault(
            "parallel.shard_size", f"{parallel.shard_size} does not divide {world_size} processes"
        )
    if parallel.kept_blocks and parallel.activation_checkpointing == "none":
        yield Fault(
            "parallel.kept_blocks",
            "all blocks keep their activations when activation_checkpointing is 'none'",
        )
    if parallel.param_dtype == "fp32" and parallel.reduce_dtype == "bf16":
        yield Fault("parallel.reduce_dtype", "'bf16' would round float32 gradients; choose fp32")


def _weights(model: ModelConfig) -> Iterator[Fault]:
    parts = {
        name: value
        for name, value in model.model_dump().items()
        if name.endswith("_pretrained_path")
    }
    given = [name for name, value in parts.items() if value is not None]
    ways = {
        "model_path": model.model_path is not None,
        "the *_pretrained_path files": bool(given),
        "random_init": model.random_init,
    }
    chosen = [way for way, is_used in ways.items() if is_used]
    if len(chosen) != 1:
        yield Fault(
            "model.model_path",
            f"weights come from {' and '.join(chosen) or 'nowhere'}; give exactly one of {', '.join(ways)}",
        )
    if given and len(given) < len(parts):
        yield Fault(
            f"model.{min(set(parts) - set(given))}",
            f"a cold start needs all of {', '.join(sorted(parts))}",
        )
    for name in given:
        yield from _exists(f"model.{name}", parts[name])
    if given:
        yield from _component_versions(model)
    yield from _architecture_origin(model)
    if model.tokenizer_path is not None:
        yield from _exists("model.tokenizer_path", model.tokenizer_path)
    if model.model_path is not None:
        yield from _checkpoint(model.model_path)


def _component_versions(model: ModelConfig) -> Iterator[Fault]:
    vae, image = model.vae_pretrained_path or "", model.image_encoder_pretrained_path or ""
    wanted = {"5b": "Wan2.2_VAE.pth", "14b": "Wan2.1_VAE.pth"}
    if (
        model.preset is not None
        and vae.endswith((".pth",))
        and not vae.endswith(wanted[model.preset])
    ):
        yield Fault(
            "model.vae_pretrained_path",
            f"the {model.preset} network needs {wanted[model.preset]}, got {vae}",
        )
    if image.endswith(".pth") and "clip" not in Path(image).name:
        yield Fault(
            "model.image_encoder_pretrained_path",
            f"{image} is no CLIP file; Wan 2.2 too uses models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth of "
            "Wan2.1-I2V-14B-480P",
        )


def _architecture_origin(model: ModelConfig) -> Iterator[Fault]:
    if model.model_path is not None:
        if model.config_path is not None:
            yield Fault("model.config_path", "the architecture is model_path's; leave it out")
    elif (model.preset is None) == (model.config_path is None):
        yield Fault(
            "model.preset", "without model_path give either preset (5b, 14b) or config_path"
        )
    if model.config_path is not None and not model.config_path.is_file():
        yield Fault("model.config_path", f"no file {model.config_path}")


def _exists(field: str, path: str) -> Iterator[Fault]:
    """Refuse a path that is written like a local one and is not there; hub ids are looked up later."""
    if not Path(path).expanduser().exists() and not _is_hub_id(path):
        yield Fault(field, f"{path} does not exist; give a local path or a hub id owner/name")


def _is_hub_id(path: str) -> bool:
    return (
        not path.startswith(("/", ".", "~"))
        and path.count("/") == 1
        and not path.endswith((".pth", ".json"))
    )


def _checkpoint(path: str) -> Iterator[Fault]:
    folder = Path(path).expanduser()
    if not folder.exists():
        yield from _exists("model.model_path", path)
        return
    if not (folder / CONFIG_FILE).is_file():
        yield Fault(
            "model.model_path", f"{folder} has no {CONFIG_FILE}; give a whole checkpoint folder"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text()).get("weight_map", {}).values())
        if absent := {shard for shard in shards if not (folder / shard).is_file()}:
            yield Fault(
                "model.model_path",
                f"{folder} lacks the shards {preview(absent)}; download them again",
            )
    elif (
        not any(folder.glob("*.safetensors"))
        and not any(folder.rglob("*.pt"))
        and not any(folder.rglob("*.distcp"))
    ):
        yield Fault(
            "model.model_path",
            f"{folder} holds no weights; it needs model.safetensors or shards and an index",
        )


def _adapters(model: ModelConfig) -> Iterator[Fault]:
    if not model.is_lora:
        for name in ("lora_rank", "lora_alpha"):
            if getattr(model, name) is not None:
                yield Fault(
                    f"model.{name}",
                    "is set, but is_lora is false: full training has no adapters; choose one",
                )
    elif model.random_init:
        yield Fault(
            "model.is_lora",
            "adapters on random weights train nothing useful; start from a checkpoint",
        )


def _evaluation(config: SFTConfig) -> Iterator[Fault]:
    if config.runner.eval_interval is not None and not config.data.holdout_episodes:
        yield Fault("runner.eval_interval", "needs held-out episodes: set data.holdout_episodes")
    if config.data.frame_grid is not None and config.data.sampling_mode != "multi_anchor":
        yield Fault(
            "data.frame_grid",
            "published grids are drawn by sampling_mode='multi_anchor'; set it too",
        )


def _resume(config: SFTConfig) -> Iterator[Fault]:
    resume = config.runner.resume_dir
    if isinstance(resume, Path) and not resume.is_dir():
        yield Fault(
            "runner.resume_dir",
            f"no folder {resume}; 'auto' takes the newest checkpoint of output_dir, if any",
        )


def _mixture(config: SFTConfig) -> Iterator[Fault]:
    kinds = {type(entry) for entry in config.data.train_data_paths}
    if len(kinds) > 1:
        yield Fault(
            "data.train_data_paths",
            "plain folders and mixture entries are mixed; write all as entries",
        )
    tags = [
        entry.embodiment_tag
        for entry in config.data.train_data_paths
        if isinstance(entry, SourceConfig)
    ]
    if tags and config.model.embodiment_tag not in tags:
        yield Fault(
            "model.embodiment_tag",
            f"{config.model.embodiment_tag!r} is none of the mixture's: {', '.join(tags)}.{suggest(config.model.embodiment_tag, tags)}",
        )


def _sources(config: SFTConfig, sources: list[SourcePlan]) -> Iterator[Fault]:
    for source in sources:
        for path in source.paths:
            yield from _dataset(source, Path(path).expanduser(), path)
        yield from _statistics(config.model, source)
    first = sources[0].embodiment
    for source in sources[1:]:
        robot = source.embodiment
        if robot.image_size != first.image_size:
            yield Fault(
                f"{source.field}.embodiment_tag",
                f"{robot.tag} tiles to {robot.image_size} pixels, {first.tag} to {first.image_size}; give both the "
                "same view sizes and rows of tiles",
            )


def _dataset(source: SourcePlan, folder: Path, given: str) -> Iterator[Fault]:
    info = folder / "meta" / "info.json"
    if not folder.exists():
        yield from _exists(source.field, given)
    elif not info.is_file():
        yield Fault(source.field, f"{folder} is no LeRobot dataset: it has no meta/info.json")
    else:
        yield from _episodes(source, folder, json.loads(info.read_text()))


def _episodes(source: SourcePlan, folder: Path, info: Mapping[str, Any]) -> Iterator[Fault]:
    needed = source.embodiment.timing.span + 1
    listed = folder / "meta" / "episodes.jsonl"
    if not listed.is_file():
        return
    lengths = [
        int(json.loads(line)["length"]) for line in listed.read_text().splitlines() if line.strip()
    ]
    if lengths and max(lengths) < needed:
        timing = source.embodiment.timing
        yield Fault(
            source.field,
            f"{folder}: the longest of {len(lengths)} episodes has {max(lengths)} steps, a sample of {timing.blocks} "
            f"blocks x {timing.action_horizon} actions needs {needed}; lower model.max_chunk_size or model.action_horizon",
        )


def _statistics(model: ModelConfig, source: SourcePlan) -> Iterator[Fault]:
    field = f"{source.field}.metadata_json_path" if source.metadata else "model.metadata_json_path"
    if source.field == "data.train_data_paths":
        field = "model.metadata_json_path"
    path = source.metadata
    if path is None and model.model_path is not None:
        folder = Path(model.model_path).expanduser()
        if not folder.exists():
            return
        path = folder / METADATA_FILE
    if path is None:
        yield Fault(
            field,
            f"is needed: make one with `dzrobot stats {source.embodiment.tag} --dataset PATH`",
        )
        return
    try:
        Statistics.from_metadata(path, source.embodiment)
    except DzrobotError as error:
        yield Fault(field, str(error))


def _relative(model: ModelConfig, sources: list[SourcePlan]) -> Iterator[Fault]:
    robot = next(
        (s.embodiment for s in sources if s.embodiment.tag == model.embodiment_tag),
        sources[0].embodiment,
    )
    names = {key.partition(".")[2] for key in robot.relative_keys}
    if model.relative_action is not None and model.relative_action != bool(names):
        yield Fault(
            "model.relative_action",
            f"is {model.relative_action}, but {robot.tag} measures {preview(names)} from the state; the embodiment "
            "decides (Part.reference): drop this field or choose another embodiment",
        )
    if model.relative_action_keys is not None and set(model.relative_action_keys) != names:
        yield Fault(
            "model.relative_action_keys",
            f"are {preview(model.relative_action_keys)}, {robot.tag} has {preview(names)} (Part.reference)",
        )


def _network(config: SFTConfig, sources: list[SourcePlan]) -> Iterator[Fault]:
    try:
        network = known_network(config.model)
        if network is None:
            return
        run = run_network(network, config.model, sources[0].embodiment)
    except DzrobotError as error:
        yield Fault("model.model_path" if config.model.model_path else "model.preset", str(error))
        return
    if (config.model.target_video_height is None) != (config.model.target_video_width is None):
        yield Fault("model.target_video_height", "give height and width, or neither")
    yield from _is_preset(config.model, network)
    yield from _fits(run, sources)


def _is_preset(model: ModelConfig, network: NetworkConfig) -> Iterator[Fault]:
    if model.preset is None or model.model_path is None:
        return
    wanted = base_network(model, None)
    names = ("model_type", "dim", "in_dim", "out_dim", "num_layers")
    unlike = [
        f"{name}={getattr(network.dit, name)} instead of {getattr(wanted.dit, name)}"
        for name in names
        if getattr(network.dit, name) != getattr(wanted.dit, name)
    ]
    if unlike:
        yield Fault(
            "model.preset",
            f"the checkpoint is no {model.preset} network ({', '.join(unlike)}); choose the recipe "
            "of its size, or model.preset=null",
        )


def _fits(network: NetworkConfig, sources: list[SourcePlan]) -> Iterator[Fault]:
    for source in sources:
        robot, dit = source.embodiment, network.dit
        rows, columns = network.target_size or robot.image_size
        step = network.size_multiple
        if rows % step or columns % step:
            near = [max(step, round(side / step) * step) for side in (rows, columns)]
            yield Fault(
                "model.target_video_height",
                f"frames of {rows} x {columns} pixels are no multiple of {step} (autoencoder stride x patch): set "
                f"target_video_height={near[0]} target_video_width={near[1]}",
            )
            return
        if robot.state_dim > dit.max_state_dim or robot.action_dim > dit.action_dim:
            yield Fault(
                f"{source.field}.embodiment_tag",
                f"{robot.tag} has {robot.state_dim} state and {robot.action_dim} action numbers, the network takes "
                f"{dit.max_state_dim} and {dit.action_dim}",
            )
        frames = dit.num_frame_per_block * network.vae.temporal_stride
        if len(robot.timing.frame_offsets) != frames:
            yield Fault(
                f"{source.field}.embodiment_tag",
                f"{robot.tag} has {len(robot.timing.frame_offsets)} frames per block, the network {frames}",
            )


def known_network(model: ModelConfig) -> NetworkConfig | None:
    """Return the network the run starts from, None where no local file or preset says it.

    Raises:
        DzrobotError: What is there describes no network.
    """
    file = model.config_path
    if model.model_path is not None:
        file = Path(model.model_path).expanduser() / CONFIG_FILE
    if file is not None and file.is_file():
        return base_network(model, json.loads(file.read_text()))
    return None if model.preset is None else base_network(model, None)
