"""Where a server listens and who may connect; its HTTP endpoint: probes and Prometheus metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from dzrobot.declared import Flag
from dzrobot.errors import ConfigError, MissingDependencyError
from dzrobot.importing import install
from dzrobot.policies.serving.dialects import VLLM_PATH
from dzrobot.policies.serving.sessions import MOST_SESSIONS
from dzrobot.websocket import RETRY_AFTER_S, ServerAccess


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServerAccess):
    """Address, access and limits of a server of a policy."""

    port: Annotated[int, Flag("port for clients that send maps", least=0, most=65535)] = 8000
    """For clients that expect a map (openpi, RoboArena); 0: the system chooses."""

    array_port: Annotated[int | None, Flag(
        "port for clients that send bare arrays", least=0, most=65535,
    )] = 5000  # fmt: skip
    """For clients that expect a bare array (DreamZero's, Arena, RoboLab); None: not served."""

    max_sessions: Annotated[int | None, Flag(
        f"episodes at a time (default: what memory allows, up to {MOST_SESSIONS})",
        least=1, most=4096,
    )] = None  # fmt: skip
    """Episodes at a time; None: as many as memory allows, up to 256."""

    max_connections: Annotated[int, Flag("clients at a time", least=1, most=65536)] = 256
    max_message: Annotated[int | None, Flag(
        "largest message (default: what the robot's largest request takes, 16 to 64)",
        name="max-message-mib", metavar="MIB", least=1, most=1024,
        becomes=lambda mebibytes: mebibytes * 1024**2,
    )] = None  # fmt: skip
    """Bytes of one message; None: what a request of the robot may have, 16 to 64 MiB."""

    max_batch: Annotated[int, Flag(
        "sessions that plan in one call: faster on a GPU, last bits vary", least=1, most=256,
    )] = 1  # fmt: skip
    """Sessions that plan in one call. 1: the actions of a session do not depend on the others, not
    even in the last bits."""

    window_s: Annotated[float, Flag(
        "longest time that a request waits for others to share its call",
        name="batch-window-ms", alias="window-ms", metavar="MS", least=0, most=1000,
        becomes=lambda ms: ms / 1000,
    )] = 0.0  # fmt: skip
    """How long a request waits for others to share its call, in seconds."""

    handshake_s: float = 10.0
    """Seconds to open a connection."""

    idle_s: Annotated[float, Flag(
        "seconds without a message after which a connection is closed", least=0.001, most=10**6,
    )] = 1800.0  # fmt: skip
    """Seconds between two messages of a connection."""

    room_s: Annotated[float, Flag(
        "seconds that a new session waits for a free seat", least=0.001, most=10**6,
    )] = 60.0  # fmt: skip
    """Seconds that a new session waits for a free seat."""

    forget_s: Annotated[float, Flag(
        "seconds after which a session ends that was left for a newer one without a reset",
        least=0.001, most=10**6,
    )] = 600.0  # fmt: skip
    """Seconds after which a session ends that its client left for a newer one without a reset."""

    drain_s: float = 30.0
    """Seconds to finish running requests when the server is stopped."""

    restart_lost: Annotated[bool, Flag(
        "what happens when a session that has ended is used again (default: error)",
        name="lost-session", words={"error": False, "restart": True},
    )] = False  # fmt: skip
    """Whether a session that has ended restarts when it is used again; else that is an error."""

    def __post_init__(self) -> None:
        counts = {
            "max_sessions": self.max_sessions, "max_connections": self.max_connections,
            "max_message": self.max_message, "max_batch": self.max_batch,
        }  # fmt: skip
        seconds = {
            "handshake_s": self.handshake_s, "idle_s": self.idle_s, "room_s": self.room_s,
            "forget_s": self.forget_s, "drain_s": self.drain_s,
        }  # fmt: skip
        faults = [
            *self._port_faults(),
            *self.access_faults("this policy"),
            *(f"{k}={v} must be at least 1" for k, v in counts.items() if v is not None and v < 1),
            *(f"{k}={v} must be above 0" for k, v in seconds.items() if not v > 0),
        ]
        if not 0 <= self.window_s <= 1:
            faults.append(f"window_s={self.window_s} must lie between 0 and 1")
        if faults:
            raise ConfigError("the server cannot start: " + "; ".join(faults))

    def _port_faults(self) -> list[str]:
        faults = []
        if not 0 <= (self.array_port or 0) < 65536:
            faults.append(f"port {self.array_port} must lie between 0 and 65535")
        if self.port and self.port == self.array_port:
            faults.append(f"both listeners would use port {self.port}")
        return faults


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32)


