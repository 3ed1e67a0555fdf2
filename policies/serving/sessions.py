"""The episode that a request belongs to, and how many episodes fit into memory at a time.

A session of the policy is a seat: its name is used again when the episode that held it has ended,
so that nothing grows with the number of episodes served. An episode is found by connection and
session id; no client can name another's.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import (
    ConfigError,
    InvalidActionError,
    SessionError,
    SessionLostError,
    counted,
    in_units,
)
from dzrobot.policies.base import Footprint, Plan, Policy, robot_of, walk_window

_MOST_KEPT = 65_536
"""Ended ids that a connection may have; one that never resets takes a new id for every episode."""

_PERIODS = 20
"""Chunk periods without a request, after which an abandoned session ends at the earliest."""

Clock = Callable[[], float]


@dataclass(eq=False)
class Session:
    """One episode of one client."""

    id: str
    """The client's id; '' of a client that gives none."""

    seat: str
    """Name of the policy's session."""

    episode: int | None
    """Number that keyed noise depends on; None: the policy's own first one."""

    last_used: float
    fresh: bool = True
    """Whether the policy has not begun it."""

    plans: int = 0
    frames: int = 0
    """Images of each view that were sent for these plans."""

    periods: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """Seconds between the latest requests."""

    def used(self, now: float) -> None:
        """Note a request."""
        if not self.fresh:
            self.periods.append(now - self.last_used)
        self.last_used = now

    def expires(self, forget_s: float) -> float:
        """Return when it ends if its client has moved on to another session."""
        middle = sorted(self.periods)[len(self.periods) // 2] if self.periods else 0.0
        return self.last_used + max(forget_s, _PERIODS * middle)


@dataclass(eq=False)
class ClientConnection:
    """One connection and its episodes."""

    number: int
    sessions: dict[str, Session] = field(default_factory=dict)
    busy: Session | None = None
    """The session with a request in flight: a connection has one at a time."""

    newest: str | None = None
    """Id of the session used last."""

    episodes: dict[str, int] = field(default_factory=dict)
    """Number of the next episode under each id that was reset."""

    lost: set[str] = field(default_factory=set)
    """Ids of sessions that ended without a reset."""


class SessionTable:
    """The policy's seats, free and taken. An episode in use never loses its seat."""

    def __init__(self, count: int, forget_s: float, clock: Clock = time.monotonic) -> None:
        self.count = count
        self._free = deque(f"seat-{number}" for number in range(count))
        self._forget_s = forget_s
        self._clock = clock

    @property
    def free(self) -> int:
        """Return how many seats are free."""
        return len(self._free)

    def find(self, client: ClientConnection, name: str, *, restart_lost: bool) -> Session | None:
        """Return the episode that runs under ``name``, or None if there is none yet.

        Raises:
            SessionLostError: it has ended without a reset, and its memory is gone.
        """
        session = client.sessions.get(name)
        if session is None and name in client.lost and not restart_lost:
            raise SessionLostError(
                f"session {name!r} has ended: it was idle while newer ones were used, and the "
                "policy's memory of its episode is gone. Reset it to begin a new one; serve with "
                "--forget-s SECONDS to keep sessions longer, or --lost-session restart"
            )
        return session

    def take(self, client: ClientConnection, name: str) -> Session | None:
        """Begin an episode under ``name``, or return None while no seat is free.

        Raises:
            SessionError: this connection itself holds every seat.
        """
        if not self._free:
            if len(client.sessions) == self.count:
                raise SessionError(
                    f"no room for session {name!r}: this connection runs {self.count} episodes, "
                    "which is all the server has room for; reset those that are over, or serve "
                    "with a higher --max-sessions"
                )
            return None
        episode = client.episodes.pop(name, None)
        session = Session(name, self._free.popleft(), episode, self._clock())
        client.sessions[name] = session
        client.lost.discard(name)
        return session

    def end(
        self, client: ClientConnection, name: str, *, next_episode: int | None = None
    ) -> Session | None:
        """End what runs under ``name`` at its client's request; see :meth:`release`.

        Args:
            client: The connection.
            name: Session id; an unknown one may be ended too.
            next_episode: Number of the next episode under this name; None: counts on.
        """
        session = client.sessions.pop(name, None)
        client.lost.discard(name)
        if session is not None or next_episode is not None:
            last = 0 if session is None else session.episode or 0
            client.episodes[name] = last + 1 if next_episode is None else next_episode
            while len(client.episodes) > _MOST_KEPT:
                client.episodes.pop(next(iter(client.episodes)))
        return session

    def forget(self, client: ClientConnection, session: Session) -> None:
        """End a session that was abandoned; see :meth:`release`.

        Raises:
            SessionError: the connection has abandoned more than are remembered.
        """
        if len(client.lost) >= _MOST_KEPT:
            raise SessionError(f"{_MOST_KEPT} sessions of one connection were never reset")
        del client.sessions[session.id]
        client.lost.add(session.id)

    def release(self, session: Session) -> None:
        """Free the seat, once the policy has evicted the session."""
        self._free.append(session.seat)

    def abandoned(self, client: ClientConnection) -> Iterator[Session]:
        """Yield episodes that ``client`` left for newer ones long ago without a reset.

        Never the newest one, and never one with a request in flight.
        """
        now = self._clock()
        for name, session in list(client.sessions.items()):
            if name == client.newest or session is client.busy:
                continue
            if now >= session.expires(self._forget_s):
                yield session


MOST_SESSIONS = 256
"""Limit where memory would allow more."""

_SHARE = 0.8
"""Share of free memory that sessions may take: calls need some too."""

_SESSION = "warm-up"


@dataclass(frozen=True, kw_only=True)
class SessionCapacity:
    """How many sessions are accepted, and why."""

    sessions: int
    session_bytes: int
    free_bytes: int

    @property
    def text(self) -> str:
        """Return it as one line of text."""
        size = f" of {in_units(self.session_bytes)}" if self.session_bytes else ""
        room = f"room for {counted(self.sessions, 'session')}{size}"
        return f"{room}; {in_units(self.free_bytes)} of memory are free"


def check_plan(plan: object, robot: Embodiment, least_rows: int) -> None:
    """Check that clients can execute a plan.

    Args:
        plan: What the policy answered.
        robot: Says how many numbers a row has.
        least_rows: Fewest rows that clients take.

    Raises:
        InvalidActionError: it is not a plan of so many finite float rows.
    """
    actions = plan.actions if isinstance(plan, Plan) else plan
    given = f"a {type(actions).__name__}"
    if isinstance(actions, np.ndarray):
        given = f"{actions.dtype} {actions.shape}"
        fits = actions.ndim == 2 and actions.shape[1] == robot.action_dim
        if fits and len(actions) >= least_rows and actions.dtype.kind == "f":
            if np.isfinite(actions).all():
                return
            given = "numbers that are not finite"
    raise InvalidActionError(
        f"the policy planned {given}: a served plan of {robot.tag} holds at least {least_rows} "
        f"rows of {robot.action_dim} finite float numbers: so many are executed before the next "
        "plan is asked for (execute of the policy, else of its Embodiment, else action_horizon)"
    )


def warm_up(
    policy: Policy, *, max_sessions: int | None, max_batch: int, least_rows: int
) -> SessionCapacity:
    """Plan once at every position of the memory's window, and return how many sessions fit.

    Args:
        policy: What plans; its first calls compile and allocate.
        max_sessions: How many are wanted; None: as many as fit, up to :data:`MOST_SESSIONS`.
        max_batch: Most sessions in one call.
        least_rows: Fewest rows of a plan that clients take.

    Raises:
        ConfigError: fewer sessions fit than are asked for, or none.
        InvalidActionError: clients could not execute what it plans.
    """
    robot, found = robot_of(policy), list[Footprint]()
    for _, plan in walk_window(policy, _SESSION):
        check_plan(plan, robot, least_rows)
        found.append(policy.footprint(_SESSION))
    measured = max(reversed(found), key=lambda footprint: footprint.session)
    policy.evict(_SESSION)
    # A call of several sessions works on copies of what they remember.
    copies = measured.session * max_batch if max_batch > 1 else 0
    left = _SHARE * (measured.free + measured.session) - copies
    fitting = int(left // measured.session) if measured.session else MOST_SESSIONS
    if fitting < (max_sessions or 1):
        raise ConfigError(
            f"{max_sessions or 1} sessions of {measured.session} bytes do not fit: "
            f"{measured.free} bytes are free, which is room for {max(0, fitting)}; lower "
            "--max-sessions or --max-batch, or choose a smaller network"
        )
    return SessionCapacity(
        sessions=max_sessions or min(fitting, MOST_SESSIONS),
        session_bytes=measured.session,
        free_bytes=measured.free,
    )
