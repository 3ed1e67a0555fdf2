"""Processes of one run: its ranks, workers that end with their parent, and SIGTERM as Ctrl-C."""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from dzrobot.errors import ConfigError, printable


def world_size() -> int:
    """Return how many processes were started together; 1 for one that was started alone."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Return the number of this process among all of them."""
    return _number("RANK", 0)


def is_first_to_report(message: str) -> bool:
    """Return whether no other process of this launch and machine has reported ``message``.

    The first process that fails reports: its launcher ends the others at once, the main one too.
    """
    if (folder := _launch_folder()) is None:
        return os.environ.get("RANK", "0") == "0"
    marker = folder / f"reported-{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(exist_ok=True)
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _launch_folder() -> Path | None:
    """Return a folder of this machine that the processes of one launch share; None: unknown."""
    if (place := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        # One folder a process, in one folder a start of all of them.
        return Path(place).parents[1]
    if "SLURM_PROCID" in os.environ and "RANK" in os.environ:
        parts = (os.environ.get(f"SLURM_{n}", "0") for n in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
        return Path(tempfile.gettempdir()) / f"dzrobot-{os.getuid()}-{'-'.join(parts)}"
    return None


def _number(variable: str, alone: int) -> int:
    text = os.environ.get(variable, str(alone))
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{variable}={text!r} in the environment: a launcher such as torchrun sets it to a "
            "number; unset it where there is none"
        )
    return int(text)


_PR_SET_PDEATHSIG = 1


_LONGEST_LOGGED = 4000
"""Characters of one line of a log."""


class EscapedFormatter(logging.Formatter):
    """Writes records of a log so that texts from others cannot move a terminal's cursor.

    A warning is called one, also where lines begin with their time alone.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record, control characters escaped."""
        lines = super().format(record).split("\n")
        return "\n".join(printable(line, _LONGEST_LOGGED) for line in lines)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line of a record, without what was raised."""
        if record.levelno >= logging.WARNING and "%(levelname)" not in str(self._fmt):
            record.message = f"{record.levelname} {record.message}"
        return super().formatMessage(record)


LINES_AN_HOUR = 2000
"""Lines that a server may log in an hour: 30 a minute, or 8 MB at most."""

_HOUR_S = 3600.0


class HourlyLimit(logging.Filter):
    """Lets so many lines of a log pass in an hour; says at the end of one how many it left out.

    Whoever may connect to a server has it log a line whenever they like, and nothing else ends
    such a log.

    Args:
        lines: How many, those of tracebacks too.
        clock: Returns seconds.
    """

    def __init__(self, lines: int = LINES_AN_HOUR, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._lines, self._clock = lines, clock
        self._since, self._passed, self._left_out = clock(), 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written; the first of a new hour tells what was not."""
        text = record.getMessage()
        if (now := self._clock()) - self._since >= _HOUR_S:
            if self._left_out:
                record.msg, record.args = f"{text} ({self._left_out} lines left out before)", ()
            self._since, self._passed, self._left_out = now, 0, 0
        size = 1 + text.count("\n")
        if self._passed + size > self._lines:
            if not self._left_out:
                record.msg = f"more than {self._lines} lines in an hour: the rest is left out"
                record.args, record.exc_info, record.levelno = (), None, logging.WARNING
            self._left_out += size
            return self._left_out == size
        self._passed += size
        return True


def limit_log() -> None:
    """Let the log of this process, a server, be of bounded length."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _ToStderr) and not handler.filters:
            handler.addFilter(HourlyLimit())


class _ToStderr(logging.StreamHandler[Any]):
    """Writes to what standard error is now: above a line that moves, where one does."""

    @property
    def stream(self) -> Any:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None:
        """Keep standard error."""


def log_escaped(form: str = "%(levelname)s %(name)s: %(message)s", *, dates: str = "") -> None:
    """Write warnings of this process to stderr, unless its log is set up by others already.

    Args:
        form: Of a line; that of the last call counts.
        dates: Form of times; empty: that of ISO 8601.
    """
    ours = [one for one in logging.getLogger().handlers if isinstance(one, _ToStderr)]
    handler = ours[0] if ours else _ToStderr()
    handler.setFormatter(EscapedFormatter(form, dates or None))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "dzrobot"


@contextmanager
def searching_here_last() -> Iterator[None]:
    """Start Python processes in the block that do not look in the current folder first.

    Whatever lies there under the name of a module of Python's would be run in its place. The
    process has the search path of this one as soon as it has begun: :func:`end_with_parent` ends
    the setting there, so that what it starts in turn is not concerned.
    """
    if os.environ.get(_SAFE_PATH):
        yield
        return
    os.environ[_SAFE_PATH] = _OURS
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH, None)


def end_with_parent(pid: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it is gone.

    A worker in the middle of a long episode reads no pipe, so that it would not notice for as long
    as the episode takes; a suspended process notices nothing at all. Elsewhere than on Linux, and
    there too, a closed pipe ends it later.

    Args:
        pid: Of the process that started this one. None: what ``multiprocessing`` knows.
    """
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]
    if pid is None and (parent := multiprocessing.parent_process()) is not None:
        pid = parent.pid
    if pid is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have ended before the kernel was asked.
    if os.getppid() != pid:
        os._exit(1)


_LAUNCHER = "DZROBOT_LAUNCHER"
"""Environment variable: which process has started this command by :func:`run_command`."""


def is_step() -> bool:
    """Return whether another command has started this one, as one of its steps."""
    # The processes of this one have another parent.
    return os.environ.get(_LAUNCHER) == str(os.getppid())


def end_with_launcher() -> None:
    """Let the kernel kill this process when torchrun, or the command that began it, is gone.

    Ranks that are connected need no launcher: they would train on unseen, and the same command,
    given again, would meet a second writer in its folder.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or is_step():
        end_with_parent(os.getppid())


def run_command(words: Sequence[str]) -> int:
    """Run ``dzrobot WORDS`` in a process of its own; return its exit code.

    It ends with this one, and its memory, that of a GPU above all, is free again afterwards. Ctrl-C
    and SIGTERM reach it, and it is waited for until it has tidied up.
    """
    with searching_here_last():
        process = subprocess.Popen(
            [sys.executable, "-m", "dzrobot.cli", *words],
            env={**os.environ, _LAUNCHER: str(os.getpid())},
        )
    with terminable():
        try:
            return process.wait()
        except KeyboardInterrupt as stop:
            # A terminal sends Ctrl-C to both.
            if isinstance(stop, Terminated):
                process.terminate()
            process.wait()
            raise


def exit_code(number: int) -> int:
    """Return the exit code of a process that the signal ``number`` ended, as shells have it.

    143 after SIGTERM, 130 after Ctrl-C. A process that tidied up first ends with it too: what waits
    for it, a shell's ``&&`` or a scheduler, must not take an interrupted run for a finished one.
    """
    return 128 + number


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a service manager or a cluster sends it."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` in the block when SIGTERM comes.

    A line of results that is being written is finished: its file is closed, and so flushed, on the
    way out. Worker processes are ended by what started them.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        # A second one, sent by an impatient manager, must not cut the tidying short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
