"""With no checkpoint named, a trained policy is there all the same."""

import json

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.bundled import EMBODIMENT, default_checkpoint
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy


def test_the_bundled_checkpoint_is_whole_small_and_knows_its_robot():
    checkpoint = open_checkpoint(default_checkpoint())
    assert set(checkpoint.metadata) == {EMBODIMENT}
    assert checkpoint.passport is not None
    weights = checkpoint.folder / "model.safetensors"
    assert 1e6 < weights.stat().st_size < 12e6
    assert (checkpoint.folder / "MODEL_CARD.md").read_text().startswith("# ")
    policy = DreamZeroPolicy.from_pretrained(
        checkpoint.folder, embodiment=load_embodiment(EMBODIMENT)
    )
    assert policy.card["execute"] == 3


def test_the_bundled_policy_lifts(command, tmp_path):
    process = command(
        "--episodes", 3, "--videos", "none", "--output", tmp_path,
        program=("examples/eval_libero.py",),
    )  # fmt: skip
    _, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    total = json.loads((tmp_path / "summary.json").read_text())["results"]["total"][0]
    assert total["errors"] == 0
    # About one start in thirty fails, and another renderer may move the last bit of a picture.
    assert total["successes"] >= 2
