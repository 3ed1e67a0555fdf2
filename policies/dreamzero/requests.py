"""From what a session has seen to a request of the network, and from its answer to a plan.

Nothing here belongs to an episode; the first observation of all is compared with the training data.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.embodiments.spec import MAX_ACTION_DIM, Embodiment
from dzrobot.errors import CheckpointError
from dzrobot.modality.pipeline import EncodedSample, Pipeline
from dzrobot.modality.window import Observation
from dzrobot.policies.base import is_warm_up
from dzrobot.policies.dreamzero.checkpoints.trained_inputs import TrainedInputs
from dzrobot.policies.dreamzero.network.continuation import Continuation
from dzrobot.policies.dreamzero.network.prompt import PromptTokenizer
from dzrobot.policies.dreamzero.network.session import (
    InferenceNoise,
    InferenceRequest,
    Prompt,
    noise_shapes,
    seeded_noise,
)
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.policies.dreamzero.options import ActingOptions
from dzrobot.policies.dreamzero.session_state import SessionState, Ticket
from dzrobot.rng import torch_seed

_log = logging.getLogger(__name__)

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
        self._guided = options.prompts == 2
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
            prompt=self.prompt(encoded["prompt"]),
            negative=self.prompt(encoded["negative_prompt"]) if self._guided else None,
            noise=self._noise(episode),
        )

    def prompt(self, text: str) -> Prompt:
        """Return the tokens of ``text``.

        Raises:
            CheckpointError: The network knows fewer tokens than the tokenizer.
        """
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


class FirstLook:
    """Says once what the first observation of a policy has that no training episode began with.

    Args:
        trained: What training showed it. None: that was not kept, and nothing is compared.
    """

    def __init__(self, trained: TrainedInputs | None) -> None:
        self._trained = trained

    def see(self, observation: Observation, robot: Embodiment) -> None:
        """Compare an observation of ``robot``, if it is the first one."""
        # What a server makes its first plan from is none.
        if self._trained is None or is_warm_up(observation, robot):
            return
        found = self._trained.unlike(observation, robot)
        self._trained = None
        if found:
            _log.warning(
                "the first observation is unlike the beginning of the training data: %s. "
                "`dzrobot doctor policy` says whether that matters",
                "; ".join(found),
            )

    def skip(self) -> None:
        """Compare nothing: for observations from within episodes."""
        self._trained = None


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
        known = self._pipeline.encode_targets(left.targets[:horizon], ticket.observation)
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
        targets = self._pipeline.decode_targets(action, ticket.observation)
        if ticket.leftover is not None:
            # What was given comes back to the bit, not through two changes of units.
            targets[: ticket.leftover.delay] = ticket.leftover.targets[: ticket.leftover.delay]
        return self._pipeline.commands(targets), targets, action[:, : robot.action_dim].numpy()
