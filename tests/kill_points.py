"""Stops a job at one of its file operations: killed, torn in the middle of a write, or disk full.

A job is a function without arguments. It runs in a forked child whose file operations below one
folder are counted, so that operation ``n`` is the same one in every run::

    steps = operations(job, folder)             # run whole, list them
    for at in spread(len(steps), 12):
        stop(job, folder, at, "kill")           # the child is gone; the folder is as it left it

Only what changes a folder counts: opening for writing, flushing, renaming, removing, making
folders. What a C library writes is seen when it is flushed or renamed.
"""

import builtins
import errno
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

Mode = Literal["kill", "torn", "full"]
"""``kill``: SIGKILL before the operation. ``torn``: the same, after half of what was written since
the file was opened, and is not on the disk yet, is cut off. ``full``: this operation and all later
ones that need room fail as on a full disk."""

_ONE_PATH = ("unlink", "remove", "mkdir", "rmdir", "truncate")
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_NEEDS_ROOM = ("open", "fsync", "mkdir", "write")


@dataclass(frozen=True)
class Ended:
    """How a stopped job ended."""

    code: int
    """Exit code: what the job returned, 1 after an exception, or minus the signal's number."""

    output: str
    """What it wrote to stdout and stderr."""


def operations(job: Callable[[], object], folder: Path) -> list[str]:
    """Run ``job`` whole in a child; return its file operations below ``folder``, in order."""
    log = folder.parent / f"{folder.name}.operations"
    ended = _child(job, _Stopper(folder, None, "kill", log))
    assert ended.code == 0, ended.output
    lines = log.read_text().splitlines()
    log.unlink()
    return lines


def stop(job: Callable[[], object], folder: Path, at: int, mode: Mode = "kill") -> Ended:
    """Run ``job`` in a child that stops at operation ``at`` (from 0) below ``folder``."""
    return _child(job, _Stopper(folder, at, mode, None))


def spread(count: int, points: int, turn: int = 0, turns: int = 1) -> list[int]:
    """Return ``points`` numbers below ``count``, evenly apart, the first and the last among them.

    Tests that take ``turns`` share that many times the points: each has every ``turns``-th one.
    ``KILL_POINTS=all`` in the environment asks for every one.
    """
    points *= turns
    if os.environ.get("KILL_POINTS") == "all":
        return list(range(count))
    if count <= points:
        return list(range(count))[turn::turns]
    return [round(i * (count - 1) / (points - 1)) for i in range(points)][turn::turns]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below ``folder``, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class _Stopper:
    """Counts the file operations of this process and stops it at one of them."""

    def __init__(self, folder: Path, at: int | None, mode: Mode, log: Path | None) -> None:
        self._folder = folder.resolve()
        self._at = at
        self._mode = mode
        self._count = 0
        self._kept: dict[str, int] = {}
        """Bytes of files when they were opened to append."""

        self._flushed: dict[int, int] = {}
        """Bytes of files that are on the disk, by the number of their inode: names change."""

        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if log else None

    def install(self) -> None:
        """Watch this process from now on."""
        for name in _ONE_PATH:
            self._watch(os, name, lambda a, k: self._inside(a[0], k.get("dir_fd")))
        for name in _TWO_PATHS:
            self._watch(os, name, lambda a, _: self._inside(a[1]))
        self._watch(os, "fsync", lambda a, _: self._inside(_path_of(a[0])))
        self._watch(os, "write", lambda a, _: self._inside(_path_of(a[0])))
        self._watch(os, "open", lambda a, k: self._os_opened(a, k) if _writes(*a) else None)
        for module in (builtins, io):
            self._watch(module, "open", lambda a, k: self._opened(a, k) if _creates(a, k) else None)

    def _watch(
        self, module: Any, name: str, path_of: Callable[[tuple[Any, ...], Any], str | None]
    ) -> None:
        original = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            path = path_of(args, kwargs)
            if path is not None:
                self._reach(name, path)
            return original(*args, **kwargs)

        setattr(module, name, watched)

    def _os_opened(self, args: tuple[Any, ...], kwargs: Any) -> str | None:
        path = self._inside(args[0], kwargs.get("dir_fd"))
        if path is not None and args[1] & os.O_APPEND:
            self._kept[path] = Path(path).stat().st_size if Path(path).exists() else 0
        return path

    def _opened(self, args: tuple[Any, ...], kwargs: Any) -> str | None:
        path = self._inside(args[0])
        if path is not None:
            appends = "a" in (args[1] if len(args) > 1 else kwargs.get("mode", "r"))
            self._kept[path] = Path(path).stat().st_size if appends and Path(path).exists() else 0
        return path

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int) or path is None:
            return None
        where = Path(os.fsdecode(path))
        if dir_fd is not None:
            where = Path(_path_of(dir_fd) or "") / where
        where = where.parent.resolve() / where.name
        return str(where) if where.is_relative_to(self._folder) else None

    def _reach(self, name: str, path: str) -> None:
        number, self._count = self._count, self._count + 1
        if self._log is not None:
            _write(self._log, f"{name} {Path(path).relative_to(self._folder)}\n".encode())
        if self._at is None or number < self._at:
            if name == "fsync" and Path(path).is_file():
                found = Path(path).stat()
                self._flushed[found.st_ino] = found.st_size
            return
        if self._mode == "full":
            if name in _NEEDS_ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return
        if self._mode == "torn" and Path(path).is_file() and name in ("fsync", "write"):
            found = Path(path).stat()
            kept = max(self._kept.get(path, 0), self._flushed.get(found.st_ino, 0))
            _truncate(path, kept + max(0, found.st_size - kept) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


_write, _truncate = os.write, os.truncate


def _path_of(handle: int) -> str | None:
    try:
        return str(Path(f"/proc/self/fd/{handle}").readlink())
    except OSError:
        return None


def _writes(_path: Any, flags: int, *_mode: Any) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _creates(args: tuple[Any, ...], kwargs: Any) -> bool:
    mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
    return any(letter in mode for letter in "wax+")


def _child(job: Callable[[], object], stopper: _Stopper) -> Ended:
    # A file, not a pipe: what the job started may outlive it and hold a pipe open.
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _live(job, stopper, output.fileno())
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), output.read().decode(errors="replace"))


def _live(job: Callable[[], object], stopper: _Stopper, output: int) -> NoReturn:
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        stopper.install()
        result = job()
        code = result if isinstance(result, int) else 0
    except BaseException:  # noqa: BLE001 (what the job leaves uncaught is part of its output)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
