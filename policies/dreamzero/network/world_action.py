"""The whole network: frozen encoders around the transformer, and the training loss.

Source: docs/model.md, section 3. Sub-modules carry the names that the checkpoint tables know.

Shapes: B batch, T frames, H pixel rows, W pixel columns, C latent channels, F latent frames,
Y latent rows, X latent columns, A actions, M width of an action, S states, N rows of the prompt,
P rows of the image embedding, E width of an embedding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise, TrainingSchedule, velocity
from dzrobot.policies.dreamzero.network.dit import (
    CausalDiT,
    Controls,
    Prompting,
    TrainForm,
    TrainInputs,
)
from dzrobot.policies.dreamzero.network.image import ImageEncoder
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding, TextEncoder, compact
from dzrobot.policies.dreamzero.network.vae import Vae, conditioning_clip

_MASK_CHANNELS = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodedImages:
    """Images of training samples after the frozen encoders."""

    latents_BCFYX: Tensor
    """Float32."""

    image_BPE: Tensor
    first_frame_BCFYX: Tensor | None
    """See :meth:`WorldActionModel.first_frame`."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what is there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatch:
    """Training samples as they come from the pipeline, on the device."""

    images: Tensor | EncodedImages
    """Tiled frames (B, T, H, W, 3) uint8, or what :meth:`WorldActionModel.encode` made of them."""

    state_BSM: Tensor
    action_BAM: Tensor
    """Normalized to [-1, 1] and padded."""

    action_mask_BAM: Tensor
    """True on the robot's own dimensions."""

    has_real_action_B: Tensor
    """False where a sample's actions are to be ignored."""

    prompt: PromptEmbedding
    """From :meth:`WorldActionModel.embed_prompts`, or from a cache of its results."""

    conditions: tuple[Tensor, ...] = ()
    """See :class:`.dit.Controls`."""

    action_weight_BA: Tensor | None = None
    """Weight of the error of every action; None: 1."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowTarget:
    """Velocities to predict, where they are not those of the straight way from noise to sample."""

    schedule: TrainingSchedule
    """Levels that the indices of the noise stand for, and the weights of their losses."""

    video_BCFYX: Tensor
    action_BAM: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedBatch:
    """Training samples after the frozen encoders; nothing here needs a gradient."""

    latents_BCFYX: Tensor
    prompting: Prompting
    state_BSM: Tensor
    action_BAM: Tensor
    action_mask_BAM: Tensor
    has_real_action_B: Tensor
    first_frame_BCFYX: Tensor | None
    conditions: tuple[Tensor, ...] = ()
    """See :class:`.dit.Controls`."""

    target: FlowTarget | None = None
    """What is to be predicted; None: :func:`straight_flow`."""

    action_weight_BA: Tensor | None = None
    """Weight of the error of every action; None: 1."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LossCounts:
    """What sums of per-sample losses are divided by, over all micro-batches and ranks of a step."""

    samples: Tensor | float
    actions: Tensor | float
    """Samples that the action loss is averaged over; see :class:`LossOptions`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """What the network predicts of training samples, and all that it was given."""

    prepared: PreparedBatch
    """The samples: clean latents and actions, masks, conditioning."""

    noise: DiffusionNoise
    """What was mixed into them, and how much."""

    target: FlowTarget
    """Velocities that were to be predicted."""

    video_BCFYX: Tensor
    """Predicted velocities of the video, float32; an odd last row or column is left out."""

    action_BAM: Tensor
    """Predicted velocities of the actions, float32."""

    def denoised_actions(self) -> Tensor:
        """Return the actions (B, A, M) in [-1, 1] that the velocities lead to, in one step."""
        schedule, index_BA = self.target.schedule, self.noise.action_index_BA
        noisy_BAM = schedule.add_noise(
            self.prepared.action_BAM, self.noise.action_BAM, index_BA, axis=1
        )
        return noisy_BAM - schedule.sigmas[index_BA][..., None] * self.action_BAM


LossTerm = Callable[[Predictions], Tensor]
"""One more term of the loss: (B,) numbers, one for each sample of the batch, weights included. They
are summed over all micro-batches and ranks of a step and divided by its samples, so they must
follow from each sample alone."""


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How the losses are averaged and which form of the forward pass runs."""

    action_loss_norm: Literal["padded", "masked"] = "padded"
    """``padded``: mean over all dimensions and samples, as published: 7 of 32 weigh 7/32.
    ``masked``: mean over a robot's own dimensions and over the samples with real actions."""

    form: TrainForm = field(default_factory=TrainForm)

    terms: Mapping[str, LossTerm] = field(default_factory=dict)
    """Terms beside the published two, by name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Losses:
    """Losses of one batch; only ``loss`` is to be differentiated."""

    loss: Tensor
    dynamics_loss: Tensor
    action_loss: Tensor
    dynamics_B: Tensor
    """Video loss of each sample; zero where its video is hidden."""

    action_B: Tensor
    """Action loss of each sample; zero where it has no real action."""

    counted_action_B: Tensor
    """1 for the samples that the action loss is averaged over; sum it for :class:`LossCounts`."""

    terms: tuple[Tensor, ...] = ()
    """Each of :attr:`LossOptions.terms`, in their order."""


class WorldActionModel(nn.Module):
    """Frozen prompt, image and video encoders, and the transformer."""

    def __init__(self, config: NetworkConfig, *, text_encoder: bool = True) -> None:
        """Build the network of ``config`` with newly initialized weights.

        Args:
            config: Sizes.
            text_encoder: False to leave out the prompt encoder: prompts then come embedded.
        """
        super().__init__()
        self.config = config
        self.model = CausalDiT(config.dit)
        self.text_encoder = TextEncoder(config.text) if text_encoder else None
        self.image_encoder = ImageEncoder(config.image)
        self.vae = Vae(config.vae)
        self.deferred_bytes = 0
        """What the prompt encoder will take on the device; 0 where it is there, or left out."""

        self._load_text: Callable[[], TextEncoder] | None = None

    def defer_text_encoder(self, load: Callable[[], TextEncoder], device_bytes: int) -> None:
        """Leave out the prompt encoder until a prompt needs it.

        Args:
            load: Returns it.
            device_bytes: What it will take on the device.
        """
        self.text_encoder, self._load_text = None, load
        self.deferred_bytes = device_bytes

    @property
    def is_text_deferred(self) -> bool:
        """Return whether the prompt encoder is still to be loaded."""
        return self._load_text is not None

    @property
    def device(self) -> torch.device:
        """Return where the transformer runs."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the transformer computes in."""
        return self.model.dtype

    def compile_encoders(self) -> None:
        """Compile what encodes images, all but the convolutions; last bits may change."""
        compile_blocks(self.vae.pointwise_layers())
        compile_blocks(self.image_encoder.compiled_layers())

    @torch.no_grad()
    def embed_prompts(self, ids_BN: Tensor, mask_BN: Tensor) -> PromptEmbedding:
        """Return the embeddings of tokenized prompts, each by itself whatever the others' length.

        Raises:
            ConfigError: The network was built without its prompt encoder.
        """
        rows_BNE = self.require_text_encoder()(ids_BN, mask_BN)
        return PromptEmbedding(rows_BNE, tuple(mask_BN.sum(dim=1).tolist()))

    def require_text_encoder(self) -> TextEncoder:
        """Return the prompt encoder, loaded at the first call where that was left for later.

        Raises:
            CheckpointError: Its weights can no longer be read.
            ConfigError: The network was built without it.
        """
        if self._load_text is not None:
            self.text_encoder, self._load_text = self._load_text(), None
            self.deferred_bytes = 0
        if self.text_encoder is None:
            raise ConfigError(
                "this network was built without its prompt encoder; give prompt embeddings, or "
                "build it with text_encoder=True"
            )
        return self.text_encoder

    @torch.no_grad()
    def prepare(self, batch: TrainBatch) -> PreparedBatch:
        """Return what the transformer trains on: latents, conditioning, state and actions."""
        images = batch.images
        encoded = images if isinstance(images, EncodedImages) else self.encode(images)
        return PreparedBatch(
            latents_BCFYX=encoded.latents_BCFYX,
            prompting=self.prompting(batch.prompt, encoded.image_BPE),
            state_BSM=batch.state_BSM,
            action_BAM=batch.action_BAM.float(),
            action_mask_BAM=batch.action_mask_BAM,
            has_real_action_B=batch.has_real_action_B,
            first_frame_BCFYX=encoded.first_frame_BCFYX,
            conditions=batch.conditions,
            action_weight_BA=batch.action_weight_BA,
        )

    @torch.no_grad()
    def encode(self, images_BTHW3: Tensor) -> EncodedImages:
        """Return uint8 frames (B, T, H, W, 3) after the frozen encoders."""
        video_B3THW = self.pixels(images_BTHW3)
        first_B3HW, first_frame_BCFYX = video_B3THW[:, :, 0], None
        if self.config.dit.concat_first_frame_latent:
            # As one batch: launches are half as many.
            gray_B3THW = conditioning_clip(first_B3HW, video_B3THW.shape[2])
            both = self.vae.encode(torch.cat([video_B3THW, gray_B3THW]))
            latents_BCFYX, gray_BCFYX = both.chunk(2)
            first_frame_BCFYX = _with_mask(gray_BCFYX)
        else:
            latents_BCFYX = self.vae.encode(video_B3THW)
        return EncodedImages(
            # Float32 from here on: noising and targets must not add bf16 rounding of their own.
            latents_BCFYX=latents_BCFYX.float(),
            image_BPE=self.image_encoder(first_B3HW),
            first_frame_BCFYX=first_frame_BCFYX,
        )

    def loss(
        self,
        prepared: PreparedBatch,
        noise: DiffusionNoise,
        counts: LossCounts | None = None,
        options: LossOptions = LossOptions(),
    ) -> Losses:
        """Return the losses of one batch (docs/model.md, section 3.3).

        Args:
            prepared: The samples.
            noise: Their noise.
            counts: What to divide by when the batch is part of a larger one; None if it is whole.
            options: How to average.
        """
        target = prepared.target or straight_flow(prepared, noise)
        schedule = target.schedule
        inputs = self.train_inputs(prepared, noise, schedule)
        video_BCFYX, action_BAM = self.model(inputs, options.form)

        rows, columns = video_BCFYX.shape[-2:]
        error_BCFYX = video_BCFYX.float() - target.video_BCFYX[..., :rows, :columns]
        error_BF = error_BCFYX.square().mean(dim=(1, 3, 4))
        dynamics_B = (schedule.weights[noise.frame_index_BF] * error_BF).mean(dim=1)
        if noise.hides_video_B is not None:
            dynamics_B = dynamics_B.masked_fill(noise.hides_video_B, 0)

        error_BAM = action_BAM.float() - target.action_BAM
        error_BA = _mean_action_error(error_BAM.square(), prepared, options)
        if prepared.action_weight_BA is not None:
            error_BA = error_BA * prepared.action_weight_BA
        action_B = _mean_of_rows(schedule.weights[noise.action_index_BA] * error_BA, noise.given_BA)
        counted_B = torch.ones_like(action_B)
        if options.action_loss_norm == "masked":
            counted_B = prepared.has_real_action_B.to(action_B.dtype)
        if counts is None:
            counts = LossCounts(samples=len(action_B), actions=counted_B.sum().clamp(min=1))
        dynamics_loss, action_loss = (
            dynamics_B.sum() / counts.samples,
            action_B.sum() / counts.actions,
        )
        predictions = Predictions(
            prepared=prepared, noise=noise, target=target,
            video_BCFYX=video_BCFYX.float(), action_BAM=action_BAM.float(),
        )  # fmt: skip
        terms = [
            _per_sample(name, term(predictions), len(action_B)).sum() / counts.samples
            for name, term in options.terms.items()
        ]
        return Losses(
            loss=sum(terms, start=dynamics_loss + action_loss),
            dynamics_loss=dynamics_loss.detach(),
            action_loss=action_loss.detach(),
            dynamics_B=dynamics_B.detach(),
            action_B=action_B.detach(),
            counted_action_B=counted_B,
            terms=tuple(term.detach() for term in terms),
        )

    def train_inputs(
        self, prepared: PreparedBatch, noise: DiffusionNoise, schedule: TrainingSchedule
    ) -> TrainInputs:
        """Return the transformer's inputs: samples mixed with their noise."""
        latents_BCFYX, frame_index_BF = prepared.latents_BCFYX, noise.frame_index_BF
        noisy_BAM = schedule.add_noise(
            prepared.action_BAM, noise.action_BAM, noise.action_index_BA, axis=1
        )
        timestep_BA = schedule.timesteps[noise.action_index_BA]
        if noise.given_BA is not None:
            noisy_BAM = torch.where(noise.given_BA[..., None], prepared.action_BAM, noisy_BAM)
            timestep_BA = timestep_BA.masked_fill(noise.given_BA, 0)
        controls = Controls(
            action_BAM=noisy_BAM, timestep_BA=timestep_BA, state_BSM=prepared.state_BSM,
            conditions=prepared.conditions,
        )  # fmt: skip
        return TrainInputs(
            noisy_BCFYX=schedule.add_noise(
                latents_BCFYX, noise.video_BCFYX, frame_index_BF, axis=2
            ),
            clean_BCFYX=latents_BCFYX,
            timestep_BF=schedule.timesteps[frame_index_BF],
            controls=controls,
            prompting=prepared.prompting,
            first_frame_BCFYX=prepared.first_frame_BCFYX,
            hides_video_B=noise.hides_video_B,
        )

    def pixels(self, images_BTHW3: Tensor) -> Tensor:
        """Return uint8 frames as (B, 3, T, H, W) in [-1, 1], resized to the network's size."""
        video_BT3HW = images_BTHW3.permute(0, 1, 4, 2, 3).to(torch.float32, copy=True)
        # (x / 255 - 0.5) / 0.5 in one tensor: to make three takes longer than the arithmetic.
        video_BT3HW.div_(255).sub_(0.5).mul_(2)
        size = self.config.target_size
        if size is not None and size != tuple(video_BT3HW.shape[-2:]):
            flat = nn.functional.interpolate(
                video_BT3HW.flatten(0, 1), size=size, mode="bilinear", align_corners=False
            )
            video_BT3HW = flat.view(*video_BT3HW.shape[:3], *size)
        return video_BT3HW.transpose(1, 2)

    def prompting(self, prompt: PromptEmbedding, image_BPE: Tensor) -> Prompting:
        """Return the conditioning of a batch, prompts without most of their padding."""
        text_BNE, bias_BN = compact(prompt)
        return Prompting(text_BNE=text_BNE, image_BPE=image_BPE, text_bias_BN=bias_BN)

    def first_frame(self, frame_B3HW: Tensor, frames: int) -> Tensor | None:
        """Return mask and latents of the frame followed by gray ones; None where they are not used.

        Args:
            frame_B3HW: First frames in [-1, 1].
            frames: Frames of the clip, gray ones included.
        """
        if not self.config.dit.concat_first_frame_latent:
            return None
        return _with_mask(self.vae.encode_conditioning(frame_B3HW, frames))


