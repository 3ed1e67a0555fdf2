"""Autoregressive generation of actions and future video, for one session or many.

Source: docs/model.md, section 4. A call reads the newest frames into the session's cache, then
denoises the next block. Sessions that stand at the same frame run as one batch.

Shapes: B sessions, R rows of the batch (prompts times sessions), C latent channels, F latent
frames, Y latent rows, X latent columns, A actions, M width of an action.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.network.config import GenerateOptions, HeadConfig, Solver
from dzrobot.policies.dreamzero.network.continuation import Continuations
from dzrobot.policies.dreamzero.network.diffusion import (
    DYNAMIC,
    InferenceSchedule,
    inference_schedule,
    step_plan,
)
from dzrobot.policies.dreamzero.network.dit import Controls, Prompting, StepInputs
from dzrobot.policies.dreamzero.network.graphs import (
    PromptBatch,
    prompt_batches,
    step_batches,
)
from dzrobot.policies.dreamzero.network.layers import ContextKV
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding, compact
from dzrobot.policies.dreamzero.network.session import (
    CallInputs,
    CallOutputs,
    InferenceNoise,
    InferenceRequest,
    KVCache,
    Prompt,
    SessionCache,
    clip_of_block,
    first_image,
    newest_frame_only,
    noise_shapes,
    seeded_noise,
)
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel

_PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention of calls for several sessions. cuDNN's, which torch prefers on Hopper, takes the host a
tenth of a second and more for every new shape, and nearly every such call has another size."""


_PUBLISHED = GenerateOptions()


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """Results of one call, one entry per session."""

    action_BAM: Tensor
    """Actions in [-1, 1], padding included."""

    videos: tuple[Tensor, ...]
    """Latents (C, F, Y, X) of the future; with the first frame before them on a fresh start.
    Without a frame where ``GenerateOptions.video`` is not ``full``."""

    starts: tuple[int, ...]
    """Latent frame that each session's call began at; 0 means that the past was forgotten."""

    evaluations: tuple[int, ...]
    """Evaluations of the transformer per prompt, without those that read frames."""


@torch.no_grad()
def predict(
    model: WorldActionModel,
    sessions: Sequence[SessionCache],
    requests: Sequence[InferenceRequest],
    options: GenerateOptions = _PUBLISHED,
    batches: Sequence[PromptBatch] | None = None,
) -> Prediction:
    """Generate the next actions of every session; the sessions remember what they saw.

    Args:
        model: The network, in evaluation mode.
        sessions: Distinct sessions, in any state.
        requests: One per session; all frames of one size.
        options: How to generate; the same during an episode.
        batches: Where its transformer runs the prompts, from :func:`prompt_batches`; the same
            during an episode. None: all as one batch, launched operator by operator. Where steps
            are recorded, one session is run at a time.

    Raises:
        ConfigError: The frames do not fit the network, the guided call lacks a negative prompt, or
            the guidance was switched on or off during an episode.
        ModalityError: The number of frames fits no block.
    """
    if not options.remembers:
        requests = [newest_frame_only(request) for request in requests]
    window = options.window(model.config.dit)
    batches = prompt_batches(model.model, options.prompts) if batches is None else tuple(batches)
    recorded = any(batch.graphs is not None for batch in batches)
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (session, request) in enumerate(zip(sessions, requests, strict=True)):
        # Which steps a dynamic call skips is the session's own affair: it runs alone.
        alone = index if recorded or options.dit_steps == DYNAMIC else 0
        groups[session.next_start(request, window), alone].append(index)
    results: dict[int, tuple[Tensor, Tensor, int, int]] = {}
    for (start, _), members in groups.items():
        call = _Call(
            model,
            [sessions[i] for i in members],
            [requests[i] for i in members],
            options,
            start,
            batches,
        )
        with sdpa_kernel(_PLANLESS) if len(members) > 1 else nullcontext():
            actions, videos, evaluations = call.run()
        for i, action_AM, video_CFYX in zip(members, actions, videos, strict=True):
            results[i] = (action_AM, video_CFYX, start, evaluations)
    ordered = [results[i] for i in range(len(sessions))]
    return Prediction(
        action_BAM=torch.stack([action_AM for action_AM, *_ in ordered]),
        videos=tuple(video_CFYX for _, video_CFYX, *_ in ordered),
        starts=tuple(start for *_, start, _ in ordered),
        evaluations=tuple(evaluations for *_, evaluations in ordered),
    )