class ServerMetrics:
    """Counters of one server; a registry of its own, so that servers of one process do not mix.

    Raises:
        MissingDependencyError: prometheus_client is not installed.
    """

    def __init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise MissingDependencyError(
                f"the server needs prometheus_client for its metrics: {install('serve')}"
            ) from error
        self._render = prometheus.generate_latest
        self.registry: Any = prometheus.CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "dzrobot"}
        self.requests: Any = prometheus.Counter(
            "requests", "Requests, by dialect, endpoint and outcome",
            ("dialect", "endpoint", "outcome"), **own,
        )  # fmt: skip
        self.refused: Any = prometheus.Counter(
            "refused_connections", "Connections refused before they were opened", ("reason",), **own
        )
        self.received: Any = prometheus.Counter("received_bytes", "Bytes of messages", **own)
        self.sent: Any = prometheus.Counter("sent_bytes", "Bytes of answers", **own)
        self.late: Any = prometheus.Counter(
            "late_requests", "Answers after their deadline, or after the plan before was used up",
            **own,
        )  # fmt: skip
        self.connections: Any = prometheus.Gauge("connections", "Open connections", **own)
        self.sessions: Any = prometheus.Gauge("sessions", "Open sessions", **own)
        self.room: Any = prometheus.Gauge("sessions_room", "Sessions that fit", **own)
        self.session_bytes: Any = prometheus.Gauge(
            "session_bytes", "Bytes of memory that one session takes", **own
        )
        self.waiting: Any = prometheus.Gauge(
            "requests_waiting", "Requests that wait for the network", **own
        )
        self.running: Any = prometheus.Gauge(
            "requests_running", "Requests whose plans are being computed", **own
        )
        self.queue: Any = prometheus.Histogram(
            "queue_seconds", "Waiting for the network", buckets=_SECONDS, **own
        )
        self.part: Any = prometheus.Histogram(
            "plan_seconds", "Parts of a call", ("part",), buckets=_SECONDS, **own
        )
        self.batch: Any = prometheus.Histogram(
            "batch_sessions", "Sessions of one call", buckets=_BATCHES, **own
        )

    def text(self) -> bytes:
        """Return all of them as text."""
        rendered: bytes = self._render(self.registry)
        return rendered


_PATHS = ("/", VLLM_PATH)


class HttpEndpoint:
    """Answers plain HTTP requests, and accepts or refuses WebSocket connections.

    Args:
        options: Holds the API key.
        metrics: What ``/metrics`` returns; refusals are counted there.
        failure: Returns why the server should be replaced, or ''.
        unready: Returns why no connection is accepted now, or ''.
    """

    def __init__(
        self,
        options: ServeOptions,
        metrics: ServerMetrics,
        *,
        failure: Callable[[], str],
        unready: Callable[[], str],
    ) -> None:
        self._access = options
        self._metrics = metrics
        self._failure, self._unready = failure, unready

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the answer to an HTTP request, or None where a WebSocket is accepted."""
        path = request.path.partition("?")[0]
        match path:
            case "/healthz" | "/health":
                return _state(connection, self._failure())
            case "/readyz":
                return _state(connection, self._failure() or self._unready())
        if not self._access.has_key(request):
            return self._refuse(
                connection, HTTPStatus.UNAUTHORIZED, "key",
                "this server requires a key: send Authorization: Api-Key KEY",
            )  # fmt: skip
        if path == "/metrics":
            response = connection.respond(HTTPStatus.OK, self._metrics.text().decode())
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = CONTENT_TYPE
            return response
        if path not in _PATHS:
            return self._refuse(
                connection, HTTPStatus.NOT_FOUND, "path", f"not found; WebSocket paths are {_PATHS}"
            )
        if reason := self._failure() or self._unready():
            response = self._refuse(connection, HTTPStatus.SERVICE_UNAVAILABLE, "room", reason)
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        return None

    def _refuse(
        self, connection: ServerConnection, status: HTTPStatus, reason: str, text: str
    ) -> Response:
        self._metrics.refused.labels(reason).inc()
        return connection.respond(status, f"{text}\n")


def _state(connection: ServerConnection, reason: str) -> Response:
    if reason:
        return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n")
    return connection.respond(HTTPStatus.OK, "OK\n")
