"""Serves environments to clients elsewhere: one for each connection, in a process of its own."""

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from multiprocessing.connection import Connection
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response
from websockets.sync.server import Server, ServerConnection, serve

from dzrobot.declared import Flag
from dzrobot.documents import shorten
from dzrobot.envs.remote.exchange import (
    SUBPROTOCOL,
    Asked,
    Facts,
    Failure,
    Made,
    Make,
    Perturb,
    Render,
    Request,
    Reset,
    Step,
    Turn,
    read,
    write,
    write_info,
    write_space,
    write_value,
)
from dzrobot.errors import ConfigError, DzrobotError, ErrorCapture, ProtocolError
from dzrobot.messages import pack, unpack
from dzrobot.process import end_with_parent, limit_log, log_escaped, searching_here_last
from dzrobot.untrusted import LARGEST_MESSAGE
from dzrobot.websocket import PING_S, PONG_S, RETRY_AFTER_S, ServerAccess, end_vanished

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""How often a busy environment's connection is looked at: a client that left ends it."""

_END_S = 5.0
_VIDEO = "video."


@dataclass(frozen=True, kw_only=True)
class EnvServerOptions(ServerAccess):
    """Address, access and limits of a server of environments."""

    port: Annotated[int, Flag("port to listen on", least=0, most=65535)] = 8100
    """0: the system chooses."""

    most: int = 8
    """Environments at a time."""

    idle_s: Annotated[float, Flag(
        "seconds without a request after which a client's environment is ended", least=0.001,
        most=10**6,
    )] = 1800.0  # fmt: skip
    """Seconds between two requests of a client, which holds a seat meanwhile."""

    def __post_init__(self) -> None:
        faults = self.access_faults("this environment")
        if self.most < 1:
            faults.append(f"most={self.most} must be at least 1")
        if faults:
            raise ConfigError("the server cannot start: " + "; ".join(faults))


@dataclass(frozen=True, kw_only=True, eq=False)
class Hosted:
    """An environment that was made for a client."""

    env: gym.Env[Any, Any]
    omit: Callable[[], None] | None
    """Leaves the images out of the next observation; None: it cannot."""

    facts: Facts
    about: Mapping[str, Any]
    """As in :class:`~dzrobot.envs.remote.exchange.Made`."""


Maker = Callable[[Mapping[str, Any], bool], Hosted]
"""Makes an environment from a client's arguments and whether it is asked for images for people;
it is sent to a new process."""


def look(maker: Maker) -> Made:
    """Make an environment as a server of ``maker`` does, and return what it is.

    Raises:
        ConfigError: it cannot be made.
    """
    with _host_process(maker) as host:
        host.send_bytes(pack(write(Make(arguments={}, draws=False))))
        try:
            content = unpack(host.recv_bytes())
        except EOFError as error:
            raise ConfigError(
                "the environment's process ended while it was made; what it printed says why"
            ) from error
    if content.keys() == Failure.model_fields.keys():
        raise ConfigError(f"the environment cannot be made: {content['message']}")
    made: Made = read(content, Made, "the environment")
    return made


