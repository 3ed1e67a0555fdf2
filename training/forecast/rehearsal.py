"""Dress rehearsal: a training step and the chunks of an episode at full size, without memory.

Both run the code that a real run runs, on the meta device. What a process keeps from its first step
on (rotary tables, noise levels) is made before anything is counted.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.video import draw_augmentation, encode_views
from dzrobot.policies.dreamzero.checkpoints.load import build_network, empty_network
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise
from dzrobot.policies.dreamzero.network.distillation import StepDistillation
from dzrobot.policies.dreamzero.network.dit import CausalDiT
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.lanes import Lane, lanes_of
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.session import (
    GenerateOptions,
    InferenceNoise,
    InferenceRequest,
    Prompt,
    SessionCache,
    noise_shapes,
)
from dzrobot.policies.dreamzero.network.world_action import (
    EncodedImages,
    LossCounts,
    LossOptions,
    PreparedBatch,
    TrainBatch,
    WorldActionModel,
)
from dzrobot.training.cost.memory import Setup, shards_of
from dzrobot.training.forecast.kernels import Kernels, compiled, eager
from dzrobot.training.forecast.operators import (
    Constructors,
    OperatorCounter,
    Upload,
    accelerator_attention,
)
from dzrobot.training.run.inputs import sample_noise
from dzrobot.training.run.parallel import DTYPES, checkpoint_activations
from dzrobot.training.run.trainer import backward
from dzrobot.training.sft_config import ParallelConfig

META = torch.device("meta")

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, eq=False, kw_only=True)
class Rehearsal:
    """What ran."""

    eager: Kernels
    """Every operator by itself."""

    compiled: Kernels
    """With each transformer block compiled."""

    uploads: Counter[Upload]
    """What the host sent to the device."""

    misplaced: Counter[str]
    """Operators that mixed devices, by place."""

    link_bytes: float
    """Sent to other devices."""

    replays: int = 0
    """How often graphs would launch a part of it as one."""

    @property
    def flops(self) -> float:
        """Return the operations of all products, attentions and convolutions."""
        return sum(count * kernel.flops for kernel, count in self.eager.items())

    def of_stage(self, name: str) -> "Rehearsal":
        """Return what one stage ran, its backward pass included; nothing that was sent."""
        return Rehearsal(
            eager=_of_stage(self.eager, name), compiled=_of_stage(self.compiled, name),
            uploads=Counter(), misplaced=Counter(), link_bytes=0.0,
        )  # fmt: skip

    @property
    def single_products(self) -> Counter[str]:
        """Return how often something was multiplied in float32 or wider, by module."""
        wide = (torch.float32, torch.float64)
        return Counter({
            f"{kernel.stage}: {kernel.module or kernel.operator}": count
            for kernel, count in self.eager.items()
            if kernel.kind != "memory" and kernel.dtype in wide
        })  # fmt: skip


def _of_stage(kernels: Kernels, name: str) -> Kernels:
    return Counter({k: n for k, n in kernels.items() if k.stage in (name, f"{name}, backward")})


def rehearse(run: Callable[[OperatorCounter], None], device: torch.device = META) -> Rehearsal:
    """Return what ``run`` runs on ``device``."""
    counter = OperatorCounter(device)
    with accelerator_attention(), Constructors(counter), counter:
        run(counter)
    return Rehearsal(
        eager=eager(counter.calls), compiled=compiled(counter.calls), uploads=counter.uploads,
        misplaced=counter.misplaced, link_bytes=counter.link_bytes, replays=counter.replays,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """A training step to rehearse."""

    setup: Setup
    robot: Embodiment
    prompt_rows: int
    """Rows of every prompt that are not padding."""

    augmented: bool = True
    has_stored_images: bool = False
    """Whether latents come from a store (``data.cache_features``)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRehearsal:
    """One device's share of an optimizer step."""

    micro_batch: Rehearsal
    """Forward and backward of one micro-batch, from frames to gradients summed over devices."""

    update: Rehearsal
    """Clipping and the optimizer, once a step."""