def _with_mask(latents_BCFYX: Tensor) -> Tensor:
    """Return latents of a first frame and gray ones below the mask that tells them apart."""
    mask_BCFYX = torch.zeros_like(latents_BCFYX[:, :1]).repeat(1, _MASK_CHANNELS, 1, 1, 1)
    mask_BCFYX[:, :, 0] = 1
    return torch.cat([mask_BCFYX, latents_BCFYX], dim=1)


@lru_cache(maxsize=8)
def training_schedule(device: torch.device) -> TrainingSchedule:
    """Return the training tables on ``device``, made once."""
    with torch.inference_mode(mode=False):
        return TrainingSchedule.on(device)


def straight_flow(prepared: PreparedBatch, noise: DiffusionNoise) -> FlowTarget:
    """Return the velocities from noise to sample, at the published levels and weights."""
    return FlowTarget(
        schedule=training_schedule(prepared.latents_BCFYX.device),
        video_BCFYX=velocity(prepared.latents_BCFYX, noise.video_BCFYX),
        action_BAM=velocity(prepared.action_BAM, noise.action_BAM),
    )


def _per_sample(name: str, found: object, samples: int) -> Tensor:
    """Return what a loss term returned.

    Raises:
        ConfigError: It is not one number for each sample.
    """
    if isinstance(found, Tensor) and found.shape == (samples,) and found.is_floating_point():
        return found
    given = (
        f"a {found.dtype} tensor of shape {tuple(found.shape)}"
        if isinstance(found, Tensor)
        else f"a {type(found).__name__}"
    )
    raise ConfigError(
        f"the loss term {name!r} returned {given}: return a floating-point tensor of shape "
        f"({samples},), one number for each sample, its weight included"
    )


def _mean_of_rows(error_BA: Tensor, given_BA: Tensor | None) -> Tensor:
    """Return the mean over the actions that were to be predicted, (B,); 0 where none was."""
    if given_BA is None:
        return error_BA.mean(dim=1)
    asked_BA = ~given_BA
    return (error_BA * asked_BA).sum(dim=1) / asked_BA.sum(dim=1).clamp(min=1)


def _mean_action_error(error_BAM: Tensor, prepared: PreparedBatch, options: LossOptions) -> Tensor:
    """Return the mean over dimensions (B, A), zero where a sample has no real action."""
    kept_BAM = prepared.action_mask_BAM * prepared.has_real_action_B[:, None, None]
    kept_BAM = kept_BAM.to(error_BAM.dtype)
    match options.action_loss_norm:
        case "padded":
            return (error_BAM * kept_BAM).mean(dim=-1)
        case "masked":
            return (error_BAM * kept_BAM).sum(dim=-1) / kept_BAM.sum(dim=-1).clamp(min=1)
