"""One policy for many clients over WebSockets. Inference never runs on the event loop."""

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from dzrobot import __version__
from dzrobot.code_identity import CODE, code_with
from dzrobot.documents import shorten
from dzrobot.embodiments.registry import EMBODIMENTS, description_of
from dzrobot.errors import ConfigError, DzrobotError, ProtocolError, SessionError, counted
from dzrobot.messages import ArrayForm, pack, unpack
from dzrobot.policies.base import Leftover, Policy, check_continuing, robot_of
from dzrobot.policies.serving.dialects import (
    SUBPROTOCOL,
    VLLM_PATH,
    ClientRequest,
    Dialect,
    Greeting,
    arena_greeting,
    largest_request,
    read_request,
    write_actions,
    write_error,
    write_reset,
)
from dzrobot.policies.serving.endpoint import HttpEndpoint, ServeOptions, ServerMetrics
from dzrobot.policies.serving.recorder import Recorder
from dzrobot.policies.serving.scheduler import ScheduledPlan, Scheduler
from dzrobot.policies.serving.sessions import (
    ClientConnection,
    Session,
    SessionCapacity,
    SessionTable,
    warm_up,
)
from dzrobot.policies.wrapping import servable
from dzrobot.websocket import PING_S, PONG_S, end_vanished

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SPARSE_PLANS = 3


