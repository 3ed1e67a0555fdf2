"""The file that is an arm's stop: while it is there, the arm's driver holds the arm.

The arm's driver and the reader of the keyboard watch and write it without the program's
interpreter, so this imports nothing but the standard library.
"""

import json
import os
from datetime import datetime
from pathlib import Path


def stop_stands(path: Path) -> bool:
    """Return whether a stop is set; whatever lies at ``path``, a broken link too, is one."""
    return os.path.lexists(path)


def write_stop(path: Path, abort: str, message: str) -> None:
    """Set the stop; one that is set already stays.

    Args:
        path: Of the file.
        abort: Its kind, as in ``info["abort"]``.
        message: What happened.

    Raises:
        OSError: the file cannot be made. One that was made counts, whatever was written to it.
    """
    at = datetime.now().astimezone().isoformat(timespec="seconds")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o644)
    except FileExistsError:
        return
    with os.fdopen(file, "w", encoding="utf-8") as writer:
        # Every user may read why, whatever this one's usual permissions are.
        os.fchmod(file, 0o644)
        json.dump({"abort": abort, "message": message, "at": at}, writer)
        writer.flush()
        os.fsync(file)
