"""What the fuzz tests share: corrupted documents, and commands run in children.

:func:`run` forks this process; a child begins with all that is loaded here, and costs the more the
more memory this process has. Hundreds of runs are cheap in children of a :class:`Nursery`, a
process that holds nothing but the modules it is given. Who forks must have opened no simulator,
process pool or thread before.
"""

import atexit
import contextlib
import copy
import gc
import importlib
import json
import logging
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hypothesis import strategies

from dzrobot import cli
from dzrobot.errors import DzrobotError
from dzrobot.process import end_with_parent

MORE_MEMORY = 500 * 2**20
"""Bytes that a bad input may cost beyond the good one."""

MORE_SECONDS = 2.0
"""Processor seconds that a bad input may cost beyond the good one."""

COUNTS = {"tried": 0, "held": 0}
"""Bad inputs of the running test: given, and answered by a result or one message."""

_ADDRESS_SPACE = 4 * 2**30
_PATIENCE_S = 120.0
_DEPTH = 100_000
_COUNT = struct.Struct("q")
_MARK = "\ue000"

_RAW = {
    "huge": b"1000000000000",
    "beyond 64 bits": b"100000000000000000000",
    "beyond a float": b"1" + b"0" * 400,
    "5000 digits": b"9" * 5000,
    "not a number": b"NaN",
    "infinite": b"Infinity",
    "minus infinite": b"-Infinity",
    "deep": b"[" * _DEPTH + b"]" * _DEPTH,
    "deep mapping": b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH,
    "lone surrogate": b'"\\ud800"',
    "NUL": b'"\\u0000"',
    "latin-1": '"é"'.encode("latin-1"),
}
"""Values that are written as they are: Python or its JSON writer has none such."""

_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "negative": -1,
    "zero": 0,
    "fraction": 0.5,
    "empty text": "",
    "text": "abc",
    "digits": "²",
    "long text": "x" * 5000,
    "upward path": "../../x",
    "empty list": [],
    "list": [1, "a", None],
    "nested": {"a": {"b": [1]}},
    "empty mapping": {},
}

Place = tuple[str | int, ...]


