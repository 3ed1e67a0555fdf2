"""What can be wrong with the weights a run starts from, reported from names and small files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dzrobot.documents import read_json
from dzrobot.errors import CheckpointError, DzrobotError, preview
from dzrobot.policies.dreamzero.checkpoints.names import ShardIndex
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.training.recipes.architecture import CONFIG_FILE, SourcePlan, base_network, run_network
from dzrobot.training.recipes.problems import Problem, missing_path
from dzrobot.training.sft_config import ModelConfig, SFTConfig


def weight_faults(model: ModelConfig) -> Iterator[Problem]:
    """Yield what is wrong with where weights, architecture and tokenizer come from."""
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
        yield Problem(
            "model.model_path",
            f"weights come from {' and '.join(chosen) or 'nowhere'}; give exactly one of "
            f"{', '.join(ways)}",
        )
    if given and len(given) < len(parts):
        yield Problem(
            f"model.{min(set(parts) - set(given))}",
            f"a cold start needs all of {', '.join(sorted(parts))}",
        )
    for name in given:
        # Of the components only the transformer is a whole repository.
        whole = name.startswith("diffusion")
        yield from missing_path(f"model.{name}", parts[name], one_file=not whole)
    if given:
        yield from _component_versions(model)
    yield from _architecture_origin(model)
    if model.tokenizer_path is not None:
        yield from missing_path("model.tokenizer_path", model.tokenizer_path)
    if model.model_path is not None:
        yield from _checkpoint(model.model_path)


def _component_versions(model: ModelConfig) -> Iterator[Problem]:
    vae, image = model.vae_pretrained_path or "", model.image_encoder_pretrained_path or ""
    wanted = {"5b": "Wan2.2_VAE.pth", "14b": "Wan2.1_VAE.pth"}
    if (
        model.preset is not None
        and vae.endswith((".pth",))
        and not vae.endswith(wanted[model.preset])
    ):
        yield Problem(
            "model.vae_pretrained_path",
            f"the {model.preset} network needs {wanted[model.preset]}, got {vae}",
        )
    if image.endswith(".pth") and "clip" not in Path(image).name:
        yield Problem(
            "model.image_encoder_pretrained_path",
            f"{image} is no CLIP file; Wan 2.2 too uses "
            "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth of "
            "Wan2.1-I2V-14B-480P",
        )


def _architecture_origin(model: ModelConfig) -> Iterator[Problem]:
    if model.model_path is not None:
        if model.config_path is not None:
            yield Problem("model.config_path", "the architecture is model_path's; leave it out")
    elif (model.preset is None) == (model.config_path is None):
        yield Problem(
            "model.preset", "without model_path give either preset (5b, 14b) or config_path"
        )
    if model.config_path is not None and not model.config_path.is_file():
        yield Problem("model.config_path", f"no file {model.config_path}")


def _checkpoint(path: str) -> Iterator[Problem]:
    folder = Path(path).expanduser()
    if not folder.exists():
        yield from missing_path("model.model_path", path)
        return
    if not (folder / CONFIG_FILE).is_file():
        yield Problem(
            "model.model_path", f"{folder} has no {CONFIG_FILE}; give a whole checkpoint folder"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(read_json(index, ShardIndex, CheckpointError).weight_map.values())
        except CheckpointError as error:
            yield Problem("model.model_path", str(error))
            return
        if absent := {shard for shard in shards if not (folder / shard).is_file()}:
            yield Problem(
                "model.model_path",
                f"{folder} lacks the shards {preview(absent)}; download them again",
            )
    elif (
        not any(folder.glob("*.safetensors"))
        and not any(folder.rglob("*.pt"))
        and not any(folder.rglob("*.distcp"))
    ):
        yield Problem(
            "model.model_path",
            f"{folder} holds no weights; it needs model.safetensors or shards and an index",
        )


def adapter_faults(model: ModelConfig) -> Iterator[Problem]:
    """Yield adapter settings that do not go with the kind of training."""
    if not model.is_lora:
        for name in ("lora_rank", "lora_alpha"):
            if getattr(model, name) is not None:
                yield Problem(
                    f"model.{name}",
                    "is set, but is_lora is false: full training has no adapters; choose one",
                )
    elif model.random_init:
        yield Problem(
            "model.is_lora",
            "adapters on random weights train nothing useful; start from a checkpoint",
        )


def network_faults(config: SFTConfig, sources: list[SourcePlan]) -> Iterator[Problem]:
    """Yield where the network of the run does not fit its robots."""
    try:
        network = known_network(config.model)
        if network is None:
            return
        run = run_network(network, config.model, sources[0].embodiment)
    except DzrobotError as error:
        yield Problem("model.model_path" if config.model.model_path else "model.preset", str(error))
        return
    if (config.model.target_video_height is None) != (config.model.target_video_width is None):
        yield Problem("model.target_video_height", "give height and width, or neither")
    yield from _is_preset(config.model, network)
    yield from _fits(run, sources)


def _is_preset(model: ModelConfig, network: NetworkConfig) -> Iterator[Problem]:
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
        yield Problem(
            "model.preset",
            f"the checkpoint is no {model.preset} network ({', '.join(unlike)}); choose the recipe "
            "of its size, or model.preset=null",
        )


def _fits(network: NetworkConfig, sources: list[SourcePlan]) -> Iterator[Problem]:
    for source in sources:
        robot, dit = source.embodiment, network.dit
        rows, columns = network.target_size or robot.image_size
        step = network.size_multiple
        if rows % step or columns % step:
            near = [max(step, round(side / step) * step) for side in (rows, columns)]
            yield Problem(
                "model.target_video_height",
                f"frames of {rows} x {columns} pixels are no multiple of {step} (autoencoder "
                "stride x patch): set "
                f"target_video_height={near[0]} target_video_width={near[1]}",
            )
            return
        if robot.state_dim > dit.max_state_dim or robot.action_dim > dit.action_dim:
            yield Problem(
                f"{source.field}.embodiment_tag",
                f"{robot.tag} has {robot.state_dim} state and {robot.action_dim} action numbers, "
                "the network takes "
                f"{dit.max_state_dim} and {dit.action_dim}",
            )
        frames = dit.num_frame_per_block * network.vae.temporal_stride
        if len(robot.timing.frame_offsets) != frames:
            yield Problem(
                f"{source.field}.embodiment_tag",
                f"{robot.tag} has {len(robot.timing.frame_offsets)} frames per block, the network "
                f"{frames}",
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
        return base_network(model, read_json(file, dict[str, Any], CheckpointError))
    return None if model.preset is None else base_network(model, None)
