"""A gripper server for the real client library: TCP requests, UDP states at about 12 Hz.

It lives by the arm's clock, on the arm's thread; only its states also come while that clock stands
still, because the client waits for them.
"""

import contextlib
import socket
import time
from dataclasses import dataclass

from dzrobot.envs.emulators import fci_protocol as wire
from dzrobot.envs.emulators.dynamics import GRIPPER_WIDTH_M, Faults, Fingers
from dzrobot.envs.emulators.fci_protocol import (
    GripperCommand,
    GripperStatus,
    MalformedError,
    RequestBuffer,
)
from dzrobot.envs.emulators.robot_client import RepeatedStates

STATE_PERIOD_S = 0.08
HOLDING_N = 20.0
"""Force of fingers that move to a width or home."""


@dataclass
class _Motion:
    """A request whose answer is due when the fingers arrive."""

    command: int
    identity: int
    goal_m: float
    speed_m_s: float
    force_n: float
    tolerance_m: tuple[float, float] | None
    not_before_ms: int
    begun: bool = False


class GripperServer:
    """The emulated hand on ``host``, port 1338.

    Args:
        host: Loopback address to listen on.
        faults: Switches shared with whoever injects faults.
        fingers: What it moves.
    """

    def __init__(self, host: str, faults: Faults, fingers: Fingers) -> None:
        self._fingers = fingers
        self._held_m: tuple[float, float] | None = None
        self._faults = faults
        self._listener = socket.create_server((host, wire.GRIPPER_PORT))
        self._listener.setblocking(False)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((host, 0))
        self.states = RepeatedStates(self._udp)
        self.patient = False
        """Whether the arm's time pauses while the machine is busy, so that slow clients stay."""

        self._tcp: socket.socket | None = None
        self._state_address: tuple[str, int] | None = None
        self._client_host = host
        self._requests = RequestBuffer(wire.GRIPPER_HEADER)
        self._motion: _Motion | None = None
        self._sequence = 0
        self._clock_ms = 0
        self._next_state_s = 0.0

    @property
    def is_grasped(self) -> bool:
        """Whether fingers commanded to grasp are still within the width that counts as one.

        As on the hand: only the distance counts, so closed fingers may count as a grasp.
        """
        if self._held_m is None:
            return False
        low, high = self._held_m
        return low < self._fingers.width_m < high

    def stop(self) -> None:
        """Close every socket."""
        self._drop()
        self._listener.close()
        self._udp.close()
        self.states.latest.close()

    def serve(self, clock_ms: int) -> None:
        """Answer requests, and move the fingers up to the arm's time."""
        self._accept()
        try:
            self._answer_requests()
        except (ConnectionError, MalformedError):
            self._drop()
        moved_s = max(0, clock_ms - self._clock_ms) / 1000.0
        self._clock_ms = clock_ms
        self._advance(moved_s)
        if time.monotonic() >= self._next_state_s:
            self._next_state_s = time.monotonic() + STATE_PERIOD_S
            self._send_state()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, address = self._listener.accept()
            self._drop()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._tcp = connection
            self._client_host = address[0]

    def _answer_requests(self) -> None:
        if self._tcp is None:
            return
        with contextlib.suppress(BlockingIOError):
            chunk = self._tcp.recv(4096)
            if not chunk:
                raise ConnectionResetError
            for command, identity, body in self._requests.add(chunk):
                self._answer(command, identity, body)

    def _answer(self, command: int, identity: int, body: bytes) -> None:
        if command == GripperCommand.CONNECT:
            _, port = wire.unpack(wire.CONNECT_REQUEST, body)
            self._state_address = (self._client_host, port)
            extra = wire.GRIPPER_VERSION.to_bytes(2, "little")
            self._reply(command, identity, GripperStatus.SUCCESS, extra)
            return
        self._abort_motion()
        if command == GripperCommand.STOP:
            self._reply(command, identity, GripperStatus.SUCCESS)
            return
        motion = self._begin(command, identity, body)
        if self._faults.gripper_fails > 0 or not self._can(motion):
            self._faults.gripper_fails = max(0, self._faults.gripper_fails - 1)
            self._reply(command, identity, GripperStatus.FAIL)
            return
        self._motion = motion

    def _can(self, motion: _Motion) -> bool:
        """Return whether the hand can do it: before homing it does not know where it is."""
        return motion.command == GripperCommand.HOMING or (
            self._faults.homed and motion.speed_m_s > 0
        )

    def _begin(self, command: int, identity: int, body: bytes) -> _Motion:
        due = self._clock_ms + round(1000 * self._faults.gripper_latency_s)
        match command:
            case GripperCommand.MOVE:
                width, speed = wire.unpack(wire.GRIPPER_MOVE, body)
                # One that opens less than it is asked to opens as far as it can.
                goal = min(max(width, 0.0), GRIPPER_WIDTH_M)
                return _Motion(command, identity, goal, speed, HOLDING_N, None, due)
            case GripperCommand.GRASP:
                width, inner, outer, speed, force = wire.unpack(wire.GRIPPER_GRASP, body)
                # The fingers press until something stops them: an object, or each other.
                counts = (width - inner, width + outer)
                return _Motion(command, identity, 0.0, speed, force, counts, due)
            case GripperCommand.HOMING:
                return _Motion(command, identity, GRIPPER_WIDTH_M, 0.1, HOLDING_N, None, due)
        raise MalformedError(f"gripper command {command}")

    def _advance(self, seconds: float) -> None:
        motion = self._motion
        if motion is None:
            return
        if self._faults.gripper_stuck or self._clock_ms < motion.not_before_ms:
            if motion.begun:
                self._fingers.rest()
            motion.begun = False
            return
        if not motion.begun:
            motion.begun, self._held_m = True, None
            self._fingers.move(motion.goal_m, motion.speed_m_s, motion.force_n)
        if self._fingers.advance(seconds):
            self._finish(motion)

    def _finish(self, motion: _Motion) -> None:
        status = GripperStatus.SUCCESS
        if motion.command == GripperCommand.HOMING:
            self._faults.homed = True
        if motion.tolerance_m is not None:
            self._held_m = motion.tolerance_m
            status = GripperStatus.SUCCESS if self.is_grasped else GripperStatus.UNSUCCESSFUL
        self._motion = None
        self._reply(motion.command, motion.identity, status)

    def _abort_motion(self) -> None:
        if self._motion is not None:
            motion, self._motion = self._motion, None
            self._fingers.rest()
            self._reply(motion.command, motion.identity, GripperStatus.ABORTED)

    def _reply(
        self, command: int, identity: int, status: GripperStatus, extra: bytes = b""
    ) -> None:
        if self._tcp is None:
            return
        body = int(status).to_bytes(2, "little") + extra
        size = wire.GRIPPER_HEADER.size + len(body)
        try:
            self._tcp.sendall(wire.GRIPPER_HEADER.pack(command, identity, size) + body)
        except (ConnectionError, BlockingIOError):
            # A client that reads no answers has gone.
            self._drop()

    def _send_state(self) -> None:
        if self._state_address is None:
            return
        self._sequence += 1
        widest = GRIPPER_WIDTH_M if self._faults.homed else 0.0
        width = self._fingers.width_m
        message = wire.GRIPPER_STATE.pack(self._sequence, width, widest, self.is_grasped, 30)
        with contextlib.suppress(OSError):
            self._udp.sendto(message, self._state_address)
        if self.patient:
            self.states.keep(message, self._state_address)

    def _drop(self) -> None:
        if self._tcp is not None:
            self._tcp.close()
        self._tcp = None
        self._state_address = None
        self.states.forget()
        self._requests.clear()
        self._motion = None
