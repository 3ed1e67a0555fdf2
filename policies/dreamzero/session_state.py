"""All that lasts one episode of one session, and the requests for plans that are made of it.

A new episode is a new object, so nothing of the last one can survive.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.embodiments.spec import MAX_ACTION_DIM, Embodiment, History
from dzrobot.errors import CheckpointError
from dzrobot.modality.pipeline import EncodedSample, Pipeline
from dzrobot.modality.window import Observation, Window, stacked
from dzrobot.policies.base import RECENT, Footprint, Leftover, Plan, frame_offsets, reads_next
from dzrobot.policies.dreamzero.network.continuation import Continuation
from dzrobot.policies.dreamzero.network.graphs import Graphs
from dzrobot.policies.dreamzero.network.prompt import PromptTokenizer
from dzrobot.policies.dreamzero.network.session import (
    InferenceNoise,
    InferenceRequest,
    Prompt,
    SessionCache,
    noise_shapes,
    seeded_noise,
)
from dzrobot.policies.dreamzero.network.vae import Decoding, Vae
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.options import ActingOptions
from dzrobot.rng import torch_seed


class ImaginedVideo:
    """What was predicted since the network last started over, a part for each plan.

    The decoder carries frames over from part to part, like the encoder. Each part is decoded once:
    what is carried stays here from the first question on.
    """

    def __init__(self) -> None:
        """Begin without a part."""
        self.parts: list[Tensor] = []
        """Normalized latents (C, F, Y, X) of each plan."""

        self._decoding: Decoding | None = None
        self._lock = Lock()
        self._part = 0
        """Number of the part that is being decoded."""

        self._done = 0
        """How many of its latents have been decoded."""

        self._frames: list[Tensor] = []
        """Their frames (3, T, H, W), one tensor for each time the decoder was called."""

    def frames(
        self, part: int, vae: Vae, graphs: Graphs | None = None, *, without: int = 0
    ) -> Tensor:
        """Return the frames (3, T, H, W) in [-1, 1] of ``part``: the last decoded, or a later one.

        Threads may call it at the same time.

        Args:
            part: Number of the plan, counted since the network last started over.
            vae: The decoder.
            graphs: See :class:`~dzrobot.policies.dreamzero.network.vae.Decoding`.
            without: How many frames to leave out at the end of the part, fewer than it has. Latents
                of these alone are decoded only if a later part is asked for.
        """
        with self._lock:
            if self._decoding is None:
                self._decoding = Decoding(vae, graphs)
            assert part >= self._part, "in order"
            for number in range(self._part, part + 1):
                if number > self._part:
                    self._part, self._done, self._frames = number, 0, []
                latents, stride = self.parts[number], vae.config.temporal_stride
                # The first latent of a video stands for one frame.
                missing = 0 if number else stride - 1
                wanted = stride * latents.shape[1] - missing - (without if number == part else 0)
                needed = -(-(wanted + missing) // stride)
                if needed > self._done:
                    more = self._decoding.more(latents[None], self._done, needed)
                    self._frames.append(more[0].clamp(-1, 1))
                    self._done = needed
            return torch.cat(self._frames, dim=1)[:, :wanted]

    def tensors(self) -> Iterator[Tensor]:
        """Yield what takes memory."""
        yield from self.parts
        if self._decoding is not None:
            yield from self._decoding.tensors()
        yield from self._frames


class SessionState:
    """One episode; a new one is a new object, so nothing of the last one can survive."""

    def __init__(self, embodiment: Embodiment, history: History, number: int) -> None:
        """Begin.

        Args:
            embodiment: Says what one observation holds and when frames were taken in training.
            history: Which frames the network is shown, see
                :func:`~dzrobot.policies.base.frame_offsets`.
            number: Of the episode within its session; keyed noise depends on it.
        """
        self.number = number
        self.chunks = 0
        """Plans made."""

        self.memory: SessionCache | None = None
        """What the network remembers; made with the first plan."""

        self.video = ImaginedVideo()
        """What the plans predict since the network last started over."""

        self.last_plan: Plan | None = None
        """The plan that was made last."""

        self._embodiment = embodiment
        self._history = history
        self._seen: deque[Observation] = deque(maxlen=embodiment.timing.action_horizon + 1)
        self._pending: deque[NDArray[np.float32]] = deque()
        self._stacks = False
        """Whether an observation held several frames: steps and frames are then not the same."""

    @property
    def needs_plan(self) -> bool:
        """Return whether no planned action is left."""
        return not self._pending

    @property
    def state(self) -> Mapping[str, object]:
        """Return the last observation, which relative actions are measured from."""
        return self._seen[-1]

    def see(self, frames: Sequence[Observation]) -> None:
        """Take in what :func:`read_observation` let through: one frame, or a stack's."""
        self._seen.extend(frames)
        self._stacks = self._stacks or len(frames) != 1

    def reads_next(self, every: int | None) -> bool:
        """Return whether a coming plan is made from the next frame.

        Args:
            every: Actions of each plan that are executed. None: nobody knows when plans are
                requested; none is from the next frame.
        """
        offsets = self.step_offsets()
        if self._stacks:
            return True
        if every is None:
            return len(offsets) > 1
        return reads_next(offsets, len(self._pending), every)

    def window(self, offsets: Sequence[int]) -> Window:
        """Return the frames at ``offsets`` from the newest; the first is repeated for earlier ones.

        The first plan of an episode is made from the newest frame alone.
        """
        if self.chunks == 0:
            offsets = (0,)
        newest = len(self._seen) - 1
        return stacked([self._seen[max(0, newest + o)] for o in offsets], self._embodiment)

    def ticket(self, offsets: Sequence[int], leftover: Leftover | None = None) -> "Ticket":
        """Return the question for a plan, with all that is known now; see :meth:`window`."""
        return Ticket(self, self.window(offsets), self.state, leftover)

    def step_offsets(self) -> tuple[int, ...]:
        """Return which frames a plan is made from where every step of the robot was seen."""
        return frame_offsets(self._embodiment, self._history)

    def call_offsets(self) -> tuple[int, ...]:
        """Return which frames a plan is made from where only some steps were sent."""
        return (0,) if self._history == "off" else tuple(range(1 - RECENT, 1))

    def plan(self, actions: NDArray[np.float32]) -> None:
        """Take ``actions`` (k, A) as the next ones."""
        self._pending = deque(actions)

    def next_action(self) -> NDArray[np.float32]:
        """Return the next planned action (A,) and forget it."""
        return self._pending.popleft()