@dataclass(frozen=True, eq=False)
class Past:
    """What an evaluation of the transformer attends beside its own tokens, for every batch."""

    caches: list[KVCache]
    """Keys and values of the frames that were read."""

    contexts: list[list[ContextKV]]
    """Keys and values of prompt and first image in every block."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of sessions that stand at the same frame."""

    model: WorldActionModel
    sessions: list[SessionCache]
    requests: list[InferenceRequest]
    options: GenerateOptions
    start: int
    """Frames in the caches; 0 forgets them."""

    batches: tuple[PromptBatch, ...]

    def run(self) -> tuple[Tensor, Tensor, int]:
        """Return actions (B, A, M), video latents (B, C, F, Y, X) and the evaluations made."""
        inputs = self._inputs()
        if self.start:
            self._check_rows()
        caches = [self._open_cache(batch) for batch in self.batches]
        length = caches[0].length
        if len(self.batches) == 1 and self.options.dit_steps != DYNAMIC:
            (batch,), joint = self.batches, inputs.continuations
            call = replace(self, batches=(batch.unrecorded(),))
            key = self.start, self.options, inputs.latents_BCFYX is None, joint and joint.trained
            outputs = batch.call(key, lambda own: call.compute(own, caches, length), inputs)
        else:
            # A graph knows one device, and cannot skip steps as results change.
            outputs = self.compute(inputs, caches, length)
        for cache in caches:
            # What was recorded writes the tokens, and does not count them again.
            cache.length = length + self._read_tokens
        self._close(caches, outputs)
        return outputs.action_BAM, outputs.video_BCFYX, outputs.evaluations

    def compute(self, inputs: CallInputs, caches: list[KVCache], length: int) -> CallOutputs:
        """Return what the device makes of ``inputs``.

        Args:
            inputs: What the sessions ask for.
            caches: For every batch the keys and values of the frames that were read before.
            length: Valid tokens in each of them.
        """
        is_first = inputs.image_BPE is None
        if self.start == 0:
            inputs, read_BCFYX = self._begin(inputs)
        elif inputs.frames_BTHW3 is not None:
            read_BCFYX = self._encoded(inputs.frames_BTHW3)
        else:
            assert inputs.latents_BCFYX is not None, "there are frames or latents"
            read_BCFYX = inputs.latents_BCFYX
        past = Past(caches, self._contexts(inputs))
        for cache in caches:
            cache.length = length
        first = max(0, self.start - self._block)
        self._velocities(inputs, read_BCFYX, (0, first), past)
        _commit(caches, self._read_tokens)
        action_BAM, video_BCFYX, evaluations = self._denoise(inputs, past)
        if self.start == 0 and self._predicts:
            video_BCFYX = torch.cat([read_BCFYX.to(video_BCFYX.dtype), video_BCFYX], dim=2)
        return CallOutputs(
            action_BAM=action_BAM, video_BCFYX=video_BCFYX, evaluations=evaluations,
            image_BPE=inputs.image_BPE if is_first else None,
            first_frame_BCFYX=inputs.first_frame_BCFYX if is_first else None,
        )  # fmt: skip

    @property
    def _block(self) -> int:
        return self.model.config.dit.num_frame_per_block

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @property
    def _predicts(self) -> bool:
        """Return whether video is denoised beside the actions."""
        return self.options.video == "full"

    @property
    def _read_tokens(self) -> int:
        """Return the tokens of the frames that this call reads."""
        return (self._block if self.start else 1) * self.model.config.dit.frame_seqlen

    def _inputs(self) -> CallInputs:
        """Return what the sessions ask for, on the device."""
        frames, latents = self._history() if self.start else (self._first_images(), None)
        texts, biases = zip(*map(compact, self._embeddings()), strict=True)
        images, firsts = self._first_frames() if self.start else (None, None)
        size = self._latent_size if latents is None else latents.shape[-2:]
        noise = [self._noise(request, (size[0], size[1])) for request in self.requests]
        action_BAM = torch.stack([one.action_AM for one in noise])
        return CallInputs(
            frames_BTHW3=frames, latents_BCFYX=latents, image_BPE=images, first_frame_BCFYX=firsts,
            texts=texts, text_biases=biases,
            noise=InferenceNoise(torch.stack([one.video_CFYX for one in noise]), action_BAM),
            state_BSM=_sent([request.state_SM for request in self.requests], self._device),
            conditions=tuple(
                _sent(values, self._device)
                for values in zip(*(request.conditions for request in self.requests), strict=True)
            ),
            continuations=self._continuations(action_BAM),
        )  # fmt: skip

    @property
    def _latent_size(self) -> tuple[int, int]:
        config = self.model.config
        height, width = config.target_size or self.requests[0].images_THW3.shape[1:3]
        return config.latent_size(height, width)

    def _first_images(self) -> Tensor:
        """Return the frames (B, 1, H, W, 3) that a window starts from."""
        images = [first_image(request.images_THW3, self._block) for request in self.requests]
        _check_network(self.model, images[0])
        return _sent(images, self._device)[:, None]

    def _history(self) -> tuple[Tensor | None, Tensor | None]:
        """Return frames (B, T, H, W, 3) or latents of the block seen since the last call."""
        known = [request.latent_video_CFYX for request in self.requests]
        clips = [
            clip_of_block(request.images_THW3, self._block)
            for request in self.requests if request.latent_video_CFYX is None
        ]  # fmt: skip
        frames = _sent(clips, self._device) if clips else None
        if len(clips) == len(known):
            return frames, None
        encoded = [] if frames is None else list(self._encoded(frames))
        parts = [
            encoded.pop(0) if one is None else one[:, -self._block :].to(self._device)
            for one in known
        ]
        return None, torch.stack(parts)

    def _first_frames(self) -> tuple[Tensor, Tensor | None]:
        """Return what a window's first call made of its first frames."""
        images = [one.image_PE for one in self.sessions if one.image_PE is not None]
        firsts = [s.first_frame_CFYX for s in self.sessions if s.first_frame_CFYX is not None]
        return torch.stack(images), torch.stack(firsts) if firsts else None

    def _begin(self, inputs: CallInputs) -> tuple[CallInputs, Tensor]:
        """Return the inputs with embedding and conditioning of the first frames; their latents."""
        assert inputs.frames_BTHW3 is not None, "a window starts from frames"
        frame_B3HW = self.model.pixels(inputs.frames_BTHW3)[:, :, 0]
        first = self.model.first_frame(frame_B3HW, self.model.config.head.num_frames)
        inputs = replace(
            inputs, image_BPE=self.model.image_encoder(frame_B3HW), first_frame_BCFYX=first
        )
        if first is None:
            return inputs, self.model.vae.encode_first_frame(frame_B3HW)
        return inputs, first[:, -self.model.config.dit.out_dim :, :1]

    def _encoded(self, frames_BTHW3: Tensor) -> Tensor:
        """Return the latents (B, C, F, Y, X) of the block that ends the frames."""
        return self.model.vae.encode(self.model.pixels(frames_BTHW3))[:, :, -self._block :]

    def _open_cache(self, batch: PromptBatch) -> KVCache:
        """Return a batch's cache, past included: a lone session's own, or a joint one."""
        if not self._is_joint(batch):
            return self._own_cache(self.sessions[0], batch)
        if batch.graphs is None:
            joint = batch.allocate(max(1, self.start) + self._block, len(self.sessions))
        else:
            joint = batch.graphs.cache(len(batch.prompts), self._most_frames)
        if self.start:
            joint.load([self._own_cache(session, batch) for session in self.sessions])
        return joint

    @property
    def _most_frames(self) -> int:
        return self.options.cached_frames(self.model.config.dit)

    def _is_joint(self, batch: PromptBatch) -> bool:
        """Return whether the batch's cache is none of a session's own."""
        return len(self.sessions) > 1 or batch.graphs is not None

    def _own_cache(self, session: SessionCache, batch: PromptBatch) -> KVCache:
        """Return a session's cache, kept from call to call.

        It has room for every call from the first one on: compiled blocks depend on its strides.
        """
        kept = session.keys_values.get(batch.number)
        if kept is None or kept.rows != len(batch.prompts):
            kept = session.keys_values[batch.number] = batch.allocate(self._most_frames, 1)
        if not self.start:
            kept.length = 0
        return kept

    def _check_rows(self) -> None:
        wanted = {batch.number: len(batch.prompts) for batch in self.batches}
        for session in self.sessions:
            if {number: kept.rows for number, kept in session.keys_values.items()} != wanted:
                raise ConfigError(
                    "the options changed during an episode: guidance (cfg_scale other than 1, a "
                    "second device) and history cannot be switched between two calls; start a new "
                    "session"
                )

    def _close(self, caches: list[KVCache], outputs: CallOutputs) -> None:
        """Leave in the sessions what the next call needs."""
        for index, session in enumerate(self.sessions):
            if outputs.image_BPE is not None:
                session.image_PE = outputs.image_BPE[index]
                first = outputs.first_frame_BCFYX
                session.first_frame_CFYX = None if first is None else first[index]
                session.prompt_key = self.requests[index].prompt.key
        for batch, cache in zip(self.batches, caches, strict=True):
            if self._is_joint(batch) and self.options.remembers:
                cache.store([self._own_cache(session, batch) for session in self.sessions])
        for session in self.sessions:
            session.start = (self.start or 1) + self._block
            if not self.options.remembers:
                session.keys_values.clear()

    def _denoise(self, inputs: CallInputs, past: Past) -> tuple[Tensor, Tensor, int]:
        """Return actions, video latents and the evaluations made."""
        options = self.options
        head = self.model.config.head
        video_schedule, action_schedule = schedules(head, options.solver_steps, options.solver)
        plan = step_plan(options.dit_steps, options.solver_steps)
        video = video_schedule.start(inputs.noise.video_CFYX)
        action = action_schedule.start(inputs.noise.action_AM)
        joint = inputs.continuations
        evaluations, read = 0, [cache.length for cache in past.caches]
        for step in range(options.solver_steps):
            if plan.due(step):
                timestep_BA = torch.full_like(
                    action.sample[..., 0], action_schedule.timesteps[step], dtype=torch.int64
                )
                shown_BAM = action.sample
                if joint is not None:
                    shown_BAM, timestep_BA = joint.shown(shown_BAM, timestep_BA)
                controls = Controls(
                    action_BAM=shown_BAM, timestep_BA=timestep_BA, state_BSM=inputs.state_BSM,
                    conditions=inputs.conditions,
                )  # fmt: skip
                shown_BCFYX = self._shown(video.sample, evaluations)
                timestep = video_schedule.timesteps[step]
                video_flow, action_flow = self._velocities(
                    inputs, shown_BCFYX, (timestep, self.start or 1), past, controls
                )
                plan.executed(video_flow)
                evaluations += 1
                if not self._predicts:
                    # What this evaluation has left of the video, the next ones attend.
                    _commit(past.caches, shown_BCFYX.shape[2] * self.model.config.dit.frame_seqlen)
            if self._predicts:
                video.step(video_flow)
            if joint is None:
                action.step(action_flow)
            else:
                # At a step that skips the network as well: the sample has moved on.
                sigma = action_schedule.sigmas[step]
                action.step(joint.guided(action_flow, action.sample, sigma))
        for cache, length in zip(past.caches, read, strict=True):
            cache.length = length
        action_BAM = action.sample if joint is None else joint.closed(action.sample)
        return action_BAM, self._shown(video.sample, evaluations), evaluations

    def _shown(self, video_BCFYX: Tensor, evaluations: int) -> Tensor:
        """Return what the transformer is shown of the video after so many evaluations."""
        kind = self.options.video
        is_shown = kind == "full" or (kind == "once" and not evaluations)
        return video_BCFYX if is_shown else video_BCFYX[:, :, :0]

    def _continuations(self, like_BAM: Tensor) -> Continuations | None:
        """Return what the plans continue; None where all start over."""
        parts = [request.continuation for request in self.requests]
        if all(part is None for part in parts):
            return None
        return Continuations.of(parts, like_BAM, self.options.solver_steps)

    def _noise(self, request: InferenceRequest, size: tuple[int, int]) -> InferenceNoise:
        """Return the noise of one session's latents of ``size``."""
        if request.noise is not None:
            return InferenceNoise(
                request.noise.video_CFYX.to(self._device), request.noise.action_AM.to(self._device)
            )
        shapes = noise_shapes(self.model.config, size)
        return seeded_noise(shapes, self.options.seed, device=self._device, dtype=self.model.dtype)

    def _velocities(
        self, inputs: CallInputs, video_BCFYX: Tensor, at: tuple[int, int], past: Past,
        controls: Controls | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the guided video velocity and the conditional action velocity.

        Args:
            inputs: What the sessions ask for.
            video_BCFYX: New frames (B, C, F, Y, X), noisy or, at timestep 0, clean.
            at: Their timestep, and the absolute index of the first of them.
            past: What they attend.
            controls: Noisy actions and their states; None where frames are only read.
        """
        sessions, joint = len(video_BCFYX), inputs.continuations
        timestep, start = at
        step = StepInputs(
            video_BCFYX=video_BCFYX,
            timestep_BF=torch.full(
                (sessions, video_BCFYX.shape[2]), timestep, dtype=torch.int64, device=self._device
            ),
            start_frame=start,
            controls=controls,
            # Video and actions are denoised in step, unless the video is to keep some noise or
            # actions are given.
            one_timestep=not self.model.config.head.decouple_inference_noise
            and (controls is None or joint is None or not joint.trained),
            first_frame_BCFYX=inputs.first_frames(start, video_BCFYX.shape[2]),
        )
        video_RCFYX, action_RAM = step_batches(
            self.batches, step, past.caches, past.contexts, self._device
        )
        conditional = video_RCFYX[:sessions]
        # Reading frames predicts no actions, and none are asked for.
        action_BAM = conditional if action_RAM is None else action_RAM[:sessions]
        if self.options.prompts == 1:
            return conditional, action_BAM
        negative = video_RCFYX[sessions:]
        # Only the video is guided; actions follow the prompt as predicted.
        return negative + self.options.cfg_scale * (conditional - negative), action_BAM

    def _contexts(self, inputs: CallInputs) -> list[list[ContextKV]]:
        """Return each batch's keys and values of prompts and images, made once per call."""
        image_BPE = inputs.image_BPE
        assert image_BPE is not None, "made where the window begins"
        contexts = []
        for batch, text, bias in zip(self.batches, inputs.texts, inputs.text_biases, strict=True):
            image_RPE = image_BPE.repeat(len(batch.prompts), 1, 1)
            prompting = Prompting(text_BNE=text, image_BPE=image_RPE, text_bias_BN=bias)
            contexts.append(
                batch.dit.project(batch.dit.embed_context(prompting.to(batch.dit.device)))
            )
        return contexts

    def _embeddings(self) -> list[PromptEmbedding]:
        """Return the embedded prompts of every batch."""
        prompts = [[request.prompt for request in self.requests]]
        if self.options.prompts == 2:
            prompts.append([request.required_negative() for request in self.requests])
        kinds = [self._embedded(one) for one in prompts]
        return [PromptEmbedding.stack([kinds[p] for p in batch.prompts]) for batch in self.batches]

    def _embedded(self, prompts: list[Prompt]) -> PromptEmbedding:
        """Return the embeddings of one prompt per session."""
        rows = []
        for session, prompt in zip(self.sessions, prompts, strict=True):
            if prompt.rows_NE is None:
                # Looked up on the host: what was embedded before needs nothing of the device.
                found = session.prompts.embed(
                    self.model.require_text_encoder, prompt.ids_N[None], prompt.mask_N[None]
                )
                rows.append(found)
            else:
                rows.append(prompt.rows_NE[None].to(self._device))
        lengths = tuple(len(prompt.key) for prompt in prompts)
        embedding = PromptEmbedding(torch.cat(rows), lengths)
        return embedding.cut() if self.options.prompt_rows == "cut" else embedding


def schedules(
    head: HeadConfig, steps: int, solver: Solver = "unipc"
) -> tuple[InferenceSchedule, InferenceSchedule]:
    """Return the solvers of video and actions, made once."""
    final = head.video_inference_final_noise if head.decouple_inference_noise else 0.0
    return (
        inference_schedule(steps, final_noise=final, solver=solver),
        inference_schedule(steps, solver=solver),
    )


def _commit(caches: Sequence[KVCache], tokens: int) -> None:
    for cache in caches:
        cache.commit(tokens)


def _sent(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the stacked ``parts`` on ``device``; the host does not wait for it."""
    return torch.stack(list(parts)).to(device, non_blocking=True)


def _check_network(model: WorldActionModel, image_HW3: Tensor) -> None:
    """Raise :class:`ConfigError` where the network cannot generate from such a frame."""
    config = model.config
    config.check_size(*(config.target_size or (image_HW3.shape[0], image_HW3.shape[1])))
    if config.head.action_horizon != config.dit.num_action_per_block:
        raise ConfigError(
            f"action_horizon={config.head.action_horizon} but num_action_per_block="
            f"{config.dit.num_action_per_block}: a call generates one block, so set both alike in "
            "the checkpoint's config.json"
        )
