"""From recordings to actions: train on two processes, resume in the middle, export, act."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import train_worlds
from test_train_damaged import hostile_description

from dzrobot.policies.dreamzero.checkpoints.checksums import write_checksums
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

ROOT = Path(__file__).parents[2]


SCRIPT = (str(ROOT / "training" / "sft.py"),)
COMMAND = ("-m", "dzrobot.cli", "train")


def launch(entry, environment, folder, recipe, *overrides):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *entry, str(recipe), *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("version", "video"), [("v2.1", False), ("v3.0", True)])
def test_from_recordings_to_actions(train_root, train_environment, tmp_path, version, video):
    dataset = train_worlds.record(tmp_path / "dataset", version=version, video=video)
    train_worlds.statistics(dataset, tmp_path / "metadata.json")
    recipe = tmp_path / "recipe.yaml"
    values = train_worlds.recipe(
        tmp_path, model__model_path=train_root / "tiny", checkpoint__export=True
    )
    recipe.write_text(json.dumps(values))

    # Ended after four steps, then taken up again by other processes.
    short = ["runner.max_steps=4", "checkpoint.export=false", "checkpoint.save_interval=2"]
    launch(SCRIPT, train_environment, tmp_path, recipe, *short)
    if version == "v2.1":
        # The newest runs code when it is unpickled freely: the run resumes from the one before.
        newest = tmp_path / "run/checkpoints/step_00000004"
        hostile_description(newest, tmp_path / "owned")
        write_checksums(newest)
    said = launch(COMMAND, train_environment, tmp_path, recipe, "runner.resume_dir=auto")
    assert "resumed" in said
    assert ("skipping" in said) == (version == "v2.1")
    assert not (tmp_path / "owned").exists()
    # Without a terminal, each log line once, with the time left.
    assert len(re.findall(r"step 8 of 8, 0:00:00 left: loss \d", said)) == 1

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    # Of the hostile checkpoint, step 4 is done and logged once more.
    assert (sorted(set(steps)) if version == "v2.1" else steps) == [2, 4, 6, 8]
    policy = DreamZeroPolicy.from_pretrained(
        tmp_path / "run" / "export" / "step_00000008", embodiment=train_worlds.ROBOT
    )
    observation, _ = train_worlds.frame(0, 3, np.random.default_rng(0))
    action = policy.act(observation)
    assert action.shape == (train_worlds.ROBOT.action_dim,)
    assert action.dtype == np.float32
    assert np.isfinite(action).all()
