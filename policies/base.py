"""What a policy is: observation in, action out, one session per episode that runs at a time."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dzrobot.modality.window import Observation

Action = NDArray[np.float32]

DEFAULT_SESSION = "default"


@runtime_checkable
class Policy(Protocol):
    """Chooses one action per observation; chunking and history are its own business."""

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> Action:
        """Return the action (A,) float32, in physical units, for one step of ``session``."""
        ...

    def reset(self, session: str | None = None, *, episode: int | None = None) -> None:
        """Start a new episode in ``session``, or end all sessions; nothing survives.

        Args:
            session: Which; None for all.
            episode: Number that keyed noise depends on; counted up by itself when None.
        """
        ...


@runtime_checkable
class BatchPolicy(Policy, Protocol):
    """A policy that serves several sessions in one call."""

    def act_batch(
        self, observations: Sequence[Observation], sessions: Sequence[str]
    ) -> list[Action]:
        """Return one action (A,) float32 for each session, which must all differ."""
        ...
