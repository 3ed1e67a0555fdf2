"""An evaluation stopped at any of its file operations: the same command finishes it, the same.

``KILL_POINTS=all`` stops it at every one.
"""

import json
import shutil
import sys

import kill_points
import pytest
from harness import run

import dzrobot.commands.eval
from dzrobot import cli
from dzrobot.rollout.records import RecordFile

pytestmark = pytest.mark.kill_points

EPISODES = 3


def words(folder):
    return [
        "eval", "--env", "dzrobot/point-v0", "--env-arg", "resolution=32", "--policy", "random",
        "--episodes", str(EPISODES), "--max-steps", "5", "--workers", "0", "--output", str(folder),
    ]  # fmt: skip


def found(folder):
    """Return what does not differ from run to run."""
    results = {name: record.result() for name, record in RecordFile(folder).records.items()}
    summary = json.loads((folder / "summary.json").read_text())
    card = json.loads((folder / "card.json").read_text())
    videos = sorted(path.name for path in (folder / "videos").rglob("*"))
    cases = (folder / "cases.jsonl").read_text()
    return results, summary["results"], summary["errors"], card, videos, cases


MODES = ("kill", "torn", "full")


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_stopped_anywhere_it_goes_on(tmp_path, mode):
    assert dzrobot.commands.eval.COMMON, "loaded here, not in every child"
    folder = tmp_path / "run"
    job = lambda: cli.main(words(folder))  # noqa: E731
    steps = kill_points.operations(job, folder)
    assert any("records.jsonl" in step for step in steps)
    whole = found(folder)
    assert len(whole[0]) == EPISODES
    points = kill_points.spread(len(steps), 5, MODES.index(mode), len(MODES))
    for at in points:
        shutil.rmtree(folder)
        ended = kill_points.stop(job, folder, at, mode)
        if mode == "full":
            # The last operations put nothing new on the disk, and need no room.
            assert ended.code in (0, 2), (steps[at], ended.output)
            assert "Traceback" not in ended.output
            assert ended.code == 0 or "make room" in ended.output
        else:
            assert ended.code == -9, (steps[at], ended.output)
        again = run(words(folder))
        assert again.code == 0, (steps[at], again.output)
        assert found(folder) == whole, steps[at]
        assert [path.name for path in folder.rglob("*.partial")] == []
    sys.stdout.write(f"{len(points)} points tried, all held\n")