class PolicyServer:
    """Serves ``policy`` to many clients; see :meth:`run`.

    Args:
        policy: Called from one thread of the server only.
        options: Address, access and limits.
        card: What the actions depend on; sent to our own clients.
        recorder: Records requests and plans; None: nothing is recorded.

    Raises:
        ConfigError: the policy needs frames that no client sends.
        MissingDependencyError: prometheus_client is not installed.
    """

    def __init__(
        self,
        policy: Policy | Any,
        options: ServeOptions | None = None,
        *,
        card: Mapping[str, Any] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        policy = servable(policy)
        if policy.history == "grid":
            raise ConfigError(
                "history='grid' cannot be served: clients send the newest frame or the last four; "
                "choose recent or off"
            )
        self._policy = policy
        self._robot = robot_of(policy)
        self.options = options or ServeOptions()
        self.metrics = ServerMetrics()
        self._card = {**(card or {}), CODE: [code_with([type(policy).__module__]).plain()]}
        self._recorder = recorder
        self._scheduler = Scheduler(
            policy, self.metrics,
            max_batch=self.options.max_batch, window_s=self.options.window_s,
        )  # fmt: skip
        self._seats = SessionTable(0, self.options.forget_s)
        self._seat_freed = asyncio.Event()
        self._clients: set[ClientConnection] = set()
        self._numbers = itertools.count(1)
        self._listeners: list[Server] = []
        self._state = "warming up"
        self.capacity = ""
        """How many sessions fit, as text; known once clients may connect."""

        self._reader = ThreadPoolExecutor(1, thread_name_prefix="messages")
        self._tasks: set[asyncio.Task[Any]] = set()
        # The default deadline of a request: when the plan before it is used up.
        self._period_s = self._execute / self._robot.timing.control_hz

    @property
    def ports(self) -> tuple[int, ...]:
        """Return the ports: for clients that expect maps, then for bare arrays."""
        return tuple(listener.sockets[0].getsockname()[1] for listener in self._listeners)

    async def run(self, stop: asyncio.Event, *, ready: Callable[[], object] = lambda: None) -> int:
        """Listen, warm up, serve until ``stop`` is set, finish running requests, and close.

        Args:
            stop: Ends the server.
            ready: Called once clients may connect.

        Returns:
            The exit code: 0, or 1 after the policy has failed.

        Raises:
            ConfigError: a port is taken, TLS cannot be set up, or no session fits into memory.
        """
        try:
            await self._listen()
            self._task(self._scheduler.run())
            await self._warm_up()
            self._task(self._sweep())
            ready()
            waits = [self._task(stop.wait()), self._task(self._scheduler.failed.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._close()
        return 0 if self._scheduler.fault is None else 1

    @property
    def _execute(self) -> int:
        robot = self._robot
        return self._policy.execute or robot.execute or robot.timing.action_horizon

    async def _listen(self) -> None:
        endpoint = HttpEndpoint(
            self.options, self.metrics, failure=self._failure, unready=self._unready
        )
        context = self.options.tls()
        wanted = [(self.options.port, Dialect.OPENPI)]
        if self.options.array_port is not None:
            wanted.append((self.options.array_port, Dialect.DREAMZERO))
        for port, dialect in wanted:
            try:
                listener = await serve(
                    functools.partial(self._connection, dialect),
                    self.options.host,
                    port,
                    process_request=endpoint.answer,
                    # Browsers send an origin: no web page may drive a robot.
                    origins=[None],
                    select_subprotocol=lambda _, offered: (
                        SUBPROTOCOL if SUBPROTOCOL in offered else None
                    ),
                    compression=None,
                    max_size=self.options.max_message or largest_request(self._robot),
                    max_queue=1,
                    open_timeout=self.options.handshake_s,
                    ping_interval=PING_S,
                    ping_timeout=PONG_S,
                    ssl=context,
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {self.options.host}:{port}: {error.strerror or error}; "
                    "choose another --port or --array-port"
                ) from error
            end_vanished(listener.sockets)
            self._listeners.append(listener)

    async def _warm_up(self) -> None:
        wanted, batch = self.options.max_sessions, self.options.max_batch
        capacity: SessionCapacity = await self._scheduler.call(
            lambda: warm_up(
                self._policy, max_sessions=wanted, max_batch=batch, least_rows=self._execute
            )
        )
        self._seats = SessionTable(capacity.sessions, self.options.forget_s)
        self.metrics.room.set(capacity.sessions)
        self.metrics.session_bytes.set(capacity.session_bytes)
        self._state, self.capacity = "", capacity.text

    def _failure(self) -> str:
        return "the policy has failed" if self._scheduler.fault is not None else ""

    def _unready(self) -> str:
        if self._state:
            return self._state
        if len(self._clients) >= self.options.max_connections:
            return f"full: {self.options.max_connections} connections are open"
        if not self._seats.free:
            return f"full: {self._seats.count} sessions are open"
        return ""

    async def _connection(self, dialect: Dialect, socket: ServerConnection) -> None:
        """Serve one connection from its greeting to its end."""
        if socket.subprotocol == SUBPROTOCOL:
            dialect = Dialect.DZROBOT
        elif socket.request is not None and socket.request.path.startswith(VLLM_PATH):
            dialect = Dialect.VLLM
        client = ClientConnection(next(self._numbers))
        self._clients.add(client)
        self.metrics.connections.set(len(self._clients))
        _log.info("client %d: %s from %s", client.number, dialect.value, socket.remote_address[0])
        why = ""
        try:
            await socket.send(self._greeting(dialect))
            while await self._exchange(dialect, client, socket):
                pass
        except ConnectionClosed as end:
            if socket.close_code == CloseCode.ABNORMAL_CLOSURE:
                why = f" ({end.__cause__ or end})"
        finally:
            self._clients.discard(client)
            self.metrics.connections.set(len(self._clients))
            names = list(client.sessions)
            for name in names:
                self._end(client, self._seats.end(client, name))
            ended = counted(len(names), "session")
            _log.info("client %d: gone%s, %s ended", client.number, why, ended)

    def _greeting(self, dialect: Dialect) -> bytes:
        if dialect is not Dialect.DZROBOT:
            return pack(arena_greeting(self._robot))
        greeting = Greeting(
            dzrobot=__version__,
            embodiment=self._robot.tag,
            action_horizon=self._robot.timing.action_horizon,
            execute=self._execute,
            history="off" if self._policy.history == "off" else "recent",
            card=self._card,
            continues=dict(self._policy.can.continues),
            images=["jpeg", "zstd"],
            robot=None if self._robot.tag in EMBODIMENTS else description_of(self._robot),
        )
        # A client that is older than a field refuses it, so what says nothing is left out.
        return pack(greeting.model_dump(exclude_none=True))

    def _check_leftover(self, dialect: Dialect, left: Leftover) -> None:
        """Refuse to continue a plan where the greeting did not announce it.

        Raises:
            ProtocolError: the dialect or the policy does not support it.
            ConfigError: the policy cannot continue that many rows.
        """
        if dialect is not Dialect.DZROBOT or not self._policy.can.continues:
            raise ProtocolError(
                f"a request with a leftover, but no greeting announced that plans can be "
                f"continued: the dialect is {dialect.value}; leave the leftover out, or connect "
                f"with the subprotocol {SUBPROTOCOL} to a policy whose greeting lists the method "
                "under 'continues'"
            )
        check_continuing(self._policy, left.method, left.delay)

    async def _exchange(
        self, dialect: Dialect, client: ClientConnection, socket: ServerConnection
    ) -> bool:
        """Take one message and answer it; return whether another one may follow."""
        endpoint, outcome, error = "?", "ok", None
        try:
            request = await self._next_request(socket)
            endpoint = request.envelope.endpoint
            if endpoint == "reset":
                answer = self._reset(dialect, client, request)
            else:
                answer = await _while_open(socket, self._infer(dialect, client, request))
        except TimeoutError:
            reason = f"no whole message within {self.options.idle_s:g} s"
            await socket.close(CloseCode.POLICY_VIOLATION, reason)
            return False
        except DzrobotError as refusal:
            error, outcome = refusal, type(refusal).__name__
            answer = write_error(dialect, refusal)
            _log.warning(
                "client %d: %s refused: %s", client.number, endpoint, shorten(str(refusal), 300)
            )
        self.metrics.requests.labels(dialect.value, endpoint, outcome).inc()
        self.metrics.sent.inc(len(answer))
        async with asyncio.timeout(self.options.idle_s):
            await socket.send(answer)
        if error is not None and not dialect.survives_errors:
            await socket.close(CloseCode.INTERNAL_ERROR, outcome)
            return False
        return True

    async def _next_request(self, socket: ServerConnection) -> ClientRequest:
        """Return the next message, read in a thread of its own: the loop goes on meanwhile.

        One thread, so that one message at a time is in memory twice. The message is dropped here;
        a request holds what it needs.
        """
        async with asyncio.timeout(self.options.idle_s):
            message = await socket.recv()
        self.metrics.received.inc(len(message))
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._read, message)

    def _read(self, message: bytes | str) -> ClientRequest:
        if isinstance(message, str):
            raise ProtocolError(f"requests are binary messages, got the text {shorten(message)}")
        forms: set[ArrayForm] = set()
        content = unpack(message, forms)
        return read_request(content, self._robot, "nd" if "nd" in forms else "openpi")

    async def _infer(
        self, dialect: Dialect, client: ClientConnection, request: ClientRequest
    ) -> bytes:
        envelope = request.envelope
        if request.leftover is not None:
            self._check_leftover(dialect, request.leftover)
        session = await self._session(client, envelope.session_id or "")
        within = self._period_s if envelope.deadline_ms is None else envelope.deadline_ms / 1000
        client.busy, client.newest = session, session.id
        session.used(time.monotonic())
        began = time.perf_counter()
        try:
            plan = await self._scheduler.plan(
                session, request.observation, within, request.leftover
            )
        finally:
            client.busy = None
        self._count(client, session, request.frames, plan)
        if self._recorder is not None:
            self._recorder.note(client, session, request, plan)
        timing = {"infer_ms": plan.timing["total_ms"], **plan.timing}
        timing["server_ms"] = 1000 * (time.perf_counter() - began)
        targets = plan.plan if self._policy.can.continues else None
        return write_actions(dialect, plan.actions, timing, targets, request.form)

    def _count(
        self, client: ClientConnection, session: Session, frames: int, plan: ScheduledPlan
    ) -> None:
        session.plans += 1
        session.frames += frames
        # The 1st, 2nd, 4th, 8th ...: a robot asks for plans for as long as the server runs.
        if not session.plans & (session.plans - 1):
            _log.info(
                "client %d session %s: plan %d from %d frames, waited %.1f, took %.1f ms with %d",
                client.number, shorten(session.id), session.plans, frames,
                plan.timing["queue_ms"], plan.timing["total_ms"], plan.batch,
            )  # fmt: skip
        sparse = self._policy.history != "off" and session.frames == session.plans
        if sparse and session.plans == _SPARSE_PLANS:
            _log.warning(
                "client %d session %s sends 1 frame a plan of %d steps; send stacks of the last 4",
                client.number, shorten(session.id), self._robot.timing.action_horizon,
            )  # fmt: skip

    async def _session(self, client: ClientConnection, name: str) -> Session:
        """Return the episode under ``name``; a new one waits for a free seat."""
        found = self._seats.find(client, name, restart_lost=self.options.restart_lost)
        if found is not None:
            return found
        try:
            async with asyncio.timeout(self.options.room_s):
                while (session := self._seats.take(client, name)) is None:
                    self._seat_freed.clear()
                    await self._seat_freed.wait()
        except TimeoutError:
            raise SessionError(
                f"no room for session {shorten(name)} within {self.options.room_s:g} s: "
                f"{self._seats.count} are open; end those that are over, or serve with a higher "
                "--max-sessions"
            ) from None
        self.metrics.sessions.set(self._seats.count - self._seats.free)
        return session

    def _reset(
        self, dialect: Dialect, client: ClientConnection, request: ClientRequest
    ) -> bytes | str:
        """End the episodes that a client names, else all of its own; never another client's."""
        envelope = request.envelope
        names: Sequence[str] = list(client.sessions)
        if envelope.session_ids is not None:
            names = envelope.session_ids
        elif envelope.session_id is not None:
            names = [envelope.session_id]
        for name in names:
            self._end(client, self._seats.end(client, name, next_episode=envelope.episode))
        _log.info("client %d: reset of %d sessions", client.number, len(names))
        return write_reset(dialect)

    def _end(self, client: ClientConnection, session: Session | None) -> None:
        """End an episode that its client has finished."""
        if session is None:
            return
        if self._recorder is not None:
            self._recorder.end(client, session)
        self._task(self._release(session))

    async def _release(self, session: Session) -> None:
        with contextlib.suppress(DzrobotError):
            # After a fault there is nothing to evict from.
            await self._scheduler.end(session)
        self._seats.release(session)
        self.metrics.sessions.set(self._seats.count - self._seats.free)
        self._seat_freed.set()

    async def _sweep(self) -> None:
        """End sessions that their clients left for newer ones long ago."""
        while True:
            await asyncio.sleep(min(15.0, self.options.forget_s / 4))
            for client in list(self._clients):
                for session in list(self._seats.abandoned(client)):
                    self._seats.forget(client, session)
                    _log.info("client %d session %s ended: abandoned", client.number, session.id)
                    self._end(client, session)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # The loop keeps no strong reference to a task.
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _close(self) -> None:
        """Finish running requests, close connections, and stop."""
        self._state = "shutting down"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.options.drain_s):
                while any(client.busy for client in self._clients):
                    await asyncio.sleep(0.01)
        for listener in self._listeners:
            listener.close()
        for listener in self._listeners:
            await listener.wait_closed()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._scheduler.close()
        self._reader.shutdown()


async def _while_open(socket: ServerConnection, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, or raise ConnectionClosed once the client is gone."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(socket.wait_closed())
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ConnectionClosed(None, None)
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


@contextmanager
def in_background(server: PolicyServer) -> Iterator[PolicyServer]:
    """Run ``server`` in a thread, for notebooks, tests and measurements; drain and stop it after.

    Raises:
        ConfigError: it cannot start.
    """
    started = threading.Event()
    failures: list[BaseException] = []
    handle: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def live() -> None:
        stop = asyncio.Event()
        handle.append((asyncio.get_running_loop(), stop))
        await server.run(stop, ready=started.set)

    def run() -> None:
        work = live()
        loop = asyncio.new_event_loop()
        task = loop.create_task(work)
        loop.run_until_complete(asyncio.wait([task]))
        if error := task.exception():
            failures.append(error)
        loop.close()
        started.set()

    thread = threading.Thread(target=run, name="policy server", daemon=True)
    thread.start()
    started.wait()
    try:
        if failures:
            raise failures[0]
        yield server
    finally:
        if not failures and thread.is_alive():
            loop, stop = handle[0]
            loop.call_soon_threadsafe(stop.set)
        thread.join()
