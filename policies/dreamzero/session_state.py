"""All that lasts one episode of one session; a new episode is a new object."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.embodiments.spec import Embodiment, History
from dzrobot.modality.window import Observation, Window, stacked
from dzrobot.policies.base import RECENT, Ask, Footprint, Leftover, Plan, frame_offsets, reads_next
from dzrobot.policies.dreamzero.imagined import ImaginedVideo
from dzrobot.policies.dreamzero.network.session import SessionCache
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel


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

        self.predicted: list[Tensor] = []
        """Normalized latents (C, F, Y, X) of each plan since the network last started over."""

        self.video: ImaginedVideo | None = None
        """Decodes them; made with the first question."""

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
    def instruction(self) -> str | None:
        """Return the newest instruction; None before the first plan."""
        return str(self._seen[-1][self._embodiment.language]) if self.chunks else None

    def see(self, frames: Sequence[Observation]) -> None:
        """Take in what :func:`read_observation` let through: one frame, or a stack's."""
        self._seen.extend(frames)
        self._stacks = self._stacks or len(frames) != 1

    def reads_next(self, every: int | None) -> bool:
        """Return whether a coming plan is made from the next frame.

        Args:
            every: Actions of each plan that are executed. None: it is not known when plans are
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

    def ticket(
        self, session: str, offsets: Sequence[int], leftover: Leftover | None = None
    ) -> "Ticket":
        """Return the question for a plan, with all that is known now; see :meth:`window`."""
        return Ticket(
            session=session, observation=self._seen[-1], leftover=leftover, episode=self,
            window=self.window(offsets),
        )  # fmt: skip

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Ticket(Ask):
    """The question for one plan, as things stood when it was asked.

    Relative actions are measured from its observation, there and back.
    """

    episode: SessionState
    window: Window


_MEMORY = Path("/proc/meminfo")


def footprint(episode: SessionState, network: WorldActionModel) -> Footprint:
    """Return the bytes that ``episode`` holds and that are free on the device of ``network``.

    Room for the prompt encoder is not free while it is still to be loaded. Shared prompt embeddings
    are not counted: they stay however many sessions there are.
    """
    device = network.device
    if device.type == "cuda":
        # What torch keeps for itself but does not use is as good as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    else:
        free = _available()
    taken = sum(tensor.untyped_storage().nbytes() for tensor in _tensors(episode))
    return Footprint(session=taken, free=max(0, free - network.deferred_bytes))


def _tensors(episode: SessionState) -> Iterator[Tensor]:
    yield from episode.predicted
    if episode.video is not None:
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
