"""The roads of ``make tiny-arm`` and ``make tiny-droid`` in miniature; nothing is learned."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import need_libraries, need_scene

from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment

TRAIN_TINY = Path(__file__).parents[2] / "examples" / "train_tiny.py"
FEW = {
    "steered": 1, "on-arm": 2, "evaluate": 1, "blind": 1, "steps": 2, "processes": 1, "workers": 1,
    "still-steps": 3, "clip-steps": 3, "arm-steps": 10,
}  # fmt: skip

pytestmark = pytest.mark.robot


def walk(suite, episodes, place):
    """Walk a road twice; return the stages that the second time finds done."""
    need_libraries()
    need_scene()
    words = [f"--{name}={value}" for name, value in {**FEW, "episodes": episodes}.items()]
    command = [
        sys.executable, str(TRAIN_TINY), f"--suite={suite}", f"--output={place}", *words,
    ]  # fmt: skip
    for _ in range(2):
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout + told.stderr
    return [line.partition(":")[0] for line in told.stdout.splitlines() if ": done (" in line]


def is_complete(folder):
    return json.loads((folder / "summary.json").read_text())["complete"]


def test_the_road_from_demonstrations_to_an_arm_that_acts(tmp_path):
    assert walk("arm", 1, tmp_path) == ["record", "steer", "stats", "init", "train"]
    robot = load_embodiment("franka_mini")
    for episode in range(2):
        recording = load_recording(tmp_path / "demonstrations", episode, robot)
        # It ends with a closed hand, lifting.
        assert recording.actions[-1, 6] == -1
    assert is_complete(tmp_path / "results")
    assert is_complete(tmp_path / "blind")


@pytest.mark.long
def test_the_road_of_droids_arm_in_simulation_and_through_the_drivers(tmp_path):
    assert walk("droid", 2, tmp_path) == ["collect", "record", "stats", "init", "train"]
    robot = load_embodiment("droid_mini")
    for dataset in ("demonstrations", "on_the_arm"):
        # It ends with a closed hand: the gripper's number is 1 there.
        assert load_recording(tmp_path / dataset, 1, robot).actions[-1, 7] == 1
    trained = tmp_path / "run" / "export" / "step_00000002"
    learned_from = (trained / "dzrobot_passport.json").read_text()
    assert "demonstrations" in learned_from
    assert "on_the_arm" in learned_from
    assert is_complete(tmp_path / "results")
    assert is_complete(tmp_path / "arm")
