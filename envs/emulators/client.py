"""One connected client of the emulated robot: its two sockets and the motion it runs."""

import contextlib
import select
import socket
import time
from dataclasses import dataclass
from typing import Self

import numpy as np

from dzrobot.envs.emulators import wire
from dzrobot.envs.emulators.arm import Target
from dzrobot.envs.emulators.wire import Command, Generator, MoveStatus, RequestBuffer


@dataclass(frozen=True)
class Order:
    """One command datagram."""

    answers_ms: int
    numbers: tuple[float, ...]
    finished: bool

    @classmethod
    def read(cls, message: bytes) -> Self:
        """Return the order in a datagram."""
        fields = wire.COMMAND.unpack(message)
        return cls(fields[0], fields, bool(fields[40] or fields[48]))

    def target(self, generator: Generator) -> Target:
        """Return what it asks of ``generator``."""
        values = np.array(self.numbers)
        return Target(
            generator,
            values[1:8],
            values[8:15],
            values[15:31].reshape(4, 4, order="F"),
            values[31:37],
            values[41:48],
        )


class EmulatorClient:
    """Requests, answers, states and commands of one client; nothing here blocks for long."""

    def __init__(self, connection: socket.socket, address: str, udp: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tcp = connection
        self._udp = udp
        # What the client before this one sent last is not this one's.
        with contextlib.suppress(OSError):
            while True:
                self._udp.recv(4096)
        self._address = address
        self._requests = RequestBuffer(wire.ROBOT_HEADER)
        self._order: Order | None = None
        self._poll = select.poll()
        self._poll.register(self._tcp, select.POLLIN)
        self._poll.register(self._udp, select.POLLIN)
        self._udp_number = self._udp.fileno()
        self.udp_port: int | None = None
        self.move_id: int | None = None
        self.commanding = False
        self.finishing = False
        self.missed = 0
        self._began_s = 0.0
        self.silent = False
        """It has not answered in time; until it does, nothing waits for it."""

    @property
    def receiver(self) -> tuple[str, int]:
        """Where states are sent."""
        return self._address, self.udp_port or 0

    def wake_on(self, descriptor: int) -> None:
        """Let :meth:`await_order` end when something can be read from ``descriptor``."""
        self._poll.register(descriptor, select.POLLIN)

    def has_left(self) -> bool:
        """Return whether the client closed its connection and everything it sent was read."""
        try:
            return not self._tcp.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def requests(self) -> list[tuple[int, int, bytes]]:
        """Return complete requests.

        Raises:
            ConnectionError: the client left.
            MalformedError: it speaks another protocol.
        """
        try:
            chunk = self._tcp.recv(65536)
        except BlockingIOError:
            return []
        if not chunk:
            raise ConnectionResetError
        return list(self._requests.add(chunk))

    def reply(self, command: int, identity: int, body: bytes) -> None:
        """Answer a request; raise ConnectionError when the client left or reads no answers."""
        size = wire.ROBOT_HEADER.size + len(body)
        try:
            self._tcp.sendall(wire.ROBOT_HEADER.pack(command, identity, size) + body)
        except BlockingIOError as error:
            raise ConnectionResetError from error

    def begin_move(self, identity: int) -> None:
        """Remember the motion whose end must be answered."""
        self.move_id = identity
        self.commanding = False
        self.finishing = False
        self.missed = 0
        self._order = None
        self._began_s = time.monotonic()

    def is_beginning(self, patience_s: float) -> bool:
        """Return whether it may still be on its way to the first command of a motion."""
        return not self.commanding and time.monotonic() - self._began_s < patience_s

    def end_move(self, status: MoveStatus) -> None:
        """Answer the running motion a second time."""
        assert self.move_id is not None
        self.reply(Command.MOVE, self.move_id, bytes([status]))
        self.move_id = None
        self.commanding = False
        self.finishing = False

    def send_state(self, message: bytes) -> None:
        """Send one state datagram; one that cannot be sent is lost, as on a network."""
        with contextlib.suppress(OSError):
            self._udp.sendto(message, self.receiver)

    def await_order(self, sequence: int, wait_s: float) -> bool:
        """Keep the newest order; wait for the one that answers state ``sequence``.

        Returns:
            Whether it came; False also when a request or a call came first.
        """
        deadline = time.monotonic() + wait_s
        while True:
            remaining_ms = max(0.0, 1000.0 * (deadline - time.monotonic()))
            ready = self._poll.poll(remaining_ms)
            for descriptor, _ in ready:
                if descriptor != self._udp_number:
                    continue
                self._receive()
                if self._order is not None and self._order.answers_ms >= sequence:
                    return True
            if any(descriptor != self._udp_number for descriptor, _ in ready):
                return False
            if not ready:
                return False

    def take_order(self) -> Order | None:
        """Return the order received since the last call."""
        order, self._order = self._order, None
        return order

    def close(self) -> None:
        """Close the connection."""
        self._tcp.close()

    def _receive(self) -> None:
        try:
            message = self._udp.recv(4096)
        except (BlockingIOError, ConnectionRefusedError):
            return
        if len(message) == wire.COMMAND.size:
            self.silent = False
            self._order = Order.read(message)
