"""What a policy asks of the network, and all that lasts from one call of an episode to the next.

Source: docs/model.md, section 4.1.

Shapes: T frames, H pixel rows, W pixel columns, C latent channels, F latent frames, Y latent rows,
X latent columns, N rows of the prompt, P rows of the image embedding, E width of an embedding,
S states, A actions, M width of an action or state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dzrobot.errors import ConfigError, ModalityError
from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    NetworkConfig,
)
from dzrobot.policies.dreamzero.network.continuation import Continuation, Continuations
from dzrobot.policies.dreamzero.network.prompt import PromptCache


@dataclass(eq=False)
class KVCache:
    """Keys (after rotation) and values of all layers; only video tokens are kept."""

    data: Tensor
    """(layers, 2, R, capacity, H, K); room behind ``length`` is scratch for the current call."""

    length: int = 0
    """Valid tokens."""

    @classmethod
    def allocate(
        cls, config: DiTConfig, *, rows: int, frames: int, device: torch.device, dtype: torch.dtype
    ) -> "KVCache":
        """Return an empty cache with room for ``frames`` frames and the tokens of one block.

        Args:
            config: The transformer.
            rows: Sessions times prompts.
            frames: Latent frames, those being denoised included.
            device: The network's.
            dtype: What the network computes in.
        """
        tokens = tokens_of(config, frames)
        shape = (config.num_layers, 2, rows, tokens, config.num_heads, config.head_dim)
        return cls(torch.empty(shape, device=device, dtype=dtype))

    def fits(self, config: DiTConfig, frames: int) -> bool:
        """Return whether ``frames`` frames and the tokens of one block have room."""
        return self.data.shape[3] >= tokens_of(config, frames)

    @property
    def rows(self) -> int:
        """Return the rows."""
        return self.data.shape[2]

    @property
    def valid(self) -> Tensor:
        """Return the valid part, (layers, 2, R, length, H, K)."""
        return self.data[:, :, :, : self.length]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer, capacity included, each (R, T, H, K)."""
        keys, values = self.data[index].unbind(0)
        return keys, values

    def commit(self, tokens: int) -> None:
        """Keep the tokens that the last forward pass wrote behind the valid part."""
        self.length += tokens

    def load(self, caches: Sequence["KVCache"]) -> None:
        """Copy the valid tokens of several sessions; rows are ordered by prompt, then session."""
        self.length = caches[0].length
        for index, cache in enumerate(caches):
            self.data[:, :, index :: len(caches), : self.length] = cache.valid

    def store(self, caches: Sequence["KVCache"]) -> None:
        """Copy tokens that the sessions' own caches lack back to them; undoes :meth:`load`."""
        for index, cache in enumerate(caches):
            news = slice(cache.length, self.length)
            cache.data[:, :, :, news] = self.data[:, :, index :: len(caches), news]
            cache.length = self.length


def tokens_of(config: DiTConfig, frames: int) -> int:
    """Return the tokens of ``frames`` frames and of one block's actions and states."""
    controls = config.num_action_per_block + config.num_state_per_block
    return frames * config.frame_seqlen + controls


_TEMPORAL_STRIDE = 4


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenized prompt."""

    ids_N: Tensor
    mask_N: Tensor
    """True on the tokens, False on padding."""

    rows_NE: Tensor | None = None
    """The embedding, zero on padding; None to have it computed and cached."""

    @property
    def key(self) -> tuple[int, ...]:
        """Return the tokens without padding: equal keys are equal prompts."""
        return tuple(self.ids_N[self.mask_N.bool()].tolist())


@dataclass(frozen=True, eq=False)
class InferenceNoise:
    """What the denoising starts from."""

    video_CFYX: Tensor
    action_AM: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class InferenceRequest:
    """One call of one session."""

    images_THW3: Tensor
    """Tiled frames, uint8, oldest first: 1 starts over; 4, 8 or 9 continue (blocks of two)."""

    state_SM: Tensor
    """Normalized and padded states; one for the coming block."""

    conditions: tuple[Tensor, ...] = ()
    """For each of the network's conditions its numbers (S, dim); see :class:`.dit.Controls`."""

    prompt: Prompt
    negative: Prompt | None = None
    """What guidance moves away from; needed unless ``cfg_scale`` is 1."""

    latent_video_CFYX: Tensor | None = None
    """Latents to remember instead of the frames; their last block is used."""

    noise: InferenceNoise | None = None
    """None for the noise of ``GenerateOptions.seed``."""

    continuation: Continuation | None = None
    """What of the running plan the new one begins with; None: it starts over."""

    def required_negative(self) -> Prompt:
        """Return what guidance moves away from.

        Raises:
            ConfigError: There is none.
        """
        if self.negative is None:
            raise ConfigError(
                "guidance needs a negative prompt: give InferenceRequest(negative=...), or set "
                "cfg_scale=1"
            )
        return self.negative


