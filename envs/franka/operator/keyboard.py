"""Single keys from the terminal, shared by all who read them."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import termios
import threading
import tty
from pathlib import Path
from typing import Any

from dzrobot.envs.driver_process import python_environment
from dzrobot.envs.franka.operator.key_reader import LONGEST
from dzrobot.errors import ConfigError

_MAIN = "from dzrobot.envs.franka.operator.key_reader import main; main()"
_END_S = 2.0


class Keyboard:
    """Reads keys in a process of its own while open; each goes to whoever takes it first.

    That process also stops the arm, whatever this one does: see
    :mod:`dzrobot.envs.franka.operator.key_reader`.
    """

    def __init__(self) -> None:
        self.gone = False
        """The terminal was closed: whoever sat there has left."""

        self._keys: list[str] = []
        self._lock = threading.Lock()
        self._stop: Path | None = None
        self._reader: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._before: list[Any] = []

    def check(self) -> None:
        """Check that somebody can type.

        Raises:
            ConfigError: standard input is not a terminal.
        """
        if not sys.stdin.isatty():
            raise ConfigError(
                "the keyboard needs a terminal, and standard input is none: run this in one, or "
                "use another source of actions, and another reward.rule than operator"
            )

    def open(self) -> None:
        """Listen to single keys; twice is harmless. What was typed before does not count.

        Raises:
            ConfigError: standard input is not a terminal.
        """
        if self._thread is not None:
            return
        self.check()
        terminal = sys.stdin.fileno()
        self._before = termios.tcgetattr(terminal)
        tty.setcbreak(terminal, termios.TCSAFLUSH)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._reader = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(os.getpid())],
                stdin=terminal, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
                env=python_environment(),
            )  # fmt: skip
        if self._stop is not None:
            self.stops(self._stop)
        self._thread = threading.Thread(
            target=self._run, args=(self._link,), name="keyboard", daemon=True
        )
        self._thread.start()

    def stops(self, path: Path) -> None:
        """Let space, or a terminal that is closed, set the stop whose file is ``path``."""
        self._stop = path
        self._tell(stop=str(path))

    def type_text(self, typing: bool) -> None:
        """Say whether text is being typed, in which a space is a space."""
        self._tell(typing=typing)

    def press(self, keys: str) -> None:
        """Add keys as if they had been typed."""
        with self._lock:
            self._keys += keys

    def take(self, which: str | None = None) -> str:
        """Return and forget the keys among ``which`` that were pressed, oldest first; None: all."""
        with self._lock:
            found = "".join(key for key in self._keys if which is None or key in which)
            self._keys = [key for key in self._keys if which is not None and key not in which]
        return found

    def close(self) -> None:
        """Give the terminal back; twice is harmless."""
        thread, self._thread = self._thread, None
        if thread is None or self._link is None or self._reader is None:
            return
        # Only this end stops sending: a key that the reader has taken still arrives.
        self._link.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reader.wait(_END_S)
        self._reader.kill()
        self._reader.wait()
        thread.join(_END_S)
        self._link.close()
        with contextlib.suppress(termios.error, OSError, ValueError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    def _tell(self, **message: object) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.send(json.dumps(message).encode())

    def _run(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while typed := link.recv(LONGEST):
                self.press(typed.decode("utf-8", "ignore"))
        # Where it was not closed, the terminal or its reader has gone: space cannot be pressed.
        self.gone = self._thread is not None


@functools.lru_cache
def terminal() -> Keyboard:
    """Return this process's keyboard: there is one terminal."""
    return Keyboard()
