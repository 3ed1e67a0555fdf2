"""Single keys from the terminal, shared by everyone who listens."""

import functools
import select
import sys
import termios
import threading
import tty

from dzrobot.errors import ConfigError


class Keyboard:
    """Reads keys on a thread while open; each key goes to whoever takes it first."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Listen to single keys; twice is harmless.

        Raises:
            ConfigError: standard input is no terminal.
        """
        if self._thread is not None:
            return
        if not sys.stdin.isatty():
            raise ConfigError(
                "the keyboard needs a terminal, and standard input is none: run this in one, or "
                "use another source of actions, and another reward.rule than operator"
            )
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="keyboard", daemon=True)
        self._thread.start()

    def press(self, keys: str) -> None:
        """Add keys as if they had been typed."""
        with self._lock:
            self._keys += keys

    def take(self, which: str) -> str:
        """Return and forget the keys among ``which`` that were pressed, oldest first."""
        with self._lock:
            found = "".join(key for key in self._keys if key in which)
            self._keys = [key for key in self._keys if key not in which]
        return found

    def close(self) -> None:
        """Give the terminal back; twice is harmless."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(1.0)
        self._thread = None

    def _run(self) -> None:
        before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        try:
            while not self._stopping.is_set():
                if select.select([sys.stdin], [], [], 0.1)[0]:
                    self.press(sys.stdin.read(1))
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@functools.lru_cache
def terminal() -> Keyboard:
    """Return this process's keyboard: there is one terminal."""
    return Keyboard()
