"""Single keys from the terminal, shared by all who read them."""

import contextlib
import functools
import os
import select
import sys
import termios
import threading
import tty
from typing import Any

from dzrobot.errors import ConfigError

_POLL_S = 0.1
_CHUNK = 1024


class Keyboard:
    """Reads keys on a thread while open; each key goes to whoever takes it first."""

    def __init__(self) -> None:
        self.gone = False
        """The terminal was closed: whoever sat there has left."""

        self._keys: list[str] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._before: list[Any] = []

    def check(self) -> None:
        """Check that somebody can type.

        Raises:
            ConfigError: standard input is no terminal.
        """
        if not sys.stdin.isatty():
            raise ConfigError(
                "the keyboard needs a terminal, and standard input is none: run this in one, or "
                "use another source of actions, and another reward.rule than operator"
            )

    def open(self) -> None:
        """Listen to single keys; twice is harmless. What was typed before does not count.

        Raises:
            ConfigError: standard input is no terminal.
        """
        if self._thread is not None:
            return
        self.check()
        terminal = sys.stdin.fileno()
        self._before = termios.tcgetattr(terminal)
        tty.setcbreak(terminal, termios.TCSAFLUSH)
        self._stopping.clear()
        self._thread = threading.Thread(
            target=self._run, args=(terminal,), name="keyboard", daemon=True
        )
        self._thread.start()

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
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(1.0)
            with contextlib.suppress(termios.error, OSError, ValueError):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)
        self._thread = None

    def _run(self, terminal: int) -> None:
        while not self._stopping.is_set():
            try:
                if not select.select([terminal], [], [], _POLL_S)[0]:
                    continue
                typed = os.read(terminal, _CHUNK)
            except OSError:
                typed = b""
            if not typed:
                self.gone = True
                return
            self.press(typed.decode("utf-8", "ignore"))


@functools.lru_cache
def terminal() -> Keyboard:
    """Return this process's keyboard: there is one terminal."""
    return Keyboard()
