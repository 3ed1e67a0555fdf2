"""From a checked recipe to everything that a training run consists of.

:func:`build` gives the order: initial weights, network, datasets, prompts, the network sharded over
the processes, cached image latents, optimizer, metrics. Its steps follow below it.

The network is never whole in one place: it is built on the meta device, sharded, and every process
copies its own part from the files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dzrobot.embodiments.spec import ActionAnchor, Embodiment, Part
from dzrobot.errors import CheckpointError, DatasetError
from dzrobot.modality.stats import Statistics
from dzrobot.modality.video import PUBLISHED, AugmentConfig
from dzrobot.policies.dreamzero.checkpoints.checksums import fingerprint
from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint, open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.load import (
    empty_network,
    load_weights,
)
from dzrobot.policies.dreamzero.checkpoints.lora import (
    nf4_layers,
)
from dzrobot.policies.dreamzero.checkpoints.names import DIT
from dzrobot.policies.dreamzero.compiling import CompileNotice
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.distillation import StepDistillation
from dzrobot.policies.dreamzero.network.prompt import DEFAULT_TOKENIZER, PromptTokenizer
from dzrobot.policies.dreamzero.network.world_action import (
    WorldActionModel,
)
from dzrobot.policies.dreamzero.quantize import set_nf4
from dzrobot.training.cost.flops import sample_cost
from dzrobot.training.cost.plan import settle
from dzrobot.training.cost.speed import device_peak
from dzrobot.training.data import (
    EpisodeSelection,
    ReaderOptions,
    SourceSpec,
    TrainingData,
)
from dzrobot.training.data.lerobot import DatasetCatalog
from dzrobot.training.data.mixture import MakeStream
from dzrobot.training.recipes.architecture import (
    SourcePlan,
    run_network,
    source_plans,
)
from dzrobot.training.run.encoder_cache import (
    PromptEncoder,
    PromptEncoding,
    Prompts,
    precompute_features,
    precompute_prompts,
    training_prompts,
)
from dzrobot.training.run.initial_weights import (
    InitialWeights,
    fill,
    from_checkpoint,
    open_initial_weights,
)
from dzrobot.training.run.inputs import NetworkInputs
from dzrobot.training.run.metrics import Rates, TrainMetrics
from dzrobot.training.run.optimizer import Ema, Optimizer
from dzrobot.training.run.parallel import (
    DTYPES,
    DistributedEnvironment,
    clean_name,
    compile_notice,
    device_memory,
    parallelize,
    shard_frozen,
)
from dzrobot.training.run.plugin import Described, Plugins
from dzrobot.training.sft_config import DataConfig, EpisodeChoice, SFTConfig

TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """Everything that a run consists of."""

    config: SFTConfig
    world: DistributedEnvironment
    initial: InitialWeights
    network: NetworkConfig
    datasets: "Datasets"
    model: WorldActionModel
    inputs: "NetworkInputs"
    """From a batch of the loader to what the network's loss takes."""

    teacher: StepDistillation | None
    """What the network is distilled from; None: it learns from the recordings alone."""

    optimizer: Optimizer
    ema: Ema | None
    metrics: TrainMetrics
    compiling: CompileNotice

    plugins: Plugins = field(default_factory=Plugins)
    """What a lab adds to the run."""

    def described(self) -> tuple[Described, ...]:
        """Return the code of a lab's own that takes part: plug-ins, then encoders."""
        parts = self.datasets.train.sources[0].spec.embodiment.conditions
        return (*self.plugins.settings, *map(Described.of_encoder, parts))


def _augmentation(data: DataConfig) -> AugmentConfig | None:
    if not data.augment:
        return None
    return replace(PUBLISHED, view_dropout=data.view_dropout, dropped_views=data.dropped_views)


