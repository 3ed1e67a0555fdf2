"""An evaluation that tests interrupt, and what of it must not depend on that."""

import json
import time

import pytest

from dzrobot.rollout.records import RecordFile

RUN = (
    "--env", "dzrobot/point-v0", "--tasks", "0-2", "--episodes", "4", "--max-steps", "25",
    "--env-arg", "resolution=32", "--policy", "rollout_policies:Slow", "--videos", "failures",
)  # fmt: skip
EPISODES = 12
PATIENCE_S = 600
"""Ends a test that hangs; a busy machine is no failure."""


def left_behind(out, folder):
    """Return all of a finished run that must not depend on how it was run."""
    table = [line for line in out.splitlines() if line.startswith(("│", "┃", "├", "└", "┏", "┡"))]
    results = {name: record.result() for name, record in RecordFile(folder).records.items()}
    summary = json.loads((folder / "summary.json").read_text())
    return table, results, summary["results"], videos(folder)


def videos(folder):
    return sorted(path.name for path in (folder / "videos").rglob("*") if path.is_file())


def wait_for(count, folder, process):
    path = folder / "records.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    pytest.fail(f"no {count} records in time")