@dataclass(frozen=True, eq=False)
class Ticket:
    """The question for one plan, as things stood when it was asked."""

    episode: SessionState
    window: Window
    state: Mapping[str, object]
    """What relative actions are measured from, there and back."""

    leftover: Leftover | None


_MEMORY = Path("/proc/meminfo")


def footprint(episode: SessionState, device: torch.device) -> Footprint:
    """Return the bytes that ``episode`` holds and that are free on ``device``.

    Shared prompt embeddings are not counted: they stay however many sessions there are.
    """
    if device.type == "cuda":
        # What torch keeps for itself but does not use is as good as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    else:
        free = _available()
    taken = sum(tensor.untyped_storage().nbytes() for tensor in _tensors(episode))
    return Footprint(session=taken, free=free)


def _tensors(episode: SessionState) -> Iterator[Tensor]:
    yield from episode.video.tensors()
    if episode.memory is not None:
        memory = episode.memory
        yield from (cache.data for cache in memory.keys_values.values())
        yield from (t for t in (memory.image_PE, memory.first_frame_CFYX) if t is not None)


def _available() -> int:
    for line in _MEMORY.read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(amount.split()[0])
    raise RuntimeError(f"{_MEMORY} does not say how much memory is available")


_MAX_PROMPTS = 256


