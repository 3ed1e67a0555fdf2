"""Stops a writer of checkpoints at its file operations; prints how many, and those that lost one.

Called by a test, in a process of its own.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from kill_points import operations, spread, stop

from dzrobot.training.run.checkpoint import CheckpointWriter, load_state, newest_intact
from dzrobot.training.run.parallel import init_distributed
from dzrobot.training.sft_config import CheckpointConfig

POINTS = 4
_RENAMED = re.compile(r"re\w+ step_\d+\.old")
STEPS = (2, 2, 4, 4, 6)
"""Steps that are saved; a repeated one takes the place of the one before."""


def writer(folder):
    world = init_distributed("cpu")
    return CheckpointWriter(folder, CheckpointConfig(keep_last_k=2, async_save=False), world)


def state(number):
    return {"model": {"w": torch.full((4, 3), float(number))}, "updates": torch.tensor(0.0)}


def save(folder, done):
    """Save every step, and write into ``done`` how many are there."""
    writes = writer(folder)
    for number, step in enumerate(STEPS, start=1):
        writes.save(step, state(number), {"skips": 0}, wait=True)
        done.write_text(str(number))


def check(folder, done):
    """Start again; fail unless what was saved last, or what came after it, is there and whole."""
    count = int(done.read_text()) if done.exists() else 0
    writer(folder)
    assert not list(folder.glob("*.writing"))
    saved = newest_intact(folder)
    if count == 0 and saved is None:
        return
    found = state(0)
    load_state(saved, found)
    # A step that is being replaced may be the former one.
    assert int(found["model"]["w"][0, 0]) >= count - (STEPS[count:][:1] == STEPS[count - 1 : count])


def main(words):
    root = Path(words[0])
    root.mkdir()
    folder, done = root / "checkpoints", root / "done"
    steps = operations(lambda: save(folder, done), folder)
    # Two renames exchange folders: a kill between them is tried in any case.
    renames = [at + 1 for at, step in enumerate(steps) if _RENAMED.match(step)]
    points, lost = sorted({*spread(len(steps), POINTS), *renames}), []
    for at in points:
        shutil.rmtree(folder)
        done.unlink(missing_ok=True)
        assert stop(lambda: save(folder, done), folder, at).code < 0
        folder.mkdir(exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
        if (ended := stop(lambda: check(folder, done), root / "nothing", -1)).code != 0:
            lost.append((at, steps[at], names, ended.output[-300:]))
    sys.stdout.write(json.dumps([len(points), lost]))
    assert not dist.is_initialized()
