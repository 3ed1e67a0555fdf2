"""One connected client of the emulated robot: its two sockets and the motion it runs."""

import select
import socket
import time

import numpy as np

from dzrobot.envs.emulators import wire
from dzrobot.envs.emulators.wire import Command, MoveStatus


class Client:
    """Requests, answers, states and commands of one client; nothing here blocks for long."""

    def __init__(self, connection: socket.socket, address: str, host: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tcp = connection
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((host, 0))
        self._udp.setblocking(False)
        self._address = address
        self._buffer = b""
        self._command: np.void | None = None
        self.udp_port: int | None = None
        self.move_id: int | None = None
        self.commanding = False
        self.finishing = False
        self.missed = 0

    def has_left(self) -> bool:
        """Return whether the client closed its connection and everything it sent was read."""
        try:
            return not self._tcp.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def requests(self) -> list[tuple[int, int, bytes]]:
        """Return complete requests; raise ConnectionError when the client left."""
        try:
            chunk = self._tcp.recv(65536)
            if not chunk:
                raise ConnectionResetError
            self._buffer += chunk
        except BlockingIOError:
            pass
        found = []
        while len(self._buffer) >= wire.ROBOT_HEADER.size:
            command, identity, size = wire.ROBOT_HEADER.unpack_from(self._buffer)
            if len(self._buffer) < size:
                break
            found.append((command, identity, self._buffer[wire.ROBOT_HEADER.size : size]))
            self._buffer = self._buffer[size:]
        return found

    def reply(self, command: int, identity: int, body: bytes) -> None:
        """Answer a request."""
        size = wire.ROBOT_HEADER.size + len(body)
        self._tcp.setblocking(True)
        self._tcp.sendall(wire.ROBOT_HEADER.pack(command, identity, size) + body)
        self._tcp.setblocking(False)

    def begin_move(self, identity: int) -> None:
        """Remember the motion whose end must be answered."""
        self.move_id = identity
        self.commanding = False
        self.finishing = False
        self.missed = 0
        self._command = None

    def end_move(self, status: MoveStatus) -> None:
        """Answer the running motion a second time."""
        assert self.move_id is not None
        self.reply(Command.MOVE, self.move_id, bytes([status]))
        self.move_id = None
        self.commanding = False
        self.finishing = False

    def send_state(self, message: bytes) -> None:
        """Send one state datagram."""
        self._udp.sendto(message, (self._address, self.udp_port or 0))

    def receive_command(self, sequence: int, wait_s: float) -> None:
        """Keep the newest command; wait for the one that answers state ``sequence``."""
        deadline = time.monotonic() + wait_s
        while True:
            if self._drain() >= sequence or time.monotonic() >= deadline:
                return
            # Waking on TCP keeps a stop request from waiting for an echo that never comes.
            remaining = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._udp, self._tcp], [], [], remaining)
            if self._tcp in ready:
                self._drain()
                return

    def take_command(self) -> np.void | None:
        """Return the command received since the last call."""
        command, self._command = self._command, None
        return command

    def close(self) -> None:
        """Close both sockets."""
        self._tcp.close()
        self._udp.close()

    def _drain(self) -> int:
        newest = -1
        while True:
            try:
                message = self._udp.recv(4096)
            except (BlockingIOError, ConnectionRefusedError):
                return newest
            if len(message) == wire.ROBOT_COMMAND.itemsize:
                command = np.frombuffer(message, wire.ROBOT_COMMAND)[0]
                newest = int(command["message_id"])
                self._command = command
