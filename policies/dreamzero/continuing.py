"""Between rows of a running plan in physical units and what the network is told of them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.embodiments.spec import MAX_ACTION_DIM
from dzrobot.modality.pipeline import Pipeline
from dzrobot.policies.dreamzero.episode import Ticket
from dzrobot.policies.dreamzero.network.continuation import Continuation

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
        """Return what the network is told of the running plan, from the state of the request."""
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
