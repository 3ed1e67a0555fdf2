"""With no checkpoint named, a trained policy is there all the same."""

import json

import pytest

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import EMBODIMENT, bundled_task, default_checkpoint
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.rollout.evaluation.planning import EvaluationRequest, plan, with_bundled
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import EvalSpec
from dzrobot.rollout.records import RecordFile


@pytest.mark.parametrize(("task", "limit"), [("lift", 12e6), ("libero_object", 50e6)])
def test_the_bundled_checkpoints_are_whole_small_and_know_their_robot(task, limit):
    checkpoint = open_checkpoint(default_checkpoint(task))
    assert set(checkpoint.metadata) == {EMBODIMENT}
    assert checkpoint.passport is not None
    weights = checkpoint.folder / "model.safetensors"
    assert 1e6 < weights.stat().st_size < limit
    assert (checkpoint.folder / "MODEL_CARD.md").read_text().startswith("# ")
    policy = DreamZeroPolicy.from_pretrained(
        checkpoint.folder, embodiment=load_embodiment(EMBODIMENT)
    )
    assert policy.card["execute"] == 3


def asked_for(*, policy=None, **what):
    spec = EvalSpec.named(None, what.pop("suites", ()), what.pop("env", None), **what)
    return EvaluationRequest(spec=spec, policy=policy or PolicySpec())


@pytest.mark.parametrize(
    ("asked", "task", "pixels", "steps", "history"),
    [
        ({"env": "dzrobot/lift-v0"}, "lift", 128, None, None),
        ({"env": "dzrobot/libero_object-v0"}, "libero_object", 128, 4, "off"),
        ({"suites": ("libero_object", "libero_object_swap")}, "libero_object", 128, 4, "off"),
        (
            {
                "suites": ("libero_object",),
                "arguments": {"resolution": 256},
                "policy": PolicySpec(solver_steps=16, history="recent"),
            },
            "libero_object",
            256,
            16,
            "recent",
        ),
    ],
)
def test_a_bundled_policy_acts_as_it_was_scored_unless_told_otherwise(
    asked, task, pixels, steps, history
):
    request, (note,) = with_bundled(asked_for(**asked))
    assert request.policy.name == str(default_checkpoint(task))
    assert request.spec.arguments["resolution"] == pixels
    assert request.policy.solver_steps == steps
    assert request.policy.history == history
    assert f"resolution={pixels}" in note


@pytest.mark.parametrize(
    "asked",
    [
        {"env": "dzrobot/libero_spatial-v0"},
        {"env": "dzrobot/point-v0"},
        {"suites": ("libero_object", "libero_10")},
        {"suites": ("lift", "libero_object")},
    ],
)
def test_a_bundled_policy_is_not_taken_for_tasks_it_never_saw(asked):
    with pytest.raises(ConfigError, match=r"no bundled policy was trained for .*give --checkpoint"):
        plan(asked_for(**asked))


@pytest.mark.parametrize("own", ["libero_object_mine-v0", "lift-v0", "dzrobot/lift_again-v0"])
def test_a_name_like_a_bundled_task_is_another_environment(own):
    with pytest.raises(ConfigError, match=f"no bundled policy was trained for {own}, only"):
        bundled_task(own)


# `make demo` is this too, with two episodes a task.
@pytest.mark.long
@pytest.mark.libero
def test_with_no_argument_the_bundled_policy_acts_in_libero(command, tmp_path, libero_assets):
    process = command(
        "--episodes", 1, "--output", tmp_path, program=("examples/eval_libero.py",)
    )  # fmt: skip
    printed, errors = process.communicate(timeout=800)
    assert process.returncode == 0, errors
    lines = printed.splitlines()
    assert lines[0] == "By default: --suite libero_object --tasks 0,3,7 --episodes 1"
    bundled = next(line for line in lines if line.startswith("No --checkpoint"))
    assert bundled.endswith("--env-arg resolution=128 --solver-steps 4 --history off")
    page = tmp_path / "report" / "report.html"
    assert page.is_file()
    assert lines[-1].startswith(f"{page}: ")
    assert any("--suite libero_spatial" in line and "--checkpoint" in line for line in lines)
    total = json.loads((tmp_path / "summary.json").read_text())["results"]["total"][0]
    assert total["errors"] == 0
    # It succeeded from all three starts; another renderer may move the last bit of an image.
    assert total["successes"] >= 2
    records = RecordFile(tmp_path).records.values()
    assert len(records) == 3
    assert all((tmp_path / record.video).stat().st_size > 0 for record in records)
