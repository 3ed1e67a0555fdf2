"""Checks of the datasets, statistics and weights that a recipe names; only small files are read."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dzrobot.documents import read_json, read_json_lines
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import CheckpointError, DatasetError, DzrobotError, preview, suggest
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.hub import is_hub_file, is_hub_id
from dzrobot.policies.dreamzero.checkpoints.names import ShardIndex
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.recording import formats as layout
from dzrobot.recording.formats import EpisodeRow, read_info
from dzrobot.training.recipes.architecture import (
    CONFIG_FILE,
    METADATA_FILE,
    SourcePlan,
    acting_plans,
    base_network,
    beside,
    run_network,
)
from dzrobot.training.sft_config import ModelConfig, SFTConfig, SourceConfig


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    field: str
    """Dotted name in the recipe."""

    message: str

    not_given: bool = False
    """Whether nothing was given rather than something wrong: a plan does without it and says so,
    a run cannot start."""


Input = Literal["weights", "data"]
"""What a plan may have to do without: the weights a run starts from, or recordings with their
statistics."""

NOT_GIVEN = "(not given)"
"""Stands for a path that the recipe leaves to the command line, while a run is planned."""


def missing_path(field: str, path: str, *, one_file: bool = False) -> Iterator[Problem]:
    """Yield a problem if a local path does not exist; hub ids are looked up later.

    Args:
        field: Dotted name in the recipe.
        path: The path as written.
        one_file: Whether a file of a hub repository, ``owner/name/file.pth``, is allowed too.
    """
    known = is_hub_file(path) if one_file else False
    if path == NOT_GIVEN:
        yield Problem(field, "is needed: the folder of a LeRobot dataset", not_given=True)
        return
    if not Path(path).expanduser().exists() and not known and not is_hub_id(path):
        form = "owner/name/file.pth" if one_file else "owner/name"
        yield Problem(field, f"{path} does not exist; give a local path or a hub id {form}")


def on_the_hub(config: SFTConfig, sources: list[SourcePlan]) -> Iterator[Problem]:
    """Yield what the recipe takes from the hub, where its files are not looked at."""
    model = config.model.model_dump()
    given = {f"model.{name}": model[name] for name in model if name.endswith("_pretrained_path")}
    given |= {
        "model.model_path": config.model.model_path,
        "distill.teacher_path": config.distill.teacher_path,
    }
    pairs = [*given.items(), *((s.field, path) for s in sources for path in s.paths)]
    for field, path in pairs:
        if path is not None and (is_hub_id(path) or is_hub_file(path)):
            yield Problem(
                field, f"{path} is on the hub, from where nothing is fetched", not_given=True
            )  # fmt: skip


def source_faults(config: SFTConfig, sources: list[SourcePlan]) -> Iterator[Problem]:
    """Yield what is wrong with each source, and with sources that share a batch."""
    acting = acting_plans(sources, config)
    for source in sources:
        for path in source.paths:
            yield from _dataset(source, Path(path).expanduser(), path)
        robot = source.embodiment if source in acting else source.read_as
        if robot.state:
            yield from _statistics(config.model, source, robot)
    yield from tiling_faults(sources)


def tiling_faults(sources: list[SourcePlan]) -> Iterator[Problem]:
    """Yield sources whose pictures do not fit into one batch with the first one's."""
    first = sources[0].embodiment
    for source in sources[1:]:
        robot = source.embodiment
        if robot.image_size != first.image_size:
            yield Problem(
                f"{source.field}.embodiment_tag",
                f"{robot.tag} tiles to {robot.image_size} pixels, {first.tag} to "
                f"{first.image_size}; give both the "
                "same view sizes and rows of tiles",
            )


def _dataset(source: SourcePlan, folder: Path, given: str) -> Iterator[Problem]:
    info = folder / layout.INFO
    if not folder.exists():
        yield from missing_path(source.field, given)
    elif not info.is_file():
        yield Problem(source.field, f"{folder} is not a LeRobot dataset: it has no meta/info.json")
    else:
        try:
            yield from _episodes(source, folder)
        except DatasetError as error:
            yield Problem(source.field, str(error))


