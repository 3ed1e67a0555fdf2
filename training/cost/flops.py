"""Floating-point operations of one training sample, by formula.

A multiply-add counts as two. Two numbers are kept apart. The *model* cost is that of the published
definition (every token, both halves of the sequence); utilization against it can be compared
between implementations. The *executed* cost is what this implementation runs: the last clean block
is never attended and is left out, the last layer computes only the noisy half, and timesteps are
embedded once per frame instead of once per token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    ImageConfig,
    NetworkConfig,
    VaeConfig,
)
from dzrobot.policies.dreamzero.network.image import ImageEncoder
from dzrobot.policies.dreamzero.network.prompt import attended_rows
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.training.sft_config import ParallelConfig, SFTConfig

_IMAGE_TOKENS = 257
_PATCH_PIXELS = 4


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """Tokens of one training sample."""

    latent_frames: int
    """Latent frames, the first one included."""

    frame_tokens: int
    """Tokens of one latent frame."""

    actions: int
    """Action tokens of all blocks."""

    states: int
    """State tokens of all blocks."""

    @property
    def video(self) -> int:
        """Return the tokens of one half of the video."""
        return self.latent_frames * self.frame_tokens

    @property
    def length(self) -> int:
        """Return the tokens of the published sequence: clean, noisy, actions, states."""
        return 2 * self.video + self.actions + self.states


def sample_shape(config: DiTConfig, frames: int, temporal_stride: int = 4) -> SampleShape:
    """Return the tokens of a clip of ``frames`` frames."""
    latent = 1 + (frames - 1) // temporal_stride
    blocks = (latent - 1) // config.num_frame_per_block
    return SampleShape(
        latent_frames=latent,
        frame_tokens=config.frame_seqlen,
        actions=blocks * config.num_action_per_block,
        states=blocks * config.num_state_per_block,
    )


def model_flops(config: DiTConfig, shape: SampleShape) -> float:
    """Return the forward cost of one sample by the published definition of the transformer."""
    length, context = shape.length, config.text_len + _IMAGE_TOKENS
    layer = _linear(config, length) + _scores(config, length * context + _pairs(config, shape))
    layer += _context(config)
    return config.num_layers * layer + _times(config, length) + _ends(config, shape, halves=2)


def executed_flops(config: DiTConfig, shape: SampleShape, text_rows: int | None = None) -> float:
    """Return the forward cost of one sample as this implementation runs it.

    Args:
        config: The transformer.
        shape: Tokens of the sample.
        text_rows: Prompt rows attended; None for all. Padding is folded into a few rows.
    """
    config = replace(config, text_len=text_rows or config.text_len)
    clean_frames = shape.latent_frames - config.num_frame_per_block
    clean = clean_frames * shape.frame_tokens
    noisy = shape.video + shape.actions + shape.states
    context = config.text_len + _IMAGE_TOKENS
    clean_pairs = _clean_pairs(config, clean_frames, shape.frame_tokens)
    noisy_pairs = _noisy_pairs(config, shape)
    inner = _linear(config, clean + noisy) + _scores(
        config, (clean + noisy) * context + clean_pairs + noisy_pairs
    )
    # The last layer asks the clean half for keys and values only.
    last = _linear(config, noisy) + 2 * 2 * clean * config.dim**2
    last += _scores(config, noisy * context + noisy_pairs)
    total = (config.num_layers - 1) * inner + last + config.num_layers * _context(config)
    timesteps = 1 + shape.latent_frames + shape.actions + shape.states
    return (
        total
        + _times(config, timesteps)
        + _ends(config, shape, halves=1 + clean_frames / shape.latent_frames)
    )


def _linear(config: DiTConfig, tokens: float) -> float:
    """Return one layer's products on its tokens: 4 of self-, 2 of cross-attention, 2 of the MLP."""
    return 2 * tokens * (6 * config.dim**2 + 2 * config.dim * config.ffn_dim)


def _scores(config: DiTConfig, pairs: float) -> float:
    """Return the cost of query-key pairs over all heads: a product for scores, one for values."""
    return 4 * pairs * config.dim


def _context(config: DiTConfig) -> float:
    """Return one layer's keys and values of prompt and image."""
    return 4 * (config.text_len + _IMAGE_TOKENS) * config.dim**2


def _times(config: DiTConfig, timesteps: float) -> float:
    return 2 * timesteps * (config.freq_dim * config.dim + 7 * config.dim**2)


def _ends(config: DiTConfig, shape: SampleShape, halves: float) -> float:
    """Return everything outside the layers but the time embedding."""
    dim, hidden = config.dim, config.hidden_size
    patch = 2 * halves * shape.video * config.in_dim * _PATCH_PIXELS * dim
    head = 2 * shape.video * dim * config.out_dim * _PATCH_PIXELS
    text = 2 * config.text_len * (config.text_dim * dim + dim**2)
    image = 2 * _IMAGE_TOKENS * (config.clip_dim**2 + config.clip_dim * dim)
    action = 2 * shape.actions * (config.action_dim * dim + 2 * dim**2 + dim**2)
    action += 2 * shape.actions * (dim * hidden + hidden * config.action_dim)
    state = 2 * shape.states * (config.max_state_dim * hidden + hidden * dim)
    return patch + head + text + image + action + state


