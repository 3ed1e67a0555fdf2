"""A policy whose network runs on another machine. Needs no torch."""

import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.documents import shorten
from dzrobot.embodiments.registry import EMBODIMENTS, described_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import (
    ConfigError,
    InvalidActionError,
    ProtocolError,
    ServerError,
    SessionError,
    SessionLostError,
)
from dzrobot.modality.window import Observation, check_seen, read_observation, stacked
from dzrobot.policies.base import (
    DEFAULT_SESSION,
    Abilities,
    Action,
    Ask,
    Leftover,
    Plan,
    Policy,
    When,
    check_leftovers,
    check_session,
    frame_offsets,
    reads_next,
)
from dzrobot.policies.serving.connection import Connection, ConnectOptions, ServerAnswer
from dzrobot.policies.serving.dialects import (
    LONGEST_PLAN,
    Dialect,
    coded_card,
    write_leftover,
    write_observation,
)
from dzrobot.policies.serving.groot import SCHEME, GrootConnection

AnyConnection = Connection | GrootConnection

_PLAIN = (Dialect.OPENPI, Dialect.GROOT)
"""Without sessions: an observation is answered by a plan, of which all rows are meant."""


@dataclass(frozen=True, kw_only=True)
class ClientTiming:
    """Times of plans in milliseconds: medians and 95th percentiles."""

    plans: int
    round_trip_p50: float
    round_trip_p95: float
    server_p50: float | None
    """None: the server does not report it."""

    sent_bytes: int
    received_bytes: int

    @property
    def text(self) -> str:
        """Return it as one line of text."""
        server = "unknown" if self.server_p50 is None else f"{self.server_p50:.1f} ms"
        return (
            f"{self.plans} plans from the server: round trip {self.round_trip_p50:.1f} ms "
            f"(95th percentile {self.round_trip_p95:.1f}), of which the server took {server}; "
            f"{self.sent_bytes} bytes sent, {self.received_bytes} received"
        )


