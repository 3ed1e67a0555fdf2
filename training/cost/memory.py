"""How much device memory a run needs, by arithmetic, before any weight is read.

Parameters are counted on a network without memory; activations by what each layer keeps for its
backward pass. The working memory of kernels and the allocator's waste are allowances, named as
such.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from torch import nn

from dzrobot.policies.dreamzero.checkpoints.load import empty_network
from dzrobot.policies.dreamzero.checkpoints.lora import nf4_layers
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.quantize import NF4_BYTES
from dzrobot.training.cost.flops import SampleShape, sample_shape
from dzrobot.training.sft_config import ModelConfig, ParallelConfig

GIB = 2**30

_EAGER_WIDTHS = 29
"""Tensors of the model's width that a block keeps per token without compilation."""

_COMPILED_WIDTHS = 18
"""As above, where the compiler recomputes element-wise work."""

_SELECTIVE_WIDTHS = 11
"""Block input, outputs of matrix products and attention."""

_UNPACKED_BYTES = 16
"""Bytes of a number while it is unpacked from four bits: its index in 64, four other results."""

_WORKSPACE = 2.0 * GIB
"""Allowance for the runtime, kernels and communication buffers."""

_WASTE = 0.03
"""Allowance for memory that the allocator cannot use."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters of a network."""

    trained: int
    frozen: int
    """Frozen parameters of the transformer (LoRA)."""

    adapted: int
    """Those of them in layers that adapters are added to, which can be held in four bits."""

    adapted_largest: int
    """Those of the largest such layer."""

    eight_bit_bytes: float
    """Bytes of both moments where those that can be kept in eight bits are."""

    block: int
    """Parameters of one transformer block."""

    root: int
    """Parameters of the transformer outside its blocks."""

    text: int
    images: int
    """Image encoder and autoencoder."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is planned."""

    network: NetworkConfig
    model: ModelConfig
    parallel: ParallelConfig
    image_size: tuple[int, int]
    """(height, width) in pixels of the tiled image."""

    micro_batch: int
    devices: int
    averaged: bool
    """Whether a moving average of the weights is kept."""

    parts: int = 1
    """Micro-batches that a device accumulates per step."""

    eight_bit: bool = False
    """Whether the optimizer's moments are kept in eight bits."""

    teacher_steps: int = 0
    """Forward passes of a teacher that is frozen, and sharded like the network; 0: there is none.
    """


@dataclass(frozen=True)
class Item:
    """One line of the plan."""

    name: str
    bytes_: float
    on_host: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """What fills one device."""

    items: tuple[Item, ...]

    @property
    def peak(self) -> float:
        """Return the expected peak of one device in bytes."""
        return (1 + _WASTE) * sum(item.bytes_ for item in self.items if not item.on_host)

    @property
    def host(self) -> float:
        """Return what one process holds in host memory, in bytes."""
        return sum(item.bytes_ for item in self.items if item.on_host)


@lru_cache(maxsize=8)
def count_parameters(network: NetworkConfig, *, is_lora: bool) -> Counts:
    """Return the parameters of every part."""
    model = empty_network(network, is_lora=is_lora, text_encoder=True)
    assert model.text_encoder is not None
    whole = list(model.model.parameters())
    trained = sum(p.numel() for p in whole if p.requires_grad)
    block = _numel(model.model.blocks[0])
    layers = nf4_layers(model.model).values() if is_lora else ()
    adapted = [layer.weight.numel() for layer in layers]
    return Counts(
        trained=trained,
        frozen=sum(p.numel() for p in whole) - trained,
        adapted=sum(adapted),
        adapted_largest=max(adapted, default=0),
        eight_bit_bytes=sum(
            p.numel() * moment_bytes(tuple(p.shape)) for p in whole if p.requires_grad
        ),
        block=block,
        root=sum(p.numel() for p in whole) - block * network.dit.num_layers,
        text=_numel(model.text_encoder),
        images=_numel(model.image_encoder) + _numel(model.vae),
    )


LARGEST_BLOCK = 256
"""Numbers that share a scale where moments are kept in eight bits, as the paper has it."""

_SMALLEST_BLOCK = 64
_FEWEST = 4096
"""Smaller parameters keep float32 moments, as in the paper."""