def build(
    config: SFTConfig, world: DistributedEnvironment, plugins: Plugins | None = None
) -> TrainingComponents:
    """Open weights and datasets, and lay the network out over the processes. Collective.

    Args:
        config: The recipe.
        world: The processes.
        plugins: What a lab adds; None: those that the recipe names.

    Raises:
        CheckpointError: The initial weights are missing, damaged or not those of the network.
        DatasetError: See :func:`open_datasets`.
        StatisticsError: See :func:`open_datasets`.
        ConfigError: ``parallel.fill_memory`` on a processor.
    """
    torch.use_deterministic_algorithms(config.runner.deterministic)
    plugins = plugins or Plugins.of(config.runner.plugins)
    initial = open_initial_weights(config.model, config.runner.seed)
    config = settle(config, initial.base, world.size, device_memory(world.device))
    network = network_config(config, initial)
    datasets = open_datasets(config, initial, plugins.sampler(config))

    tokenizer = tokenizer_path(config, initial)
    texts = datasets.prompts()
    stored, longest = None, network.dit.text_len
    if config.model.cache_prompts:
        encoding = PromptEncoding(
            network=network, weights=initial.source, tokenizer=tokenizer,
            dtype=DTYPES[config.parallel.param_dtype],
        )  # fmt: skip
        stored = precompute_prompts(texts, encoding, config.runner.output_dir / "prompts", world)
        longest = stored.longest(texts)

    conditions = datasets.train.sources[0].spec.embodiment.conditions
    model = shard(config, network, initial, world, conditions)
    compiling = compile_notice(config, network, world)
    features = None
    if config.data.cache_features:
        with compiling.watching("encoding of images"):
            features = precompute_features(config, model, datasets.train, world)
        datasets = replace(datasets, train=datasets.train.without_images())
    prompts: Prompts = stored or PromptEncoder(
        model, PromptTokenizer(tokenizer, text_len=network.dit.text_len)
    )

    trained = {clean_name(n): p for n, p in model.model.named_parameters() if p.requires_grad}
    image_size = datasets.train.sources[0].spec.embodiment.image_size
    rates = Rates(
        cost=sample_cost(config, network, image_size, longest), devices=world.size,
        peak_tflops=config.logging.peak_tflops or device_peak(world.device),
    )  # fmt: skip
    return TrainingComponents(
        config=config, world=world, initial=initial, network=network, datasets=datasets,
        model=model,
        inputs=NetworkInputs(
            model=model, prompts=prompts, data=datasets.train, device=world.device,
            augment=_augmentation(config.data), features=features,
            cut_prompts=config.model.prompt_rows == "cut",
        ),
        teacher=open_teacher(config, network, initial, datasets.train, world),
        optimizer=Optimizer(trained.items(), config.optim, config.runner.max_steps),
        ema=Ema(trained, config.optim.ema_decay) if config.optim.ema_decay else None,
        metrics=TrainMetrics(rates, world.device, terms=tuple(plugins.terms)),
        compiling=compiling, plugins=plugins,
    )  # fmt: skip


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
    config: SFTConfig, initial: InitialWeights, sampler: MakeStream | None = None
) -> Datasets:
    """Open every source of ``config``; the lists of a folder are read once.

    Args:
        config: The recipe.
        initial: The weights it starts from, whose statistics are used where it names none.
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
    options = ReaderOptions(
        decoder=config.data.video_backend, damaged=config.data.on_corrupt,
        episodes=config.data.episodes,
    )  # fmt: skip
    train = TrainingData.open(
        [_spec(plan, catalogs, initial, config.data) for plan in plans], seed=config.runner.seed,
        options=replace(
            options, start_share=config.data.start_share, start_rows=config.data.start_rows
        ),
        sampler=sampler,
    )  # fmt: skip
    if not count:
        return Datasets(train, None)
    kept = [
        _spec(plan, catalogs, initial, config.data, held_out=True)
        for plan in plans if plan.recorded == "actions"
    ]  # fmt: skip
    if not kept:
        return Datasets(train, None)
    return Datasets(train, TrainingData.open(kept, seed=config.runner.seed, options=options))


def _spec(
    plan: SourcePlan, catalogs: Mapping[str, DatasetCatalog], initial: InitialWeights,
    data: DataConfig, *, held_out: bool = False,
) -> SourceSpec:  # fmt: skip
    """Return a source without the held-out episodes of each folder, or with them alone.

    Recordings without actions are all trained on: there is nothing to compare predictions with.
    """
    embodiment = plan.read_as
    metadata: Path | Mapping[str, Any] | None = plan.metadata or initial.metadata
    inherited = plan.metadata is None or plan.metadata == initial.metadata
    if not embodiment.state:
        metadata = {embodiment.tag: {}}
    assert metadata is not None, "checked before anything was opened"
    if held_out:
        # Errors are measured against what was recorded, not against repeated rows.
        timing = replace(embodiment.timing, pad_tail=False)
        embodiment = replace(embodiment, timing=timing)
    opened = [catalogs[path] for path in plan.paths]
    embodiment = replace(embodiment, action_anchor=_anchor(opened, embodiment, data))
    last = [
        last_episodes(catalog, data.episodes, data.holdout_episodes)
        if embodiment.action
        else frozenset()
        for catalog in opened
    ]
    return SourceSpec(
        paths=opened, embodiment=embodiment, metadata=metadata, inherited=inherited,
        weight=plan.weight, distribute_weights=plan.distribute_weights,
        selections=[
            EpisodeSelection(only=episodes) if held_out else EpisodeSelection(without=episodes)
            for episodes in last
        ],
    )  # fmt: skip


def _anchor(
    catalogs: Sequence[DatasetCatalog], robot: Embodiment, data: DataConfig
) -> ActionAnchor | None:
    """Return what the steps of a source's actions are measured from.

    Raises:
        DatasetError: recordings and recipe differ.
    """
    if robot.action_frame is None:
        return None
    stated = {str(catalog.root): catalog.action_anchor for catalog in catalogs}
    stated["data.action_anchor"] = data.action_anchor
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


def shard(
    config: SFTConfig, network: NetworkConfig, initial: InitialWeights,
    world: DistributedEnvironment, conditions: Sequence[Part] = (),
) -> WorldActionModel:  # fmt: skip
    """Return the network on its devices: trained weights in float32, frozen in the compute dtype.

    Raises:
        CheckpointError: The weights are not those of the network.
    """
    model = empty_network(
        network, is_lora=config.model.is_lora, text_encoder=not config.model.cache_prompts,
        conditions=conditions,
    )  # fmt: skip
    compute = DTYPES[config.parallel.param_dtype]
    for parameter in model.parameters():
        # Only updated weights need a higher precision than they are used in.
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else compute)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, buffer.to(compute))
    four_bit = nf4_layers(model) if config.model.lora_base == "nf4" else {}
    # Neither sharded nor given memory: each gets its value in four bits, as it is read.
    shapes = {name: layer.get_parameter("weight") for name, layer in four_bit.items()}
    for layer in four_bit.values():
        layer.register_parameter("weight", None)
    mesh = parallelize(model.model, model.model.blocks, config.parallel, world)
    if config.parallel.compile:
        model.compile_encoders()
    if (
        model.text_encoder is not None
        and world.size > 1
        and config.parallel.strategy in ("fsdp", "hsdp")
    ):
        shard_frozen(model.text_encoder, list(model.text_encoder.stack.block), mesh)
    offloaded = torch.device("cpu") if config.parallel.cpu_offload else world.device
    for name, child in model.named_children():
        child.to_empty(device=offloaded if name == "model" else world.device)
    for name, layer in four_bit.items():
        layer.register_parameter("weight", shapes[name])
    setters = {
        f"{name}.weight": partial(set_nf4, layer, device=world.device, dtype=compute)
        for name, layer in four_bit.items()
    }
    fill(model, initial, config.runner.seed, setters)
    return model


def open_teacher(
    config: SFTConfig, network: NetworkConfig, initial: InitialWeights, data: TrainingData,
    world: DistributedEnvironment,
) -> StepDistillation | None:  # fmt: skip
    """Return the teacher on its devices, frozen and sharded like the network; None without one.

    Raises:
        CheckpointError: It is another network, has other encoders or statistics, or was distilled
            for other steps than ``distill.from_steps``.
    """
    distill = config.distill
    if distill.to_steps is None:
        return None
    path = distill.teacher_path or config.model.model_path
    assert path is not None, "checked before anything was opened"
    own = distill.teacher_path is None
    checkpoint = open_checkpoint(path, revision=config.model.revision if own else None)
    weights = initial if own else from_checkpoint(checkpoint)
    _check_teacher(checkpoint, distill.from_steps, data)
    if not own:
        _check_encoders(weights, initial)
    head = replace(network.head, train_architecture="full")
    dit = empty_network(
        replace(network, head=head), is_lora=False, text_encoder=False,
        conditions=data.sources[0].spec.embodiment.conditions,
    ).model  # fmt: skip
    dit.requires_grad_(requires_grad=False).to(DTYPES[config.parallel.param_dtype])
    layout = config.parallel.model_copy(
        update={"activation_checkpointing": "none", "kept_blocks": 0, "float8": False}
    )
    parallelize(dit, dit.blocks, layout, world)
    dit.to_empty(device="cpu" if layout.cpu_offload else world.device)
    # As a network of this part alone: the frozen encoders are the student's.
    load_weights(nn.ModuleDict({"model": dit}), weights.source)
    return StepDistillation(
        teacher=dit, device=world.device, head=network.head, from_steps=distill.from_steps,
        to_steps=distill.to_steps, weights=weights.fingerprint,
    )  # fmt: skip


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
