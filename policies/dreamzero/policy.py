"""DreamZero as a policy: observations in, actions out, for any number of episodes at a time."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.documents import shorten
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, SessionError, preview
from dzrobot.modality.window import Observation, prompt_of, read_observation
from dzrobot.policies.base import (
    DEFAULT_SESSION,
    Abilities,
    Action,
    Ask,
    Footprint,
    ImaginedLatents,
    Leftover,
    Method,
    Observations,
    Plan,
    PlanningTotals,
    Policy,
    When,
    check_count,
    check_leftovers,
    check_session,
    check_sessions,
    observations_of,
)
from dzrobot.policies.dreamzero.checkpoints.directory import Checkpoint
from dzrobot.policies.dreamzero.checkpoints.passport import check_compatible
from dzrobot.policies.dreamzero.compiling import CompileNotice
from dzrobot.policies.dreamzero.imagined import ImaginedVideo, as_images, encoded_images
from dzrobot.policies.dreamzero.network.generate import predict, schedules
from dzrobot.policies.dreamzero.network.graphs import prompt_batches
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.prompt import PromptCache, PromptTokenizer
from dzrobot.policies.dreamzero.network.session import InferenceRequest, SessionCache, filled_up
from dzrobot.policies.dreamzero.options import (
    SOLVER_STEPS,
    ActingOptions,
    PolicyOptions,
    WeightOptions,
    check_device,
    chosen_device,
)
from dzrobot.policies.dreamzero.parts import PolicyParts, check_combinations, load_parts
from dzrobot.policies.dreamzero.requests import Continuing, FirstLook, Requests
from dzrobot.policies.dreamzero.session_state import SessionState, Ticket, footprint

_log = logging.getLogger(__name__)

_UNTOLD = {
    "batch_size": None, "graphs": False, "video": "full", "solver_steps": SOLVER_STEPS,
    "solver": "unipc",
}  # fmt: skip
"""Values that cards do not mention: those of results from before there were others."""

__all__ = ["DreamZeroPolicy", "PolicyOptions", "PolicyParts", "WeightOptions"]


class DreamZeroPolicy(Policy):
    """A DreamZero network as a policy. Not to be called from two threads at once.

    Every episode lives in a session. A session opens with its first observation or with
    :meth:`reset`, is replaced by :meth:`reset`, and ends with :meth:`evict`.
    """

    def __init__(
        self, parts: PolicyParts, options: PolicyOptions | ActingOptions | None = None
    ) -> None:
        """Put the parts together; see :meth:`from_pretrained`.

        Raises:
            CheckpointError: Robot and network do not fit.
            ConfigError: More actions are to be executed than are planned.
        """
        self.embodiment: Embodiment = parts.pipeline.embodiment
        """Robot that it acts as."""

        self.options: ActingOptions = (
            options
            if isinstance(options, ActingOptions)
            else (options or PolicyOptions()).for_robot(self.embodiment, parts.distilled_steps)
        )
        """How it acts."""

        self.execute, self.history = self.options.execute, self.options.history
        self.source = parts.source
        """Where the weights come from, for records."""

        self.planning: PlanningTotals = PlanningTotals()
        """What has been planned so far, in all sessions."""

        self._network, self._pipeline = parts.network, parts.pipeline
        check_compatible(self.embodiment, self._network.config, shorter=True)
        check_combinations(parts, self.options)
        if self.options.compile:
            for transformer in (self._network.model, parts.negative):
                compile_blocks(() if transformer is None else transformer.blocks)
            self._network.compile_encoders()
        self._compiling = CompileNotice(
            what="the network", key=repr((self._network.config, self._network.dtype, self.options)),
            device=self._network.device, is_on=self.options.compile,
        )  # fmt: skip
        # Made here, so that the first plan does not wait for it.
        schedules(self._network.config.head, self.options.solver_steps, self.options.solver)
        self._batches = prompt_batches(
            self._network.model, self.options.prompts, parts.negative,
            graphs=self.options.graphs,
        )  # fmt: skip
        self._tokenizer = parts.tokenizer
        self._requests = Requests(parts.tokenizer, self._network, self.embodiment, self.options)
        self._continuing = Continuing(parts.pipeline, self._network.config.head.action_horizon)
        self._quantize = parts.quantize
        self._trained_delay = parts.trained_delay
        if self.options.video not in ("full", parts.trained_video):
            _log.warning(
                "video=%r, and this checkpoint was not trained to plan that way "
                "(model.action_only_ratio): its actions may be worse, so measure them",
                self.options.video,
            )
        self._embeddings = PromptCache(files=parts.prompt_files)
        self._episodes: dict[str, SessionState] = {}
        self._evicted: set[str] = set()
        self._unreset_told = False
        self.first_look: FirstLook = FirstLook(parts.inputs)
        """Compares the first observation with the training data."""

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - the one call users write
        cls,
        path_or_repo: str | Path | Checkpoint,
        *,
        embodiment: Embodiment | str | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        tokenizer: str | Path | PromptTokenizer | None = None,
        options: PolicyOptions | ActingOptions | None = None,
        weights: WeightOptions | None = None,
    ) -> Self:
        """Return the policy of a checkpoint.

        Args:
            path_or_repo: Folder or file of any published layout, a Hugging Face id, or what
                ``open_checkpoint`` returned: then it is not opened again.
            embodiment: The robot, or its tag; the checkpoint must have been trained for it. None:
                the one that the checkpoint names, if it names exactly one.
            device: Where the network runs; ``auto`` is a GPU where torch sees one.
            dtype: What it computes in; None for float32 on a CPU and bfloat16 elsewhere.
            revision: Branch, tag or commit of a Hugging Face repository.
            tokenizer: Folder, repository or tokenizer; None for the checkpoint's own, else the one
                that published checkpoints were trained with.
            options: How it acts; what is left open is filled in for robot and checkpoint.
            weights: Where weights come from beyond the checkpoint.

        Raises:
            CheckpointError: Incomplete, damaged, foreign, or made for something else.
            StatisticsError: metadata.json does not fit the embodiment.
            ConfigError: No such device, options that exclude each other, or too little memory.
            MissingDependencyError: ``weights`` asks for what is not installed.
        """
        device = chosen_device(device) if isinstance(device, str) else device
        check_device(device)
        parts = load_parts(
            path_or_repo,
            embodiment=embodiment,
            device=device,
            dtype=dtype,
            revision=revision,
            tokenizer=tokenizer,
            weights=weights or WeightOptions(),
        )
        return cls(parts, options)

    @property
    def card(self) -> dict[str, Any]:
        """Return what the actions depend on, as plain values for records."""
        anchor = self.embodiment.action_anchor
        return {
            "policy": "dreamzero",
            "checkpoint": self.source,
            "embodiment": self.embodiment.tag,
            "statistics": self._pipeline.statistics.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "device": self._network.device.type,
            "dtype": str(self._network.dtype).removeprefix("torch."),
            **({} if anchor is None else {"action_anchor": anchor}),
            **({} if self._quantize is None else {"quantize": self._quantize}),
            **({} if len(self._batches) == 1 else {"cfg_devices": 2}),
            **{n: v for n, v in asdict(self.options).items() if _UNTOLD.get(n, ...) != v},
        }

    @property
    def can(self) -> Abilities:
        """Return what it can do, with these weights, options and device."""
        delays: dict[Method, int] = {
            "guided": self.embodiment.timing.action_horizon,
            "trained": self._trained_delay,
        }
        on_cpu = self._network.device.type == "cpu"
        return Abilities(
            plans=True,
            batches=True,
            serves=True,
            continues={method: longest for method, longest in delays.items() if longest},
            predicts=self.options.video == "full",
            # On a GPU both threads would share one queue, and what is captured must be alone.
            defers=on_cpu and not self.options.compile,
            encodes=True,
        )

    def prepare(self, instructions: Sequence[str]) -> None:
        """Embed ``instructions``, so that they may be given at any step of an episode.

        An instruction is otherwise embedded when an episode begins with it. One that is new on this
        machine takes as long as reading the prompt encoder does.

        Raises:
            CheckpointError: The weights of the prompt encoder can no longer be read.
            ModalityError: One is not an instruction.
        """
        for text in instructions:
            prompt = self._requests.prompt(prompt_of(text, self.embodiment))
            encoder = self._network.require_text_encoder
            self._embeddings.embed(encoder, prompt.ids_N[None], prompt.mask_N[None])

    @property
    def sessions(self) -> tuple[str, ...]:
        """Return the open sessions."""
        return tuple(self._episodes)

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode in ``session``; nothing of the one before survives.

        Args:
            session: Its name; a session that is new or was evicted is opened.
            episode: Number that noise depends on, unless it is fixed. None counts on from the
                last one; with ``slot`` noise, the session keeps its slot.

        Raises:
            SessionError: Too many sessions are open, or the name is not text.
        """
        check_session(session)
        last = self._episodes.get(session)
        if last is None:
            self._check_room([session])
        number = self._next_number(last) if episode is None else episode
        self._episodes[session] = SessionState(self.embodiment, self.options.history, number)
        self._evicted.discard(session)

    def end_all(self) -> None:
        """End all sessions and free their memory."""
        self._episodes.clear()
        self._evicted.clear()

    def _next_number(self, last: SessionState | None) -> int:
        if self.options.noise != "slot":
            return 0 if last is None else last.number + 1
        if last is not None:
            return last.number
        slots = self.options.noise_slots
        taken = {episode.number % slots for episode in self._episodes.values()}
        free = next((slot for slot in range(slots) if slot not in taken), None)
        if free is None:
            raise SessionError(
                f"all {slots} slots of noise='slot' are taken; raise PolicyOptions.noise_slots, or "
                "evict a session that has ended"
            )
        return free

    def evict(self, session: str) -> None:
        """End ``session`` and free its memory; using it again without a reset is an error."""
        self._open(session)
        del self._episodes[session]
        self._evicted.add(session)

    def stage(self, session: str) -> int:
        """Return the latent frame ``session`` stands at; sessions of one stage run as one batch."""
        memory = self._open(session).memory
        return 0 if memory is None else memory.start

    def footprint(self, session: str) -> Footprint:
        """Return the memory that ``session`` takes, and what is left on the network's device."""
        return footprint(self._open(session), self._network)

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> Action:
        """Return the next action (A,) float32; to be called once per step of the robot.

        Every observation is checked, also where no plan is due; one that is refused leaves the
        session as it was.

        Args:
            obs: The embodiment's keys: images (H, W, 3) uint8, states (D,) float32, the text.
            session: Which episode it belongs to.

        Raises:
            ModalityError: The observation does not fit the embodiment, or lacks images that are
                looked at; see :meth:`reads_frames`.
            SessionError: The session's episode has ended, or too many sessions are open.
        """
        return self.act_batch([obs], [session])[0]

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return whether the images of the next observation are looked at, then or later.

        Where they are not, that observation may lack all of them.

        Args:
            session: Which episode; it has been reset.
            when: What the observation will be for.

        Raises:
            SessionError: The session is not open.
        """
        episode = self._open(session)
        every = self.options.execute if when == "acting" else None
        return when == "planning" or episode.reads_next(every)

    def plans_next(self, *, session: str = DEFAULT_SESSION) -> bool:
        """Return whether the next :meth:`act` of ``session`` makes a plan.

        Raises:
            SessionError: The session is not open.
        """
        return self._open(session).needs_plan

    def act_batch(self, observations: Observations, sessions: Sequence[str]) -> list[Action]:
        """Return the next action of each session; those without a planned one plan together.

        Args:
            observations: One for each session, or what a vector environment returns: a mapping of
                batched arrays ``(sessions, ...)`` and sequences of instructions. Where one of
                its environments began a new episode, :meth:`reset` that session first.
            sessions: Their names, all different.

        Raises:
            ModalityError: An observation does not fit; then no session has seen any of them.
            SessionError: As :meth:`act`, or not one observation for each session.
        """
        episodes = self._take(observations, sessions, when="acting")
        due = {n: one for n, one in zip(sessions, episodes, strict=True) if one.needs_plan}
        if due:
            plans = self._plan([one.ticket(n, one.step_offsets()) for n, one in due.items()])
            for episode, plan in zip(due.values(), plans, strict=True):
                episode.plan(plan.actions[: self.options.execute])
        return [episode.next_action() for episode in episodes]

    def observe(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> None:
        """Take in ``obs``, what the robot of ``session`` sees at this step.

        Raises:
            ModalityError, SessionError: As :meth:`act`.
        """
        # Whether a plan will be requested from it is not known: the request looks for its images.
        self._take([obs], [session], when="moving")

    def ask(self, *, session: str = DEFAULT_SESSION, leftover: Leftover | None = None) -> Ticket:
        """Return the question for a plan from the newest observation on; nothing is computed.

        Args:
            session: The session that has observed.
            leftover: What the robot executes in the meantime; None: the plan starts over.

        Raises:
            ConfigError: ``trained`` is asked of a network that was not, or not for such a delay.
            SessionError: The session is not open.
        """
        check_leftovers(self, [leftover])
        episode = self._open(session)
        return episode.ticket(session, episode.step_offsets(), leftover)

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return the plan of each question, made together.

        Observations that come with a question may hold stacks of frames (T, H, W, 3). With history,
        the network is then shown the last four frames sent, as published servers do.

        Args:
            asks: Made by :meth:`ask`, or with an observation each.

        Raises:
            ConfigError: As :meth:`ask`; then no session has seen any observation.
            ModalityError: An observation does not fit; the same.
            SessionError: As :meth:`act`, or the episode of a question of :meth:`ask` is over.
        """
        check_leftovers(self, [ask.leftover for ask in asks])
        if all(isinstance(ask, Ticket) for ask in asks):
            return self._plan([self._current(ask) for ask in asks if isinstance(ask, Ticket)])
        episodes = self._take([ask.observation for ask in asks], [ask.session for ask in asks])
        return self._plan([
            episode.ticket(ask.session, episode.call_offsets(), ask.leftover)
            for episode, ask in zip(episodes, asks, strict=True)
        ])  # fmt: skip

    def _current(self, ticket: Ticket) -> Ticket:
        # A copy, made at once: another thread may open sessions meanwhile.
        if any(episode is ticket.episode for episode in tuple(self._episodes.values())):
            return ticket
        raise SessionError(
            f"the episode of session {ticket.session!r} is over; the plan was asked for in it"
        )

    def last_plan(self, session: str = DEFAULT_SESSION) -> Plan | None:
        """Return the plan that ``session`` made last; None before the first.

        Raises:
            SessionError: The session is not open.
        """
        return self._open(session).last_plan

    def imagine(self, session: str = DEFAULT_SESSION) -> NDArray[np.uint8]:
        """Return the video (T, H, W, 3) uint8 that the last plan predicts, views tiled.

        Raises:
            ConfigError: The policy predicts no video.
            SessionError: The session is not open or has made no plan.
        """
        return self.imagine_later(session)(0)

    def imagine_later(self, session: str = DEFAULT_SESSION) -> Callable[[int], NDArray[np.uint8]]:
        """Return what computes :meth:`imagine`, to be called once, in the order of the plans.

        The function takes how many frames to leave out at the end, fewer than there are, so that
        they need not be decoded.

        Args:
            session: Whose video; (T, H, W, 3) uint8.

        Raises:
            ConfigError, SessionError: As :meth:`imagine`.
        """
        video, graphs = self._imagined(session), self._batches[0].graphs
        newest = len(video.parts) - 1

        @torch.no_grad()
        def compute(without: int) -> NDArray[np.uint8]:
            return as_images(video.frames(newest, self._network.vae, graphs, without=without))

        return compute

    def imagine_latents(self, session: str = DEFAULT_SESSION) -> ImaginedLatents:
        """Return the latents (C, F, Y, X) that the last plan predicts, for decoding later.

        Args:
            session: Whose latents.

        Raises:
            ConfigError, SessionError: As :meth:`imagine`.
        """
        parts = self._imagined(session).parts
        return ImaginedLatents(latents=parts[-1].float().cpu().numpy(), starts=len(parts) == 1)

    def encode_images(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the normalized latents (N, C, Y, X) of images (N, H, W, 3), each by itself.

        Args:
            images: Views tiled, as :meth:`imagine` returns them.
        """
        return encoded_images(self._network, images, self._network.device)

    def _imagined(self, session: str) -> ImaginedVideo:
        episode = self._open(session)
        if not self.can.predicts:
            raise ConfigError(
                f"with video={self.options.video!r} no video is predicted, so none can be shown; "
                "load the policy with video='full' to see one"
            )
        if not episode.predicted:
            raise SessionError(f"session {session!r} has made no plan yet; call act or infer first")
        if episode.video is None:
            episode.video = ImaginedVideo(episode.predicted)
        return episode.video

    def _take(
        self, observations: object, sessions: Sequence[str], *, when: When = "planning"
    ) -> list[SessionState]:
        """Return the episodes of ``sessions`` after they have seen their observations.

        Everything is checked before anything changes. What the observations are for says which of
        them have to hold images.
        """
        names = check_sessions(sessions)
        given = observations_of(observations, len(names))
        check_count(given, names)
        new = [name for name in names if name not in self._episodes and name not in self._evicted]
        self._check_room(new)
        for name in names:
            if name not in new:
                self._open(name)
        frames = [
            read_observation(
                observation,
                self.embodiment,
                frames=name in new or self.reads_frames(session=name, when=when),
            )
            for name, observation in zip(names, given, strict=True)
        ]
        self.first_look.see(frames[0][0], self.embodiment)
        for name, seen in zip(names, frames, strict=True):
            if name not in new:
                self._tell_of_instruction(name, seen[-1])
        self._open_all(new)
        if new and not self._unreset_told:
            self._unreset_told = True
            _log.warning(
                "session %r was never reset: its episode begins with this observation. Call "
                "policy.reset(%r) at the start of every episode; this is said once.",
                new[0],
                new[0],
            )
        episodes = [self._episodes[name] for name in names]
        for episode, seen in zip(episodes, frames, strict=True):
            episode.see(seen)
        return episodes

    def _tell_of_instruction(self, session: str, seen: Observation) -> None:
        """Say that the prompt encoder has to be read between two steps, and how to avoid it.

        A changed instruction is taken all the same: clients that keep one connection for many
        tasks begin each task with it.
        """
        text, before = str(seen[self.embodiment.language]), self._episodes[session].instruction
        if before in (None, text) or not self._network.is_text_deferred:
            return
        prompt = self._requests.prompt(prompt_of(text, self.embodiment))
        if not self._embeddings.knows(prompt.ids_N[None], prompt.mask_N[None]):
            _log.warning(
                "the instruction of session %r became %s during an episode, and it is new on this "
                "machine: reading the prompt encoder first. To have it ready, call "
                "prepare([...]) with all instructions before the episode",
                session,
                shorten(text),
            )

    def _open(self, session: str) -> SessionState:
        check_session(session)
        if session in self._episodes:
            return self._episodes[session]
        raise SessionError(
            f"session {session!r} {'was evicted' if session in self._evicted else 'is not open'} "
            f"(open: {preview(self._episodes)}); call reset({session!r}) to start an episode in it"
        )

    def _open_all(self, new: Sequence[str]) -> None:
        """Open all of ``new``, or none."""
        before = dict(self._episodes)
        try:
            for name in new:
                self.reset(name)
        except SessionError:
            self._episodes = before
            raise

    def _check_room(self, new: Sequence[str]) -> None:
        if len(self._episodes) + len(new) > self.options.max_sessions:
            raise SessionError(
                f"no room for session {preview(map(repr, new))}: {len(self._episodes)} of "
                f"max_sessions={self.options.max_sessions} are open; evict one that has ended, or "
                "raise PolicyOptions.max_sessions"
            )

    def _plan(self, tickets: Sequence[Ticket]) -> list[Plan]:
        """Return the plan of every episode."""
        began = time.perf_counter()
        leftovers = [self._continuing.leftover(ticket) for ticket in tickets]
        requests = [
            self._requests.make(self._pipeline.encode(ticket.window), ticket.episode, leftover)
            for ticket, leftover in zip(tickets, leftovers, strict=True)
        ]
        encoded = time.perf_counter()
        alone = self.options.independent or self.options.compile or self.options.graphs
        group = 1 if alone else self.options.batch_size or len(requests)
        predicted: list[Tensor] = []
        for first in range(0, len(requests), group):
            part = slice(first, first + group)
            predicted += self._predict([t.episode for t in tickets[part]], requests[part])
        generated = time.perf_counter()
        decoded = [
            self._continuing.decoded(action, ticket)
            for ticket, action in zip(tickets, predicted, strict=True)
        ]
        done = time.perf_counter()
        self.planning.add(done - began, len(requests), -(-len(requests) // group))
        marks = {"encode_ms": (began, encoded), "generate_ms": (encoded, generated)}
        marks |= {"decode_ms": (generated, done), "total_ms": (began, done)}
        timing = {name: 1000 * (stop - start) for name, (start, stop) in marks.items()}
        plans = [
            Plan(
                actions=actions, targets=targets, normalized=normalized, timing=timing,
                clipped=self._pipeline.outside(ticket.window),
            )
            for ticket, (actions, targets, normalized) in zip(tickets, decoded, strict=True)
        ]  # fmt: skip
        for ticket, plan in zip(tickets, plans, strict=True):
            ticket.episode.last_plan = plan
        return plans

    def _predict(
        self, episodes: Sequence[SessionState], requests: Sequence[InferenceRequest]
    ) -> list[Tensor]:
        """Return the normalized actions (H, 32) of each episode, on the host."""
        memories = []
        for episode in episodes:
            if episode.memory is None:
                episode.memory = SessionCache(prompts=self._embeddings)
            memories.append(episode.memory)
        memories, requests = filled_up(memories, requests, self.options.batch_size or 0)
        compiles = self.options.compile
        with self._compiling.watching("plan") if compiles else nullcontext():
            prediction = predict(self._network, memories, requests, self.options, self._batches)
        # The copies come last, and are dropped.
        for episode, start, latents in zip(
            episodes, prediction.starts, prediction.videos, strict=False
        ):
            if start == 0:
                episode.predicted, episode.video = [], None
            if latents.shape[1]:
                episode.predicted.append(latents)
            episode.chunks += 1
        return list(prediction.action_BAM[: len(episodes)].float().cpu())
