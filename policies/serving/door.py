"""What is decided before a connection is opened: probes, keys, paths, room."""

import hmac
import ssl
from collections.abc import Callable
from http import HTTPStatus

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from dzrobot.errors import ConfigError
from dzrobot.policies.serving.dialects import VLLM_PATH
from dzrobot.policies.serving.metrics import CONTENT_TYPE, ServerMetrics
from dzrobot.policies.serving.options import ServeOptions

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
