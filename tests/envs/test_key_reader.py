"""The reader of the operator's keys: space stops the arm though the program does nothing."""

import contextlib
import fcntl
import io
import json
import os
import pty
import socket
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

from dzrobot.envs.driver_process import python_environment
from dzrobot.envs.franka.operator.console import OperatorConsole
from dzrobot.envs.franka.operator.key_reader import has_terminal
from dzrobot.envs.franka.operator.keyboard import _MAIN, Keyboard

PATIENCE_S = 60.0


def wait_for(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Reader:
    """The process beside a program, this one, that says what a test has it say, and no more."""

    def __init__(self, stop):
        self.master, slave = pty.openpty()
        self.program, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.program.settimeout(PATIENCE_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid())],
                stdin=slave, pass_fds=[theirs.fileno()], start_new_session=True,
                env=python_environment(),
            )  # fmt: skip
        os.close(slave)
        self.say(stop=str(stop))

    def say(self, **message):
        self.program.send(json.dumps(message).encode())

    def type(self, keys):
        os.write(self.master, keys)
        # A line at a time: nobody has asked for single keys here.
        return self.program.recv(4096)

    def end(self):
        self.program.close()
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture
def reader(tmp_path):
    reader = Reader(tmp_path / "stop")
    yield reader
    reader.process.kill()
    reader.process.wait()


def test_space_sets_the_stop_and_other_keys_do_not(reader, tmp_path):
    assert reader.type(b"cbz\n") == b"cbz\n"
    assert not (tmp_path / "stop").exists()
    assert reader.type(b"x y\n") == b"x y\n"
    stop = json.loads((tmp_path / "stop").read_text())
    assert (stop["abort"], stop["message"]) == ("operator_stop", "the operator stopped the arm")
    reader.end()


def test_a_space_in_a_text_is_a_space(reader, tmp_path):
    reader.say(typing=True)
    assert reader.type(b"cup upside down\n")
    assert not (tmp_path / "stop").exists()
    reader.say(typing=False)
    assert reader.type(b" \n")
    assert (tmp_path / "stop").exists()


def test_a_closed_terminal_sets_the_stop_and_a_program_that_ends_does_not(reader, tmp_path):
    os.close(reader.master)
    assert reader.process.wait(PATIENCE_S) == 0
    assert "terminal was closed" in (tmp_path / "stop").read_text()
    (tmp_path / "stop").unlink()
    other = Reader(tmp_path / "stop")
    other.end()
    assert not (tmp_path / "stop").exists()


GROUPS = """
import os, sys, time
from dzrobot.envs.franka.operator.console import OperatorConsole
from dzrobot.envs.franka.operator.key_reader import has_terminal
started, ending = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    os.setpgid(0, 0)
    os.write(started[1], b"x")
    os.read(ending[0], 1)
    os._exit(0)
os.read(started[0], 1)
print(has_terminal(os.getpid()), has_terminal(child), file=sys.stderr)
os.write(ending[1], b"x")
os.wait()
"""


def test_keys_belong_to_who_has_the_terminal():
    master, slave = pty.openpty()

    def own_the_terminal():
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    done = subprocess.run(
        [sys.executable, "-c", GROUPS], stdin=slave, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=own_the_terminal, env=python_environment(),
    )  # fmt: skip
    os.close(slave)
    os.close(master)
    # A program that the shell has suspended is in the background, and the shell takes its keys.
    assert done.stderr.split() == ["True", "False"]
    assert has_terminal(1 << 22), "a program that is gone has nothing to lose"


def test_a_keyboard_whose_reader_is_gone_says_so(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal, contextlib.suppress(OSError):
        monkeypatch.setattr(sys, "stdin", terminal)
        keyboard = Keyboard()
        keyboard.open()
        os.write(master, b"c")
        wait_for(lambda: keyboard.take("c"))
        assert not keyboard.gone
        keyboard._reader.kill()
        wait_for(lambda: keyboard.gone)
        keyboard.close()
        os.close(master)


def test_the_log_has_a_stop_that_the_program_never_looked_for(monkeypatch, tmp_path):
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal, contextlib.suppress(OSError):
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr("dzrobot.envs.franka.operator.console.terminal", Keyboard)
        console = OperatorConsole(log=tmp_path / "log", screen=Console(file=io.StringIO()))
        console.start(tmp_path / "stop")
        os.write(master, b" ")
        # As soon as the arm is stopped, an episode and its program may end.
        wait_for((tmp_path / "stop").exists)
        console.close()
        os.close(master)
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(e["event"], e.get("reason")) for e in events] == [("stop", "space")]
