"""Files beside an arm: the lock of the program that moves it, and a stop that outlasts programs."""

import contextlib
import fcntl
import json
import logging
import os
import pwd
import re
import stat
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dzrobot.documents import parse_json
from dzrobot.envs.franka.safeguards.limits import Abort
from dzrobot.errors import RobotError
from dzrobot.files import cache_folder

_LARGEST_NOTE = 4096


class ArmLock:
    """A lock on an arm that ends with the process, however it ends.

    Args:
        address: Of the arm.
        folder: Where the lock file lies. None: the user's runtime folder.
    """

    def __init__(self, address: str, folder: str | None) -> None:
        self._address = address
        self._given = None if folder is None else Path(folder)
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock; twice is harmless.

        Raises:
            RobotError: another program, another environment of this one or another user has it, or
                its file is not one that can be trusted.
        """
        if self._file is not None:
            return
        path = file_of(self._address, "lock", self._given or runtime_folder())
        file, ours = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(file, _LARGEST_NOTE, 0).decode("utf-8", "replace").strip()
            whose = "" if ours else f" of user {user_name(os.fstat(file).st_uid)}"
            os.close(file)
            raise RobotError(
                f"the arm at {self._address} is in use by process {owner or 'unknown'}{whose}: "
                f"close() that environment or end that program ({path})"
            ) from error
        if ours:
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file

    def release(self) -> None:
        """Let others in; twice is harmless."""
        if self._file is not None:
            os.close(self._file)
        self._file = None


def file_of(address: str, kind: str, folder: Path) -> Path:
    """Return the path of the file of ``kind`` of the arm at ``address``."""
    name = re.sub(r"[^\w.-]", "_", address)
    return folder / f"dzrobot-franka-{name}.{kind}"


def runtime_folder() -> Path:
    """Return a folder of this user alone for what lasts as long as programs run.

    Raises:
        RobotError: what is there belongs to someone else, or is a link.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    return private_folder(Path(given) / "dzrobot" if given else cache_folder() / "run")


def state_folder() -> Path:
    """Return a folder of this user alone for what outlasts a login.

    Raises:
        RobotError: what is there belongs to someone else, or is a link.
    """
    given = os.environ.get("XDG_STATE_HOME")
    return private_folder((Path(given) if given else Path.home() / ".local/state") / "dzrobot")


def private_folder(path: Path) -> Path:
    """Return ``path``, made if it is not there, once it is known to be this user's alone.

    Raises:
        RobotError: it cannot be made, is a link, or belongs to another user.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise RobotError(
            f"cannot use the folder {path}: {error.strerror}; set lock_folder of the workcell to a "
            "folder that you may write to"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        what = "belongs to " + user_name(found.st_uid)
        if not stat.S_ISDIR(found.st_mode):
            what = "is a link or a file, no folder"
        raise RobotError(f"{path} {what}: remove it, or set lock_folder of the workcell to another")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path


def user_name(number: int) -> str:
    """Return the name of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _opened(path: Path) -> tuple[int, bool]:
    """Return the open lock file, and whether it is ours to write to."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file, ours = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644), True
    except PermissionError:
        # Another user's: it can still be locked, and says who has it.
        try:
            file, ours = os.open(path, flags | os.O_RDONLY), False
        except OSError as error:
            raise _unusable(path, error) from error
    except OSError as error:
        raise _unusable(path, error) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise RobotError(f"the lock {path} is no regular file: remove it")
    return file, ours


def _unusable(path: Path, error: OSError) -> RobotError:
    if path.is_symlink():
        return RobotError(f"the lock {path} is a link, which is not followed: remove it")
    owner = ""
    with contextlib.suppress(OSError):
        owner = f", which belongs to user {user_name(path.lstat().st_uid)}"
    return RobotError(
        f"cannot open the lock {path}{owner}: {error.strerror}; ask its owner to remove it, or set "
        "lock_folder of the workcell to a folder that everyone who uses this arm may write to"
    )


_log = logging.getLogger(__name__)

_LARGEST = 16_384


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Why nothing may move."""

    abort: str
    """As in ``info["abort"]``."""

    message: str
    at: str
    """When, as ISO 8601 in local time."""

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.abort or 'stop'} at {self.at or 'an unknown time'}: {self.message}"


class StopLatch:
    """The stop of one arm: while it is set, nothing moves the arm.

    Args:
        address: Of the arm; its stop is a file, which other programs see too. None: the stop lasts
            as long as this object.
        folder: Where the file lies. None: the user's folder for what outlasts a login.
    """

    def __init__(self, address: str | None, folder: str | None = None) -> None:
        self._address = address
        self._given = None if folder is None else Path(folder)
        self._kept: Stop | None = None
        self._lock = threading.Lock()

    @property
    def remedy(self) -> str:
        """What ends a stop, once a person has looked."""
        call = "env.unwrapped.acknowledge()"
        if self._address is not None:
            return f"`dzrobot acknowledge {self._address}`, or {call}"
        return f"run the command again, as this stop ends with its program, or call {call} in yours"

    def active(self) -> Stop | None:
        """Return the stop if it is set and nobody has acknowledged it."""
        with self._lock:
            path = self._path()
            if path is None:
                return self._kept
            if not os.path.lexists(path):
                # Only a stop that could not be written is kept here; another program's
                # acknowledgement ends all others.
                return self._kept
            return _read(path)

    def set(self, abort: Abort, message: str) -> None:
        """Set the stop; a stop that is already set stays."""
        stop = Stop(
            abort=abort.value,
            message=message,
            at=datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        with self._lock:
            try:
                path = self._path()
                if path is not None:
                    _write(path, stop)
                    return
            except (OSError, RobotError) as error:
                _log.warning("the stop could not be written and ends with this program: %s", error)
            self._kept = self._kept or stop

    def acknowledge(self) -> Stop | None:
        """Clear the stop and return it; None if none was set.

        Raises:
            RobotError: its file belongs to someone else.
        """
        stop = self.active()
        with self._lock:
            path = self._path()
            self._kept = None
            if path is not None:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise RobotError(
                        f"the stop of {self._address} cannot be acknowledged: {path} belongs to "
                        f"user {user_name(path.lstat().st_uid)} ({error.strerror})"
                    ) from error
        return stop

    def _path(self) -> Path | None:
        if self._address is None:
            return None
        return file_of(self._address, "stop", self._given or state_folder())


def _write(path: Path, stop: Stop) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o644)
    except FileExistsError:
        # Whatever lies there, a link too, counts as a stop.
        return
    with os.fdopen(file, "w", encoding="utf-8") as writer:
        json.dump(vars(stop), writer)
        writer.flush()
        os.fsync(writer.fileno())


def _read(path: Path) -> Stop:
    """Return the stop in ``path``; one that cannot be read is a stop nevertheless."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as reader:
            return parse_json(reader.read(_LARGEST), Stop, str(path), RobotError)
    except (OSError, RobotError):
        return Stop(abort="", message=f"a stop whose file cannot be read ({path})", at="")
