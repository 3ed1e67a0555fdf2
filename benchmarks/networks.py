"""Networks with random weights, what they are asked, and a micro-batch that they learn from."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.load import empty_network
from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    VaeConfig,
)
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise, NoiseShape, draw_noise
from dzrobot.policies.dreamzero.network.dit import TrainForm
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.session import InferenceRequest, Prompt
from dzrobot.policies.dreamzero.network.world_action import (
    LossOptions,
    PreparedBatch,
    TrainBatch,
    WorldActionModel,
)

TINY = NetworkConfig(
    dit=DiTConfig(
        model_type="ti2v",
        dim=192,
        ffn_dim=768,
        num_heads=6,
        num_layers=4,
        in_dim=8,
        out_dim=8,
        frame_seqlen=50,
        concat_first_frame_latent=False,
        clip_dim=16,
        num_action_per_block=16,
    ),
    vae=VaeConfig(version="2.2", dim=4, z_dim=8, dec_dim=4),
    head=HeadConfig(action_horizon=16, target_video_height=160, target_video_width=320),
    image=ImageConfig(vision_dim=16, vision_heads=2, vision_layers=2, embed_dim=4),
)
MID = replace(TINY, dit=replace(TINY.dit, dim=512, ffn_dim=2048, num_heads=8, num_layers=8))
WORDS = 90
"""Rows of a prompt that hold words; the others are padding."""


@dataclass(frozen=True)
class DeviceNetwork:
    """One network on one device."""

    model: WorldActionModel
    device: torch.device

    def request(self, seed: int, frames: int, *, padding: bool = False) -> InferenceRequest:
        """Return one call's question, with all rows of padding in its prompts or without."""
        generator = torch.Generator().manual_seed(seed)
        config = self.model.config
        size = config.target_size
        images = torch.randint(0, 256, (frames, *size, 3), generator=generator, dtype=torch.uint8)
        prompt, negative = (self.prompt(number, padding=padding) for number in (seed, 1000))
        state = torch.rand(1, config.dit.max_state_dim, generator=generator)
        return InferenceRequest(
            images_THW3=images, state_SM=state, prompt=prompt, negative=negative
        )

    def prompt(self, seed: int, *, padding: bool = False) -> Prompt:
        """Return an embedded prompt."""
        config = self.model.config.dit
        rows = self.rows(seed, 1)[0]
        ids = torch.full((config.text_len,), seed + 1)
        words = config.text_len if padding else WORDS
        return Prompt(ids, torch.arange(config.text_len) < words, rows)

    def rows(self, seed: int, batch: int) -> Tensor:
        """Return prompt embeddings."""
        config = self.model.config.dit
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(batch, config.text_len, config.text_dim, generator=generator)
        rows[:, WORDS:] = 0
        return rows.to(self.device, self.model.model.dtype)


@dataclass(frozen=True)
class TrainingCase:
    """A micro-batch of noise, and what the network makes of it."""

    model: WorldActionModel
    batch: TrainBatch
    prepared: PreparedBatch
    noise: DiffusionNoise

    @property
    def whole(self) -> PreparedBatch:
        """Return the samples with all rows of padding in their prompts."""
        rows = self.batch.prompt.rows_BNE
        return replace(
            self.prepared,
            prompting=replace(self.prepared.prompting, text_BNE=rows, text_bias_BN=None),
        )

    def step(self, form: TrainForm, given: PreparedBatch | None = None) -> Tensor:
        """Differentiate the loss; return the gradient of one weight of the first block."""
        self.model.zero_grad()
        options = LossOptions(form=form)
        self.model.loss(given or self.prepared, self.noise, options=options).loss.backward()
        return self.model.model.blocks[0].self_attn.q.weight.grad


def training_case(bench: DeviceNetwork, batch: int) -> TrainingCase:
    """Return ``batch`` samples of noise, the same on every device."""
    model, config = bench.model, bench.model.config
    blocks, dit = 4, config.dit
    generator = torch.Generator().manual_seed(0)
    actions = blocks * dit.num_action_per_block
    frames = (batch, config.head.num_frames, *config.target_size, 3)
    images = torch.randint(0, 256, frames, generator=generator, dtype=torch.uint8)
    samples = TrainBatch(
        images=images.to(bench.device),
        state_BSM=torch.rand(batch, blocks, dit.max_state_dim, generator=generator).to(
            bench.device
        ),
        action_BAM=torch.rand(batch, actions, dit.action_dim, generator=generator).to(bench.device),
        action_mask_BAM=torch.ones(batch, actions, dit.action_dim, device=bench.device),
        has_real_action_B=torch.ones(batch, device=bench.device),
        prompt=PromptEmbedding(bench.rows(0, batch), (WORDS,) * batch),
    )
    prepared = model.prepare(samples)
    shape = NoiseShape(tuple(prepared.latents_BCFYX.shape[1:]), (actions, dit.action_dim))
    generators = [torch.Generator().manual_seed(i) for i in range(batch)]
    noise = draw_noise(dit, config.head, shape, generators, bench.device)
    return TrainingCase(model, samples, prepared, noise)


def small_network(
    device: torch.device, dtype: torch.dtype, config: NetworkConfig = TINY
) -> DeviceNetwork:
    """Return a network with random weights, without a text encoder."""
    return DeviceNetwork(random_network(config, device, dtype, text_encoder=False), device)


def random_network(
    config: NetworkConfig, device: torch.device, dtype: torch.dtype, *, text_encoder: bool = True
) -> WorldActionModel:
    """Return a network on ``device`` with random weights; norms start at one."""
    model = empty_network(config, is_lora=False, text_encoder=text_encoder).to(dtype)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(std=0.02)
        for module in model.modules():
            if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
                module.weight.fill_(1)
    return model
