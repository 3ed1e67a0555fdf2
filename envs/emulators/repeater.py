"""States continue while a busy machine keeps the emulator from running.

A client of the arm or the hand that receives nothing for a second closes its connection for good.
The arm's time stands still meanwhile, so nothing has happened: a small process of its own, which
sleeps nearly all the time and so is let run at once, sends the last state again.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from dzrobot.envs.processes.driver_process import Latest

_LARGEST = 2048
_PERIOD_S = 0.2
_RECEIVER = struct.Struct("!4sH")


class RepeatedStates:
    """The newest state of one server, and who receives it.

    Args:
        sender: The socket that it is sent from; clients answer there.
    """

    def __init__(self, sender: socket.socket) -> None:
        self.sender = sender
        self.latest = Latest.create(_LARGEST)

    def keep(self, message: bytes, receiver: tuple[str, int]) -> None:
        """Send ``message`` again when nothing newer follows."""
        host, port = receiver
        self.latest.put(_RECEIVER.pack(socket.inet_aton(host), port), message)

    def forget(self) -> None:
        """Send nothing again: the silence is meant, or nobody is there."""
        if self.latest.get():
            self.latest.put(b"")

    def send(self) -> None:
        """Send the newest state again, if there is one."""
        value = self.latest.get()
        if value:
            host, port = _RECEIVER.unpack_from(value)
            with contextlib.suppress(OSError):
                self.sender.sendto(value[_RECEIVER.size :], (socket.inet_ntoa(host), port))


def start_repeating(servers: Sequence[RepeatedStates]) -> None:
    """Start the process that repeats; it ends with this one. To be called before any thread is."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        _repeat(servers, parent)
    finally:
        os._exit(0)


def _repeat(servers: Sequence[RepeatedStates], parent: int) -> None:
    # The scheduler shares the machine out by session.
    os.setsid()
    kept = {number for one in servers for number in (one.sender.fileno(), one.latest.descriptor)}
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
    seen = [0] * len(servers)
    while os.getppid() == parent:
        time.sleep(_PERIOD_S)
        for index, server in enumerate(servers):
            before, seen[index] = seen[index], server.latest.count()
            if before == seen[index]:
                server.send()
