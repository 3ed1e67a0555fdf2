"""The causal transformer that denoises future video and actions together.

Source: docs/model.md, section 2. Parameter names and shapes are those of published checkpoints
below ``action_head.model.``; there are no buffers. Timesteps are used in float32 or better and
refused in half precision: shard with ``cast_forward_inputs=False``; the network casts the rest.

Modalities of a robot's own are vectors that condition the network beside the published state. A
state part of an embodiment may name an encoder, ``Part(encoder="my_lab:Touch")``. It is called with
the width of the part and the width of the transformer and returns a :class:`torch.nn.Module` that
maps normalized numbers (B, S, dim) to (B, S, width), one row for each block of a sample. What it
returns is added to the state tokens behind a gate that starts at zero: a network that has just been
given a condition computes to the bit what it computed before. Its weights are called
``action_head.model.conditions.<name of the part>.*``, and are trained, sharded, saved, averaged and
exported like all others.

Shapes: B batch, F latent frames, C channels, Y latent rows, X latent columns, L tokens, D width,
G distinct timesteps, A actions, M width of an action, S states, E width of an embedding, N rows of
the prompt, P rows of the image embedding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dzrobot.embodiments.spec import Part
from dzrobot.errors import ConfigError, preview
from dzrobot.importing import load_reference
from dzrobot.policies.dreamzero.network.attention import (
    Attention,
    AttentionPattern,
    Backend,
    CachedAttention,
    TokenLayout,
    train_attention,
)
from dzrobot.policies.dreamzero.network.config import PATCH, DiTConfig
from dzrobot.policies.dreamzero.network.layers import (
    ActionEncoder,
    Block,
    CategoryMLP,
    Conditioning,
    Context,
    ContextKV,
    Head,
    ImageProjection,
    refuse_half,
    rope_table,
    sinusoid,
)
from dzrobot.policies.dreamzero.network.session import KVCache, map_tensors


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompting:
    """What a forward pass is conditioned on: prompt embedding and embedding of the first image."""

    text_BNE: Tensor
    """Prompt embedding; rows of padding are zero."""

    image_BPE: Tensor

    text_bias_BN: Tensor | None = None
    """Added to the attention scores of the prompt rows, where rows stand for several; else None."""

    def to(self, device: torch.device) -> "Prompting":
        """Return it on ``device``."""
        return map_tensors(lambda one: one.to(device, non_blocking=True), self)


@dataclass(frozen=True, eq=False, kw_only=True)
class Controls:
    """Noisy actions of one or more blocks, and the states they start from."""

    action_BAM: Tensor
    timestep_BA: Tensor
    """Noise level of each action, 0 to 1000, float32 or integer."""

    state_BSM: Tensor
    conditions: tuple[Tensor, ...] = ()
    """For each of :attr:`CausalDiT.conditions` its numbers (B, S, dim), in their order."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainInputs:
    """One training forward pass."""

    noisy_BCFYX: Tensor
    clean_BCFYX: Tensor
    timestep_BF: Tensor
    """Noise level of each frame, 0 to 1000, float32 or integer."""

    controls: Controls
    prompting: Prompting
    first_frame_BCFYX: Tensor | None = None
    """Mask and latents of the first frame, concatenated to the channels; None for the 5B."""

    hides_video_B: Tensor | None = None
    """True for samples whose actions do not see the noisy video; None: there are none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInputs:
    """One inference forward pass over new frames."""

    video_BCFYX: Tensor
    """New frames; none where actions alone are denoised."""

    timestep_BF: Tensor
    start_frame: int
    """Absolute index of the first new frame."""

    controls: Controls | None = None
    """None where frames are only read into the cache."""

    first_frame_BCFYX: Tensor | None = None

    one_timestep: bool = False
    """Whether all tokens have the first one's timestep, so that embedding it once will do."""

    def to(self, device: torch.device) -> "StepInputs":
        """Return it on ``device``."""
        return map_tensors(lambda one: one.to(device, non_blocking=True), self)

    def repeat(self, times: int) -> "StepInputs":
        """Return the batch ``times`` times over, once per prompt."""
        return map_tensors(lambda one: one.repeat(times, *(1,) * (one.dim() - 1)), self)


@dataclass(frozen=True)
class TrainForm:
    """Which of the equal forms of the training forward pass runs."""

    backend: Backend = "packed"
    exact_savings: bool = True
    """Leave out what nothing depends on: the last clean block, the last layer's clean half."""


