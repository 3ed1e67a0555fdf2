"""What recordings need of files beyond :mod:`dzrobot.files`."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dzrobot.errors import DatasetError
from dzrobot.files import TEMPORARY, explained, locked, replacing, write_bytes
from dzrobot.recording.change import finish
from dzrobot.recording.layout import ASIDE

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


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to ``path`` so that no reader ever sees half of it."""
    before = path.read_bytes() if path.exists() else b""
    write_bytes(path, before + json.dumps(row, allow_nan=False).encode() + b"\n")


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
