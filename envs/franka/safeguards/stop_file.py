"""Stops that outlast the program: after one, nothing moves until a person has said so."""

import json
import logging
import os
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dzrobot.documents import parse_json
from dzrobot.envs.franka.safeguards.limits import Abort
from dzrobot.envs.franka.safeguards.lock import file_of, state_folder, user_name
from dzrobot.errors import RobotError

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


class Stops:
    """The stop that stands for one arm, if one does.

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

    def standing(self) -> Stop | None:
        """Return the stop that nobody has acknowledged, None if there is none."""
        with self._lock:
            path = self._path()
            if path is None:
                return self._kept
            if not os.path.lexists(path):
                # Only a stop that could not be written is kept here; another program's
                # acknowledgement ends all others.
                return self._kept
            return _read(path)

    def put(self, abort: Abort, message: str) -> None:
        """Let a stop stand; one that stands already stays."""
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
        """End the stop that stands, and return it; None if there was none.

        Raises:
            RobotError: its file belongs to someone else.
        """
        stop = self.standing()
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
