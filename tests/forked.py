"""Runs the collected tests in processes that are forked: what tests import is imported once.

``--processes N``. pytest-xdist starts fresh interpreters, of which each imports torch, the
simulators and all test files again: 20 s of processor time for each.
The tests of a file run in one process, so their fixtures (a simulator, a training run) are made
once. A process that dies fails its test, and another one continues with the next.

What tests marked ``copies`` start by the method ``spawn`` is forked too, from a copy of the process
that had run nothing yet: without a simulator, thread or lock, as a fresh interpreter is, but with
all modules. Their long forms start fresh interpreters.
"""

import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing import context, forkserver, reduction
from multiprocessing.connection import Connection, arbitrary_address, wait
from pathlib import Path
from typing import Any

import pytest

from dzrobot.process import end_with_parent

_FORK = multiprocessing.get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes."""
    help_ = "run the test files side by side in so many forked processes; 0: in this one"
    parser.addoption("--processes", type=int, default=0, metavar="N", help=help_)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hook that is called in every process before its first test."""
    pluginmanager.add_hookspecs(Hooks)


class Hooks:
    """What conftest.py files may add to."""

    @staticmethod
    def pytest_process_begins() -> None:
        """Called in a forked process that has all modules and has run nothing yet."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in processes where some are asked for; pytest's own loop does the rest."""
    count = session.config.getoption("processes")
    if not count or session.config.getoption("collectonly") or session.testsfailed:
        return None
    if (threads := threading.enumerate())[1:]:
        # They would be missing in the copies, with their locks held.
        raise session.Failed(f"test files start threads as they are imported: {threads}")
    Pool(session, count).run()
    return True


class Worker:
    """One forked process, and which tests it has still to run."""

    def __init__(self, session: pytest.Session, assigned: deque[int]) -> None:
        self.assigned = assigned
        self.channel, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_work, args=(session, [*assigned], theirs))
        self.process.start()
        theirs.close()


class Pool:
    """The processes of a session, and the files that none of them has begun."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._hook = session, session.config.hook
        files: dict[str, list[int]] = {}
        for number, item in enumerate(session.items):
            files.setdefault(item.nodeid.partition("::")[0], []).append(number)
        self._files = deque(files.values())
        self._count = min(count, len(files))
        self._workers: list[Worker] = []

    def run(self) -> None:
        """Run all tests; those that failed are in the session's reports."""
        reporter: Any = self._session.config.pluginmanager.get_plugin("terminalreporter")
        # Else every dot of another file than the last would begin a line.
        reporter.showfspath = False
        try:
            self._workers += [Worker(self._session, deque()) for _ in range(self._count)]
            while self._workers:
                ready = wait(
                    [each for w in self._workers for each in (w.channel, w.process.sentinel)]
                )
                for worker in [*self._workers]:
                    if worker.channel in ready:
                        self._hear(worker)
                    elif worker.process.sentinel in ready:
                        self._bury(worker)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        finally:
            for worker in self._workers:
                worker.process.terminate()
                worker.process.join()

    def _hear(self, worker: Worker) -> None:
        try:
            kind, told = worker.channel.recv()
        except (EOFError, ConnectionResetError):
            self._bury(worker)
            return
        config = self._session.config
        if kind == "more":
            more = self._files.popleft() if self._files else []
            worker.assigned.extend(more)
            worker.channel.send(more)
        elif kind == "done":
            worker.assigned.popleft()
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(config=config, data=told)
            self._hook.pytest_runtest_logreport(report=report)
        else:
            told["warning_message"] = warnings.WarningMessage(**told["warning_message"])
            self._hook.pytest_warning_recorded.call_historic(kwargs=told)

    def _bury(self, worker: Worker) -> None:
        """Take away a process that has ended; report and replace it where tests are left."""
        worker.process.join()
        self._workers.remove(worker)
        if not worker.assigned:
            return
        item = self._session.items[worker.assigned.popleft()]
        said = f"the process of this test ended with exit code {worker.process.exitcode}"
        report = pytest.TestReport(
            item.nodeid, item.location, keywords={}, outcome="failed", longrepr=said, when="call"
        )
        self._hook.pytest_runtest_logreport(report=report)
        self._workers.append(Worker(self._session, worker.assigned))


