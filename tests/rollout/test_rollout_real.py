"""The example on the real simulators: with no argument, and on LIBERO, killed and resumed."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.tiny import write_tiny_checkpoint
from dzrobot.rollout.evaluation.planning import EvaluationRequest, prepare
from dzrobot.rollout.policy_spec import PolicySpec, resolve_policy
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.records import RecordFile

EXAMPLE = ("examples/eval_libero.py",)
FAST = ("--env-arg", "quality=draft", "--videos", "none")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a tiny random checkpoint for LIBERO."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return write_tiny_checkpoint(folder, load_embodiment("libero_sim"))


def finish(process, timeout=800):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


@pytest.mark.long
def test_the_expert_lifts_without_cameras(command, tmp_path):
    words = ("--env", "dzrobot/lift-v0", "--env-arg", "cameras=false", "--policy", "expert")
    words = (*words, "--episodes", 1)
    finish(command(*words, *FAST, "--output", tmp_path, program=EXAMPLE))
    total = json.loads((tmp_path / "summary.json").read_text())["results"]["total"][0]
    assert (total["successes"], total["episodes"], total["errors"]) == (1, 1, 0)


@pytest.mark.long
def test_the_expert_is_recorded(command, tmp_path):
    words = ("--env", "dzrobot/lift-v0", "--env-arg", "quality=draft", "--env-arg", "resolution=64")
    words = (*words, "--policy", "expert", "--episodes", 1, "--output", tmp_path / "set")
    said = finish(command(*words, program=("-m", "dzrobot.cli", "record")))
    assert "kept 1 of 1" in said
    assert "frames per second" not in said


def test_a_device_that_is_not_there_is_said(checkpoint):
    policy = PolicySpec(name=str(checkpoint), device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(ConfigError, match=r"built without CUDA|visible to torch"):
        resolve_policy(policy, load_embodiment("libero_sim"))


def test_a_checkpoint_is_opened_once(checkpoint):
    read = []
    listening = [True]

    def listen(event, arguments):
        # A hook of the interpreter stays; it is told when to stop listening.
        if listening and event == "open" and str(arguments[0]).endswith("config.json"):
            read.append(Path(str(arguments[0])).parent)

    sys.addaudithook(listen)
    spec = EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=1)
    prepare(EvaluationRequest(spec=spec, policy=PolicySpec(name=str(checkpoint))))
    listening.clear()
    assert read.count(checkpoint) == 1


@pytest.mark.long
@pytest.mark.libero
def test_libero_killed_in_the_middle_and_gone_on_with(libero_assets, command, checkpoint, tmp_path):
    run = (
        "--suite", "libero_object", "--tasks", "0,1", "--episodes", 2, "--max-steps", 12,
        "--checkpoint", checkpoint, "--dit-steps", 5, *FAST,
    )  # fmt: skip
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = command(*run, "--output", killed, program=EXAMPLE)
    records = killed / "records.jsonl"
    deadline = time.monotonic() + 200
    while not records.exists() or not records.read_bytes().count(b"\n"):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no episode in 200 seconds"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = records.read_bytes()
    assert 1 <= before.count(b"\n") < 4
    resumed = finish(command(*run, "--output", killed, "--workers", 2, program=EXAMPLE))
    assert records.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    straight = finish(command(*run, "--output", whole, program=EXAMPLE))
    assert _table(resumed) == _table(straight)
    assert _results(killed) == _results(whole)
    assert len({result["action_sha256"] for result in _results(whole).values()}) == 4
    assert {result["steps"] for result in _results(whole).values()} == {12}
    card = json.loads((whole / "card.json").read_text())
    assert card["policy"]["weights"]
    assert card["suites"]["libero_object"]["arguments"]["settle_steps"] == 10
    assert "WARNING" in resumed or not card["assets"]["libero_object"]["altered"]
    assert open_checkpoint(checkpoint).folder.name == card["policy"]["checkpoint"]


def _table(out):
    return [line for line in out.splitlines() if line.startswith(("│", "┃"))]


def _results(folder):
    return {name: record.result() for name, record in RecordFile(folder).records.items()}
