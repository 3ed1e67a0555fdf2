"""From encoded observations to what the network is asked: tokens and noise."""

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import CheckpointError
from dzrobot.modality.pipeline import EncodedSample
from dzrobot.policies.dreamzero.episode import SessionState
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
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.rng import torch_seed

_MAX_PROMPTS = 256


class Requests:
    """Makes requests; remembers the tokens of prompts, and nothing of an episode."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        network: WorldActionModel,
        embodiment: Embodiment,
        options: PolicyOptions,
    ) -> None:
        """Prepare for one network and robot."""
        self._tokenizer = tokenizer
        self._config = network.config
        self._network = network
        self._size = self._config.target_size or embodiment.image_size
        filled = options.for_robot(embodiment)
        assert filled.seed is not None, "filled"
        assert filled.noise_slots is not None, "filled"
        self._kind, self._seed, self._slots = filled.noise, filled.seed, filled.noise_slots
        self._guided = options.generate(embodiment).prompts == 2
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
        if self._kind == "fixed":
            return None
        shapes = noise_shapes(self._config, self._config.latent_size(*self._size))
        if self._kind == "slot":
            row_of = episode.number % self._slots, self._slots
            return seeded_noise(
                shapes, self._seed, row_of=row_of,
                device=self._network.device, dtype=self._network.dtype,
            )  # fmt: skip
        # Drawn on the processor in float32, whatever the network runs on.
        noise = seeded_noise(shapes, _key(self._seed, episode))
        video, action = (
            x.to(self._network.device, self._network.dtype)
            for x in (noise.video_CFYX, noise.action_AM)
        )
        return InferenceNoise(video, action)


def _key(seed: int, episode: SessionState) -> int:
    """Return the generator seed of the coming plan."""
    return torch_seed("policy noise", seed, episode.number, episode.chunks)
