"""Device drivers in child processes, so that a hung library blocks nothing else and can be killed.

Native driver libraries may hold Python's lock while they wait, for ever where a device falls
silent, and may make the thread that uses them real-time. So the environment's process imports none
of them: it calls a child process over a socket, and reads frames from shared memory. Every call has
a deadline; a child that misses one is killed, and the next connect starts another.
"""

import contextlib
import faulthandler
import importlib.util
import mmap
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import dzrobot
from dzrobot.errors import DzrobotError, MissingDependencyError, RobotError

PROMPT_S = 0.1
"""How long the control loop waits for an answer before it continues with what it knows."""

SILENT_S = 1.5
"""A driver that answers nothing for this long is killed."""

_START_S = 20.0
_BIGGEST = 1 << 20
_COUNT = struct.Struct("<Q")
_SLOTS = 4

_MAIN = "import sys; sys.path.append(''); from dzrobot.envs.driver_process import main; main()"
"""Run with ``-P``: the current folder is looked in last, where a driver of a lab's own may lie."""

_NO_WAIT_S = 1e-4
"""Zero would be another mode of the socket, with another error."""

NO_ANSWER = 0
"""Number of a message that is not answered."""


class DisconnectedError(RobotError):
    """The connection is gone; only connecting again helps."""


class Latest:
    """The newest value of one writing process, for one that reads; neither waits for the other.

    Args:
        descriptor: Of the shared memory.
        size: Bytes of the largest value.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._slot = -(-(_COUNT.size + size) // 64) * 64
        self._map = mmap.mmap(descriptor, 64 + _SLOTS * self._slot)

    @classmethod
    def create(cls, size: int) -> "Latest":
        """Return new memory without a name: it is gone with the last process that has it."""
        descriptor = os.memfd_create("dzrobot-driver")
        os.ftruncate(descriptor, 64 + _SLOTS * (-(-(_COUNT.size + size) // 64) * 64))
        return cls(descriptor, size)

    def put(self, *parts: bytes | memoryview) -> None:
        """Publish the bytes of ``parts``, one after another."""
        (count,) = _COUNT.unpack_from(self._map, 0)
        start = 64 + (count + 1) % _SLOTS * self._slot
        at = start + _COUNT.size
        for part in parts:
            length = memoryview(part).nbytes
            self._map[at : at + length] = memoryview(part).cast("B")
            at += length
        _COUNT.pack_into(self._map, start, at - start - _COUNT.size)
        # Last, so that whoever sees the number finds the value whole.
        _COUNT.pack_into(self._map, 0, count + 1)

    def count(self) -> int:
        """Return how many values were published."""
        (count,) = _COUNT.unpack_from(self._map, 0)
        return int(count)

    def get(self) -> bytes | None:
        """Return the newest value; None before the first."""
        while count := self.count():
            start = 64 + count % _SLOTS * self._slot
            (length,) = _COUNT.unpack_from(self._map, start)
            value = self._map[start + _COUNT.size : start + _COUNT.size + length]
            # The writer has not come round to this slot meanwhile.
            if self.count() - count < _SLOTS - 1:
                return value
        return None

    def close(self) -> None:
        """Let go of the memory."""
        self._map.close()
        os.close(self.descriptor)


class DriverProcess:
    """One driver, in a child process.

    Args:
        name: Of the device, for errors.
        make: What the child calls for its driver, a function or class of a module: see
            :class:`~dzrobot.envs.driver_process.Driver`.
        *arguments: What it is called with.
        memory: Bytes of the largest value that the driver publishes; 0: it publishes nothing.
        patience: How many times longer than beside hardware an answer is waited for; more than 1
            only where the arm's time is paused meanwhile.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., object],
        *arguments: object,
        memory: int = 0,
        patience: float = 1.0,
    ) -> None:
        self._name = name
        self._patience = patience
        self._latest = Latest.create(memory) if memory else None
        self._turn = threading.Lock()
        self._number = 0
        self._owed_since_s: float | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        kept = [theirs.fileno()]
        words = [str(theirs.fileno())]
        if self._latest is not None:
            kept.append(self._latest.descriptor)
            words += [str(self._latest.descriptor), str(memory)]
        with theirs:
            # A session of its own: Ctrl-C at the terminal is for the environment to deal with.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *words],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=kept, start_new_session=True,
                env=python_environment(),
            )  # fmt: skip
        self._write((make, arguments), _START_S)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def latest(self) -> Latest:
        """What the driver publishes.

        Raises:
            DisconnectedError: it has been killed.
        """
        if self._latest is None:
            raise DisconnectedError(f"the {self._name}'s driver has ended")
        return self._latest

    def is_running(self) -> bool:
        """Return whether the child has neither ended nor been killed."""
        return self._process.poll() is None

    def call(self, method: str, *arguments: object, timeout_s: float) -> Any:
        """Return what the driver answers.

        Raises:
            DisconnectedError: it did not answer in time, and was killed.
            DzrobotError: what the driver raised.
        """
        timeout_s *= self._patience
        if not self._turn.acquire(timeout=timeout_s):
            raise self._lost(f"is still busy after {timeout_s} s")
        try:
            number = self._send(method, arguments, timeout_s)
            return self._receive(number, time.monotonic() + timeout_s)
        except TimeoutError as error:
            raise self._lost(f"gave no answer within {timeout_s} s") from error
        finally:
            self._turn.release()

    def try_call(self, method: str, *arguments: object, default: Any = None) -> Any:
        """Return what the driver answers, or ``default`` where it does not do so at once.

        The first answer that does not come is waited for :data:`PROMPT_S`; while it is owed nothing
        else is waited for.

        Raises:
            DisconnectedError: it has answered nothing for :data:`SILENT_S`, and was killed.
            DzrobotError: what the driver raised.
        """
        prompt_s, silent_s = PROMPT_S * self._patience, SILENT_S * self._patience
        wait_s = prompt_s if self._owed_since_s is None else _NO_WAIT_S
        if not self._turn.acquire(timeout=wait_s):
            return default
        try:
            # A driver that has stopped reading may have left no room for another question.
            number = self._send(method, arguments, wait_s)
            return self._receive(number, time.monotonic() + wait_s, prompt_s)
        except TimeoutError as error:
            now = time.monotonic()
            self._owed_since_s = self._owed_since_s or now
            if now - self._owed_since_s > silent_s:
                raise self._lost(f"has answered nothing for {silent_s} s") from error
            return default
        finally:
            self._turn.release()

    def notify(self, method: str, *arguments: object) -> None:
        """Ask for something that is not answered.

        Raises:
            DisconnectedError: the driver has ended, or takes nothing any more, and was killed.
        """
        with self._turn:
            try:
                self._write((NO_ANSWER, method, arguments), PROMPT_S * self._patience)
            except TimeoutError as error:
                raise self._lost("takes nothing any more") from error

    @contextlib.contextmanager
    def killed_on_error(self) -> Iterator[None]:
        """Kill the child if the block raises."""
        with contextlib.ExitStack() as guard:
            guard.callback(self.kill)
            yield
            guard.pop_all()

    def kill(self) -> None:
        """End the child at once, whatever it does; twice is harmless."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        self._let_go()

    def end(self, timeout_s: float) -> None:
        """Let the child close its device and end; kill it where it takes longer."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s * self._patience)
        self.kill()

    def _let_go(self) -> None:
        self._socket.close()
        if self._latest is not None:
            self._latest.close()
        self._latest = None

    def _send(self, method: str, arguments: tuple[object, ...], timeout_s: float) -> int:
        self._number += 1
        self._write((self._number, method, arguments), timeout_s)
        return self._number

    def _write(self, message: object, timeout_s: float) -> None:
        try:
            self._socket.settimeout(timeout_s)
            self._socket.send(pickle.dumps(message))
        except TimeoutError:
            raise
        except OSError as error:
            raise self._lost("has ended") from error

    def _receive(self, number: int, deadline_s: float, late_s: float = 0.0) -> Any:
        """Return the answer to a question; one that comes late grants this one ``late_s`` more."""
        while True:
            try:
                self._socket.settimeout(max(_NO_WAIT_S, deadline_s - time.monotonic()))
                data = self._socket.recv(_BIGGEST)
            except TimeoutError:
                raise
            except OSError as error:
                raise self._lost("has ended") from error
            if not data:
                raise self._lost("has ended")
            answered, value = pickle.loads(data)
            # A late answer to an earlier question says no more than that somebody is there: without
            # time for the own one, every answer from then on would be late.
            self._owed_since_s = None
            deadline_s = max(deadline_s, time.monotonic() + late_s)
            if answered == number:
                if isinstance(value, BaseException):
                    raise value
                return value

    def _lost(self, message: str) -> DisconnectedError:
        self.kill()
        return DisconnectedError(f"the {self._name}'s driver {message}")


