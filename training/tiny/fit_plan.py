"""What ``dzrobot init`` makes, as values: how its autoencoder is fitted, and sizes of networks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dzrobot.errors import ConfigError
from dzrobot.recording.formats import EpisodeChoice
from dzrobot.training.sft_config import DamagedFiles

_FEWEST = 3
"""Updates in which a rate can rise and fall."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderPlan:
    """How the autoencoder is fitted."""

    still_steps: int = 3000
    """Optimizer steps on single frames. Each shows as much of a scene as a clip does, in a
    tenth of the time."""

    still_batch: int = 8
    """Frames per such step."""

    still_bytes: int = 512 << 20
    """Memory for the recordings that these frames are drawn from, which are decoded once; other
    clips are left out. Twice as much is needed while they are read."""

    clip_steps: int = 600
    """Then, optimizer steps on clips of nine frames."""

    clip_batch: int = 2
    """Clips per such step."""

    decoder_steps: int = 0
    """Then, optimizer steps of the decoder alone on further clips, with half the learning rates."""

    lr: float = 0.02
    """Highest learning rate of weight matrices, by Muon; it falls to zero along a cosine."""

    other_lr: float = 2e-3
    """The same for all other parameters, by AdamW."""

    latent_noise: float = 0.05
    """Noise on latents of unit variance while decoding: neighbors must look alike."""

    predicted_noise: float = 2.0
    """Most noise on a clip's latents after the first, while the decoder is fitted alone; each clip
    draws its own level. They stand for a network's predictions, which are far less exact than the
    first, that of a frame it has seen."""

    focus: float = 12.0
    """Extra weight of what differs from the batch's mean image: cameras do not move, and a small
    object covers few pixels, which an even average would neglect."""

    color: float = 1.0
    """Weight of errors in the differences between red, green and blue. Most errors are of
    brightness: without this term, small objects stay gray for a long time, and objects that
    differ only in color look the same to the network."""

    held_batches: int = 16
    """Batches after the last step that the latents' scale and the errors are measured on."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of products and activations in the fit; weights, updates and the loss are float32."""

    seed: int = 0
    """Seed of the order of clips and of the latent noise."""

    num_workers: int = 0
    """Processes that read recordings."""

    held_out: int = 0
    """Last episodes of each folder that nothing is fitted to, as ``data.holdout_episodes`` of a
    run."""

    damaged: DamagedFiles = "refuse"
    """What becomes of episodes that cannot be used, as ``data.on_corrupt`` of a recipe has it."""

    episodes: EpisodeChoice = "successes"
    """Which are used, as in :class:`~dzrobot.training.data.ReaderOptions`."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a phase too short for its learning rates to rise and fall."""
        for steps in (self.still_steps, self.clip_steps, self.decoder_steps):
            if 0 < steps < _FEWEST:
                raise ConfigError(f"a phase of {steps} steps: it takes 0 or at least {_FEWEST}")


@dataclass(frozen=True, kw_only=True)
class NetworkSize:
    """What differs between small networks."""

    width: int
    """Width of the transformer."""

    ffn: int
    layers: int
    latents: int
    """Channels of a latent pixel."""

    encoder: int
    """Base width of the autoencoder's encoder."""

    decoder: int
    """Base width of its decoder, which only predicted video needs."""

    image: int = 224
    """Pixels of each side of the first frame, as the image encoder gets it."""

    high_noise: bool = False
    """Whether training emphasizes high noise, where a prediction has to choose among objects. Noise
    levels above 0.9 have 10 % of the loss's weight without the emphasis, and 37 % with it."""


SIZES: Mapping[str, NetworkSize] = {
    "mini": NetworkSize(width=192, ffn=576, layers=6, latents=24, encoder=8, decoder=8),
    "small": NetworkSize(
        width=256, ffn=768, layers=8, latents=48, encoder=16, decoder=32, image=112, high_noise=True
    ),
}
"""By the name that ``dzrobot init --size`` takes: one object in one scene, and several in many."""
