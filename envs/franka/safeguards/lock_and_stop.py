"""Files beside an arm: the lock of the program that moves it, and a stop that outlasts programs.

Both are named after the arm's resolved address, so that every spelling of it means the same arm; an
arm tells its clients no serial number. They lie where every user of this machine sees them.
"""

import contextlib
import fcntl
import functools
import logging
import os
import pwd
import re
import socket
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from dzrobot.documents import parse_json
from dzrobot.envs.franka.safeguards.limits import Abort
from dzrobot.envs.franka.safeguards.stop_file import stop_stands, write_stop
from dzrobot.errors import ArmBusyError, RobotError
from dzrobot.files import cache_folder

_log = logging.getLogger(__name__)

_LARGEST_NOTE = 4096

FOLDER_VARIABLE = "DZROBOT_LOCK_FOLDER"
"""Environment variable that names another folder, for workcells without ``lock_folder``."""

_SHARED = "/var/tmp"
"""Belongs to root and is sticky, so users cannot remove each other's files. It outlasts a restart
of the machine."""


class ArmLock:
    """A lock on an arm that ends with the process, however it ends.

    Args:
        address: Of the arm.
        folder: Where the lock file lies. None: see :func:`lock_folder`.
    """

    def __init__(self, address: str, folder: str | None) -> None:
        self._address = address
        self._given = folder
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock; twice is harmless.

        Raises:
            ArmBusyError: another program, another environment of this one or another user has it.
            RobotError: its file is not one that can be trusted, or the address is unknown.
        """
        if self._file is not None:
            return
        path = file_of(self._address, "lock", lock_folder(self._given))
        file, ours = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(file, _LARGEST_NOTE, 0).decode("utf-8", "replace").strip()
            whose = "" if ours else f" of user {user_name(os.fstat(file).st_uid)}"
            os.close(file)
            raise ArmBusyError(
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
    """Return the path of the file of ``kind`` of the arm at ``address``.

    Raises:
        RobotError: the address is a host name that cannot be resolved.
    """
    name = re.sub(r"[^\w.-]", "_", resolved(address))
    return folder / f"dzrobot-franka-{name}.{kind}"


def resolved(address: str) -> str:
    """Return the IP address that a host name, or any spelling of an address, stands for.

    Raises:
        RobotError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(address.encode("ascii"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RobotError(
            f"the address {address!r} of the arm cannot be resolved ({error}): check its spelling "
            "and this machine's network, or give the IP address"
        ) from error
    # Of several, always the same one; IPv4 comes first.
    return str(min((family, where[0]) for family, _, _, _, where in found)[1])


def lock_folder(given: str | None) -> Path:
    """Return where locks and stops lie.

    That is ``given`` (a workcell's ``lock_folder``), else what :data:`FOLDER_VARIABLE` names, else
    a folder that all users of this machine share. Where there is none it is this user's alone, and
    a warning says so.

    Raises:
        RobotError: the user's own folder belongs to someone else, or is a link.
    """
    if named := given or os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    return Path(_SHARED) if _is_shared(_SHARED) else _own_folder()


def _is_shared(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    mode = stat.S_ISVTX | stat.S_IWOTH
    sticky = stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and found.st_mode & mode == mode
    return sticky and os.access(folder, os.W_OK | os.X_OK)


@functools.cache
def _own_folder() -> Path:
    folder = private_folder(cache_folder() / "locks")
    _log.warning(
        "%s is no folder that all users of this machine may write to, so lock and stop of the arm "
        "lie in %s, where other users do not see them: set lock_folder of the workcell",
        _SHARED, folder,
    )  # fmt: skip
    return folder


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
        raise RobotError(f"the lock {path} is not a regular file: remove it")
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

    It is a file, so that the arm's driver, the reader of the keyboard and other programs see and
    set it too, whatever this program does.

    Args:
        address: Of the arm. None: an arm that no other program reaches; the stop lasts as long as
            this object.
        folder: Where the file lies. None: see :func:`lock_folder`.
    """

    def __init__(self, address: str | None, folder: str | None = None) -> None:
        self._address = address
        self._given = folder
        self._kept: Stop | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def path(self) -> Path:
        """The file.

        Raises:
            RobotError: the arm's address is unknown, or its folder cannot be used.
        """
        if self._address is None:
            self._own = tempfile.TemporaryDirectory(prefix="dzrobot-stop-")
            return Path(self._own.name) / "stop"
        return file_of(self._address, "stop", lock_folder(self._given))

    @property
    def remedy(self) -> str:
        """What ends a stop, once a person has looked."""
        call = "env.unwrapped.acknowledge()"
        if self._address is not None:
            return f"`dzrobot acknowledge {self._address}`, or {call}"
        return f"run the command again, as this stop ends with its program, or call {call} in yours"

    def active(self) -> Stop | None:
        """Return the stop if it is set and has not been acknowledged."""
        with self._lock:
            # Only a stop that could not be written is kept here; another program's acknowledgement
            # ends all others.
            return _read(self.path) if stop_stands(self.path) else self._kept

    def set(self, abort: Abort, message: str) -> None:
        """Set the stop; a stop that is already set stays."""
        with self._lock:
            try:
                write_stop(self.path, abort.value, message)
            except (OSError, RobotError) as error:
                _log.warning("the stop could not be written and ends with this program: %s", error)
                self._kept = self._kept or Stop(abort=abort.value, message=message, at="")

    def acknowledge(self) -> Stop | None:
        """Clear the stop and return it; None if none was set.

        Raises:
            RobotError: its file belongs to someone else.
        """
        stop = self.active()
        with self._lock:
            self._kept = None
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                raise RobotError(
                    f"the stop of {self._address} cannot be acknowledged: {self.path} belongs to "
                    f"user {user_name(self.path.lstat().st_uid)} ({error.strerror}); that user or "
                    "root can"
                ) from error
        return stop


def _read(path: Path) -> Stop:
    """Return the stop in ``path``; one that cannot be read is a stop nevertheless."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as reader:
            return parse_json(reader.read(_LARGEST), Stop, str(path), RobotError)
    except (OSError, RobotError):
        return Stop(abort="", message=f"a stop whose file cannot be read ({path})", at="")