def fields(document: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of every field below ``document``; of a list, the first item's."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield (*place, key)
            yield from fields(value, (*place, key))
    elif isinstance(document, list) and document:
        yield (*place, 0)
        yield from fields(document[0], (*place, 0))


def mutations(
    document: Any, *, head: bytes = b"", tail: bytes = b"", only: Sequence[Place] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield ``(name, content)`` of files that hold ``document`` in one line, each corrupted once.

    Args:
        document: Plain values.
        head: Bytes before it, such as the lines above in a file of lines.
        tail: Bytes after it.
        only: Places of the fields to corrupt; None: all.
    """
    for place in fields(document) if only is None else only:
        name = ".".join(map(str, place))
        yield f"{name} removed", head + _dumped(_changed(document, place, remove=True)) + tail
        for kind, value in _VALUES.items():
            yield f"{name} {kind}", head + _dumped(_changed(document, place, value)) + tail
        marked = _dumped(_changed(document, place, _MARK))
        for kind, raw in _RAW.items():
            yield f"{name} {kind}", head + marked.replace(json.dumps(_MARK).encode(), raw) + tail
    if isinstance(document, dict):
        yield "one more field", head + _dumped({**document, "surplus": 1}) + tail
    for name, content in whole_mutations(_dumped(document)):
        yield name, head + content + tail


def whole_mutations(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield ``(name, content)`` of files in the place of ``good``, whatever its format."""
    yield "empty", b""
    yield "half", good[: len(good) // 2]
    yield "twice", good + good
    yield "NUL bytes", b"\0" * len(good)
    yield "NUL bytes after", good + b"\0" * 64
    yield "binary", bytes(range(256)) * 4
    yield "latin-1 before", "é".encode("latin-1") + good
    yield "UTF-16", good.decode("utf-8", "replace").encode("utf-16")
    yield "byte order mark", b"\xef\xbb\xbf" + good
    yield "10 MB of blanks", b" " * 10_000_000
    for kind, value in _VALUES.items():
        yield f"only {kind}", json.dumps(value).encode()
    for kind, raw in _RAW.items():
        yield f"only {kind}", raw


def corrupted(document: Any) -> strategies.SearchStrategy[bytes]:
    """Return documents like ``document`` in which one to three fields hold anything at all."""
    places = list(fields(document))
    anything = strategies.recursive(
        strategies.none()
        | strategies.booleans()
        | strategies.integers()
        | strategies.floats()
        | strategies.text(max_size=20),
        lambda inner: (
            strategies.lists(inner, max_size=3)
            | strategies.dictionaries(strategies.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=6,
    )
    changes = strategies.lists(
        strategies.tuples(strategies.sampled_from(places), anything), min_size=1, max_size=3
    )

    def apply(chosen: list[tuple[Place, Any]]) -> bytes:
        changed = document
        for place, value in chosen:
            # The change before may have removed the place.
            with contextlib.suppress(LookupError, TypeError):
                changed = _changed(changed, place, value)
        return _dumped(changed)

    return changes.map(apply)


@dataclass(frozen=True)
class Result:
    """What came of a command."""

    argv: tuple[str, ...]
    code: int
    """Exit code; negative: the signal that ended it."""

    output: str
    """stdout and stderr, in the order they were written."""

    traceback: bool
    memory: int
    """Bytes by which the largest process grew over what it began with."""

    seconds: float
    """Processor time, child processes included."""


def run(argv: Sequence[object], *, prepare: Callable[[], None] = lambda: None) -> Result:
    """Run ``dzrobot`` with the words of ``argv`` in a child of this process.

    Args:
        argv: Command and its arguments.
        prepare: Called in the child before the command, for limits such as those on file sizes.
    """
    words = tuple(map(str, argv))
    with tempfile.TemporaryFile() as caught, mmap.mmap(-1, _COUNT.size) as shared:
        child = os.fork()
        if child == 0:
            # The child's own count: it begins with fewer pages than its parent holds.
            _COUNT.pack_into(shared, 0, _resident())
            _be_the_command(words, caught.fileno(), prepare)
        watch = threading.Timer(_PATIENCE_S, os.killpg, (child, signal.SIGABRT))
        watch.start()
        _, status, used = os.wait4(child, 0)
        watch.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        (began,) = _COUNT.unpack_from(shared)
        caught.seek(0)
        output = caught.read().decode("utf-8", "replace")
    return Result(
        argv=words,
        code=os.waitstatus_to_exitcode(status),
        output=output,
        traceback="Traceback (most recent call last)" in output,
        memory=max(0, used.ru_maxrss * 1024 - began),
        seconds=used.ru_utime + used.ru_stime,
    )


class Nursery:
    """A process that runs commands in children of its own, as :func:`run` does in this one's.

    Args:
        modules: What the commands need, loaded once.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._process: Connection | None = None

    def run(self, argv: Sequence[object]) -> Result:
        """Run ``dzrobot`` with ``argv``: in this folder, and with the environment of now."""
        if self._process is None:
            self._process = self._begin()
        words = tuple(map(str, argv))
        self._process.send((words, Path.cwd(), dict(os.environ), sys.path))
        result: Result = self._process.recv()
        return result

    def copy_this_process(self) -> None:
        """Begin as a copy of this process, which has most modules and has run no test yet."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            end_with_parent(os.getppid())
            nurse(str(theirs.detach()), *self._modules)
            os._exit(0)
        theirs.close()
        self._process = Connection(ours.detach())

    def _begin(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", "import sys, harness; harness.nurse(*sys.argv[1:])",
                 str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        connection = Connection(ours.detach())
        # It ends when nobody can ask it any more, also where this process is killed.
        atexit.register(lambda: (connection.close(), process.wait()))
        return connection


LIGHT = Nursery(
    *(
        f"dzrobot.commands.{name}"
        for name in ("collect", "compare", "consolidate", "emulate", "eval", "merge", "plan",
                     "record", "relabel", "replay")
    ),
    "dzrobot.envs.fakes",
)  # fmt: skip
"""Of commands that need no torch, or refuse before they do."""

HEAVY = Nursery(
    *(f"dzrobot.commands.{name}" for name in ("convert", "init", "inspect", "stats", "train")),
    "dzrobot.training.run.build",
    "dzrobot.training.run.trainer",
    "torch.utils.tensorboard",
)
"""Of commands that need torch."""


def nurse(handle: str, *modules: str) -> None:
    """Be the process of a :class:`Nursery`, at the other end of the connection ``handle``."""
    with Connection(int(handle)) as connection, contextlib.suppress(EOFError):
        missing = [*modules]
        while True:
            words, folder, environment, path = connection.recv()
            if missing:
                for name in missing:
                    importlib.import_module(name)
                missing.clear()
                # A collection in a child would touch, and so copy, every object of this process.
                gc.collect()
                gc.freeze()
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = path
            # The child's alone: the folder may be gone when the next one begins.
            connection.send(run(words, prepare=lambda: os.chdir(folder)))  # noqa: B023


def assert_held(result: Result, good: Result, *, codes: Sequence[int] = (0, 2)) -> None:
    """Assert that a bad input gave a result or one message, at about the price of a good one."""
    COUNTS["tried"] += 1
    said = f"dzrobot {' '.join(result.argv)[:300]}\n{result.output[-2000:]}"
    assert not result.traceback, f"a traceback from {said}"
    assert result.code in codes, f"code {result.code} from {said}"
    assert result.code == 0 or result.output.strip(), f"no message from {said}"
    more = result.memory - good.memory
    assert more < MORE_MEMORY, f"{more / 2**20:.0f} MiB more for {said}"
    longer = result.seconds - good.seconds
    assert longer < MORE_SECONDS, f"{longer:.1f} s longer for {said}"
    COUNTS["held"] += 1


def assert_refused(result: Result, good: Result) -> None:
    """Assert that a bad input was refused with a message."""
    assert_held(result, good, codes=(2,))


def refuses(read: Callable[[], Any]) -> str | None:
    """Return the message with which ``read`` refuses, None if it takes what it was given.

    What else it raises is a fault of the reader, and raised on.
    """
    COUNTS["tried"] += 1
    message = None
    try:
        read()
    except DzrobotError as error:
        message = str(error)
        assert message.strip(), "an error without a message"
    COUNTS["held"] += 1
    return message


def _be_the_command(
    words: tuple[str, ...], output: int, prepare: Callable[[], None]
) -> None:  # pragma: no cover
    code = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        with (
            open(1, "w", closefd=False, errors="backslashreplace") as sys.stdout,
            open(2, "w", closefd=False, errors="backslashreplace") as sys.stderr,
        ):
            logging.getLogger().handlers.clear()
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + _ADDRESS_SPACE,) * 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                prepare()
                code = cli.main(words)
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:  # noqa: BLE001 (what a command leaves uncaught is looked for)
                code = 1
                traceback.print_exc()
    finally:
        # Nothing of the test process may run here: no other test, no exit handler.
        os._exit(code)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _changed(document: Any, place: Place, value: Any = None, *, remove: bool = False) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    if remove:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def _dumped(document: Any) -> bytes:
    return json.dumps(document).encode()
