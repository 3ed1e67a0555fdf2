"""How a policy is served."""

from dataclasses import dataclass
from pathlib import Path

from dzrobot.errors import ConfigError
from dzrobot.policies.serving.wire import LARGEST_MESSAGE

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
        counts = ("max_sessions", "max_connections", "max_message", "max_batch")
        for name in counts:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                faults.append(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("handshake_s", "idle_s", "room_s", "forget_s", "drain_s"):
            if not getattr(self, name) > 0:
                faults.append(f"{name}={getattr(self, name)} must be above 0")
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