def require(module: str, message: str) -> None:
    """Look for a library without importing it.

    Raises:
        MissingDependencyError: it is not installed; with ``message``.
    """
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(message)


def python_environment() -> dict[str, str]:
    """Return the environment of a child that is to find this package, also in a plain checkout."""
    root = str(Path(dzrobot.__file__).resolve().parents[1])
    known = [part for part in (root, os.environ.get("PYTHONPATH", "")) if part]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(known)}


_HUNG_S = 30.0
"""A native call that lasts longer ends the process: the parent that would kill it may be gone."""

_WATCHED_S = 1.0


class Driver(Protocol):
    """What runs in the process; its public methods are what the parent may ask."""

    def tick(self) -> float:
        """Do what is due and return the seconds until the next is."""
        ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What its library raises. Any other error is a bug: it ends the process."""
        ...

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        ...

    def close(self) -> None:
        """Bring the device to rest and let it go."""
        ...


def serve(connection: socket.socket, latest: Latest | None) -> None:
    """Run the driver that the first message names, until the parent is gone."""
    make, arguments = pickle.loads(connection.recv(_BIGGEST))
    given = arguments if latest is None else (*arguments, latest)
    driver: Driver = make(*given)
    watched_s, parent = -_WATCHED_S, os.getppid()
    try:
        # A socket that a process forked by the parent holds does not end with the parent.
        while os.getppid() == parent:
            if time.monotonic() - watched_s > _WATCHED_S:
                watched_s = time.monotonic()
                # This timer needs no lock of Python's, which a hung call may hold. It is a thread,
                # so it is not set again for every question.
                faulthandler.dump_traceback_later(_HUNG_S, exit=True)
            # Zero would make the socket answer at once, with another error.
            connection.settimeout(max(1e-4, driver.tick()))
            try:
                data = connection.recv(_BIGGEST)
            except TimeoutError:
                continue
            if not data:
                return
            number, method, words = pickle.loads(data)
            connection.settimeout(_HUNG_S)
            answer = _answer(driver, method, words)
            if number != NO_ANSWER:
                connection.send(pickle.dumps((number, answer)))
    except OSError:
        # The parent went away between a question and its answer.
        return
    finally:
        driver.close()


def _answer(driver: Driver, method: str, words: tuple[Any, ...]) -> Any:
    try:
        return getattr(driver, method)(*words)
    except DzrobotError as error:
        found = error
    except driver.errors as error:
        found = driver.translate(error)
    # Frames hold the driver's objects, and causes need not be picklable.
    found.__traceback__ = found.__cause__ = found.__context__ = None
    return found


def plainly(error: Exception) -> RobotError:
    """Return an unexpected error of a library as one of this package."""
    return RobotError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Run the driver's process: its arguments are a socket, and a memory with its size."""
    numbers = [int(word) for word in sys.argv[1:]]
    serve(
        socket.socket(fileno=numbers[0]),
        Latest(numbers[1], numbers[2]) if len(numbers) > 1 else None,
    )
    # Destructors of native libraries may wait for threads that never end.
    os._exit(0)
