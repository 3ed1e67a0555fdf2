"""What can be wrong with recordings, mixtures and statistics, reported from small text files."""

from collections.abc import Iterator
from pathlib import Path

from dzrobot.documents import read_json_lines
from dzrobot.errors import DatasetError, DzrobotError, preview, suggest
from dzrobot.modality.stats import Statistics
from dzrobot.recording import formats as layout
from dzrobot.recording.formats import EpisodeRow
from dzrobot.training.architecture import METADATA_FILE, SourcePlan
from dzrobot.training.config import ModelConfig, SFTConfig, SourceConfig
from dzrobot.training.data.lerobot import read_info
from dzrobot.training.validate.faults import Problem, missing_path


def source_faults(config: SFTConfig, sources: list[SourcePlan]) -> Iterator[Problem]:
    """Yield what is wrong with each source, and with sources that share a batch."""
    for source in sources:
        for path in source.paths:
            yield from _dataset(source, Path(path).expanduser(), path)
        yield from _statistics(config.model, source)
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
        yield Problem(source.field, f"{folder} is no LeRobot dataset: it has no meta/info.json")
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


def _statistics(model: ModelConfig, source: SourcePlan) -> Iterator[Problem]:
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
        yield Problem(
            field,
            f"is needed: make one with `dzrobot stats {source.embodiment.tag} --dataset PATH`",
        )
        return
    try:
        statistics = Statistics.from_metadata(path, source.embodiment)
    except DzrobotError as error:
        yield Problem(field, str(error))
        return
    if model.relative_action_per_horizon not in (None, statistics.per_step):
        yield Problem(
            "model.relative_action_per_horizon",
            f"is {model.relative_action_per_horizon}, but {path} measured relative actions "
            + ("step by step" if statistics.per_step else "over all steps of a block together")
            + f": set the field to {str(statistics.per_step).lower()}, or make statistics with "
            "`dzrobot stats --recipe` and this recipe",
        )


def relative_faults(model: ModelConfig, sources: list[SourcePlan]) -> Iterator[Problem]:
    """Yield where the recipe expects other relative actions than the robot has."""
    robot = next(
        (s.embodiment for s in sources if s.embodiment.tag == model.embodiment_tag),
        sources[0].embodiment,
    )
    names = {key.partition(".")[2] for key in robot.relative_keys}
    if model.relative_action is not None and model.relative_action != bool(names):
        yield Problem(
            "model.relative_action",
            f"is {model.relative_action}, but {robot.tag} measures {preview(names)} from the "
            "state; the embodiment "
            "decides (Part.reference): drop this field or choose another embodiment",
        )
    if model.relative_action_keys is not None and set(model.relative_action_keys) != names:
        yield Problem(
            "model.relative_action_keys",
            f"are {preview(model.relative_action_keys)}, {robot.tag} has {preview(names)} "
            "(Part.reference)",
        )


def mixture_faults(config: SFTConfig) -> Iterator[Problem]:
    """Yield what is wrong with the list of sources itself."""
    kinds = {type(entry) for entry in config.data.train_data_paths}
    if len(kinds) > 1:
        yield Problem(
            "data.train_data_paths",
            "plain folders and mixture entries are mixed; write all as entries",
        )
    tags = [
        entry.embodiment_tag
        for entry in config.data.train_data_paths
        if isinstance(entry, SourceConfig)
    ]
    if tags and config.model.embodiment_tag not in tags:
        yield Problem(
            "model.embodiment_tag",
            f"{config.model.embodiment_tag!r} is none of the mixture's: "
            f"{', '.join(tags)}.{suggest(config.model.embodiment_tag, tags)}",
        )
