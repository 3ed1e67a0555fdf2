"""From a checked recipe to everything that a training run consists of.

:func:`build` gives the order: initial weights, network, datasets, prompts, the network sharded over
the processes, cached image latents, optimizer, metrics. Its steps follow below it.

The network is never whole in one place: it is built on the meta device, sharded, and every process
copies its own part from the files.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from dzrobot.code_identity import CodeIdentity, package_code
from dzrobot.errors import ConfigError
from dzrobot.modality.video import PUBLISHED, AugmentConfig
from dzrobot.policies.dreamzero.checkpoints.load import (
    empty_network,
    load_weights,
)
from dzrobot.policies.dreamzero.checkpoints.lora import (
    nf4_layers,
)
from dzrobot.policies.dreamzero.compiling import CompileNotice
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.distillation import StepDistillation
from dzrobot.policies.dreamzero.network.prompt import PromptTokenizer
from dzrobot.policies.dreamzero.network.world_action import (
    WorldActionModel,
)
from dzrobot.policies.dreamzero.quantize import set_nf4
from dzrobot.training.cost.flops import sample_cost
from dzrobot.training.cost.plan import settle
from dzrobot.training.cost.speed import device_peak
from dzrobot.training.run.initial_weights import (
    InitialWeights,
    fill,
)
from dzrobot.training.run.inputs import (
    NetworkInputs,
    PromptEncoder,
    PromptEncoding,
    Prompts,
    precompute_features,
    precompute_prompts,
)
from dzrobot.training.run.metrics import Rates, TrainMetrics
from dzrobot.training.run.opening import Datasets, OpenedRun, open_run, tokenizer_path
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
from dzrobot.training.sft_config import DataConfig, SFTConfig


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """Everything that a run consists of."""

    config: SFTConfig
    world: DistributedEnvironment
    initial: InitialWeights
    network: NetworkConfig
    datasets: Datasets
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

    codes: list[CodeIdentity] = field(default_factory=lambda: [package_code()])
    """Code of this run, after that of the runs that it resumed."""

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Return the fingerprint of the tokenizer of its prompts."""
        return PromptTokenizer(tokenizer_path(self.config, self.initial)).fingerprint


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
        DzrobotError: See :func:`.opening.open_run`.
        ConfigError: ``parallel.fill_memory`` on a processor.
    """
    codes = world.gathered(package_code())
    if odd := [rank for rank, code in enumerate(codes) if not code.is_same(codes[0])]:
        raise ConfigError(
            f"the processes run different code: rank 0 dzrobot {codes[0].text}, rank {odd[0]} "
            f"{codes[odd[0]].text}; install the same on all machines"
        )
    torch.use_deterministic_algorithms(config.runner.deterministic)
    plugins = plugins or Plugins.of(config.runner.plugins)
    opened = open_run(config, plugins)
    initial, network, datasets = opened.initial, opened.network, opened.datasets
    if world.is_main:
        # Begins, beside all that follows.
        _ = initial.hashed
    config = settle(config, initial.base, world.size, device_memory(world.device))
    tokenizer = opened.tokenizer
    texts = datasets.prompts()
    stored, longest = None, network.dit.text_len
    if config.model.cache_prompts:
        encoding = PromptEncoding(
            network=network, weights=initial.source, tokenizer=tokenizer,
            dtype=DTYPES[config.parallel.param_dtype],
        )  # fmt: skip
        stored = precompute_prompts(texts, encoding, config.runner.output_dir / "prompts", world)
        longest = stored.longest(texts)

    model = shard(config, opened.model, initial, world)
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
        teacher=place_teacher(config, opened, world),
        optimizer=Optimizer(trained.items(), config.optim, config.runner.max_steps),
        ema=Ema(trained, config.optim.ema_decay) if config.optim.ema_decay else None,
        metrics=TrainMetrics(rates, world.device, terms=tuple(plugins.terms)),
        compiling=compiling, plugins=plugins,
    )  # fmt: skip


def shard(
    config: SFTConfig, model: WorldActionModel, initial: InitialWeights,
    world: DistributedEnvironment,
) -> WorldActionModel:  # fmt: skip
    """Return the network on its devices: trained weights in float32, frozen in the compute dtype.

    Args:
        config: The recipe.
        model: The network without memory for its weights; it gets them here.
        initial: Its weights.
        world: The processes.

    Raises:
        CheckpointError: The weights are not those of the network.
    """
    if config.model.cache_prompts:
        model.text_encoder = None
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


def place_teacher(
    config: SFTConfig, opened: OpenedRun, world: DistributedEnvironment
) -> StepDistillation | None:
    """Return the teacher on its devices, frozen and sharded like the network; None without one."""
    distill, weights, network = config.distill, opened.teacher, opened.network
    if distill.to_steps is None or weights is None:
        return None
    head = replace(network.head, train_architecture="full")
    dit = empty_network(
        replace(network, head=head), is_lora=False, text_encoder=False,
        conditions=opened.datasets.train.sources[0].spec.embodiment.conditions,
    ).model  # fmt: skip
    dit.requires_grad_(requires_grad=False).to(DTYPES[config.parallel.param_dtype])
    layout = config.parallel.model_copy(
        update={
            "activation_checkpointing": "none",
            "kept_blocks": 0,
            "float8": False,
            "cuda_graphs": "none",
        }
    )
    parallelize(dit, dit.blocks, layout, world)
    dit.to_empty(device="cpu" if layout.cpu_offload else world.device)
    # As a network of this part alone: the frozen encoders are the student's.
    load_weights(nn.ModuleDict({"model": dit}), weights.source)
    return StepDistillation(
        teacher=dit, device=world.device, head=network.head, from_steps=distill.from_steps,
        to_steps=distill.to_steps, weights=weights.fingerprint,
    )  # fmt: skip
