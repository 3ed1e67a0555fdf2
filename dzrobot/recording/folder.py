"""A recording's folder: one writer at a time, and changes that apply completely or not at all.

New files are written aside, in a folder laid out like the recording's; renaming that folder is the
commit. Then each file moves to its place. Killed before the commit, nothing has changed. Killed
after it, readers refuse the recording, and the next process that locks it finishes the moves.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dzrobot.documents import read_json
from dzrobot.errors import DatasetError
from dzrobot.files import (
    TEMPORARY,
    explained,
    flush,
    locked,
    move,
    remove,
    replacing,
    undone_on_error,
    write_bytes,
    write_json,
)
from dzrobot.recording.formats import ASIDE

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
    with undone_on_error(lambda: remove(prepared)):
        change = Change(prepared)
        yield change
        write_json(prepared / _REMOVED, change.removed)
        for path in prepared.rglob("*"):
            flush(path)
        move(prepared, root / _COMMITTED)
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
                f"{committed} would change {place}, which is not a file of the recording: this "
                "change was not made by dzrobot; remove it, or take the recording anew"
            )
    for path, place in moves.items():
        move(path, place)
    for name in going:
        (root / name).unlink(missing_ok=True)
    # The list goes last: without it, everything that it names is gone.
    shutil.rmtree(committed)


_UNFINISHED = (TEMPORARY, ".aside")
"""Endings of what a killed writer leaves; recordings before 2026-11 have the second."""


def lock(root: Path) -> ExitStack:
    """Return what keeps other writers out of ``root`` until it is closed.

    A change of the recording that was interrupted is finished first.

    Raises:
        DatasetError: Another writer is at work, or the folder cannot be written to.
    """
    refusal = DatasetError(
        f"another writer is recording to {root}: wait for it or use another folder"
    )
    held = ExitStack()
    with explained(f"record to {root}", DatasetError):
        (root / ASIDE).mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(root / ASIDE / "lock", refusal))
        finish(root)
    return held


def keep_lines(path: Path, count: int) -> None:
    """Forget all but the first ``count`` lines of ``path``; without any, the file goes.

    Raises:
        DatasetError: It holds fewer.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if len(lines) < count:
        raise DatasetError(
            f"{path} has {len(lines)} lines, meta/info.json counts {count}: the recording is "
            "incomplete or older than 2026-11; it can be read, but record to a new folder"
        )
    if not count:
        path.unlink(missing_ok=True)
    elif len(lines) > count:
        write_bytes(path, b"".join(lines[:count]))


def write_parquet(path: Path, table: pa.Table, *, row_group_size: int | None = None) -> None:
    """Write ``table`` to ``path``, replacing it in one step."""
    with replacing(path) as temporary:
        # In one piece: how a table was put together must not show in the file.
        pq.write_table(table.combine_chunks(), temporary, row_group_size=row_group_size)


def is_unfinished(path: Path) -> bool:
    """Return whether ``path`` is what a killed writer left of a file."""
    return any(ending in path.suffixes for ending in _UNFINISHED)


def remove_unfinished(root: Path) -> None:
    """Remove what killed writers left anywhere below ``root``."""
    for path in root.rglob("*"):
        if is_unfinished(path) and path.is_file():
            path.unlink()
