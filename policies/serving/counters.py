"""What a server counts, in Prometheus' text format."""

from typing import Any

from dzrobot.errors import MissingDependencyError

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
                "the server counts with prometheus_client: pip install -e '.[serve]'"
            ) from error
        self._write = prometheus.generate_latest
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
        """Return all of it."""
        written: bytes = self._write(self.registry)
        return written