@dataclass(frozen=True, eq=False, kw_only=True)
class CallInputs:
    """All that the device is given for one call of sessions that stand at the same frame."""

    frames_BTHW3: Tensor | None
    """Uint8: first frames of a window, or those seen since the last call; None: latents are given.
    """

    latents_BCFYX: Tensor | None
    """Latents of the block seen since the last call; None where they are made from frames."""

    image_BPE: Tensor | None
    """Embedding of the first frames; None where a window starts, which makes it."""

    first_frame_BCFYX: Tensor | None
    """Mask and latents of the first frames; None likewise, and where the network takes none."""

    texts: tuple[Tensor, ...]
    """The prompts of every batch, (R, N, E)."""

    text_biases: tuple[Tensor | None, ...]
    """See :class:`.dit.Prompting`."""

    noise: InferenceNoise
    """What the denoising of all sessions starts from, batch first."""

    state_BSM: Tensor
    conditions: tuple[Tensor, ...]
    """Each (B, S, dim)."""

    continuations: Continuations | None

    def first_frames(self, start: int, frames: int) -> Tensor | None:
        """Return the conditioning of the frames from ``start`` on; the last ones if beyond it."""
        first_BCFYX = self.first_frame_BCFYX
        if first_BCFYX is None or not frames:
            return None
        if start + frames > first_BCFYX.shape[2]:
            return first_BCFYX[:, :, -frames:]
        return first_BCFYX[:, :, start : start + frames]


@dataclass(frozen=True, eq=False, kw_only=True)
class CallOutputs:
    """What the device makes of :class:`CallInputs`."""

    action_BAM: Tensor
    video_BCFYX: Tensor
    image_BPE: Tensor | None
    """Embedding of the first frames, where a window starts; else None."""

    first_frame_BCFYX: Tensor | None
    """Mask and latents of the first frames, likewise, and where the network takes them."""

    evaluations: int
    """Evaluations of the transformer per prompt, without those that read frames."""


_Tree = TypeVar("_Tree")


def map_tensors(change: Callable[[Tensor], Tensor], tree: _Tree) -> _Tree:
    """Return dataclasses and tuples in one another with each of their tensors changed."""
    found: Any = tree
    if isinstance(tree, Tensor):
        found = change(tree)
    elif isinstance(tree, tuple):
        parts = [map_tensors(change, one) for one in tree]
        found = tuple(parts) if type(tree) is tuple else type(tree)(*parts)
    elif is_dataclass(tree) and not isinstance(tree, type):
        found = replace(
            tree, **{f.name: map_tensors(change, vars(tree)[f.name]) for f in fields(tree)}
        )
    return cast(_Tree, found)


def tensors_of(tree: object) -> list[Tensor]:
    """Return the tensors of dataclasses and tuples in one another, in the order of their fields."""
    found: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        found.append(one)
        return one

    map_tensors(keep, tree)
    return found