@dataclass(eq=False)
class _Episode:
    """One episode; every episode is an object of its own."""

    seen: deque[Observation]
    number: int
    """What keyed noise depends on, where the server is dzrobot's."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Session id sent to the server, which never sees one twice."""

    plans: int = 0
    pending: deque[NDArray[np.float32]] = field(default_factory=deque)
    stacks: bool = False
    """Whether an observation held several frames: a step is then not a frame."""

    generation: int = 0
    """Generation of the connection that the episode began on."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RemoteTicket(Ask):
    """A request for one plan, from the newest observation when it was made."""

    episode: _Episode
    message: Mapping[str, Any]


def served_robot(server: str, options: ConnectOptions) -> Embodiment:
    """Return the robot that a server of dzrobot names, or describes where it is not built in.

    Args:
        server: Its address.
        options: How the connection is made.

    Raises:
        ServerError: it cannot be reached, or refuses the connection.
        ConfigError: it does not say which robot it serves, or does not describe it.
        ProtocolError: this version does not read its description.
    """
    give = "say which robot acts: --embodiment TAG or module:NAME (in Python embodiment=...)"
    if server.startswith(SCHEME):
        raise ConfigError(f"{server} does not say which robot it serves: {give}")
    with closing(Connection(server, options)) as connection:
        greeting = connection.greeting
    if greeting is None:
        raise ConfigError(f"{server} does not say which robot it serves: {give}")
    if greeting.robot is not None:
        where = f"the greeting of {server}: robot"
        return described_embodiment(greeting.robot, where, ProtocolError)
    if greeting.embodiment not in EMBODIMENTS:
        raise ConfigError(
            f"{server} serves {greeting.embodiment}, which is not built in here, and does not "
            f"describe it: {give}"
        )
    return EMBODIMENTS[greeting.embodiment]


class RemotePolicy(Policy):
    """Acts as the policy of a server does: fetches a plan and executes a part of it.

    With dzrobot's own server, actions equal those of its policy in this process, bit for bit.
    Servers that speak the dialect of openpi, RoboArena, DreamZero or vLLM-Omni work too, and those
    of GR00T.

    An episode ends when its connection breaks: the server's memory of it is gone, and further
    actions would be those of another policy. :meth:`reset` begins a new one.

    Args:
        server: ``ws://host:port``, ``wss://...``, or with the path of vLLM-Omni; ``zmq://host:port``
            for GR00T's.
        embodiment: The robot. None: the one that dzrobot's server names, or describes.
        execute: Actions of each plan that are executed. None: what dzrobot's server says, all that
            openpi's sends, or the robot's number.
        actions: What the actions of a server mean that does not say so, such as
            ``joint_position``; see :attr:`~dzrobot.embodiments.spec.Embodiment.motion`.
        options: How the connection is made.

    Raises:
        ServerError: it cannot be reached, or refuses the connection.
        ConfigError: it serves another robot, or does not say which; it does not say what its
            actions mean, or ``execute`` is more than is planned.
    """

    def __init__(
        self,
        server: str,
        embodiment: Embodiment | None = None,
        *,
        execute: int | None = None,
        actions: str | None = None,
        options: ConnectOptions | None = None,
    ) -> None:
        self._server = server
        self._options = options or ConnectOptions()
        embodiment = embodiment or served_robot(server, self._options)
        self.embodiment: Embodiment = embodiment
        """The robot."""

        first = self._connect()
        self._dialect = first.dialect
        self._check_robot(first)
        self._check_images(first)
        self._actions = self._meaning(first, actions)
        greeting = first.greeting
        horizon = embodiment.timing.action_horizon if greeting is None else greeting.action_horizon
        self._least = execute or (1 if greeting is None else greeting.execute)
        """Rows that every plan holds."""

        self.execute: int = execute or self._usual(first)
        """Most actions of each plan that are executed."""

        self._stated = None if self.execute == LONGEST_PLAN else self.execute

        if self.execute < 1 or (greeting is not None and self.execute > horizon):
            raise ConfigError(
                f"execute={self.execute}, but {horizon} actions are planned: choose 1 to {horizon}"
            )
        history = greeting.history if greeting is not None else embodiment.history
        # A server without sessions has no memory either.
        remembers = first.sessions and history != "off"
        self._offsets = frame_offsets(embodiment, "recent") if remembers else (0,)
        self._connections: dict[str, AnyConnection] = {"": first}
        self._episodes: dict[str, _Episode] = {}
        self._answers: deque[ServerAnswer] = deque(maxlen=10_000)
        self._plans = 0
        self._bytes = [0, 0]

    @property
    def card(self) -> dict[str, Any]:
        """Return what the actions depend on, as plain values for records."""
        first = self._connections[""]
        described = first.greeting.card if first.greeting is not None else first.metadata
        return {
            "policy": "remote",
            "dialect": self._dialect.value,
            "embodiment": self.embodiment.tag,
            "execute": self._stated,
            "actions": self._actions,
            **coded_card(self._options.images),
            "server": described,
        }

    def report(self) -> str:
        """Return the latency of the answers so far; empty without any."""
        return "" if self.timing is None else self.timing.text

    @property
    def timing(self) -> ClientTiming | None:
        """Return how long the latest 10,000 plans took; None before the first."""
        if not self._answers:
            return None
        trips = [answer.round_trip_ms for answer in self._answers]
        served = [a.server_ms for a in self._answers if a.server_ms is not None]
        return ClientTiming(
            plans=self._plans,
            round_trip_p50=float(np.percentile(trips, 50)),
            round_trip_p95=float(np.percentile(trips, 95)),
            server_p50=float(np.percentile(served, 50)) if served else None,
            sent_bytes=self._bytes[0],
            received_bytes=self._bytes[1],
        )

    @property
    def can(self) -> Abilities:
        """Return what it can do; other servers than dzrobot's cannot be told of a running plan."""
        greeting = self._connections[""].greeting
        return Abilities(plans=True, continues={} if greeting is None else greeting.continues)

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> Action:
        """Return the next action (A,) float32; to be called once per step of the robot.

        Args:
            obs: The embodiment's keys: images (H, W, 3) uint8, states (D,) float32, the text.
            session: Which episode it belongs to.

        Raises:
            ModalityError: the observation does not fit the embodiment, or lacks images that are
                looked at; see :meth:`reads_frames`.
            SessionLostError: the connection broke during the episode.
            ServerError: the server refuses, or answers what is not a plan.
        """
        episode = self._observe(obs, session, frames=self.reads_frames(session=session))
        if not episode.pending:
            plan = self._plan(self._ticket(episode, session))
            episode.pending.extend(plan[: self.execute])
        return episode.pending.popleft()

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return whether the images of the next observation are sent, with it or later.

        Where they are not, that observation may lack all of them.

        Args:
            session: Which episode.
            when: What the observation will be for.
        """
        episode = self._episodes.get(session)
        if episode is None or episode.stacks:
            return True
        if when == "acting":
            return reads_next(self._offsets, len(episode.pending), self.execute)
        return when == "planning" or len(self._offsets) > 1

    def plans_next(self, *, session: str = DEFAULT_SESSION) -> bool:
        """Return whether the next action of ``session`` takes a plan of the server."""
        episode = self._episodes.get(session)
        return episode is None or not episode.pending

    def observe(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> None:
        """Take in ``obs``, what the robot of ``session`` sees at this step.

        Raises:
            ModalityError, SessionLostError: As :meth:`act`.
        """
        # Whether a plan will be requested from it is unknown: the request checks for its images.
        self._observe(obs, session, frames=self.reads_frames(session=session, when="moving"))

    def ask(
        self, *, session: str = DEFAULT_SESSION, leftover: Leftover | None = None
    ) -> RemoteTicket:
        """Return the question for a plan from the newest observation on; nothing is sent yet.

        Args:
            session: The session that has observed.
            leftover: What the robot executes meanwhile; None: the plan starts afresh.

        Raises:
            ConfigError: the server does not announce that it can continue a plan this way.
            SessionError: nothing was observed in the session.
        """
        check_leftovers(self, [leftover])
        if session not in self._episodes:
            raise SessionError(f"session {session!r} has observed nothing: call observe first")
        return self._ticket(self._episodes[session], session, leftover)

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return the plan that the server makes for each of ``asks``, one after the other.

        Raises:
            SessionLostError, ServerError: As :meth:`act`.
            SessionError: the episode of a question is over.
        """
        return [self._answer(ask) for ask in asks]

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode in ``session``; nothing of the one before survives.

        Args:
            session: Its name.
            episode: Number that keyed noise depends on, where the server is dzrobot's. None counts
                on from the last one.

        Raises:
            SessionError: the server can hold only one session.
        """
        check_session(session)
        last = self._episodes.get(session)
        counted = 0 if last is None else last.number + 1
        self._end(session)
        self._begin(session, counted if episode is None else episode)

    def end_all(self) -> None:
        """End all sessions, here and on the server; the connections stay open."""
        for name in list(self._episodes):
            self._end(name)

    def close(self) -> None:
        """End all sessions and connections."""
        for connection in self._connections.values():
            connection.close()

    def _observe(self, obs: Observation, session: str, *, frames: bool) -> _Episode:
        check_session(session)
        seen = read_observation(obs, self.embodiment, frames=frames)
        episode = self._episodes.get(session) or self._begin(session, 0)
        if episode.plans and episode.generation != self._connection(session).generation:
            raise SessionLostError(
                f"the connection to {self._server} broke during the episode of session "
                f"{session!r}, and the server's memory of it is gone: call "
                f"reset({session!r}) to begin a new one"
            )
        episode.seen.extend(seen)
        episode.stacks = episode.stacks or len(seen) != 1
        return episode

    def _begin(self, session: str, number: int) -> _Episode:
        others = [name for name in self._episodes if name != session]
        if self._dialect in (Dialect.DREAMZERO, Dialect.VLLM) and others:
            raise SessionError(
                f"session {session!r} beside {others[0]!r}: {self._server} is not a dzrobot server "
                "and holds one episode at a time; call end_all() first, or use one server for each"
            )
        seen: deque[Observation] = deque(maxlen=1 - min(self._offsets))
        episode = _Episode(seen, number)
        self._episodes[session] = episode
        return episode

    def _end(self, session: str) -> None:
        episode = self._episodes.pop(session, None)
        if episode is None or not episode.plans:
            return
        connection = self._connection(session)
        if self._dialect is Dialect.OPENPI:
            # In openpi's protocol only closing the connection ends an episode.
            connection.close()
        elif connection.generation == episode.generation:
            connection.reset(episode.name)

    def _connection(self, session: str) -> AnyConnection:
        name = session if self._dialect is Dialect.OPENPI else ""
        if name not in self._connections:
            self._connections[name] = self._connect()
        return self._connections[name]

    def _connect(self) -> AnyConnection:
        if self._server.startswith(SCHEME):
            return GrootConnection(self._server, self._options, self.embodiment)
        return Connection(self._server, self._options)

    def _ticket(
        self, episode: _Episode, session: str, leftover: Leftover | None = None
    ) -> RemoteTicket:
        message = self._message(episode)
        if leftover is not None:
            message["leftover"] = write_leftover(leftover)
        return RemoteTicket(
            session=session, observation=episode.seen[-1], leftover=leftover, episode=episode,
            message=message,
        )  # fmt: skip

    def _answer(self, ask: Ask) -> Plan:
        if not isinstance(ask, RemoteTicket):
            check_leftovers(self, [ask.leftover])
            episode = self._observe(ask.observation, ask.session, frames=True)
            ask = self._ticket(episode, ask.session, ask.leftover)
        elif self._episodes.get(ask.session) is not ask.episode:
            raise SessionError(
                f"the episode of session {ask.session!r} is over; the plan was asked for in it"
            )
        actions, answer = self._plan(ask), self._answers[-1]
        if answer.targets is None:
            # Other servers do not send what the network predicted.
            return Plan.of(actions, answer.timing)
        return Plan(
            actions=actions,
            targets=self._rows(answer.targets, len(actions)),
            normalized=self._rows(answer.normalized, len(actions)),
            timing=answer.timing,
        )

    def _plan(self, ticket: RemoteTicket) -> NDArray[np.float32]:
        episode, connection = ticket.episode, self._connection(ticket.session)
        if not episode.plans:
            # Nothing is lost yet: a broken connection may be opened again.
            connection.ensure()
            # A server begins every session with episode 0 unless it is told another number.
            if self._dialect is Dialect.DZROBOT and episode.number:
                connection.reset(episode.name, episode.number)
            episode.generation = connection.generation
        answer = connection.request_plan(ticket.message, first=not episode.plans)
        plan = self._checked(answer)
        episode.plans += 1
        self._plans += 1
        self._answers.append(answer)
        self._bytes[0] += answer.sent_bytes
        self._bytes[1] += answer.received_bytes
        return plan

    def _message(self, episode: _Episode) -> dict[str, Any]:
        offsets = self._offsets if episode.plans else (0,)
        newest = len(episode.seen) - 1
        chosen = [episode.seen[max(0, newest + offset)] for offset in offsets]
        check_seen(chosen, self.embodiment)
        observation: dict[str, Any] = dict(chosen[-1])
        if len(chosen) > 1:
            frames = stacked(chosen, self.embodiment)
            observation.update({view.key: frames[view.key] for view in self.embodiment.views})
        message = write_observation(
            observation, self.embodiment, self._dialect, self._options.images
        )
        if self._dialect not in _PLAIN:
            message |= {"endpoint": "infer", "session_id": episode.name}
        return message

    def _checked(self, answer: ServerAnswer) -> NDArray[np.float32]:
        plan = self._rows(answer.actions, self._least)
        if self._dialect not in _PLAIN:
            # A server's plan may be shorter than the robot's; frames are kept for the next one.
            self.execute = min(self.execute, len(plan))
        return plan

    def _rows(self, plan: object, least: int) -> NDArray[np.float32]:
        """Return rows that the server sent, checked."""
        robot, given = self.embodiment, shorten(plan)
        if isinstance(plan, np.ndarray):
            given = f"{plan.dtype} {plan.shape}"
            fits = plan.ndim == 2 and plan.shape[1] == robot.action_dim and len(plan) >= least
            if fits and plan.dtype.kind == "f":
                if not np.isfinite(plan).all():
                    raise InvalidActionError(
                        f"{self._server} answered a plan with numbers that are not finite"
                    )
                return np.array(plan, np.float32)
        raise ServerError(
            f"{self._server} answered {given}: a plan of {robot.tag} holds at least {least} rows "
            f"of {robot.action_dim} numbers"
        )

    def _usual(self, connection: AnyConnection) -> int:
        """Return how many actions of a plan are executed where it is not said."""
        if connection.greeting is not None:
            return connection.greeting.execute
        if self._dialect in _PLAIN:
            return LONGEST_PLAN
        return self.embodiment.execute or self.embodiment.timing.action_horizon

    def _meaning(self, connection: AnyConnection, given: str | None) -> str | None:
        """Return what the server's actions mean; None: they have no name, as LIBERO's.

        Actions of another meaning may have the same shape, and would move an arm.
        """
        needed, stated = self.embodiment.motion, connection.metadata.get("action_space")
        if connection.greeting is not None:
            if given not in (None, needed):
                raise ConfigError(
                    f"{self._server} serves {self.embodiment.tag}, whose actions mean "
                    f"{needed or 'what its environment says'}; {given!r} was given: leave it out"
                )
            return needed
        if needed is None:
            return given
        if stated is None and given is None:
            raise ConfigError(
                f"{self._server} does not say what its actions mean, and {self.embodiment.tag} "
                f"takes {needed}; others, such as velocities, have the same shape. If they are "
                f"that, say so: --server-actions {needed} (in Python actions={needed!r})"
            )
        for said, who in ((stated, "says that it answers"), (given, "is said to answer")):
            if said not in (None, needed):
                raise ConfigError(
                    f"{self._server} {who} {shorten(said)}, and {self.embodiment.tag} takes "
                    f"{needed}: dzrobot converts none; choose a policy of {needed}"
                )
        return needed

    def _check_images(self, connection: AnyConnection) -> None:
        """Refuse images in a form that the server does not announce."""
        wanted = self._options.images
        known = ["raw"] if connection.greeting is None else ["raw", *connection.greeting.images]
        if wanted not in known:
            raise ConfigError(
                f"{self._server} reads images as {' or '.join(known)}, and {wanted} was asked for: "
                "leave --server-images out, or update dzrobot there"
            )

    def _check_robot(self, connection: AnyConnection) -> None:
        robot, greeting = self.embodiment, connection.greeting
        if greeting is not None:
            given = (greeting.embodiment, greeting.action_horizon)
            # Without memory, a plan may have any length: no frames are spread over it.
            any_length = greeting.history == "off" and greeting.embodiment == robot.tag
            if given != (robot.tag, robot.timing.action_horizon) and not any_length:
                raise ConfigError(
                    f"{self._server} serves {given[0]} with plans of {given[1]}; this robot is "
                    f"{robot.tag} with plans of {robot.timing.action_horizon}"
                )
            served = greeting.card.get("action_anchor")
            if served is not None and robot.action_anchor not in (None, served):
                raise ConfigError(
                    f"{self._server} serves a policy that measures actions from the anchor "
                    f"{served!r}, this robot does from {robot.action_anchor!r}: set action.anchor "
                    f"of the workcell to {served}"
                )
            return
        arena = robot.wire.arena
        metadata = connection.metadata
        if arena is None or "needs_session_id" not in metadata:
            return
        own = {
            "n_external_cameras": arena.n_external_cameras,
            "needs_wrist_camera": arena.needs_wrist_camera,
            "needs_stereo_camera": arena.needs_stereo_camera,
            "action_space": arena.action_space,
        }
        differences = [
            f"{k}: {metadata[k]} there, {v} here" for k, v in own.items() if metadata.get(k, v) != v
        ]
        size = metadata.get("image_resolution")
        if size is not None and tuple(size) != robot.views[0].resolution:
            differences.append(f"image_resolution: {size} there, {robot.views[0].resolution} here")
        if differences:
            raise ConfigError(
                f"{self._server} does not serve {robot.tag}: {'; '.join(differences)}"
            )
