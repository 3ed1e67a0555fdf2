"""A change of a finished recording: all of its files at once, or none.

New files are written aside, in a folder laid out like the recording's; renaming that folder is the
commit. Then each file moves to its place. Killed before the commit, nothing has changed. Killed
after it, readers refuse the recording, and whoever locks it next finishes the moves.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dzrobot.documents import read_json
from dzrobot.errors import DatasetError
from dzrobot.files import flush, move, remove, write_json
from dzrobot.recording.layout import ASIDE

_COMMITTED = ASIDE / "change"
_PREPARED = ASIDE / "change.prepared"
_REMOVED = "removed.json"


class Change:
    """New files of a recording, and files of it that go; use :func:`changing`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Takes new files, under the names that they have below the recording's folder."""

        self.removed: list[str] = []
        """Files that go, below the recording's folder."""

    def link(self, source: Path, name: str) -> None:
        """Let the content of ``source`` be at ``name`` too."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            # Not every file system knows links.
            shutil.copyfile(source, target)


@contextmanager
def changing(root: Path) -> Iterator[Change]:
    """Yield a change of the recording in ``root``, which the caller has locked.

    It is made when the block ends; if the block raises, nothing has changed.
    """
    prepared = root / _PREPARED
    remove(prepared)
    prepared.mkdir(parents=True)
    try:
        change = Change(prepared)
        yield change
        write_json(prepared / _REMOVED, change.removed)
        for path in prepared.rglob("*"):
            flush(path)
        move(prepared, root / _COMMITTED)
    except BaseException:
        remove(prepared)
        raise
    finish(root)


def check_whole(root: Path) -> None:
    """Raise :class:`DatasetError` if a change of the recording in ``root`` was interrupted."""
    if (root / _COMMITTED).is_dir():
        raise DatasetError(
            f"a change of {root} was interrupted when half of its files were in their place: "
            f"`dzrobot relabel {root}` finishes it"
        )


def finish(root: Path) -> None:
    """Finish a change of ``root`` that was interrupted after its commit; forget one before it."""
    remove(root / _PREPARED)
    committed = root / _COMMITTED
    if not committed.is_dir():
        return
    listed = committed / _REMOVED
    going = read_json(listed, list[str], DatasetError) if listed.exists() else []
    coming = [path for path in sorted(committed.rglob("*")) if path.is_file() and path != listed]
    moves = {path: root / path.relative_to(committed) for path in coming}
    # The folder may have come from a stranger.
    for place in (*moves.values(), *(root / name for name in going)):
        if not place.parent.resolve().is_relative_to(root.resolve()) or place.is_dir():
            raise DatasetError(
                f"{committed} would change {place}, which is no file of the recording: this change "
                "was not made by dzrobot; remove it, or take the recording anew"
            )
    for path, place in moves.items():
        move(path, place)
    for name in going:
        (root / name).unlink(missing_ok=True)
    # The list goes last: without it, everything that it names is gone.
    shutil.rmtree(committed)
