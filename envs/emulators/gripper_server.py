"""A gripper server for the real client library: TCP requests, UDP states at about 12 Hz."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

from dzrobot.envs.emulators import wire
from dzrobot.envs.emulators.faults import Faults
from dzrobot.envs.emulators.wire import GripperCommand, GripperStatus

MAX_WIDTH_M = 0.08
STATE_PERIOD_S = 0.08
TICK_S = 0.005


@dataclass
class _Motion:
    """A request whose answer is due when the fingers arrive."""

    command: int
    identity: int
    goal_m: float
    speed_m_s: float
    tolerance_m: tuple[float, float] | None
    not_before_s: float


class GripperServer:
    """The emulated hand on ``host``, port 1338.

    Args:
        host: Loopback address to listen on.
        faults: Switches shared with whoever injects faults; also holds the object's width.
    """

    def __init__(self, host: str, faults: Faults) -> None:
        self.width_m = MAX_WIDTH_M
        self.is_grasped = False
        self._faults = faults
        self._listener = socket.create_server((host, wire.GRIPPER_PORT))
        self._listener.setblocking(False)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((host, 0))
        self._tcp: socket.socket | None = None
        self._state_address: tuple[str, int] | None = None
        self._client_host = host
        self._buffer = b""
        self._motion: _Motion | None = None
        self._sequence = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="emulated-gripper", daemon=True)

    def start(self) -> None:
        """Serve until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close every socket."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._drop()
        self._listener.close()
        self._udp.close()

    def _run(self) -> None:
        next_state = time.monotonic()
        while not self._stopping.is_set():
            self._accept()
            try:
                self._serve()
            except ConnectionError:
                self._drop()
            self._advance()
            if time.monotonic() >= next_state:
                next_state = time.monotonic() + STATE_PERIOD_S
                self._send_state()
            time.sleep(TICK_S)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, address = self._listener.accept()
            self._drop()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._tcp = connection
            self._client_host = address[0]

    def _serve(self) -> None:
        if self._tcp is None:
            return
        with contextlib.suppress(BlockingIOError):
            chunk = self._tcp.recv(4096)
            if not chunk:
                raise ConnectionResetError
            self._buffer += chunk
        while len(self._buffer) >= wire.GRIPPER_HEADER.size:
            command, identity, size = wire.GRIPPER_HEADER.unpack_from(self._buffer)
            if len(self._buffer) < size:
                return
            body = self._buffer[wire.GRIPPER_HEADER.size : size]
            self._buffer = self._buffer[size:]
            self._answer(command, identity, body)

    def _answer(self, command: int, identity: int, body: bytes) -> None:
        if command == GripperCommand.CONNECT:
            _, port = wire.CONNECT_REQUEST.unpack(body)
            self._state_address = (self._client_host, port)
            extra = wire.GRIPPER_VERSION.to_bytes(2, "little")
            self._reply(command, identity, GripperStatus.SUCCESS, extra)
            return
        self._abort_motion()
        if command == GripperCommand.STOP:
            self._reply(command, identity, GripperStatus.SUCCESS)
            return
        if self._faults.gripper_fails > 0:
            self._faults.gripper_fails -= 1
            self._reply(command, identity, GripperStatus.FAIL)
            return
        self._motion = self._begin(command, identity, body)

    def _begin(self, command: int, identity: int, body: bytes) -> _Motion:
        due = time.monotonic() + self._faults.gripper_latency_s
        if command == GripperCommand.MOVE:
            width, speed = wire.GRIPPER_MOVE.unpack(body)
            return _Motion(command, identity, min(width, MAX_WIDTH_M), speed, None, due)
        if command == GripperCommand.GRASP:
            width, inner, outer, speed, _ = wire.GRIPPER_GRASP.unpack(body)
            return _Motion(command, identity, 0.0, speed, (width - inner, width + outer), due)
        return _Motion(command, identity, MAX_WIDTH_M, 0.1, None, due)

    def _advance(self) -> None:
        motion = self._motion
        if motion is None or self._faults.gripper_stuck or time.monotonic() < motion.not_before_s:
            return
        object_m = self._faults.object_width_m
        goal = motion.goal_m
        if object_m is not None and goal < object_m <= self.width_m + 1e-9:
            goal = object_m
        step = max(abs(motion.speed_m_s), 1e-3) * TICK_S
        if abs(self.width_m - goal) > step:
            self.width_m += step if goal > self.width_m else -step
            return
        self.width_m = goal
        self._finish(motion, holds_object=object_m is not None and goal == object_m)

    def _finish(self, motion: _Motion, *, holds_object: bool) -> None:
        status = GripperStatus.SUCCESS
        self.is_grasped = False
        if motion.tolerance_m is not None:
            low, high = motion.tolerance_m
            self.is_grasped = holds_object and low <= self.width_m <= high
            status = GripperStatus.SUCCESS if self.is_grasped else GripperStatus.UNSUCCESSFUL
        self._motion = None
        self._reply(motion.command, motion.identity, status)

    def _abort_motion(self) -> None:
        if self._motion is not None:
            motion, self._motion = self._motion, None
            self._reply(motion.command, motion.identity, GripperStatus.ABORTED)

    def _reply(
        self, command: int, identity: int, status: GripperStatus, extra: bytes = b""
    ) -> None:
        if self._tcp is None:
            return
        body = int(status).to_bytes(2, "little") + extra
        size = wire.GRIPPER_HEADER.size + len(body)
        self._tcp.setblocking(True)
        self._tcp.sendall(wire.GRIPPER_HEADER.pack(command, identity, size) + body)
        self._tcp.setblocking(False)

    def _send_state(self) -> None:
        if self._state_address is None:
            return
        self._sequence += 1
        message = wire.GRIPPER_STATE.pack(
            self._sequence, self.width_m, MAX_WIDTH_M, self.is_grasped, 30
        )
        with contextlib.suppress(ConnectionRefusedError):
            self._udp.sendto(message, self._state_address)

    def _drop(self) -> None:
        if self._tcp is not None:
            self._tcp.close()
        self._tcp = None
        self._state_address = None
        self._buffer = b""
        self._motion = None
