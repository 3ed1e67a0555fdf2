"""WebSockets between programs: who may connect to a server, and how a client connects to one."""

import contextlib
import hmac
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    InvalidURI,
)
from websockets.http11 import Request
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from dzrobot.declared import Flag
from dzrobot.documents import read_bytes
from dzrobot.errors import ConfigError, ServerError
from dzrobot.untrusted import LARGEST_MESSAGE

PING_S, PONG_S = 60, 600
"""As in DreamZero's clients: a client that is busy with its robot is not a dead one."""

VANISHED_S = 50
"""Seconds after which a connection ends whose machine answers nothing: switched off, or out of
reach. Its system answers for a client that is busy or stopped."""

RETRY_AFTER_S = 5
"""What a server that is full tells its clients."""

KEY_VARIABLE = "DZROBOT_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SCHEMES = ("Api-Key ", "Bearer ")
_LONGEST_KEY = 4096
_TRY_AGAIN = 503
_TRY_LATER = (OSError, TimeoutError, ConnectionClosed, InvalidMessage, InvalidStatus)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """Where a server listens, and who may connect."""

    host: Annotated[str, Flag("address to bind")] = "127.0.0.1"
    port: Annotated[int, Flag("port to listen on", least=0, most=65535)] = 8000
    """0: the system chooses."""

    api_key: Annotated[str | None, Flag(
        "whose first line is the server's key (default: the variable DZROBOT_API_KEY)",
        name="api-key-file", metavar="FILE", kind="path", becomes=lambda file: read_key(file),
    )] = None  # fmt: skip
    """Key that clients must present; None: any client that reaches the port may connect."""

    insecure: Annotated[bool, Flag("let other machines in without a key")] = False
    """Whether other machines may connect without a key."""

    certificate: Annotated[Path | None, Flag("certificate of TLS, PEM", name="cert")] = None
    private_key: Annotated[Path | None, Flag("its private key, PEM", name="key")] = None
    """Files for TLS; both or neither."""

    def access_faults(self, what: str) -> list[str]:
        """Return what is wrong.

        Args:
            what: What whoever connects may use, for the message.
        """
        faults = []
        if self.host not in LOOPBACK and self.api_key is None and not self.insecure:
            faults.append(
                f"host={self.host} lets other machines use {what}: give an API key, or add "
                "--insecure"
            )
        if self.api_key is not None and not self.api_key.strip():
            faults.append("the API key is empty")
        if (self.certificate is None) != (self.private_key is None):
            faults.append("TLS needs both a certificate and its private key")
        if not 0 <= self.port < 65536:
            faults.append(f"port {self.port} must lie between 0 and 65535")
        return faults

    def url(self, port: int) -> str:
        """Return the address that clients give, at ``port``."""
        scheme = "ws" if self.certificate is None else "wss"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}"

    def has_key(self, request: Request) -> bool:
        """Return whether ``request`` presents the key, if there is one."""
        if self.api_key is None:
            return True
        given = request.headers.get_all("Authorization")
        if len(given) != 1:
            return False
        for scheme in _SCHEMES:
            if given[0].startswith(scheme):
                key = given[0].removeprefix(scheme).encode()
                return hmac.compare_digest(key, self.api_key.encode())
        return False

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS of this server, or None.

        Raises:
            ConfigError: certificate and key cannot be read, or do not belong together.
        """
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key)
        except OSError as error:
            raise ConfigError(
                f"TLS with {self.certificate} and {self.private_key}: {error}"
            ) from error
        return context


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


def open_socket(
    server: str,
    greet: Callable[[ClientConnection, float], None],
    *,
    subprotocol: Subprotocol,
    key: str | None,
    within_s: float,
) -> ClientConnection:
    """Return an open connection, waiting for a server that is starting or full.

    Args:
        server: ``ws://`` or ``wss://`` address.
        greet: Called with every connection that opens, and the seconds that are left.
        subprotocol: What the client prefers to speak.
        key: Of the server, if it wants one.
        within_s: Seconds to connect, all attempts together.

    Raises:
        ConfigError: no such address.
        ServerError: the server cannot be reached, or refuses the connection.
    """
    until, pause = time.monotonic() + within_s, _FIRST_PAUSE_S
    while True:
        try:
            with contextlib.ExitStack() as closing:
                left = max(0.001, until - time.monotonic())
                socket = closing.enter_context(_handshake(server, subprotocol, key, left))
                greet(socket, left)
                # From here on the caller closes it.
                closing.pop_all()
            return socket
        except _TRY_LATER as error:
            if isinstance(error, InvalidStatus) and error.response.status_code != _TRY_AGAIN:
                raise ServerError(_refusal(server, error)) from error
            if time.monotonic() + pause >= until:
                raise ServerError(
                    f"no connection to {server} within {within_s:g} s: {reason(error)}; is the "
                    "server running, and is this its address?"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def reason(error: Exception) -> str:
    """Return why a connection failed, in words."""
    if isinstance(error, InvalidStatus):
        body = (error.response.body or b"").decode(errors="replace").strip()
        return f"HTTP {error.response.status_code} {body[:300]}"
    return str(error) or type(error).__name__


def end_vanished(listeners: Iterable[Any]) -> None:
    """Have the system end connections that ``listeners`` accept if their machine vanishes.

    Without it, a cable that is pulled is noticed after ``PING_S + PONG_S``.

    Args:
        listeners: Listening sockets, whose options those of their connections become.
    """
    wanted = {
        "TCP_KEEPIDLE": VANISHED_S - 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3,
        # Where something was sent, the system tries to deliver it, and does not ask.
        "TCP_USER_TIMEOUT": 1000 * VANISHED_S,
    }  # fmt: skip
    # No system but Linux has all of them.
    known = {
        getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)
    }
    for listener in listeners:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in known.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _handshake(
    server: str, subprotocol: Subprotocol, key: str | None, within_s: float
) -> ClientConnection:
    try:
        return connect(
            server,
            subprotocols=[subprotocol],
            additional_headers={"Authorization": f"Api-Key {key}"} if key else None,
            compression=None,
            max_size=LARGEST_MESSAGE,
            open_timeout=within_s,
            ping_interval=PING_S,
            ping_timeout=PONG_S,
            proxy=None,
        )
    except ssl.SSLCertVerificationError as error:
        # Before the next clause: this is a ValueError too.
        raise ServerError(
            f"the certificate of {server} is not trusted ({error.verify_message}): for a "
            "self-signed one set SSL_CERT_FILE to its file, and use the host name that it names"
        ) from error
    except (InvalidURI, ValueError) as error:
        raise ConfigError(
            f"{server!r} is no server address: write ws://HOST:PORT, or wss:// for TLS"
        ) from error
    except InvalidHandshake as error:
        if isinstance(error, InvalidMessage | InvalidStatus):
            raise
        raise ServerError(f"{server} is no server of this kind: {error}") from error


def _refusal(server: str, error: InvalidStatus) -> str:
    status = error.response.status_code
    body = (error.response.body or b"").decode(errors="replace").strip()[:500]
    advice = "; give the key with --api-key-file" if status == 401 else ""
    return f"{server} refuses the connection (HTTP {status}: {body or 'no reason given'}){advice}"
