"""Whose episode a request belongs to, and the room that episodes share.

A session of the policy is a seat: its name is used again when the episode that held it has ended,
so that nothing grows with the number of episodes served. An episode is found by connection and
session id; no client can name another's.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dzrobot.errors import SessionError, SessionLostError

_MOST_KEPT = 65_536
"""Ended ids that a connection may have; one that never resets takes a new id for every episode."""

_PERIODS = 20
"""Chunk periods without a request, after which an abandoned session ends at the earliest."""

Clock = Callable[[], float]


@dataclass(eq=False)
class Session:
    """One episode of one client."""

    id: str
    """As the client calls it; '' of one that has no name for it."""

    seat: str
    """Name of the policy's session."""

    episode: int | None
    """Number that keyed noise depends on; None: the policy's own first."""

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
        """Return when it ends if its client has moved on to another one."""
        middle = sorted(self.periods)[len(self.periods) // 2] if self.periods else 0.0
        return self.last_used + max(forget_s, _PERIODS * middle)


@dataclass(eq=False)
class ClientConnection:
    """One connection and its episodes."""

    number: int
    sessions: dict[str, Session] = field(default_factory=dict)
    busy: Session | None = None
    """The one with a request in flight: a connection has one at a time."""

    newest: str | None = None
    """Id of the session used last."""

    episodes: dict[str, int] = field(default_factory=dict)
    """Number of the next episode under each id that was reset."""

    lost: set[str] = field(default_factory=set)
    """Ids of sessions that ended although nobody reset them."""


class SessionTable:
    """The policy's sessions, free and taken. What holds one is never put out of it while in use."""

    def __init__(self, count: int, forget_s: float, clock: Clock = time.monotonic) -> None:
        self.count = count
        self._free = deque(f"seat-{number}" for number in range(count))
        self._forget_s = forget_s
        self._clock = clock

    @property
    def free(self) -> int:
        """Return how many are free."""
        return len(self._free)

    def find(self, client: ClientConnection, name: str, *, restart_lost: bool) -> Session | None:
        """Return the episode that runs under ``name``, or None where one is to begin.

        Raises:
            SessionLostError: it has ended without a reset, and what it remembered is gone.
        """
        session = client.sessions.get(name)
        if session is None and name in client.lost and not restart_lost:
            raise SessionLostError(
                f"session {name!r} was idle while newer ones were used, and has ended: what the "
                "policy remembered of its episode is gone. Reset it to begin a new one; serve with "
                "--forget-s SECONDS to keep sessions longer, or --lost-session restart"
            )
        return session

    def take(self, client: ClientConnection, name: str) -> Session | None:
        """Begin an episode under ``name``, or return None where there is no room now.

        Raises:
            SessionError: there never will be: this connection holds all seats, and uses them.
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
        """End what runs under ``name``, as its client asks; see :meth:`give_back`.

        Args:
            client: Whose.
            name: Session id; one that is unknown may be ended too.
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
        """End a session that was abandoned; see :meth:`give_back`.

        Raises:
            SessionError: the connection has abandoned more than are kept in mind.
        """
        if len(client.lost) >= _MOST_KEPT:
            raise SessionError(f"{_MOST_KEPT} sessions of one connection were never reset")
        del client.sessions[session.id]
        client.lost.add(session.id)

    def give_back(self, session: Session) -> None:
        """Let others have the seat; the policy has let go of it."""
        self._free.append(session.seat)

    def abandoned(self, client: ClientConnection) -> Iterator[Session]:
        """Yield episodes that ``client`` has left for newer ones long ago, without a reset.

        Never the newest one, and never one with a request in flight.
        """
        now = self._clock()
        for name, session in list(client.sessions.items()):
            if name == client.newest or session is client.busy:
                continue
            if now >= session.expires(self._forget_s):
                yield session
