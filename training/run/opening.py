"""What a run opens before it loads a weight: headers, recordings, statistics, tokenizer, teacher.

``dzrobot plan`` opens the same, as far as it is there, so that it refuses what a run would refuse.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dzrobot.embodiments.spec import ActionAnchor, Embodiment
from dzrobot.errors import CheckpointError, ConfigError, DatasetError
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.checksums import fingerprint
from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint, open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.load import check_weights, empty_network
from dzrobot.policies.dreamzero.checkpoints.names import DIT
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.prompt import DEFAULT_TOKENIZER, PromptTokenizer
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.formats import EpisodeChoice
from dzrobot.training.data import (
    DatasetReader,
    EpisodeSelection,
    ReaderOptions,
    SourceSpec,
    TrainingData,
)
from dzrobot.training.data.mixture import MakeStream
from dzrobot.training.data.video_decoding import load_decoder
from dzrobot.training.recipes.architecture import SourcePlan, run_network, source_plans
from dzrobot.training.recipes.check_inputs import Input
from dzrobot.training.run.initial_weights import (
    InitialWeights,
    from_checkpoint,
    open_initial_weights,
    starting_weights,
)
from dzrobot.training.run.inputs import training_prompts
from dzrobot.training.run.plugin import Plugins
from dzrobot.training.sft_config import DataConfig, SFTConfig

TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """What a run starts from, opened and compared; no weight has been read."""

    initial: InitialWeights
    network: NetworkConfig
    model: WorldActionModel
    """The network without memory for its weights, on the meta device."""

    datasets: "Datasets"
    tokenizer: str
    teacher: InitialWeights | None
    """What the network is distilled from; None: nothing."""


def open_run(config: SFTConfig, plugins: Plugins) -> OpenedRun:
    """Open what a run starts from; everything that can be wrong without a weight is found here.

    Raises:
        CheckpointError: Weights, tokenizer or teacher are missing, damaged or not those of the
            network.
        DatasetError: See :func:`open_datasets`.
        StatisticsError: See :func:`open_datasets`.
        MissingDependencyError: The video decoder cannot be used.
    """
    initial, network, model = _open_weights(config)
    datasets = _open_data(config, initial.metadata, plugins)
    tokenizer = tokenizer_path(config, initial)
    if Path(tokenizer).is_dir():
        PromptTokenizer(tokenizer, text_len=network.dit.text_len)
    teacher = _open_teacher(config, initial, datasets.train)
    return OpenedRun(
        initial=initial, network=network, model=model, datasets=datasets, tokenizer=tokenizer,
        teacher=teacher,
    )  # fmt: skip


def check_run(config: SFTConfig, plugins: Plugins, lacking: Set[Input]) -> list[str]:
    """Open what :func:`open_run` opens, but for what is lacking, and drop it.

    Recordings that lack nothing but statistics are opened too.

    Returns:
        What was opened, for a sentence.

    Raises:
        DzrobotError: As :func:`open_run`.
    """
    if not lacking:
        open_run(config, plugins)
        return ["weights", "data"]
    beside, opened = None, []
    if "weights" not in lacking:
        beside = _open_weights(config)[0].metadata
        opened.append("weights")
    if "data" not in lacking:
        _open_data(config, beside, plugins)
        opened.append("data")
    elif _open_recordings(config):
        opened.append("recordings (not yet with statistics)")
    return opened


def _open_recordings(config: SFTConfig) -> bool:
    """Open those that lie on this machine, without statistics; False where there are none."""
    found = [
        (path, plan.read_as, plan.credit)
        for plan in source_plans(config) for path in plan.paths if Path(path).is_dir()
    ]  # fmt: skip
    for path, robot, credit in found:
        DatasetReader(path, robot, replace(ReaderOptions.of(config.data), credit=credit))
    return bool(found)


def _open_weights(
    config: SFTConfig,
) -> tuple[InitialWeights, NetworkConfig, WorldActionModel]:
    """Return initial weights, network, and the empty model; names and shapes are compared."""
    initial = open_initial_weights(config.model, config.runner.seed)
    network = network_config(config, initial)
    conditions = source_plans(config)[0].embodiment.conditions
    model = empty_network(
        network, is_lora=config.model.is_lora, text_encoder=True, conditions=conditions
    )  # fmt: skip
    check_weights(model, starting_weights(model, initial, config.runner.seed))
    return initial, network, model


def _open_data(config: SFTConfig, beside: Path | None, plugins: Plugins) -> "Datasets":
    load_decoder(config.data.video_backend)
    return open_datasets(config, beside, plugins.sampler(config))


def network_config(config: SFTConfig, initial: InitialWeights) -> NetworkConfig:
    """Return the network of the run; its horizon is the longest of all sources."""
    longest = max(source_plans(config), key=lambda plan: plan.embodiment.timing.action_horizon)
    return run_network(initial.base, config.model, longest.embodiment)


def tokenizer_path(config: SFTConfig, initial: InitialWeights) -> str:
    """Return the tokenizer given, else the one beside the checkpoint, else the published one."""
    if config.model.tokenizer_path is not None:
        return config.model.tokenizer_path
    beside = None if initial.folder is None else initial.folder / TOKENIZER_FOLDER
    return str(beside) if beside is not None and beside.is_dir() else DEFAULT_TOKENIZER


@dataclass(frozen=True)
class Datasets:
    """The samples to train on, and those held out for evaluation."""

    train: TrainingData
    held_out: TrainingData | None

    def prompts(self) -> list[str]:
        """Return every prompt of training and held-out episodes, sorted."""
        both = [self.train, self.held_out]
        return sorted(
            {text for data in both if data is not None for text in training_prompts(data)}
        )


def open_datasets(
    config: SFTConfig, beside: Path | None, sampler: MakeStream | None = None
) -> Datasets:
    """Open every source of ``config``; the lists of a folder are read once.

    Args:
        config: The recipe.
        beside: Statistics beside the weights it starts from, used where it names none.
        sampler: What makes the stream of training samples; None: the recipe decides.

    Raises:
        DatasetError: See :meth:`TrainingData.open`.
        StatisticsError: See :meth:`TrainingData.open`.
    """
    plans = source_plans(config)
    catalogs = {
        path: DatasetCatalog.open(path)
        for path in dict.fromkeys(path for plan in plans for path in plan.paths)
    }
    count = config.data.holdout_episodes
    options = ReaderOptions.of(config.data)
    train = TrainingData.open(
        [_spec(plan, catalogs, beside, config.data) for plan in plans], seed=config.runner.seed,
        options=replace(
            options, start_share=config.data.start_share, start_rows=config.data.start_rows
        ),
        sampler=sampler,
    )  # fmt: skip
    if not count:
        return Datasets(train, None)
    kept = [
        _spec(plan, catalogs, beside, config.data, held_out=True)
        for plan in plans if plan.recorded == "actions" and plan.credit is None
    ]  # fmt: skip
    if not kept:
        return Datasets(train, None)
    return Datasets(train, TrainingData.open(kept, seed=config.runner.seed, options=options))


def _spec(
    plan: SourcePlan, catalogs: Mapping[str, DatasetCatalog], beside: Path | None,
    data: DataConfig, *, held_out: bool = False,
) -> SourceSpec:  # fmt: skip
    """Return a source without the held-out episodes of each folder, or with them alone.

    Recordings without actions are all trained on: there is nothing to compare predictions with.
    So are runs of a policy, whose actions are not all to be predicted.
    """
    embodiment = plan.read_as
    metadata: Path | Mapping[str, Any] | None = plan.metadata or beside
    # A policy's runs are never measured: its actions would mean something else.
    inherited = plan.metadata in (None, beside) or plan.credit is not None
    if not embodiment.state:
        metadata = {embodiment.tag: {}}
    if metadata is None:
        raise ConfigError(f"nothing has the statistics of {embodiment.tag}: set metadata_json_path")
    if held_out:
        # Errors are measured against what was recorded, not against repeated rows.
        timing = replace(embodiment.timing, pad_tail=False)
        embodiment = replace(embodiment, timing=timing)
    opened = [catalogs[path] for path in plan.paths]
    embodiment = replace(
        embodiment, action_anchor=recorded_anchor(opened, embodiment, data.action_anchor)
    )
    last = [
        last_episodes(catalog, data.episodes, data.holdout_episodes)
        if embodiment.action and plan.credit is None
        else frozenset()
        for catalog in opened
    ]
    return SourceSpec(
        paths=opened, embodiment=embodiment, metadata=metadata, inherited=inherited,
        weight=plan.weight, distribute_weights=plan.distribute_weights, credit=plan.credit,
        selections=[
            EpisodeSelection(only=episodes) if held_out else EpisodeSelection(without=episodes)
            for episodes in last
        ],
    )  # fmt: skip


def recorded_anchor(
    catalogs: Sequence[DatasetCatalog], robot: Embodiment, said: ActionAnchor | None = None
) -> ActionAnchor | None:
    """Return what the steps of a source's actions are measured from.

    Args:
        catalogs: Recordings of the source.
        robot: Its robot, whose anchor it is where nothing says another.
        said: ``data.action_anchor`` of the recipe.

    Raises:
        DatasetError: recordings and recipe differ.
    """
    if robot.action_frame is None:
        return None
    stated = {str(catalog.root): catalog.action_anchor for catalog in catalogs}
    stated["data.action_anchor"] = said
    known = {anchor for anchor in stated.values() if anchor is not None}
    if len(known) > 1:
        raise DatasetError(
            f"actions of {robot.tag} are measured from one anchor, and here it is "
            + "; ".join(f"{anchor} in {name}" for name, anchor in stated.items() if anchor)
            + ": train on recordings of one"
        )
    return known.pop() if known else robot.action_anchor


def last_episodes(catalog: DatasetCatalog, choice: EpisodeChoice, kept: int) -> frozenset[int]:
    """Return the last ``kept`` episodes of a folder among those that are used.

    Raises:
        DatasetError: that is every one of them.
    """
    unused = catalog.left_out(choice)
    used = [number for number in catalog.episodes.index.tolist() if number not in unused]
    if used and kept >= len(used):
        raise DatasetError(
            f"data.holdout_episodes={kept} holds out every episode of {catalog.root}, which has "
            f"{len(used)}: lower it, or record more"
        )
    return frozenset(used[-kept:] if kept else ())


def _open_teacher(
    config: SFTConfig, initial: InitialWeights, data: TrainingData
) -> InitialWeights | None:
    """Return the weights of the teacher; None without one.

    Raises:
        CheckpointError: It has other encoders or statistics, or was distilled for other steps than
            ``distill.from_steps``.
    """
    distill = config.distill
    if distill.to_steps is None:
        return None
    path = distill.teacher_path or config.model.model_path
    if path is None:
        raise ConfigError("distillation needs a teacher: set distill.teacher_path")
    own = distill.teacher_path is None
    checkpoint = open_checkpoint(path, revision=config.model.revision if own else None)
    weights = initial if own else from_checkpoint(checkpoint)
    _check_teacher(checkpoint, distill.from_steps, data)
    if not own:
        _check_encoders(weights, initial)
    return weights


def _check_teacher(checkpoint: Checkpoint, steps: int, data: TrainingData) -> None:
    own = checkpoint.passport.distilled_steps
    if own not in (None, steps):
        raise CheckpointError(
            f"distill.from_steps={steps}, and the teacher {checkpoint.path} was distilled for "
            f"{own} solver steps: set distill.from_steps={own}, or choose another teacher"
        )
    for source in data.sources:
        robot = source.spec.embodiment
        learned = Statistics.from_metadata(checkpoint.metadata_file, robot)
        if learned.fingerprint != source.pipeline.statistics.fingerprint:
            raise CheckpointError(
                f"the teacher {checkpoint.path} was trained with other statistics of {robot.tag} "
                f"than those of {source.spec.metadata}, so its actions mean something else: leave "
                "the metadata_json_path out, or give the teacher's own"
            )


def _check_encoders(teacher: InitialWeights, initial: InitialWeights) -> None:
    """Check that what the student sees is what its teacher was trained on."""
    first, second = (
        fingerprint(one.source, [name for name in one.source.tensors if not name.startswith(DIT)])
        for one in (teacher, initial)
    )
    if first != second:
        raise CheckpointError(
            f"the teacher {teacher.folder} has other encoders than {initial.folder}: choose a "
            "teacher that was trained from the same ones, or leave distill.teacher_path out"
        )