class Requests:
    """Makes requests; remembers the tokens of prompts, and nothing of an episode."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        network: WorldActionModel,
        embodiment: Embodiment,
        options: ActingOptions,
    ) -> None:
        """Prepare for one network and robot."""
        self._tokenizer = tokenizer
        self._config = network.config
        self._network = network
        self._size = self._config.target_size or embodiment.image_size
        self._options = options
        self._guided = options.generate().prompts == 2
        self._prompts: dict[str, Prompt] = {}

    def make(
        self,
        encoded: EncodedSample,
        episode: SessionState,
        continuation: Continuation | None = None,
    ) -> InferenceRequest:
        """Return the request of the coming plan of ``episode``."""
        return InferenceRequest(
            continuation=continuation,
            images_THW3=encoded["images"],
            state_SM=encoded["state"],
            conditions=tuple(encoded["conditions"].values()),
            prompt=self._prompt(encoded["prompt"]),
            negative=self._prompt(encoded["negative_prompt"]) if self._guided else None,
            noise=self._noise(episode),
        )

    def _prompt(self, text: str) -> Prompt:
        if text not in self._prompts:
            ids, mask = self._tokenizer([text])
            if int(ids.max()) >= self._config.text.vocab:
                raise CheckpointError(
                    f"the tokenizer gives ids up to {int(ids.max())}, the network knows "
                    f"{self._config.text.vocab}; give the tokenizer it was trained with"
                )
            if len(self._prompts) >= _MAX_PROMPTS:
                self._prompts.pop(next(iter(self._prompts)))
            self._prompts[text] = Prompt(ids[0], mask[0])
        return self._prompts[text]

    def _noise(self, episode: SessionState) -> InferenceNoise | None:
        """Return what the coming plan starts from; None for the published noise."""
        if self._options.noise == "fixed":
            return None
        shapes = noise_shapes(self._config, self._config.latent_size(*self._size))
        if self._options.noise == "slot":
            slots = self._options.noise_slots
            return seeded_noise(
                shapes, self._options.seed, row_of=(episode.number % slots, slots),
                device=self._network.device, dtype=self._network.dtype,
            )  # fmt: skip
        # Drawn on the processor in float32, whatever the network runs on.
        noise = seeded_noise(shapes, _key(self._options.seed, episode))
        video, action = (
            x.to(self._network.device, self._network.dtype)
            for x in (noise.video_CFYX, noise.action_AM)
        )
        return InferenceNoise(video, action)


def _key(seed: int, episode: SessionState) -> int:
    """Return the generator seed of the coming plan."""
    return torch_seed("policy noise", seed, episode.number, episode.chunks)


Floats = NDArray[np.float32]


class Continuing:
    """Encodes leftovers and decodes plans of one robot."""

    def __init__(self, pipeline: Pipeline, rows: int) -> None:
        """Prepare.

        Args:
            pipeline: Of the robot.
            rows: Actions that the network plans; of a mixture's network more than the robot uses.
        """
        self._pipeline = pipeline
        self._rows = rows

    def leftover(self, ticket: Ticket) -> Continuation | None:
        """Return what the network continues of the running plan, from the state of the request."""
        left = ticket.leftover
        if left is None:
            return None
        horizon = self._pipeline.embodiment.timing.action_horizon
        known = self._pipeline.encode_targets(left.targets[:horizon], ticket.state)
        # Held, not zero: zeros would pull the end of the plan to the mean. Their weight is zero.
        held = np.repeat(known[-1:], self._rows - len(known), axis=0)
        mask = torch.arange(MAX_ACTION_DIM) < self._pipeline.embodiment.action_dim
        return Continuation(
            action_AM=torch.from_numpy(np.concatenate([known, held])),
            mask_M=mask,
            delay=min(left.delay, len(known)),
            end=len(known),
            method=left.method,
            strength=left.strength,
            weights=left.weights,
        )

    def decoded(self, action: Tensor, ticket: Ticket) -> tuple[Floats, Floats, Floats]:
        """Return a plan: actions, targets and normalized numbers, each (H, A)."""
        robot = self._pipeline.embodiment
        # Of a mixture's network, the beginning: as many as this robot was trained with.
        action = action[: robot.timing.action_horizon]
        targets = self._pipeline.decode_targets(action, ticket.state)
        if ticket.leftover is not None:
            # What was given comes back to the bit, not through two changes of units.
            targets[: ticket.leftover.delay] = ticket.leftover.targets[: ticket.leftover.delay]
        return self._pipeline.commands(targets), targets, action[:, : robot.action_dim].numpy()
