"""One program at a time moves one arm."""

import fcntl
import os
import re
import tempfile
from pathlib import Path
from typing import IO

from dzrobot.errors import RobotError


class ArmLock:
    """A lock on an arm that ends with the process, however it ends.

    Args:
        address: Of the arm.
        folder: Where the lock file lies. None: the folder for temporary files.
    """

    def __init__(self, address: str, folder: str | None) -> None:
        name = re.sub(r"[^\w.-]", "_", address)
        self._address = address
        self._path = Path(folder or tempfile.gettempdir()) / f"dzrobot-franka-{name}.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock; twice is harmless.

        Raises:
            RobotError: another program, or another environment of this one, has it.
        """
        if self._file is not None:
            return
        # "a+" does not empty the file of an owner who still holds it.
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise RobotError(
                f"the arm at {self._address} is in use by process {owner}: close() that "
                f"environment or end that program ({self._path})"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let others in; twice is harmless."""
        if self._file is not None:
            self._file.close()
        self._file = None
