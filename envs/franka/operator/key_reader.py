"""The process that reads the operator's keys, and stops the arm without the program that drives it.

A policy may hold the program's interpreter for seconds, or somebody may suspend the program. Space
then reaches the arm's driver all the same: this process writes the stop that the driver watches. It
has a session of its own, so that no signal of the terminal reaches it, and imports little.
"""

import contextlib
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from dzrobot.envs.franka.safeguards.stop_file import write_stop

STOP_KEY = b" "
LONGEST = 4096
"""Bytes of one message, either way."""

_LOOK_S = 0.1
_ABORT = "operator_stop"
_SPACE = "the operator stopped the arm"
_CLOSED = "the terminal was closed"
_SUSPENDED = "the program lost its terminal, as it does when it is suspended"


class KeyReader:
    """Passes keys on, and sets the stop where space is pressed or can no longer be pressed.

    Args:
        terminal: File descriptor that keys are read from.
        program: Takes the keys; says by JSON objects where the stop lies (``stop``) and whether
            text is being typed, in which a space is a space (``typing``).
        pid: Of the program.
    """

    def __init__(self, terminal: int, program: socket.socket, pid: int) -> None:
        self._terminal = terminal
        self._program = program
        self._pid = pid
        self._stop: Path | None = None
        self._typing = False
        self._shown = True

    def run(self) -> None:
        """Read keys until the program or the terminal is gone."""
        while os.getppid() == self._pid:
            sources: list[Any] = [self._terminal, self._program]
            ready = select.select(sources, [], [], _LOOK_S)[0]
            if self._program in ready and not self._listen():
                return
            if not self._is_shown():
                time.sleep(_LOOK_S)
            elif self._terminal in ready and not self._read():
                return

    def _listen(self) -> bool:
        """Take all that the program has said; return whether it is still there."""
        try:
            while data := self._program.recv(LONGEST, socket.MSG_DONTWAIT):
                message = json.loads(data)
                if "stop" in message:
                    self._stop = Path(message["stop"])
                self._typing = message.get("typing", self._typing)
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        # A terminal that is closed ends the program too, perhaps before its end was seen here.
        if is_closed(self._terminal):
            self._set_stop(_CLOSED)
        return False

    def _is_shown(self) -> bool:
        """Return whether the program has its terminal; keys of another program are not taken.

        While it has not, space cannot be pressed, so that is a stop.
        """
        shown = has_terminal(self._pid)
        if self._shown and not shown:
            self._set_stop(_SUSPENDED)
        self._shown = shown
        return shown

    def _read(self) -> bool:
        """Take keys; return whether the terminal is still there."""
        try:
            typed = os.read(self._terminal, LONGEST)
        except OSError:
            typed = b""
        if not typed:
            self._set_stop(_CLOSED)
            return False
        if STOP_KEY in typed and not self._typing:
            self._set_stop(_SPACE)
        # A program that takes no keys is busy: what matters has been done already.
        with contextlib.suppress(OSError):
            self._program.send(typed, socket.MSG_DONTWAIT)
        return True

    def _set_stop(self, message: str) -> None:
        if self._stop is not None:
            # Where the file cannot be written, the program still hears the key.
            with contextlib.suppress(OSError):
                write_stop(self._stop, _ABORT, message)


def has_terminal(pid: int) -> bool:
    """Return whether a process is in the foreground of its terminal, or has none to be taken."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    # After the name in brackets: state, parent, group, session, terminal, its foreground group.
    _, _, group, _, terminal, foreground = text.rpartition(")")[2].split()[:6]
    return terminal == "0" or group == foreground


def is_closed(terminal: int) -> bool:
    """Return whether the terminal behind a file descriptor is gone."""
    events = select.poll()
    events.register(terminal, select.POLLIN)
    return any(flags & (select.POLLHUP | select.POLLERR) for _, flags in events.poll(0))


def main() -> None:
    """Read the keys of standard input for the program that the arguments name."""
    with socket.socket(fileno=int(sys.argv[1])) as program:
        KeyReader(sys.stdin.fileno(), program, int(sys.argv[2])).run()