def _episodes(source: SourcePlan, folder: Path) -> Iterator[Problem]:
    needed = source.embodiment.timing.rows_needed
    read_info(folder)
    listed = folder / layout.EPISODES_V2
    if not listed.is_file():
        return
    lengths = [row.length for row in read_json_lines(listed, EpisodeRow, DatasetError)]
    if lengths and max(lengths) < needed:
        timing = source.embodiment.timing
        yield Problem(
            source.field,
            f"{folder}: the longest of {len(lengths)} episodes has {max(lengths)} steps, a sample "
            f"of {timing.blocks} "
            f"blocks x {timing.action_horizon} actions needs {needed}; lower model.max_chunk_size "
            "or model.action_horizon",
        )


def _statistics(model: ModelConfig, source: SourcePlan, robot: Embodiment) -> Iterator[Problem]:
    plain = source.field == "data.train_data_paths"
    field = f"{'model' if plain else source.field}.metadata_json_path"
    path = None if source.metadata == Path(NOT_GIVEN) else source.metadata
    if path is None and plain and model.model_path is not None:
        folder = beside(model.model_path)
        if not folder.exists():
            return
        if (folder / METADATA_FILE).is_file() or (folder / CONFIG_FILE).is_file():
            path = folder / METADATA_FILE
    if path is None:
        yield Problem(
            field,
            f"is needed: make one with `dzrobot stats {source.embodiment.tag} --dataset PATH`",
            not_given=True,
        )
        return
    try:
        statistics = Statistics.from_metadata(path, robot)
    except DzrobotError as error:
        yield Problem(field, str(error))
        return
    if robot.action and model.relative_action_per_horizon not in (None, statistics.per_step):
        yield Problem(
            "model.relative_action_per_horizon",
            f"is {model.relative_action_per_horizon}, but {path} measured relative actions "
            + ("step by step" if statistics.per_step else "over all steps of a block together")
            + f": set the field to {str(statistics.per_step).lower()}, or make statistics with "
            "`dzrobot stats --recipe` and this recipe",
        )


def relative_faults(model: ModelConfig, sources: list[SourcePlan]) -> Iterator[Problem]:
    """Yield where the recipe expects other relative actions than a robot of the run has."""
    acting = [source for source in sources if source.recorded == "actions"] or sources
    robots = {source.embodiment.tag: source.embodiment for source in acting}
    measured = {tag: _relative_names(robot) for tag, robot in robots.items()}
    tag = model.embodiment_tag if model.embodiment_tag in robots else next(iter(robots))
    wanted = model.relative_action
    # One robot with relative actions is enough for them, all are without where there are none.
    if wanted is not None and wanted != any(measured.values()):
        tags = [tag for tag, names in measured.items() if names] or list(measured)
        yield Problem(
            "model.relative_action",
            f"is {wanted}, but {tags[0]} measures {preview(measured[tags[0]])} from the "
            "state; the embodiment "
            "decides (Part.reference): drop this field or choose another embodiment",
        )
    if model.relative_action_keys is not None and set(model.relative_action_keys) != measured[tag]:
        yield Problem(
            "model.relative_action_keys",
            f"are {preview(model.relative_action_keys)}, {tag} has {preview(measured[tag])} "
            "(Part.reference)",
        )


def _relative_names(robot: Embodiment) -> set[str]:
    return {key.partition(".")[2] for key in robot.relative_keys}


def mixture_faults(config: SFTConfig) -> Iterator[Problem]:
    """Yield what is wrong with the list of sources itself."""
    kinds = {type(entry) for entry in config.data.train_data_paths}
    if len(kinds) > 1:
        yield Problem(
            "data.train_data_paths",
            "plain folders and mixture entries are mixed; write all as entries",
        )
    entries = [one for one in config.data.train_data_paths if isinstance(one, SourceConfig)]
    for number, entry in enumerate(entries):
        if entry.credit is None:
            continue
        field = f"data.train_data_paths.{number}.credit"
        if entry.recorded != "actions":
            yield Problem(
                field, f"says what is imitated, and recorded={entry.recorded} has nothing"
            )
        if entry.credit.share is not None and config.data.start_share:
            yield Problem(
                f"{field}.share", "and data.start_share both decide what is sampled; give one"
            )
    tags = [entry.embodiment_tag for entry in entries]
    if tags and config.model.embodiment_tag not in tags:
        yield Problem(
            "model.embodiment_tag",
            f"{config.model.embodiment_tag!r} is none of the mixture's: "
            f"{', '.join(tags)}.{suggest(config.model.embodiment_tag, tags)}",
        )