def moment_block(shape: tuple[int, ...]) -> int | None:
    """Return how many numbers of a parameter share a scale in eight bits; None: none can.

    Blocks lie within a row, so that they are the same however rows are spread over processes.
    """
    row = prod(shape[1:])
    block = gcd(row, LARGEST_BLOCK)
    quantized = len(shape) > 1 and row * shape[0] >= _FEWEST and block >= _SMALLEST_BLOCK
    return block if quantized else None


def moment_bytes(shape: tuple[int, ...]) -> float:
    """Return the bytes of both moments of one number, in eight bits where that is possible."""
    block = moment_block(shape)
    return 8.0 if block is None else 2 * (1 + 4 / block)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def plan_memory(setup: Setup, counts: Counts) -> MemoryPlan:
    """Return what one device holds at the worst moment of a step, item by item."""
    items = [*_states(setup, counts), *_gathered(setup, counts), *_encoders(setup, counts)]
    items += _recorded(setup, counts)
    # Encoders run before the transformer keeps anything: the two never add up.
    moments = {
        "activations": activation_bytes(setup),
        "images in the encoders": _reading_bytes(setup),
    }
    if kept := _kept_gathered(setup, counts):
        # Backward, blocks keep their weights as they lose their activations.
        beside = max(_reading_bytes(setup), block_activations(setup))
        moments["all weights, and images or one block"] = kept + beside
    name = max(moments, key=lambda moment: moments[moment])
    return MemoryPlan((*items, Item(name, moments[name]), Item("workspace", _WORKSPACE)))


def _states(setup: Setup, counts: Counts) -> Iterator[Item]:
    shards = shards_of(setup)
    width = compute_bytes(setup)
    host = setup.parallel.cpu_offload
    yield Item("master weights, float32", 4 * counts.trained / shards, host)
    yield from _gradients(setup, counts)
    if setup.eight_bit:
        yield Item("Adam moments, 8 bits", counts.eight_bit_bytes / shards, host)
    else:
        yield Item("Adam moments, float32", 8 * counts.trained / shards, host)
    if setup.averaged:
        yield Item("averaged weights, float32", 4 * counts.trained / shards, host)
    if setup.teacher_steps:
        whole = counts.trained + counts.frozen
        yield Item("teacher's weights", width * whole / shards, host)
        # Never freed: nothing else of the teacher is gathered for long.
        yield Item("teacher's weights outside its blocks", width * counts.root)
    four_bit = _four_bit(setup, counts)
    if counts.frozen:
        yield Item("frozen weights", width * (counts.frozen - four_bit) / shards, host)
    if four_bit:
        yield Item("frozen weights in 4 bits, not sharded", NF4_BYTES * four_bit)
        yield Item("one layer of these as it is used", _UNPACKED_BYTES * counts.adapted_largest)


def _gradients(setup: Setup, counts: Counts) -> Iterator[Item]:
    host, sharded = setup.parallel.cpu_offload, 4 * counts.trained / shards_of(setup)
    if setup.parts == 1 or setup.parallel.enable_gradient_accumulation is not True:
        yield Item("gradients, float32", sharded, host)
        return
    whole = reduced_bytes(setup) * counts.trained
    # The last backward pass frees them block by block, as it makes their shards.
    yield Item("whole gradients", whole if host else max(whole, sharded))
    if host:
        yield Item("gradients, float32", sharded, host)


def _four_bit(setup: Setup, counts: Counts) -> int:
    return counts.adapted if setup.model.lora_base == "nf4" else 0


def _gathered(setup: Setup, counts: Counts) -> Iterator[Item]:
    width, parallel = compute_bytes(setup), setup.parallel
    layers = setup.network.dit.num_layers
    block = counts.block - _four_bit(setup, counts) / layers
    if parallel.reshard_after_forward:
        held = counts.root + (2 + parallel.prefetch_blocks) * block
    else:
        held = counts.root + block * layers
    yield Item("gathered weights", width * held)
    reduced = reduced_bytes(setup)
    share = counts.trained / (counts.trained + counts.frozen)
    yield Item("gradients of two blocks in flight", share * counts.block * (2 * width + reduced))


