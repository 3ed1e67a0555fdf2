"""A training step and the chunks of an episode on the meta device: no weights, no memory.

Both run the code that a real run runs. What a process keeps from its first step on (rotary tables,
noise levels) is made before anything is counted.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.video import draw_augmentation, encode_views
from dzrobot.policies.dreamzero.checkpoints.load import build_network, empty_network
from dzrobot.policies.dreamzero.network.config import GenerateOptions, NetworkConfig
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise
from dzrobot.policies.dreamzero.network.distillation import StepDistillation
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import PromptBatch, prompt_batches
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.session import (
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
from dzrobot.training.cost.memory import Setup
from dzrobot.training.run.inputs import sample_noise
from dzrobot.training.run.parallel import DTYPES, checkpoint_activations
from dzrobot.training.run.trainer import backward
from dzrobot.training.sft_config import ParallelConfig
from rehearsal.operators import Call, Constructors, OperatorCounter, Upload, accelerator_attention

META = torch.device("meta")

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, eq=False, kw_only=True)
class Rehearsal:
    """What ran."""

    calls: Counter[Call]
    """Operators, each by itself; equal ones are counted."""

    uploads: Counter[Upload]
    """What the host sent to the device."""

    misplaced: Counter[str]
    """Operators that mixed devices, by place."""

    replays: int
    """How often graphs would launch a part of it as one."""

    @property
    def flops(self) -> float:
        """Return the operations of all products, attentions and convolutions."""
        return sum(count * call.flops for call, count in self.calls.items())

    def of_stage(self, name: str) -> Counter[Call]:
        """Return what one stage ran, its backward pass included."""
        stages = (name, f"{name}, backward")
        return Counter({call: n for call, n in self.calls.items() if call.stage in stages})

    @property
    def single_products(self) -> Counter[str]:
        """Return how often something was multiplied in float32 or wider, by module."""
        wide = (torch.float32, torch.float64)
        return Counter({
            f"{call.stage}: {call.module or call.operator}": count
            for call, count in self.calls.items()
            if call.kind != "memory" and call.dtype in wide
        })  # fmt: skip


def rehearse(run: Callable[[OperatorCounter], object], device: torch.device = META) -> Rehearsal:
    """Return what ``run`` runs on ``device``."""
    counter = OperatorCounter(device)
    with accelerator_attention(), Constructors(counter), counter:
        run(counter)
    return Rehearsal(
        calls=counter.calls, uploads=counter.uploads, misplaced=counter.misplaced,
        replays=counter.replays,
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


def rehearse_step(plan: StepSetup) -> Rehearsal:
    """Return forward and backward of one micro-batch, from frames to gradients."""
    setup = plan.setup

    def run(layers: int) -> Rehearsal:
        network = with_layers(setup.network, layers)
        part = replace(plan, setup=replace(setup, network=network))
        model = training_network(network, setup.parallel, is_lora=setup.model.is_lora)
        return rehearse(lambda counter: _micro_batch(part, model, counter))

    # What a process makes once and keeps, the first run makes.
    run(1)
    return run(setup.network.dit.num_layers)


def with_layers(network: NetworkConfig, layers: int) -> NetworkConfig:
    """Return ``network`` with so many transformer blocks."""
    return replace(network, dit=replace(network.dit, num_layers=layers))


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
    prompts = SessionCache().prompts
    network = inference_network(plan)
    for token in (1, 2):
        prompts.embed(network.require_text_encoder, *_row(_tokens(plan, token)))
    # What a process makes once and keeps, the first run makes.
    small = replace(plan, network=with_layers(plan.network, 1))
    _chunks(small, SessionCache(prompts=prompts))
    return _chunks(plan, SessionCache(prompts=prompts))


def rehearse_prompt(plan: ChunkSetup) -> Rehearsal:
    """Return what encoding one new prompt runs."""
    model = inference_network(plan)

    def encode(counter: OperatorCounter) -> None:
        with counter.stage("prompt"):
            SessionCache().prompts.embed(model.require_text_encoder, *_row(_tokens(plan, 1)))

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
                batches = [
                    _WatchedBatch(batch.number, batch.dit, batch.prompts, counter=counter)
                    for batch in prompt_batches(model.model, plan.options.prompts)
                ]
                predict(model, [session], [request], plan.options, batches)

        found[start] = rehearse(chunk)


@dataclass(frozen=True, eq=False, kw_only=True)
class _WatchedBatch(PromptBatch):
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
