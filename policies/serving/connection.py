"""One WebSocket connection of a client to a server: opening, reconnecting, requests, closing."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from dzrobot.documents import shorten, validated
from dzrobot.errors import (
    InvalidActionError,
    ProtocolError,
    ServerError,
    SessionLostError,
)
from dzrobot.messages import pack, unpack
from dzrobot.policies.serving.dialects import (
    SUBPROTOCOL,
    VLLM_PATH,
    Dialect,
    Greeting,
    ImageCoding,
)
from dzrobot.websocket import open_socket, reason

_RAISED_HERE = {kind.__name__: kind for kind in (SessionLostError, InvalidActionError)}
"""Errors of a server that are raised as what they are; others are a `ServerError`."""


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """Timeouts of a client, and its API key."""

    api_key: str | None = field(default=None, repr=False)
    connect_s: float = 60.0
    """Seconds to connect, while a server starts or is full."""

    first_s: float = 300.0
    """Seconds for the first plan of an episode: the first call of a network compiles."""

    later_s: float = 30.0
    """Seconds for every other answer."""

    images: ImageCoding = "raw"
    """How images are sent; a server of dzrobot's announces what it reads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerAnswer:
    """One plan as the server sent it."""

    actions: NDArray[Any]
    targets: object
    """As in :class:`~dzrobot.policies.base.Plan`, unchecked; None: the server does not send it."""

    normalized: object
    round_trip_ms: float
    timing: Mapping[str, float]
    """The server's own times, in milliseconds; may be empty."""

    sent_bytes: int
    received_bytes: int

    @property
    def server_ms(self) -> float | None:
        """Return how long the server had the request, if it reports that."""
        return self.timing.get("server_ms", self.timing.get("infer_ms"))


class Connection:
    """A WebSocket to one server; see :meth:`request_plan`.

    Args:
        server: ``ws://`` or ``wss://`` address.
        options: Timeouts and key.

    Raises:
        ConfigError: no such address.
        ServerError: the server cannot be reached, or refuses the connection.
    """

    def __init__(self, server: str, options: ConnectOptions) -> None:
        self._server, self._options = server, options
        self.generation = 0
        """How often the connection was made; the server's memory does not outlive one."""

        self.metadata: Mapping[str, Any] = {}
        self.greeting: Greeting | None = None
        self.dialect = Dialect.OPENPI
        self._socket: ClientConnection | None = None
        self.ensure()

    @property
    def sessions(self) -> bool:
        """Return whether one connection can carry several episodes."""
        return self.dialect is not Dialect.OPENPI

    def ensure(self) -> None:
        """Connect if necessary, waiting for a server that is starting or full."""
        if self._socket is not None:
            # A connection that was closed in the meantime is noticed before a request is sent.
            if self._socket.close_code is None:
                return
            self._drop()
        self._socket = open_socket(
            self._server,
            self._greet,
            subprotocol=SUBPROTOCOL,
            key=self._options.api_key,
            within_s=self._options.connect_s,
        )

    def request_plan(self, request: Mapping[str, Any], *, first: bool) -> ServerAnswer:
        """Return the plan that answers ``request``.

        Args:
            request: The message.
            first: Whether it is the first of its episode, for which more time is given.

        Raises:
            SessionLostError: the connection broke; the server has forgotten the episode.
            InvalidActionError: the policy predicted what is not an action.
            ServerError: the server refuses, or its answer is not a plan.
        """
        began = time.perf_counter()
        message = pack(request)
        wait_s = self._options.first_s if first else self._options.later_s
        answer = self._exchange(message, wait_s)
        spent = 1000 * (time.perf_counter() - began)
        if isinstance(answer, str):
            raise ServerError(f"{self._server} refuses: {answer.strip()[-2000:]}")
        actions, fields = self._read(answer)
        timing = fields.get("server_timing")
        numbers = timing.items() if isinstance(timing, dict) else ()
        return ServerAnswer(
            actions=actions,
            targets=fields.get("targets"),
            normalized=fields.get("normalized"),
            round_trip_ms=spent,
            timing={str(k): float(v) for k, v in numbers if isinstance(v, int | float)},
            sent_bytes=len(message),
            received_bytes=len(answer),
        )

    def reset(self, session: str, episode: int | None = None) -> None:
        """Tell the server that ``session`` is over, and the number of its next episode."""
        request: dict[str, Any] = {"endpoint": "reset", "session_id": session}
        request["session_ids"] = [session]
        if episode is not None:
            request["episode"] = episode
        # Any answer will do; without one, the server has forgotten the session anyway.
        with contextlib.suppress(SessionLostError):
            self._exchange(pack(request), self._options.later_s)

    def close(self) -> None:
        """Close; :meth:`ensure` connects again."""
        if self._socket is not None:
            self._socket.close()
            self._drop()

    def _greet(self, socket: ClientConnection, within_s: float) -> None:
        """Read what the server says first."""
        message = socket.recv(timeout=within_s)
        if isinstance(message, str):
            raise ServerError(f"{self._server} says: {message[:500]}")
        fields = unpack(message)
        if not isinstance(fields, dict):
            raise ServerError(
                f"{self._server} sent {shorten(fields)} as its greeting, which is not a map"
            )
        self.metadata = {str(key): value for key, value in fields.items()}
        if socket.subprotocol == SUBPROTOCOL:
            self.dialect = Dialect.DZROBOT
            where = f"the greeting of {self._server}"
            greeting = validated(fields, Greeting, where, ProtocolError)
            if self.greeting is not None and greeting != self.greeting:
                raise ServerError(
                    f"{self._server} now serves another policy than when this run began: start "
                    "again"
                )
            self.greeting = greeting
        elif self._server.partition("?")[0].endswith(VLLM_PATH):
            self.dialect = Dialect.VLLM
        elif "needs_session_id" in fields:
            self.dialect = Dialect.DREAMZERO

    def _exchange(self, message: bytes, wait_s: float) -> bytes | str:
        if self._socket is None:
            raise SessionLostError(f"there is no connection to {self._server}")
        try:
            self._socket.send(message)
            return self._socket.recv(timeout=wait_s)
        except TimeoutError as error:
            # A late answer would be taken for that of the next request.
            self.close()
            raise ServerError(f"{self._server} has not answered within {wait_s:g} s") from error
        except ConnectionClosed as error:
            self._drop()
            raise SessionLostError(
                f"the connection to {self._server} broke ({reason(error)}), and what the server "
                "remembered of the episode is gone"
            ) from error

    def _read(self, answer: bytes) -> tuple[NDArray[Any], dict[str, Any]]:
        """Return the actions, and the map they came in."""
        fields = unpack(answer)
        if isinstance(fields, np.ndarray):
            return fields, {}
        if not isinstance(fields, dict):
            raise ServerError(f"{self._server} answered {shorten(fields)}, which is not a plan")
        if fields.get("type") == "error":
            kind = _RAISED_HERE.get(str(fields.get("kind")), ServerError)
            raise kind(f"{self._server} refuses: {str(fields.get('message'))[:2000]}")
        actions = fields.get("actions", fields.get("action"))
        if not isinstance(actions, np.ndarray):
            raise ServerError(
                f"{self._server} answered a map with {shorten(sorted(map(str, fields)))}, which "
                "holds no array of actions"
            )
        return actions, fields

    def _drop(self) -> None:
        """Forget a connection; its episodes see that from the new generation."""
        self._socket = None
        self.generation += 1