def _recorded(setup: Setup, counts: Counts) -> Iterator[Item]:
    if setup.parallel.cuda_graphs == "none":
        return
    # A block's weights and gradients where recorded work reads and writes them, and what it keeps
    # for its backward pass: the memory of a recording is not used for anything else.
    weights = 2 * compute_bytes(setup) * counts.block
    yield Item("one block in CUDA graphs", weights + block_activations(setup))


def _kept_gathered(setup: Setup, counts: Counts) -> float:
    """Return the bytes of the blocks that stay gathered from one micro-batch to the next."""
    parallel, layers = setup.parallel, setup.network.dit.num_layers
    if setup.parts == 1 or parallel.reshard_after_backward or not parallel.reshard_after_forward:
        return 0.0
    four_bit = _four_bit(setup, counts) / layers
    return compute_bytes(setup) * (counts.block - four_bit) * layers


def reduced_bytes(setup: Setup) -> int:
    """Return the bytes of one number of the gradients that are summed over processes."""
    return 4 if setup.parallel.reduce_dtype == "fp32" else 2


def _encoders(setup: Setup, counts: Counts) -> Iterator[Item]:
    width = compute_bytes(setup)
    yield Item("image encoder and autoencoder", width * counts.images)
    if not setup.model.cache_prompts:
        yield Item("prompt encoder", width * counts.text / shards_of(setup))


def shards_of(setup: Setup) -> int:
    """Return over how many devices states are spread."""
    match setup.parallel.strategy:
        case "fsdp":
            return setup.devices
        case "hsdp":
            return setup.parallel.shard_size or min(setup.devices, 8)
        case _:
            return 1


def compute_bytes(setup: Setup) -> int:
    """Return the bytes of one number in forward and backward."""
    return 4 if setup.parallel.param_dtype == "fp32" else 2


def activation_bytes(setup: Setup) -> float:
    """Return what is kept between forward and backward, the block being recomputed included."""
    network, parallel = setup.network, setup.parallel
    shape = sample_shape(network.dit, network.head.num_frames, network.vae.temporal_stride)
    tokens, width = executed_tokens(setup, shape), compute_bytes(setup) * setup.micro_batch
    whole = block_activations(setup)
    layers = network.dit.num_layers
    match parallel.activation_checkpointing:
        case "none":
            return whole * layers
        case "selective":
            dit = network.dit
            kept = (_SELECTIVE_WIDTHS * dit.dim + dit.ffn_dim) * tokens * width
        case "full":
            kept = network.dit.dim * tokens * width
    inside = min(parallel.kept_blocks, layers)
    return kept * (layers - inside) + whole * max(inside, 1)


def block_activations(setup: Setup) -> float:
    """Return what one block keeps when it recomputes nothing, in bytes."""
    network = setup.network
    shape = sample_shape(network.dit, network.head.num_frames, network.vae.temporal_stride)
    numbers = kept_widths(setup) * executed_tokens(setup, shape)
    return numbers * compute_bytes(setup) * setup.micro_batch


def executed_tokens(setup: Setup, shape: SampleShape) -> int:
    """Return the tokens a block computes: all but the last clean block."""
    return shape.length - setup.network.dit.num_frame_per_block * shape.frame_tokens


def kept_widths(setup: Setup) -> float:
    """Return the numbers that one block keeps per token when it recomputes nothing.

    ``parallel.compile: auto`` counts as true: a plan is for accelerators.
    """
    dit = setup.network.dit
    widths = _COMPILED_WIDTHS if setup.parallel.compile else _EAGER_WIDTHS
    return widths * dit.dim + 2 * dit.ffn_dim


def _reading_bytes(setup: Setup) -> float:
    """Return the largest working set while images are resized and encoded."""
    network, frames = setup.network, setup.network.head.num_frames
    rows, columns = setup.image_size
    # Frames as float32 and two temporaries of their normalization.
    pixels = 3 * 3 * 4 * frames * rows * columns
    height, width = network.target_size or setup.image_size
    patch = network.vae.patch_size
    features = network.vae.dim * (height // patch) * (width // patch)
    # Eight feature maps of a four-frame chunk are alive inside the widest residual block.
    encoder = 8 * 4 * features * compute_bytes(setup)
    # The first frame's clip is encoded in the same batch.
    clips = 2 if network.dit.concat_first_frame_latent else 1
    return float(setup.micro_batch * (pixels + clips * encoder))
