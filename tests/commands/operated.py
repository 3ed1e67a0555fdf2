"""A command on a terminal of its own, and an operator who reads its log and presses keys."""

import atexit
import contextlib
import json
import multiprocessing
import os
import pty
import runpy
import signal
import sys
import threading
import time

from dzrobot.cli import main

PATIENCE_S = 180.0
"""How long a busy machine may take to get to the next event."""

POLICY = '''
import atexit, json, os, time
import numpy as np

class Slow:
    """Drives forward, slowly, so that an operator can keep up with an arm that needs no time."""

    def __init__(self, env):
        self.arm = env.unwrapped.arm
        atexit.register(self.leave)

    def reset(self, session=None, *, episode=None):
        pass

    def act(self, obs, *, session="default"):
        open(os.environ["LEFT"], "a").close()
        time.sleep(0.02)
        return np.array([0.001, 0, 0, 0, 0, 0, 1], np.float32)

    def leave(self):
        # What the program leaves behind, for the test to read.
        left = {"connected": self.arm.is_connected, "controlled": self.arm._controlled}
        with open(os.environ["LEFT"], "w") as file:
            json.dump(left, file)

class Still(Slow):
    """For an arm that keeps time by itself, and has nothing to leave behind."""

    def __init__(self, env):
        pass

class Forward(Still):
    """As :class:`Still`, under another name."""
'''


def operator_environment(folder):
    """Return the environment variables of a command, below ``folder``, that knows `POLICY`."""
    (folder / "slow_policy.py").write_text(POLICY)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    folders = {"DZROBOT_LOCK_FOLDER": str(folder), "DZROBOT_CACHE": str(folder / "cache")}
    return {"PYTHONPATH": path, "LEFT": str(folder / "left.json"), **folders}


def run_on_a_terminal(terminal, environment, program, words):
    """Be what runs ``words`` in a shell: the leader of a session, whose terminal this is."""
    os.setsid()
    # The first terminal that the leader of a session opens becomes its own.
    own = os.open(terminal, os.O_RDWR)
    for number in range(3):
        os.dup2(own, number)
    os.close(own)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [str(program), *words]
    with contextlib.ExitStack() as ends:
        # A copy does not come to the interpreter's end, where the test's own duties would wait.
        atexit.register = ends.callback
        if program is None:
            sys.exit(main(words))
        runpy.run_path(str(program), run_name="__main__")


class Operated:
    """One command on a pseudo terminal, in a process that is a copy where tests are marked so.

    Args:
        words: The command line after ``dzrobot``.
        log: The operator's log that it writes.
        environment: On top of this process's.
        program: The file that takes the words, if not ``dzrobot``.
    """

    def __init__(self, words, log, environment, program=None):
        self._log = log
        self._seen = len(self._events())
        self.screen = b""
        self._master, slave = pty.openpty()
        self.process = multiprocessing.get_context("spawn").Process(
            target=run_on_a_terminal,
            args=(os.ttyname(slave), {"TERM": "xterm", **environment}, program, words),
        )
        self.process.start()
        # Held until the end: a terminal that nothing has open yet reads as one that was closed.
        self._slave = slave
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.is_alive():
            self.process.kill()
        self.end()
        self.hang_up()

    def wait_for(self, event, phase=None):
        """Return the next event of this kind, and of this phase where one is given."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            # Asked before the log is read, which is whole once the process has ended.
            ended = not self.process.is_alive()
            events = self._events()
            while self._seen < len(events):
                found = events[self._seen]
                self._seen += 1
                if found["event"] == event and phase in (None, found.get("phase")):
                    return found
            if ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {event} {phase}: {self._shown()}")

    def _shown(self):
        return self.screen.decode(errors="replace")[-3000:]

    def wait_for_file(self, path):
        """Return once ``path`` is there."""
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert time.monotonic() < deadline, f"no {path}: {self._events()[-5:]} {self._shown()}"
            time.sleep(0.02)

    def press(self, keys):
        os.write(self._master, keys.encode())

    def signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def begin(self):
        """Answer the two questions before an episode; return once it runs."""
        self.wait_for("question", "stand clear")
        self.press("\n")
        self.wait_for("question", "scene ready?")
        self.press("\n")
        self.wait_for("phase", "running")

    def hang_up(self):
        """Close the terminal."""
        if self._master >= 0:
            os.close(self._master)
        self._master = -1

    def end(self):
        """Return the exit code."""
        self.process.join(PATIENCE_S)
        if self._slave >= 0:
            os.close(self._slave)
        self._slave = -1
        self._reader.join(5.0)
        return self.process.exitcode

    def _events(self):
        if not self._log.exists():
            return []
        lines = self._log.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def _read(self):
        with contextlib.suppress(OSError):
            while chunk := os.read(self._master, 65536):
                self.screen += chunk