class CausalDiT(nn.Module):
    """The transformer; :meth:`forward` trains, :meth:`step` denoises over a cache."""

    def __init__(self, config: DiTConfig) -> None:
        """Build the network of ``config`` with newly initialized weights."""
        super().__init__()
        self.config = config
        dim, patch = config.dim, (1, PATCH, PATCH)
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, kernel_size=patch, stride=patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.img_emb = ImageProjection(config.clip_dim, dim)
        self.state_encoder = CategoryMLP(config.max_state_dim, config.hidden_size, dim)
        self.action_encoder = ActionEncoder(config.action_dim, dim)
        self.action_decoder = CategoryMLP(dim, config.hidden_size, config.action_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config, config.out_dim * PATCH**2)
        self.conditions = nn.ModuleDict()
        """Modalities of a robot's own, by name; see :func:`.conditions.attach`. Published networks
        have none."""

    def forward(self, inputs: TrainInputs, form: TrainForm = TrainForm()) -> tuple[Tensor, Tensor]:
        """Return the predicted velocities of video (B, C, F, Y, X) and actions (B, A, M).

        An odd last latent row or column is left out of the prediction.
        """
        layout = self.train_layout(inputs, form)
        clean_BCFYX = inputs.clean_BCFYX[:, :, : layout.clean_frames]
        clean_BLD = self.embed_video(clean_BCFYX, inputs.first_frame_BCFYX)
        noisy_BLD = self.embed_video(inputs.noisy_BCFYX, inputs.first_frame_BCFYX)
        x_BLD = torch.cat([clean_BLD, noisy_BLD, *self._controls(inputs.controls)], dim=1)

        zero_B1 = torch.zeros_like(inputs.timestep_BF[:, :1])
        time_BGD = self._time([zero_B1, inputs.timestep_BF], inputs.controls)
        given = Conditioning(
            self._modulation(time_BGD),
            rope_table(layout, self.config.head_dim, x_BLD.device),
            self.embed_context(inputs.prompting),
        )
        for block, attention in self._routes(layout, form, x_BLD.device, inputs.hides_video_B):
            x_BLD = block(x_BLD, given, attention)
        # With the savings on, the clean half has already gone.
        x_BLD = x_BLD[:, x_BLD.shape[1] - layout.length + len(layout.clean) :]
        return self._decode(x_BLD, time_BGD[:, 1 : 1 + layout.frames], layout)

    def step(
        self, inputs: StepInputs, cache: KVCache, contexts: Sequence[Context | ContextKV]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the velocities of new frames (B, C, F, Y, X) and their actions (B, A, M), if any.

        The keys and values of the new frames are written behind the cache's valid part; they stay
        only if the caller commits them with :meth:`KVCache.commit`.

        Args:
            inputs: The new frames, noisy or, with timestep 0, clean.
            cache: The past; its rows are the batch.
            contexts: For each block the context, best with keys and values from :meth:`project`.
        """
        layout, controls = self.step_layout(inputs), inputs.controls
        parts = [] if controls is None else [*self._controls(controls)]
        if layout.frames:
            parts.insert(0, self.embed_video(inputs.video_BCFYX, inputs.first_frame_BCFYX))
        x_BLD = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        runs = ((1, layout.length),) if inputs.one_timestep else layout.runs
        if inputs.one_timestep:
            timestep = inputs.timestep_BF
            if controls is not None and not layout.frames:
                timestep = controls.timestep_BA
            time_BGD = self._time([timestep[:, :1]], None)
        else:
            time_BGD = self._time([inputs.timestep_BF], controls)
        time_BG6D = self._modulation(time_BGD)
        rope = rope_table(layout, self.config.head_dim, x_BLD.device)
        for index, (block, context) in enumerate(zip(self.blocks, contexts, strict=True)):
            attention = CachedAttention(*cache.layer(index), cache.length, runs)
            x_BLD = block(x_BLD, Conditioning(time_BG6D, rope, context), attention)
        video_BCFYX, action_BAM = self._decode(x_BLD, time_BGD[:, : layout.frames], layout)
        return video_BCFYX, None if controls is None else action_BAM

    def new_cache(self, rows: int, frames: int) -> KVCache:
        """Return an empty cache of ``rows`` with room for ``frames`` frames and one block."""
        return KVCache.allocate(
            self.config, rows=rows, frames=frames, device=self.device, dtype=self.dtype
        )

    def embed_context(self, prompting: Prompting) -> Context:
        """Return prompt and image embedding in the width of the transformer."""
        text_BND = self.text_embedding(prompting.text_BNE.to(self.dtype))
        image_BPD = self.img_emb(prompting.image_BPE.to(self.dtype))
        bias_BN = prompting.text_bias_BN
        return Context(text_BND, image_BPD, None if bias_BN is None else bias_BN.to(self.dtype))

    def project(self, context: Context) -> list[ContextKV]:
        """Return the context's keys and values in every block: once per chunk, not per step."""
        return [block.cross_attn.project(context) for block in self._blocks()]

    def embed_video(self, video_BCFYX: Tensor, first_frame_BCFYX: Tensor | None) -> Tensor:
        """Return video tokens (B, L, D) in the order frame, row, column."""
        video_BCFYX = video_BCFYX.to(self.dtype)
        if first_frame_BCFYX is not None:
            y_BCFYX = first_frame_BCFYX[:, :, : video_BCFYX.shape[2]]
            video_BCFYX = torch.cat([video_BCFYX, y_BCFYX.to(self.dtype)], dim=1)
        rows, columns = (side // PATCH for side in video_BCFYX.shape[-2:])
        even_BCFYX = video_BCFYX[..., : rows * PATCH, : columns * PATCH]
        # The convolution does not overlap, so it is a linear layer on patches.
        patches = even_BCFYX.reshape(*video_BCFYX.shape[:3], rows, PATCH, columns, PATCH)
        patches_BLV = patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        weight = self.patch_embedding.weight.flatten(1)
        return nn.functional.linear(patches_BLV, weight, self.patch_embedding.bias)

    def train_layout(self, inputs: TrainInputs, form: TrainForm) -> TokenLayout:
        """Return where the tokens of a training pass lie.

        Raises:
            ValueError: Frames, actions and states make no whole blocks.
        """
        config = self.config
        frames, rows, columns = _token_grid(inputs.noisy_BCFYX)
        actions, states = inputs.controls.action_BAM.shape[1], inputs.controls.state_BSM.shape[1]
        blocks = (frames - 1) // config.num_frame_per_block
        wanted = (
            1 + blocks * config.num_frame_per_block,
            blocks * config.num_action_per_block,
            blocks * config.num_state_per_block,
        )
        if blocks < 1 or (frames, actions, states) != wanted:
            raise ValueError(
                f"{frames} latent frames, {actions} actions and {states} states make no whole "
                f"blocks of {config.num_frame_per_block}, {config.num_action_per_block} and "
                f"{config.num_state_per_block}; the first frame stands alone"
            )
        dropped = config.num_frame_per_block if form.exact_savings else 0
        return self._layout((frames, rows, columns), actions, states, clean_frames=frames - dropped)

    def step_layout(self, inputs: StepInputs) -> TokenLayout:
        """Return where the new tokens of an inference pass lie."""
        grid, controls = _token_grid(inputs.video_BCFYX), inputs.controls
        if controls is None:
            return self._layout(grid, 0, 0, start_frame=inputs.start_frame)
        actions, states = controls.action_BAM.shape[1], controls.state_BSM.shape[1]
        return self._layout(grid, actions, states, start_frame=inputs.start_frame)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the forward pass computes in."""
        return self.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Return where the forward pass runs."""
        return self.patch_embedding.weight.device

    def _blocks(self) -> Iterator[Block]:
        return (cast(Block, block) for block in self.blocks)

    def _layout(
        self, grid: tuple[int, int, int], actions: int, states: int, *, clean_frames: int = 0,
        start_frame: int = 0,
    ) -> TokenLayout:  # fmt: skip
        frames, rows, columns = grid
        return TokenLayout(
            frames=frames, rows=rows, columns=columns, actions=actions, states=states,
            block_frames=self.config.num_frame_per_block,
            block_actions=self.config.num_action_per_block,
            block_states=self.config.num_state_per_block,
            clean_frames=clean_frames, start_frame=start_frame,
        )  # fmt: skip

    def _routes(
        self,
        layout: TokenLayout,
        form: TrainForm,
        device: torch.device,
        hides_video_B: Tensor | None,
    ) -> Iterator[tuple[nn.Module, Attention]]:
        """Yield each block with its attention; the last one may leave out the clean queries."""
        pattern = AttentionPattern(
            layout, self.config.max_chunk_size, hides_video=hides_video_B is not None
        )
        whole, last = (
            train_attention(
                pattern, form.backend, device, noisy_only=short, hides_video_B=hides_video_B
            )
            for short in (False, form.exact_savings)
        )
        for index, block in enumerate(self.blocks):
            yield block, last if index == len(self.blocks) - 1 else whole

    def _controls(self, controls: Controls) -> tuple[Tensor, Tensor]:
        """Return action tokens (B, A, D) and state tokens (B, S, D)."""
        if len(controls.conditions) != len(self.conditions):
            raise ConfigError(
                f"the network is conditioned on {preview(self.conditions)} beside the state, and "
                f"{len(controls.conditions)} such vectors were given: encode observations with the "
                "pipeline of the robot that the network was built for"
            )
        state_BSD = self.state_encoder(controls.state_BSM.to(self.dtype))
        for condition, x_BSK in zip(self.conditions.values(), controls.conditions, strict=True):
            state_BSD = state_BSD + condition(x_BSK.to(self.dtype))
        return (
            self.action_encoder(controls.action_BAM.to(self.dtype), controls.timestep_BA),
            state_BSD,
        )

    def _time(self, timesteps: list[Tensor], controls: Controls | None) -> Tensor:
        """Return the time embeddings (B, G, D): given ones, actions, states."""
        if controls is not None:
            # A state has the noise level of its block's first action.
            every = controls.timestep_BA.shape[1] // controls.state_BSM.shape[1]
            timesteps = [*timesteps, controls.timestep_BA, controls.timestep_BA[:, ::every]]
        for timestep in timesteps:
            refuse_half(timestep)
        waves_BGE = sinusoid(torch.cat(timesteps, dim=1), self.config.freq_dim)
        time_BGD: Tensor = self.time_embedding(waves_BGE.to(self.dtype))
        return time_BGD

    def _modulation(self, time_BGD: Tensor) -> Tensor:
        """Return shift, scale and gate of every timestep, (B, G, 6, D)."""
        return torch.unflatten(self.time_projection(time_BGD), -1, (6, -1))

    def _decode(
        self, x_BLD: Tensor, time_BFD: Tensor, layout: TokenLayout
    ) -> tuple[Tensor, Tensor]:
        """Return the velocities of video and actions from tokens without the clean half."""
        video_BLD, action_BAD, _ = x_BLD.split_with_sizes(
            [len(layout.video), layout.actions, layout.states], dim=1
        )
        if not layout.frames:
            size = (layout.rows * PATCH, layout.columns * PATCH)
            empty_BCFYX = x_BLD.new_empty(len(x_BLD), self.config.out_dim, 0, *size)
            return empty_BCFYX, self.action_decoder(action_BAD)
        patches_BLV = self.head(video_BLD, time_BFD)
        grid = (layout.frames, layout.rows, layout.columns)
        patches = patches_BLV.view(len(patches_BLV), *grid, PATCH, PATCH, -1)
        video_BCFYX = patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)
        return video_BCFYX, self.action_decoder(action_BAD)


def _token_grid(video_BCFYX: Tensor) -> tuple[int, int, int]:
    """Return frames, token rows and token columns."""
    frames, rows, columns = video_BCFYX.shape[2:]
    return frames, rows // PATCH, columns // PATCH


class Condition(nn.Module):
    """An encoder behind a gate of zeros."""

    def __init__(self, part: Part, width: int) -> None:
        """Build the encoder that ``part`` names.

        Raises:
            ConfigError: It is not a module, or keeps numbers that would not be saved.
            UnknownNameError: There is no such module or name.
        """
        super().__init__()
        assert part.encoder is not None, "a condition has an encoder"
        make = load_reference(part.encoder, f"encoder of {part.key}", Callable)
        encoder = make(part.dim, width)
        if not isinstance(encoder, nn.Module):
            raise ConfigError(
                f"{part.encoder}({part.dim}, {width}), the encoder of {part.key}, returned a "
                f"{type(encoder).__name__}: return a torch.nn.Module"
            )
        if buffers := [name for name, _ in encoder.named_buffers()]:
            raise ConfigError(
                f"{part.encoder}, the encoder of {part.key}, keeps the buffers {preview(buffers)}, "
                "which training would neither update nor save: make them parameters, or compute "
                "them in forward (LayerNorm in place of BatchNorm)"
            )
        self.encoder = encoder
        self.gate = nn.Parameter(torch.zeros(width))
        self._part = part

    def forward(self, x_BSK: Tensor) -> Tensor:
        """Return (B, S, width), zero until the gate has been trained.

        Args:
            x_BSK: Normalized numbers (B, S, dim).

        Raises:
            ConfigError: The numbers or what the encoder returns have another shape.
        """
        key, dim = self._part.key, self._part.dim
        if x_BSK.shape[-1] != dim:
            raise ConfigError(f"{key} has {x_BSK.shape[-1]} numbers instead of {dim}")
        made: Tensor = self.encoder(x_BSK)
        wanted = (*x_BSK.shape[:-1], len(self.gate))
        if made.shape != wanted:
            raise ConfigError(
                f"the encoder of {key} returned the shape {tuple(made.shape)} for "
                f"{tuple(x_BSK.shape)}: return {tuple(wanted)}"
            )
        return made * self.gate

    def again(self) -> "Condition":
        """Return another one, with newly initialized weights."""
        return Condition(self._part, len(self.gate))


def attach(network: CausalDiT, conditions: Sequence[Part]) -> None:
    """Give ``network`` the conditions of a robot, with newly initialized weights.

    Raises:
        ConfigError: See :class:`Condition`.
        UnknownNameError: See :class:`Condition`.
    """
    for part in conditions:
        network.conditions[part.name] = Condition(part, network.config.dim)
