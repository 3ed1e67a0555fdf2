"""All that lasts one episode of one session: frames seen, the network's memory, pending actions."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment, History
from dzrobot.modality.window import Observation, Window, stacked
from dzrobot.policies.base import Leftover, Plan
from dzrobot.policies.dreamzero.imagined import ImaginedVideo
from dzrobot.policies.dreamzero.network.session import SessionCache
from dzrobot.policies.history import RECENT, frame_offsets, reads_next


class SessionState:
    """One episode; a new one is a new object, so nothing of the last one can survive."""

    def __init__(self, embodiment: Embodiment, history: History, number: int) -> None:
        """Begin.

        Args:
            embodiment: Says what one observation holds and when frames were taken in training.
            history: Which frames the network is shown, see :func:`.history.frame_offsets`.
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
        """Return the frames at ``offsets`` from the newest; the first stands for earlier ones.

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
