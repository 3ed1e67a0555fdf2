"""How a policy is served."""

import hmac
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from dzrobot.errors import ConfigError
from dzrobot.policies.serving.counters import CONTENT_TYPE, ServerMetrics
from dzrobot.policies.serving.dialects import VLLM_PATH
from dzrobot.policies.serving.msgpack_arrays import LARGEST_MESSAGE

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where the server listens, whom it lets in, and how much of everything it takes."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Of clients that expect a map (openpi, RoboArena); 0: the system chooses."""

    array_port: int | None = 5000
    """Of clients that expect a bare array (DreamZero's, Arena, RoboLab); None: not served."""

    api_key: str | None = None
    """What clients must present; None: everybody who reaches the port is let in."""

    insecure: bool = False
    """Whether other machines may connect although there is no key."""

    certificate: Path | None = None
    private_key: Path | None = None
    """Of TLS; both or neither."""

    max_sessions: int | None = None
    """Episodes that may run at a time; None: as many as memory allows, up to 256."""

    max_connections: int = 256
    max_message: int = LARGEST_MESSAGE
    """Bytes."""

    max_batch: int = 1
    """Sessions that plan in one call. 1: the actions of a session do not depend on the others, not
    even in the last bits."""

    window_s: float = 0.0
    """How long a request waits for others to share its call."""

    handshake_s: float = 10.0
    """To open a connection."""

    idle_s: float = 1800.0
    """Between two messages of a connection."""

    room_s: float = 60.0
    """That a new session waits for room."""

    forget_s: float = 600.0
    """After which a session that its client has left for a newer one ends, if it never reset it."""

    drain_s: float = 30.0
    """To finish what has begun when the server is stopped."""

    restart_lost: bool = False
    """Whether a session that has ended starts over when it is used again; else that is an error."""

    def __post_init__(self) -> None:
        faults = [*self._door_faults()]
        given = vars(self)
        for name in ("max_sessions", "max_connections", "max_message", "max_batch"):
            if given[name] is not None and given[name] < 1:
                faults.append(f"{name}={given[name]} must be at least 1")
        for name in ("handshake_s", "idle_s", "room_s", "forget_s", "drain_s"):
            if not given[name] > 0:
                faults.append(f"{name}={given[name]} must be above 0")
        if not 0 <= self.window_s <= 1:
            faults.append(f"window_s={self.window_s} must lie between 0 and 1")
        if faults:
            raise ConfigError("the server cannot be started so: " + "; ".join(faults))

    def _door_faults(self) -> list[str]:
        faults = []
        if self.host not in LOOPBACK and self.api_key is None and not self.insecure:
            faults.append(
                f"host={self.host} lets other machines drive this policy: give an API key, or say "
                "--insecure"
            )
        if self.api_key is not None and not self.api_key.strip():
            faults.append("the API key is empty")
        if (self.certificate is None) != (self.private_key is None):
            faults.append("TLS needs both a certificate and its private key")
        for port in (self.port, self.array_port or 0):
            if not 0 <= port < 65536:
                faults.append(f"port {port} must lie between 0 and 65535")
        if self.port and self.port == self.array_port:
            faults.append(f"both listeners on port {self.port}")
        return faults


RETRY_AFTER_S = 5
_PATHS = ("/", VLLM_PATH)
_SCHEMES = ("Api-Key ", "Bearer ")


class HttpEndpoint:
    """Answers plain HTTP, and lets WebSockets in or not.

    Args:
        options: Says the key.
        metrics: Answer of ``/metrics``; refusals are counted there.
        unwell: Returns why the server should be replaced, or ''.
        unready: Returns why no connection is taken now, or ''.
    """

    def __init__(
        self,
        options: ServeOptions,
        metrics: ServerMetrics,
        *,
        unwell: Callable[[], str],
        unready: Callable[[], str],
    ) -> None:
        self._key = options.api_key
        self._metrics = metrics
        self._unwell, self._unready = unwell, unready

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the answer to an HTTP request, or None where a WebSocket is let in."""
        path = request.path.partition("?")[0]
        match path:
            case "/healthz" | "/health":
                return _state(connection, self._unwell())
            case "/readyz":
                return _state(connection, self._unwell() or self._unready())
        if not self._knows(request):
            return self._refuse(
                connection, HTTPStatus.UNAUTHORIZED, "key",
                "this server wants a key: send Authorization: Api-Key KEY",
            )  # fmt: skip
        if path == "/metrics":
            response = connection.respond(HTTPStatus.OK, self._metrics.text().decode())
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = CONTENT_TYPE
            return response
        if path not in _PATHS:
            return self._refuse(
                connection, HTTPStatus.NOT_FOUND, "path", f"there is nothing here but {_PATHS}"
            )
        if reason := self._unwell() or self._unready():
            response = self._refuse(connection, HTTPStatus.SERVICE_UNAVAILABLE, "room", reason)
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        return None

    def _knows(self, request: Request) -> bool:
        if self._key is None:
            return True
        given = request.headers.get_all("Authorization")
        if len(given) != 1:
            return False
        for scheme in _SCHEMES:
            if given[0].startswith(scheme):
                key = given[0].removeprefix(scheme).encode()
                return hmac.compare_digest(key, self._key.encode())
        return False

    def _refuse(
        self, connection: ServerConnection, status: HTTPStatus, reason: str, text: str
    ) -> Response:
        self._metrics.refused.labels(reason).inc()
        return connection.respond(status, f"{text}\n")


def tls(options: ServeOptions) -> ssl.SSLContext | None:
    """Return the TLS of ``options``, or None.

    Raises:
        ConfigError: certificate and key cannot be read, or do not belong together.
    """
    if options.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.certificate, options.private_key)
    except OSError as error:
        raise ConfigError(
            f"TLS with {options.certificate} and {options.private_key}: {error}"
        ) from error
    return context


def _state(connection: ServerConnection, reason: str) -> Response:
    if reason:
        return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n")
    return connection.respond(HTTPStatus.OK, "OK\n")