class EnvServer:
    """Listens from now on, and serves environments; see :meth:`run`.

    Args:
        maker: Makes one.
        options: Address, access and limits.

    Raises:
        ConfigError: the port is taken, or TLS cannot be set up.
    """

    def __init__(self, maker: Maker, options: EnvServerOptions) -> None:
        self._maker, self._options = maker, options
        self._seats = threading.BoundedSemaphore(options.most)
        self._open: set[ServerConnection] = set()
        try:
            self._server: Server = serve(
                self._serve, options.host, options.port,
                ssl=options.tls(), process_request=self._admit,
                # Browsers send an origin: no web page may use an environment.
                origins=[None], subprotocols=[SUBPROTOCOL], compression=None,
                max_size=LARGEST_MESSAGE, ping_interval=PING_S, ping_timeout=PONG_S,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; "
                "choose another --port"
            ) from error
        end_vanished([self._server.socket])

    @property
    def port(self) -> int:
        """Return the port."""
        number: int = self._server.socket.getsockname()[1]
        return number

    def run(self) -> None:
        """Serve until :meth:`stop`, from any thread."""
        self._server.serve_forever()

    def stop(self) -> None:
        """End the server and every environment."""
        self._server.shutdown()
        for connection in list(self._open):
            connection.close()

    def _admit(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        if not self._options.has_key(request):
            return connection.respond(
                HTTPStatus.UNAUTHORIZED,
                "this server requires a key: send Authorization: Api-Key KEY\n",
            )
        if path != "/":
            return connection.respond(HTTPStatus.NOT_FOUND, "the only WebSocket path is /\n")
        if len(self._open) >= self._options.most:
            response = connection.respond(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"all {self._options.most} environments are in use\n",
            )
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        return None

    def _serve(self, connection: ServerConnection) -> None:
        """Answer one client, until it leaves."""
        if connection.subprotocol != SUBPROTOCOL:
            connection.send(f"this is a server of environments, which speaks {SUBPROTOCOL}")
            return
        # Two that arrived together for one seat take turns.
        with self._seats, self._counted(connection), _host_process(self._maker) as host:
            try:
                while (answer := self._answered(connection, host)) is not None:
                    connection.send(answer)
            except ConnectionClosed:
                return
            except TimeoutError:
                silent = f"no request within {self._options.idle_s:g} s (serve-env --idle-s)"
                connection.close(CloseCode.POLICY_VIOLATION, silent)
            except (EOFError, OSError):
                connection.send("the environment's process ended; the server's log says more")

    @contextmanager
    def _counted(self, connection: ServerConnection) -> Iterator[None]:
        self._open.add(connection)
        try:
            yield
        finally:
            self._open.discard(connection)

    def _answered(self, connection: ServerConnection, host: Connection) -> bytes | None:
        """Return the answer to the client's next message; None once it has left."""
        message = connection.recv(timeout=self._options.idle_s)
        if isinstance(message, str):
            failure = Failure(error=ProtocolError.__name__, message="requests are binary messages")
            return pack(write(failure))
        host.send_bytes(message)
        while not host.poll(_LOOK_S):
            if connection.close_code is not None:
                return None
        return host.recv_bytes()


@contextmanager
def _host_process(maker: Maker) -> Iterator[Connection]:
    """Return a link to a new process that hosts an environment; the process ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_host, args=(theirs, maker), name="environment", daemon=True)
    with searching_here_last():
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode:
            _log.warning("the process of an environment ended with %s", process.exitcode)


def _host(link: Connection, maker: Maker) -> None:
    end_with_parent()
    log_escaped()
    limit_log()
    host = _Host(maker)
    try:
        while True:
            link.send_bytes(host.answer(link.recv_bytes()))
    except (EOFError, OSError, KeyboardInterrupt):
        host.close()


@dataclass
class _Host:
    """One environment, and its client's requests."""

    maker: Maker
    hosted: Hosted | None = None
    left_out: set[str] = field(default_factory=set)
    """Keys of ``info`` that cannot be sent, and of which the log has said so."""

    def answer(self, message: bytes) -> bytes:
        """Return the answer to ``message``."""
        try:
            with ErrorCapture(passes=lambda error: isinstance(error, DzrobotError)) as caught:
                return pack(self._do(read(unpack(message), Request, "the client")))
        except DzrobotError as error:
            _log.warning("refused: %s", shorten(str(error), 300))
            return pack(write(Failure(error=type(error).__name__, message=str(error))))
        fault = caught.failure
        assert fault is not None
        _log.error("the environment failed:\n%s", fault.details)
        return pack(write(Failure(error="Exception", message=fault.error)))

    def close(self) -> None:
        """Close the environment, if there is one."""
        if self.hosted is not None:
            self.hosted.env.close()

    def _do(self, asked: Asked) -> Any:
        if isinstance(asked, Make):
            self.close()
            self.hosted = self.maker(asked.arguments, asked.draws)
            return write(_made(self.hosted))
        if self.hosted is None:
            raise ProtocolError("the first request has to be 'make'")
        env = self.hosted.env
        match asked:
            case Reset():
                observation, info = env.reset(seed=asked.seed, options=asked.options)
                return write(self._turn(observation, info))
            case Step():
                return write(self._step(self.hosted, asked))
            case Perturb():
                scene: Any = env.unwrapped
                return scene.perturb(asked.axis, asked.level, asked.seed)
            case Render():
                return write_value(env.render(), "the image")

    def _step(self, hosted: Hosted, asked: Step) -> Turn:
        if asked.omit_frames and hosted.omit is not None:
            hosted.omit()
        action = asked.action
        # A message cannot be written to, and some environments clip in place.
        action = action.copy() if isinstance(action, np.ndarray) else action
        observation, reward, terminated, truncated, info = hosted.env.step(action)
        if asked.omit_frames and isinstance(observation, Mapping):
            observation = {k: v for k, v in observation.items() if not k.startswith(_VIDEO)}
        turn = self._turn(observation, info)
        return turn.model_copy(
            update={
                "reward": float(reward),
                "terminated": bool(terminated),
                "truncated": bool(truncated),
            }
        )

    def _turn(self, observation: object, info: Mapping[str, Any]) -> Turn:
        sent, left = write_info(info)
        for key in left.keys() - self.left_out:
            _log.warning("left out: %s", left[key])
            self.left_out.add(key)
        return Turn(observation=write_value(observation, "the observation"), info=sent)


def _made(hosted: Hosted) -> Made:
    env = hosted.env
    return Made(
        observation_space=write_space(env.observation_space),
        action_space=write_space(env.action_space),
        render_mode=env.render_mode,
        render_fps=env.metadata.get("render_fps"),
        facts=hosted.facts,
        about=dict(hosted.about),
    )
