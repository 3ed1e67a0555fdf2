"""One thread that owns one driver, with a time limit on everything asked of it.

Driver libraries may make the thread that uses them real-time, and every thread started from it
would inherit that; so nothing but driver calls runs here. A call that never returns is left behind
with its thread: the program goes on, and ends, without it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

from dzrobot.errors import RobotError

T = TypeVar("T")


class Worker:
    """Runs jobs one after another on a thread of its own.

    Args:
        name: Name of the thread, and of the device in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Return the future of ``job``."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def do(self, job: Callable[[], T], timeout_s: float) -> T:
        """Return what ``job`` returns.

        Raises:
            RobotError: no answer within ``timeout_s``.
        """
        future = self.submit(job)
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            # A late result must not be taken for the answer to a later question.
            future.cancel()
            raise RobotError(f"the {self._name} gave no answer within {timeout_s} s") from error

    def end(self, timeout_s: float = 2.0) -> None:
        """Let the thread end after the jobs it has; one that hangs is left behind."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if future.set_running_or_notify_cancel():
                with _Answer(future):
                    future.set_result(job())


class _Answer:
    """Hands whatever a driver raises to the caller who waits for the result."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if error is not None:
            _drop_frames(error)
            self._future.set_exception(error)
        return True


def _drop_frames(error: BaseException | None) -> None:
    """Forget where ``error`` and its causes were raised.

    Those frames hold the driver's objects: a connection would stay open for as long as anyone keeps
    the error, and close, slowly, on whichever thread collects it.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