@dataclass(eq=False)
class SessionCache:
    """All that lasts an episode. A new episode is a new object; none is stored on the network."""

    prompts: PromptCache = field(default_factory=PromptCache, repr=False)
    """Prompt embeddings; may be shared by all sessions of one network."""

    start: int = 0
    """Absolute latent frame that the next call generates from; 0 before the first call."""

    prompt_key: tuple[int, ...] | None = None
    keys_values: dict[int, KVCache] = field(default_factory=dict)
    """Keys and values of every batch, by its number; see :class:`.graphs.PromptBatch`."""

    image_PE: Tensor | None = None
    """Embedding of the first frame."""

    first_frame_CFYX: Tensor | None = None
    """Mask and latents of the first frame; None where the network takes none."""

    def next_start(self, request: InferenceRequest, window: int) -> int:
        """Return where this call begins: 0 forgets the past (first match wins)."""
        if self.prompt_key is None or self.prompt_key != request.prompt.key:
            return 0
        if request.images_THW3.shape[0] == 1 or self.start >= window:
            return 0
        return self.start


def newest_frame_only(request: InferenceRequest) -> InferenceRequest:
    """Return the request of a policy without memory."""
    return replace(request, images_THW3=request.images_THW3[-1:], latent_video_CFYX=None)


def first_image(images_THW3: Tensor, block_frames: int) -> Tensor:
    """Return the frame (H, W, 3) that a call which forgets the past starts from.

    The newest one of a block of observations (4, or 9 with an overlap), else the first.
    """
    frames = images_THW3.shape[0]
    newest = frames in (2 * block_frames, _TEMPORAL_STRIDE * block_frames + 1)
    return images_THW3[-1 if newest else 0]


def clip_of_block(images_THW3: Tensor, block_frames: int) -> Tensor:
    """Return the 1 + 4 * block_frames frames that encode to the last block.

    Too few frames are repeated, then the first one is put before them.

    Raises:
        ModalityError: The number of frames fits no block.
    """
    frames, wanted = images_THW3.shape[0], _TEMPORAL_STRIDE * block_frames
    if frames == wanted + 1:
        return images_THW3
    if frames < _TEMPORAL_STRIDE or wanted % frames:
        allowed = [n for n in range(_TEMPORAL_STRIDE, wanted + 1) if wanted % n == 0]
        raise ModalityError(
            f"{frames} frames do not make a block of history: give 1 frame to start over, or "
            f"{', '.join(map(str, [*allowed, wanted + 1]))} frames"
        )
    repeated = images_THW3.repeat_interleave(wanted // frames, dim=0)
    return torch.cat([repeated[:1], repeated])


def noise_shapes(
    config: NetworkConfig, latent: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes (C, F, Y, X) and (A, M) of a call's noise, for so many rows and columns."""
    dit = config.dit
    video = (dit.out_dim, dit.num_frame_per_block, *latent)
    return video, (config.head.action_horizon, dit.action_dim)


def seeded_noise(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    seed: int,
    *,
    row_of: tuple[int, int] = (0, 1),
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> InferenceNoise:
    """Return the noise of one call; as published, video and actions each start from the seed again.

    Args:
        shapes: Of video and actions, see :func:`noise_shapes`.
        seed: Seed.
        row_of: Which row, and of how many that are drawn together.
        device: Where to draw; other devices draw other numbers.
        dtype: What to draw in.
    """
    row, rows = row_of
    video_CFYX, action_AM = (
        torch.randn(
            (rows, *shape),
            generator=torch.Generator(device).manual_seed(seed),
            device=device,
            dtype=dtype,
        )[row]
        for shape in shapes
    )
    return InferenceNoise(video_CFYX, action_AM)


def filled_up(
    sessions: Sequence[SessionCache], requests: Sequence[InferenceRequest], size: int
) -> tuple[list[SessionCache], list[InferenceRequest]]:
    """Return a batch of at least ``size``: copies of its first request follow.

    Args:
        sessions: Those of the requests.
        requests: One at least; none depends on what its session remembers.
        size: How many there are to be.
    """
    missing = max(0, size - len(requests))
    more = [SessionCache(prompts=sessions[0].prompts) for _ in range(missing)]
    return [*sessions, *more], [*requests, *[requests[0]] * missing]