class Forwarding:
    """Stands in a forked process for what reports: sends it to the process that collected."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config, self._channel = config, channel
        # pytest-timeout writes there which threads were busy.
        self._tw = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._channel.send(("report", told))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Send a warning, of a class that is known everywhere."""
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        plain = {"message": UserWarning(text), "category": UserWarning}
        plain |= {"filename": warning_message.filename, "lineno": warning_message.lineno}
        told = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._channel.send(("warning", told))


def _work(session: pytest.Session, assigned: list[int], channel: Connection) -> None:
    """Run tests in a forked process until none is left."""
    end_with_parent()
    # Processes that tests start import the main module of theirs: pytest.
    sys.modules["__main__"] = types.ModuleType("__main__")
    # Locks are shared by the programs of one machine; here each process stands for one.
    os.environ["DZROBOT_LOCK_FOLDER"] = tempfile.mkdtemp(dir=os.environ["DZROBOT_LOCK_FOLDER"])
    plugins = session.config.pluginmanager
    forwarding = Forwarding(session.config, channel)
    plugins.unregister(name="terminalreporter")
    plugins.register(forwarding, "terminalreporter")
    capture: Any = plugins.get_plugin("capturemanager")
    # All copies share the place in the files that output is captured in.
    capture.stop_global_capturing()
    capture.start_global_capturing()
    session.config.hook.pytest_process_begins()
    plugins.register(Copies(), "copies")
    upcoming = _upcoming(assigned, channel)
    number = next(upcoming, None)
    while number is not None:
        following = next(upcoming, None)
        session.config.hook.pytest_runtest_protocol(
            item=session.items[number],
            nextitem=None if following is None else session.items[following],
        )
        channel.send(("done", None))
        number = following


def _upcoming(assigned: list[int], channel: Connection) -> Iterator[int]:
    """Yield the numbers of the tests to run; whatever runs next is asked for one test ahead."""
    while True:
        yield from assigned
        channel.send(("more", None))
        if not (assigned := channel.recv()):
            return


class Copies:
    """Begins as a copy of this process, and forks what is to be spawned from now on."""

    def __init__(self) -> None:
        self._fresh = multiprocessing.get_context
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(arbitrary_address("AF_UNIX"))
        listener.listen()
        ended, alive = os.pipe()
        if (server := os.fork()) == 0:
            end_with_parent(os.getppid())
            _let_go_of_all_but(0, 1, 2, listener.fileno(), ended)
            try:
                forkserver.main(listener.detach(), ended, [])
            finally:
                if not isinstance(sys.exception(), SystemExit):
                    traceback.print_exc()
                os._exit(0)
        os.close(ended)
        vars(forkserver.ensure_running.__self__).update(  # type: ignore[attr-defined]
            _forkserver_address=listener.getsockname(),
            _forkserver_alive_fd=alive,
            _forkserver_pid=server,
        )
        listener.close()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Choose how the processes of a test begin."""
        copies = item.get_closest_marker("copies") and not item.get_closest_marker("long")
        multiprocessing.get_context = self._copied if copies else self._fresh  # type: ignore[assignment]

    def _copied(self, method: str | None = None) -> Any:
        return _CopyContext() if method == "spawn" else self._fresh(method)


class _CopiedProcess(context.ForkServerProcess):
    """Has the surroundings of the process that starts it, as a fresh interpreter has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_process, (_Surroundings(), type(self), vars(self))


class _CopyContext(context.ForkServerContext):
    Process = _CopiedProcess  # type: ignore[assignment]


class _Surroundings:
    """Environment, output and log; unpickled before anything else of the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _surround, (dict(os.environ), reduction.DupFd(1), reduction.DupFd(2))


def _surround(environment: dict[str, str], *outputs: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, output in enumerate(outputs, 1):
        os.dup2(output.detach(), number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    logging.getLogger().handlers.clear()


def _copied_process(_: None, kind: type, state: dict[str, Any]) -> Any:
    process = kind.__new__(kind)
    # It ends with the process that it is forked from, which ends with the test's.
    vars(process).update(state, _parent_pid=os.getppid())
    return process


def _let_go_of_all_but(*kept: int) -> None:
    """Give up all files that a fresh interpreter would not have.

    Their numbers stay in use: torch's loggers write to what pytest captured while it collected, and
    would write into whatever came to have that number.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if number not in (*kept, nothing):
            os.dup2(nothing, number, inheritable=False)
