"""One connection of a client to a policy server: opened, opened again after a loss, closed."""

import contextlib
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    InvalidURI,
)
from websockets.sync.client import ClientConnection, connect

from dzrobot.documents import read_bytes, shorten, validated
from dzrobot.errors import ConfigError, ProtocolError, ServerError, SessionLostError
from dzrobot.files import undone_on_error
from dzrobot.policies.serving.dialects import SUBPROTOCOL, VLLM_PATH, Dialect, Greeting
from dzrobot.policies.serving.msgpack_arrays import LARGEST_MESSAGE, pack, unpack

_PING_S, _PONG_S = 60, 600
_TRY_AGAIN = 503
_TRY_LATER = (OSError, TimeoutError, ConnectionClosed, InvalidMessage, InvalidStatus)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0


KEY_VARIABLE = "DZROBOT_API_KEY"
"""Environment variable of the key, where no file is named."""

_LONGEST_KEY = 4096


def read_key(file: Path | None) -> str | None:
    """Return the key in the first line of ``file``, else in `KEY_VARIABLE`; None: there is none.

    Raises:
        ConfigError: it is empty, or no printable ASCII text, which is all that HTTP carries.
    """
    if file is not None:
        content = read_bytes(file, ConfigError, largest=_LONGEST_KEY)
        key, where = content.decode("utf-8", "replace").partition("\n")[0].strip(), "the file"
    elif KEY_VARIABLE in os.environ:
        key, where = os.environ[KEY_VARIABLE].strip(), f"the variable {KEY_VARIABLE}"
    else:
        return None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where} holds no key: it is a line of printable ASCII characters")
    return key


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """How long a client waits, and what it presents."""

    api_key: str | None = field(default=None, repr=False)
    connect_s: float = 60.0
    """To be let in, while a server starts or is full."""

    first_s: float = 300.0
    """For the first plan of an episode: the first call of a network compiles."""

    later_s: float = 30.0
    """For every other answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerAnswer:
    """One plan as it came."""

    actions: NDArray[Any]
    targets: object
    """As :class:`~dzrobot.policies.base.Plan` has it, unchecked; None: the server does not say."""

    normalized: object
    round_trip_ms: float
    timing: Mapping[str, float]
    """What the server says of its time, in milliseconds; may be empty."""

    sent_bytes: int
    received_bytes: int

    @property
    def server_ms(self) -> float | None:
        """Return how long the server had the request, if it says so."""
        return self.timing.get("server_ms", self.timing.get("infer_ms"))


class Connection:
    """A WebSocket to one server; see :meth:`ask`.

    Args:
        server: ``ws://`` or ``wss://`` address.
        options: How long is waited.

    Raises:
        ConfigError: no such address.
        ServerError: the server cannot be reached, or lets nobody in.
    """

    def __init__(self, server: str, options: ConnectOptions) -> None:
        self._server, self._options = server, options
        self.life = 0
        """Counts how often the connection was made: with each, the server knows nothing."""

        self.metadata: Mapping[str, Any] = {}
        self.greeting: Greeting | None = None
        self.dialect = Dialect.OPENPI
        self._socket: ClientConnection | None = None
        self.ensure()

    @property
    def sessions(self) -> bool:
        """Return whether the server tells episodes of one connection apart."""
        return self.dialect is not Dialect.OPENPI

    def ensure(self) -> None:
        """Connect unless it is connected; a server that starts or is full is waited for."""
        if self._socket is not None:
            # A connection that was closed in the meantime is noticed here, not by a request.
            if self._socket.close_code is None:
                return
            self._drop()
        until = time.monotonic() + self._options.connect_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                self._open(max(0.001, until - time.monotonic()))
                return
            except _TRY_LATER as error:
                if isinstance(error, InvalidStatus) and error.response.status_code != _TRY_AGAIN:
                    raise ServerError(_refusal(self._server, error)) from error
                if time.monotonic() + pause >= until:
                    raise ServerError(
                        f"no connection to {self._server} within {self._options.connect_s:g} s: "
                        f"{_reason(error)}; is the server running, and is this its address?"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def ask(self, request: Mapping[str, Any], *, first: bool) -> ServerAnswer:
        """Return the plan that answers ``request``.

        Args:
            request: The message.
            first: Whether it is the first of its episode, for which more time is given.

        Raises:
            SessionLostError: the connection broke; the server has forgotten the episode.
            ServerError: the server refuses, or its answer is none.
        """
        began = time.perf_counter()
        message = pack(request)
        wait_s = self._options.first_s if first else self._options.later_s
        answer = self._exchange(message, wait_s)
        spent = 1000 * (time.perf_counter() - began)
        if isinstance(answer, str):
            raise ServerError(f"{self._server} refuses: {answer.strip()[-2000:]}")
        actions, content = self._read(answer)
        timing = content.get("server_timing")
        numbers = timing.items() if isinstance(timing, dict) else ()
        return ServerAnswer(
            actions=actions,
            targets=content.get("targets"),
            normalized=content.get("normalized"),
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
        # Any answer will do; where there is none, the server has forgotten the session anyway.
        with contextlib.suppress(SessionLostError):
            self._exchange(pack(request), self._options.later_s)

    def close(self) -> None:
        """Close; :meth:`ensure` connects again."""
        if self._socket is not None:
            self._socket.close()
            self._drop()

    def _open(self, within_s: float) -> None:
        key = self._options.api_key
        try:
            opening = connect(
                self._server,
                subprotocols=[SUBPROTOCOL],
                additional_headers={"Authorization": f"Api-Key {key}"} if key else None,
                compression=None,
                max_size=LARGEST_MESSAGE,
                open_timeout=within_s,
                ping_interval=_PING_S,
                ping_timeout=_PONG_S,
                proxy=None,
            )
            # Closed by close(); the library wants its use to be that of a context.
            socket = contextlib.ExitStack().enter_context(opening)
        except ssl.SSLCertVerificationError as error:
            # Before the next clause: this too is a ValueError.
            raise ServerError(
                f"{self._server} shows a certificate that is not trusted here "
                f"({error.verify_message}): name the file of a self-made one in the variable "
                "SSL_CERT_FILE, and the server as its certificate does"
            ) from error
        except (InvalidURI, ValueError) as error:
            raise ConfigError(
                f"{self._server!r} is no address of a server: write ws://HOST:PORT, or wss:// "
                "for TLS"
            ) from error
        except InvalidHandshake as error:
            if isinstance(error, InvalidMessage | InvalidStatus):
                raise
            raise ServerError(f"{self._server} is no policy server: {error}") from error
        with undone_on_error(socket.close):
            self._greeted(socket, socket.recv(timeout=within_s))
        self._socket = socket

    def _greeted(self, socket: ClientConnection, message: bytes | str) -> None:
        if isinstance(message, str):
            raise ServerError(f"{self._server} says: {message[:500]}")
        content = unpack(message)
        if not isinstance(content, dict):
            raise ServerError(f"{self._server} greets with {shorten(content)}, which is no map")
        self.metadata = {str(key): value for key, value in content.items()}
        if socket.subprotocol == SUBPROTOCOL:
            self.dialect = Dialect.DZROBOT
            where = f"the greeting of {self._server}"
            greeting = validated(content, Greeting, where, ProtocolError)
            if self.greeting is not None and greeting != self.greeting:
                raise ServerError(
                    f"{self._server} now serves another policy than when this run began; start over"
                )
            self.greeting = greeting
        elif self._server.partition("?")[0].endswith(VLLM_PATH):
            self.dialect = Dialect.VLLM
        elif "needs_session_id" in content:
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
                f"the connection to {self._server} broke ({_reason(error)}), and what the server "
                "remembered of the episode is gone"
            ) from error

    def _read(self, answer: bytes) -> tuple[NDArray[Any], dict[str, Any]]:
        """Return the actions, and the map that they came in."""
        content = unpack(answer)
        if isinstance(content, np.ndarray):
            return content, {}
        if not isinstance(content, dict):
            raise ServerError(f"{self._server} answered {shorten(content)}, which is no plan")
        if content.get("type") == "error":
            kind = SessionLostError if content.get("kind") == "SessionLostError" else ServerError
            raise kind(f"{self._server} refuses: {str(content.get('message'))[:2000]}")
        actions = content.get("actions", content.get("action"))
        if not isinstance(actions, np.ndarray):
            raise ServerError(
                f"{self._server} answered a map with {shorten(sorted(map(str, content)))}, which "
                "holds no array of actions"
            )
        return actions, content

    def _drop(self) -> None:
        """Forget a connection; the next one tells whoever had an episode on it."""
        self._socket = None
        self.life += 1


def _refusal(server: str, error: InvalidStatus) -> str:
    status = error.response.status_code
    reason = (error.response.body or b"").decode(errors="replace").strip()[:500]
    advice = "; give the key with --api-key-file" if status == 401 else ""
    return f"{server} lets nobody in (HTTP {status}: {reason or 'no reason given'}){advice}"


def _reason(error: Exception) -> str:
    if isinstance(error, InvalidStatus):
        body = (error.response.body or b"").decode(errors="replace").strip()
        return f"HTTP {error.response.status_code} {body[:300]}"
    return str(error) or type(error).__name__
