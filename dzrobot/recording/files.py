"""Files that are either there whole or not at all: written aside, flushed to disk, renamed."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path``, replacing it in one step."""
    _write_text(path, json.dumps(value, indent=4) + "\n")


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line to ``path``, replacing it in one step."""
    _write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to ``path`` so that no reader ever sees half of it."""
    before = path.read_text() if path.exists() else ""
    _write_text(path, before + json.dumps(row) + "\n")


def write_parquet(path: Path, table: pa.Table, *, row_group_size: int | None = None) -> None:
    """Write ``table`` to ``path``, replacing it in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".aside")
    pq.write_table(table, aside, row_group_size=row_group_size)
    move(aside, path)


def move(source: Path, target: Path) -> None:
    """Flush ``source`` to disk and rename it to ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _flush(source)
    source.replace(target)
    _flush(target.parent)


def is_unfinished(path: Path) -> bool:
    """Return whether ``path`` is what a killed writer left of a file."""
    return ".aside" in path.suffixes


def remove_unfinished(root: Path) -> None:
    """Remove what killed writers left anywhere below ``root``."""
    for path in root.rglob("*.aside*"):
        if path.is_file() and is_unfinished(path):
            path.unlink()


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``."""
    return json.loads(path.read_text())


def read_json_lines(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the objects in the first ``limit`` lines of ``path``."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line) for line in lines[:limit]]


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".aside")
    aside.write_text(text)
    move(aside, path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