def rehearse_step(plan: StepSetup) -> StepRehearsal:
    """Return what a device runs in one optimizer step."""
    setup = plan.setup
    is_lora = setup.model.is_lora

    def run(layers: int) -> Rehearsal:
        network = with_layers(setup.network, layers)
        part = replace(plan, setup=replace(setup, network=network))
        model = training_network(network, setup.parallel, is_lora=is_lora)
        return rehearse(lambda counter: _micro_batch(part, model, counter))

    # The last blocks differ: they keep their activations, or leave out the clean half.
    few = setup.parallel.kept_blocks + 2
    whole = of_all_layers(run, few, setup.network.dit.num_layers)
    model = training_network(setup.network, setup.parallel, is_lora=is_lora)
    shapes = [p.shape for p in model.model.parameters() if p.requires_grad]
    shards = shards_of(setup)
    update = rehearse(lambda counter: _update(shapes, shards, counter))
    return StepRehearsal(micro_batch=whole, update=update)


def with_layers(network: NetworkConfig, layers: int) -> NetworkConfig:
    """Return ``network`` with so many transformer blocks."""
    return replace(network, dit=replace(network.dit, num_layers=layers))


def of_all_layers(run: Callable[[int], Rehearsal], few: int, layers: int) -> Rehearsal:
    """Return what ``run`` runs with ``layers`` blocks, from runs with ``few`` and one more.

    Blocks are equal, so each further one adds what the last one added. What a process makes once
    and keeps, the first run makes, so it is not among what the second one sends.
    """
    if layers <= few + 1:
        run(layers)
        return run(layers)
    less, more = run(few), run(few + 1)
    further = layers - few - 1
    return Rehearsal(
        eager=_extended(less.eager, more.eager, further),
        compiled=_extended(less.compiled, more.compiled, further),
        uploads=more.uploads,
        misplaced=more.misplaced,
        link_bytes=more.link_bytes + further * (more.link_bytes - less.link_bytes),
        replays=more.replays,
    )


def _extended(less: Kernels, more: Kernels, further: int) -> Kernels:
    found, gone, added = Counter(more), less - more, more - less
    for small, count in gone.items():
        # A launch for all blocks together, as a copy of their cache, grows with their number.
        large = [
            kernel
            for kernel, times in added.items()
            if times == count and kernel._replace(flops=small.flops, bytes_=small.bytes_) == small
        ]
        if len(large) != 1:
            raise RuntimeError(f"blocks are not equal: another one takes away {small}")
        grown = large[0]._replace(
            flops=large[0].flops + further * (large[0].flops - small.flops),
            bytes_=large[0].bytes_ + further * (large[0].bytes_ - small.bytes_),
        )
        del added[large[0]], found[large[0]]
        found[grown] += count
    for kernel, count in added.items():
        found[kernel] += further * count
    return found


def training_network(
    network: NetworkConfig, parallel: ParallelConfig, *, is_lora: bool
) -> WorldActionModel:
    """Return the network as forward and backward see it: gathered, in the compute dtype."""
    model = empty_network(network, is_lora=is_lora, text_encoder=False)
    model.to(DTYPES[parallel.param_dtype])
    checkpoint_activations(model.model.blocks, parallel)
    return model


def _micro_batch(plan: StepSetup, model: WorldActionModel, counter: OperatorCounter) -> None:
    setup, timing, dit = plan.setup, plan.robot.timing, plan.setup.network.dit
    size = setup.micro_batch
    with counter.stage("frames"):
        images = _stored(plan) if plan.has_stored_images else _augmented(plan)
    with counter.stage("encoders"):
        prepared = model.prepare(
            TrainBatch(
                images=images,
                state_BSM=_sent(size, timing.blocks, dit.max_state_dim),
                action_BAM=_sent(size, timing.actions, dit.action_dim),
                action_mask_BAM=_sent(size, timing.actions, dit.action_dim, dtype=torch.bool),
                has_real_action_B=_sent(size, dtype=torch.bool),
                prompt=_prompt(plan),
            )
        )
    with counter.stage("transformer"):
        noise = sample_noise(setup.network, prepared, 0, 0, range(size))
    if setup.teacher_steps:
        with counter.stage("teacher"):
            prepared, noise = _taught(setup, model, prepared, noise)
    with counter.stage("transformer"):
        counts = LossCounts(samples=float(size), actions=float(size))
        options = LossOptions(action_loss_norm=setup.model.action_loss_norm)
        backward(model, prepared, noise, counts, options)
    with counter.stage("weights and gradients"):
        for unit in (*model.model.blocks, model.model):
            _gather_and_reduce(unit, plan, counter)
    model.zero_grad(set_to_none=True)