_WHERE_FROM = (
    ": `dzrobot download` fetches published weights, `dzrobot init` makes a small network to start "
    "from"
)


def weight_faults(model: ModelConfig) -> Iterator[Problem]:
    """Yield what is wrong with where weights, architecture and tokenizer come from."""
    parts = {
        name: value
        for name, value in model.model_dump().items()
        if name.endswith("_pretrained_path")
    }
    given = [name for name, value in parts.items() if value is not None]
    origins = {
        "model_path": model.model_path is not None,
        "the *_pretrained_path files": bool(given),
        "random_init": model.random_init,
    }
    chosen = [name for name, is_used in origins.items() if is_used]
    if len(chosen) != 1:
        yield Problem(
            "model.model_path",
            f"weights come from {' and '.join(chosen) or 'nowhere'}; give exactly one of "
            f"{', '.join(origins)}" + ("" if chosen else _WHERE_FROM),
            not_given=not chosen,
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
        yield from _checkpoint(model, model.model_path)


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
            f"{image} is not a CLIP file; Wan 2.2 too uses "
            "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth of "
            "Wan2.1-I2V-14B-480P",
        )


def _architecture_origin(model: ModelConfig) -> Iterator[Problem]:
    if model.model_path is not None:
        has_own = (beside(model.model_path) / CONFIG_FILE).is_file()
        if model.config_path is not None and has_own:
            yield Problem("model.config_path", "the architecture is model_path's; leave it out")
        elif model.config_path is not None and model.preset is not None:
            yield Problem("model.preset", "and config_path both give the architecture; choose one")
    elif (model.preset is None) == (model.config_path is None):
        yield Problem(
            "model.preset",
            "without model_path give either preset (5b, 14b) or config_path",
            not_given=model.preset is None,
        )
    if model.config_path is not None and not model.config_path.is_file():
        yield Problem("model.config_path", f"no file {model.config_path}")


def _checkpoint(model: ModelConfig, path: str) -> Iterator[Problem]:
    folder = Path(path).expanduser()
    if not folder.exists():
        yield from missing_path("model.model_path", path, one_file=True)
        return
    described = model.preset is not None or model.config_path is not None
    if not described and not (beside(path) / CONFIG_FILE).is_file():
        yield Problem(
            "model.model_path",
            f"{beside(path)} has no {CONFIG_FILE}, which says what network the weights are: set "
            "model.preset (5b, 14b) or model.config_path, or make a whole folder of them with "
            f"`dzrobot convert {path} NEW_FOLDER --preset 5b --metadata FILE --embodiment "
            f"{model.embodiment_tag}`",
        )
    if folder.is_file():
        return
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
            f"{folder} holds no weights: it needs model.safetensors, shards and an index, "
            "full_weights.pt, or *.distcp files",
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
    here, wanted = asdict(network.dit), asdict(base_network(model, None).dit)
    names = ("model_type", "dim", "in_dim", "out_dim", "num_layers")
    differences = [
        f"{name}={here[name]} instead of {wanted[name]}"
        for name in names
        if here[name] != wanted[name]
    ]
    if differences:
        yield Problem(
            "model.preset",
            f"the checkpoint is not a {model.preset} network ({', '.join(differences)}); choose "
            "the recipe of its size, or model.preset=null",
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
                f"frames of {rows} x {columns} pixels are not a multiple of {step} (autoencoder "
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
    """Return the network the run starts from, None if neither a local file nor a preset gives it.

    Raises:
        DzrobotError: The file describes no network.
    """
    file = model.config_path
    if model.model_path is not None:
        own = beside(model.model_path) / CONFIG_FILE
        file = own if own.is_file() else file
    if file is not None and file.is_file():
        return base_network(model, file)
    return None if model.preset is None else base_network(model, None)