def _pairs(config: DiTConfig, shape: SampleShape) -> float:
    clean = _clean_pairs(config, shape.latent_frames, shape.frame_tokens)
    return clean + _noisy_pairs(config, shape) + _state_pairs(config, shape)


def _clean_pairs(config: DiTConfig, frames: int, frame_tokens: int) -> float:
    step = config.num_frame_per_block
    if config.max_chunk_size == -1:
        tokens = frames * frame_tokens
        return tokens * (tokens + 1) / 2
    window = config.max_chunk_size * step + 1
    pairs = 1.0
    for first in range(1, frames, step):
        stop = min(first + step, frames)
        pairs += (stop - first) * (1 + stop - max(1, stop - window))
    return pairs * frame_tokens**2


def _noisy_pairs(config: DiTConfig, shape: SampleShape) -> float:
    step, tokens = config.num_frame_per_block, shape.frame_tokens
    pairs = float(tokens**2)
    for first in range(1, shape.latent_frames, step):
        queries = step * tokens + config.num_action_per_block
        pairs += queries * (first * tokens + queries + config.num_state_per_block)
    return pairs


def _state_pairs(config: DiTConfig, shape: SampleShape) -> float:
    return float(shape.states * config.num_state_per_block)


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """Operations of one training sample."""

    model_forward: float
    """Transformer forward by the published definition."""

    executed_forward: float
    """Transformer forward as run."""

    encoders: float
    """Frozen encoders as run, forward only."""

    recomputed_share: float
    """Share of the executed forward that the backward pass runs again."""

    teacher_forwards: int = 0
    """Forward passes of a teacher of the same size."""

    @property
    def model(self) -> float:
        """Return all passes of transformers, encoders left out: the base of MFU."""
        return (3 + self.teacher_forwards) * self.model_forward

    @property
    def executed(self) -> float:
        """Return everything that is run: forward, backward, recompute, teacher, encoders."""
        passes = 3 + self.recomputed_share + self.teacher_forwards
        return passes * self.executed_forward + self.encoders


def sample_cost(
    config: SFTConfig, network: NetworkConfig, image_size: tuple[int, int], longest_prompt: int
) -> SampleCost:
    """Return the operations of one sample as this run computes it.

    Args:
        config: Says what is recomputed and whether prompts are encoded in every step.
        network: The network of the run.
        image_size: (height, width) in pixels of the tiled image.
        longest_prompt: Prompt rows that are not padding.
    """
    shape = sample_shape(network.dit, network.head.num_frames, network.vae.temporal_stride)
    rows = min(attended_rows(longest_prompt), network.dit.text_len)
    executed = executed_flops(network.dit, shape, rows)
    return SampleCost(
        model_forward=model_flops(network.dit, shape),
        executed_forward=executed,
        encoders=encoder_flops(
            network, image_size, 0 if config.model.cache_prompts else longest_prompt
        ),
        recomputed_share=recomputed_share(config.parallel, network.dit.num_layers),
        teacher_forwards=config.distill.teacher_steps,
    )


def recomputed_share(parallel: ParallelConfig, layers: int) -> float:
    """Return the share of the forward pass's matrix products that the backward pass runs again."""
    if parallel.activation_checkpointing != "full":
        return 0.0
    return (layers - min(parallel.kept_blocks, layers)) / layers


def encoder_flops(network: NetworkConfig, image_size: tuple[int, int], prompt_tokens: int) -> float:
    """Return the operations of the frozen encoders for one sample.

    Images are counted on a run without memory; ``prompt_tokens`` is 0 where embeddings are
    stored.
    """
    images = _image_flops(
        network.vae,
        network.image,
        network.target_size or image_size,
        network.head.num_frames,
        2 if network.dit.concat_first_frame_latent else 1,
    )
    text = network.text
    layer = 4 * text.dim * text.dim_attn + 3 * text.dim * text.dim_ffn
    scores = 2 * prompt_tokens * text.dim_attn
    return float(images + 2 * text.num_layers * prompt_tokens * (layer + scores))


@cache
def _image_flops(
    vae: VaeConfig, image: ImageConfig, size: tuple[int, int], frames: int, clips: int
) -> int:
    """Return the cost of encoding ``clips`` clips and one frame of ``size``: seconds of counting.

    Kept, because every trainer of a process asks for the same.
    """
    with torch.device("meta"):
        frame = torch.empty(1, 3, *size)
        encode, see = Vae(vae), ImageEncoder(image)
    return clips * _clip_flops(encode, frame, frames) + _count(partial(see, frame))


def _clip_flops(vae: Vae, frame: torch.Tensor, frames: int) -> int:
    """Return the cost of encoding a clip: from the third chunk on, all cost the same."""
    stride = vae.config.temporal_stride
    clips = [frame[:, :, None].expand(-1, -1, n, -1, -1) for n in (1 + stride, 1 + 2 * stride)]
    short, long = (_count(partial(vae.encode, clip)) for clip in clips)
    return short + (frames // stride - 1) * (long - short)


def _count(run: Callable[[], object]) -> int:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