def _taught(
    setup: Setup, model: WorldActionModel, prepared: PreparedBatch, noise: DiffusionNoise
) -> tuple[PreparedBatch, DiffusionNoise]:
    teacher = empty_network(setup.network, is_lora=False, text_encoder=False).model
    distillation = StepDistillation(
        teacher=teacher.to(DTYPES[setup.parallel.param_dtype]), device=META,
        head=setup.network.head, from_steps=setup.teacher_steps, to_steps=1, weights="none",
    )  # fmt: skip
    return distillation.lesson(model, prepared, noise, LossOptions().form)


def _sent(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that the host sends to the device, as the trainer does."""
    return torch.empty(shape, dtype=dtype).to(META, non_blocking=True)


def _augmented(plan: StepSetup) -> Tensor:
    size, frames = plan.setup.micro_batch, plan.robot.timing.frames
    views = {
        view.key: _sent(size, frames, *view.resolution, 3, dtype=torch.uint8)
        for view in plan.robot.views
    }
    draws = [draw_augmentation(0, number) for number in range(size)] if plan.augmented else None
    return encode_views(views, plan.robot, draws)


def _stored(plan: StepSetup) -> EncodedImages:
    network, size = plan.setup.network, plan.setup.micro_batch
    latent = network.latent_size(*(network.target_size or plan.setup.image_size))
    frames = network.vae.latent_frames(network.head.num_frames)
    image = network.image
    tokens = 1 + (image.image_size // image.patch_size) ** 2
    first = None
    if network.dit.concat_first_frame_latent:
        first = _sent(size, network.dit.in_dim - network.dit.out_dim, frames, *latent)
    return EncodedImages(
        latents_BCFYX=_sent(size, network.dit.out_dim, frames, *latent),
        image_BPE=_sent(size, tokens, image.vision_dim),
        first_frame_BCFYX=first,
    )


def _prompt(plan: StepSetup) -> PromptEmbedding:
    dit, size = plan.setup.network.dit, plan.setup.micro_batch
    dtype = DTYPES[plan.setup.parallel.param_dtype]
    rows = _sent(size, dit.text_len, dit.text_dim, dtype=dtype)
    return PromptEmbedding(rows, (min(plan.prompt_rows, dit.text_len),) * size)


def _gather_and_reduce(unit: nn.Module, plan: StepSetup, counter: OperatorCounter) -> None:
    """Move what sharding moves for one unit; the blocks are units of their own.

    Shards of trained weights are float32, of frozen ones in the compute dtype. Both are copied into
    a buffer, gathered, and copied out, again in the backward pass where they were freed; gradients
    go the other way. One device does the same, but for the link.
    """
    parallel, shards = plan.setup.parallel, shards_of(plan.setup)
    compute, sums = DTYPES[parallel.param_dtype], DTYPES[parallel.reduce_dtype]
    is_root = isinstance(unit, CausalDiT)
    inner = {id(p) for p in unit.blocks.parameters()} if isinstance(unit, CausalDiT) else set()
    sizes = {
        trained: sum(
            p.numel()
            for p in unit.parameters()
            if p.requires_grad is trained and id(p) not in inner
        )
        for trained in (True, False)
    }
    times = 1 if is_root or not parallel.reshard_after_forward else 2
    for trained, numel in sizes.items():
        if not numel:
            continue
        local = -(-numel // shards)
        for _ in range(times):
            stored = torch.float32 if trained else compute
            torch.empty(local, dtype=compute, device=META).copy_(
                torch.empty(local, dtype=stored, device=META)
            )
            torch.empty(numel, dtype=compute, device=META).clone()
            counter.send(compute.itemsize * local * (shards - 1))
        if trained:
            torch.empty(numel, dtype=sums, device=META).copy_(
                torch.empty(numel, dtype=compute, device=META)
            )
            counter.send(sums.itemsize * local * (shards - 1))
            torch.empty(local, dtype=torch.float32, device=META).copy_(
                torch.empty(local, dtype=sums, device=META)
            )


def _update(shapes: Sequence[torch.Size], shards: int, counter: OperatorCounter) -> None:
    """Clip and update this device's share of the trained weights.

    What ``Optimizer.step`` comes to on an accelerator; torch refuses its fused form, and lists
    of tensors at a time, on the meta device.
    """
    weights, gradients, first, second = (
        [torch.empty(-(-rows // shards), *rest, device=META) for rows, *rest in shapes]
        for _ in range(4)
    )
    steps = [torch.empty((), device=META) for _ in shapes]
    with counter.stage("optimizer"):
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, norm.reciprocal())
        torch._fused_adamw_(
            weights, gradients, first, second, [], steps, lr=0.0, beta1=0.0, beta2=0.0,
            weight_decay=0.0, eps=0.0, amsgrad=False, maximize=False,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChunkSetup:
    """The chunks of an episode to rehearse."""

    network: NetworkConfig
    image_size: tuple[int, int]
    """(height, width) in pixels of the tiled image."""

    options: GenerateOptions
    prompt_rows: int
    dtype: torch.dtype = torch.bfloat16


def rehearse_chunks(plan: ChunkSetup) -> dict[int, Rehearsal]:
    """Return what each chunk runs, from the first to the last before history is dropped.

    Keys are the latent frame that a chunk begins at. Prompts have been encoded before; see
    :func:`rehearse_prompt`.
    """
    runs: dict[int, dict[int, Rehearsal]] = {}
    prompts = SessionCache().prompts
    encoder = inference_network(plan).require_text_encoder()
    for token in (1, 2):
        prompts.embed(encoder, *_row(_tokens(plan, token)))

    def run(layers: int) -> dict[int, Rehearsal]:
        if layers not in runs:
            part = replace(plan, network=with_layers(plan.network, layers))
            runs[layers] = _chunks(part, SessionCache(prompts=prompts))
        return runs[layers]

    layers = plan.network.dit.num_layers

    def at(place: int) -> Rehearsal:
        return of_all_layers(lambda count: run(count)[place], 1, layers)

    return {place: at(place) for place in run(1)}


def rehearse_prompt(plan: ChunkSetup) -> Rehearsal:
    """Return what encoding one new prompt runs."""
    model = inference_network(plan)

    def encode(counter: OperatorCounter) -> None:
        with counter.stage("prompt"):
            SessionCache().prompts.embed(model.require_text_encoder(), *_row(_tokens(plan, 1)))

    return rehearse(encode)


def inference_network(plan: ChunkSetup) -> WorldActionModel:
    """Return the network as a policy has it: on the device, frozen, in one dtype."""
    model = build_network(plan.network).to(plan.dtype)
    return model.eval().requires_grad_(requires_grad=False)


def _chunks(plan: ChunkSetup, session: SessionCache) -> dict[int, Rehearsal]:
    model = inference_network(plan)
    found: dict[int, Rehearsal] = {}
    window = plan.options.window(plan.network.dit)
    while True:
        request = _request(plan, 4 if found else 1)
        start = session.next_start(request, window)
        if start in found:
            return found

        def chunk(counter: OperatorCounter, request: InferenceRequest = request) -> None:
            with counter.stage("chunk"):
                lanes = [
                    _WatchedLane(lane.number, lane.dit, lane.prompts, counter=counter)
                    for lane in lanes_of(model.model, plan.options.prompts)
                ]
                predict(model, [session], [request], plan.options, lanes)

        found[start] = rehearse(chunk)


@dataclass(frozen=True, eq=False, kw_only=True)
class _WatchedLane(Lane):
    """Tells a counter which operators graphs would launch as one."""

    counter: OperatorCounter

    def call(self, key: Hashable, work: Callable[[_In], _Out], given: _In) -> _Out:
        """Return what ``work`` makes of ``given``."""
        with self.counter.recorded():
            return super().call(key, work, given)


def _request(plan: ChunkSetup, frames: int) -> InferenceRequest:
    height, width = plan.network.target_size or plan.image_size
    shapes = noise_shapes(plan.network, plan.network.latent_size(height, width))
    video, action = (torch.empty(shape, dtype=plan.dtype, device=META) for shape in shapes)
    guided = plan.options.prompts == 2
    return InferenceRequest(
        images_THW3=torch.empty(frames, height, width, 3, dtype=torch.uint8),
        state_SM=torch.empty(1, plan.network.dit.max_state_dim),
        prompt=_tokens(plan, 1),
        negative=_tokens(plan, 2) if guided else None,
        noise=InferenceNoise(video, action),
    )


def _row(prompt: Prompt) -> tuple[Tensor, Tensor]:
    return prompt.ids_N[None], prompt.mask_N[None]


def _tokens(plan: ChunkSetup, token: int) -> Prompt:
    rows = plan.network.dit.text_len
    return Prompt(torch.full((rows,), token), torch.arange(rows) < plan.prompt_rows)
