"""The commands around a robot cell: ``record``, ``replay`` and ``doctor``."""

import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions

ROBOT = load_embodiment("franka_pnp")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def record(tmp_path):
    def run(*words, steps=56):
        return main(
            ["record", "--workcell", "fake", "--output", str(tmp_path / "set"),
             "--max-steps", str(steps), *words]
        )  # fmt: skip

    return run


def drift(observation):
    """Move slowly along x; named by ``--call``."""
    assert set(ROBOT.state_keys) <= set(observation)
    return np.array([0.2, 0, 0, 0, 0, 0, 1], dtype=np.float32)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_recordings_are_what_training_reads(version, record, tmp_path, capsys):
    words = ["--call", f"{__name__}:drift", "--version", version]
    assert record(*words, "--episodes", "2") == 0
    assert "2 episodes in" in capsys.readouterr().out
    assert record(*words) == 0
    assert "3 episodes in" in capsys.readouterr().out
    reader = DatasetReader(tmp_path / "set", ROBOT, ReaderOptions(cache=tmp_path / "reader"))
    assert reader.catalog.episodes.length.tolist() == [56, 56, 56]


def test_replay_sends_the_same_actions(record, tmp_path, capsys):
    assert record("--call", f"{__name__}:drift") == 0
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "set"), "--workcell", "fake"]) == 0
    said = capsys.readouterr().out
    assert "56 of 56 recorded steps carried out" in said
    (line,) = [line for line in said.splitlines() if line.startswith("hand")]
    assert float(line.split()[-4]) < 1e-3
    assert record("--replay", f"{tmp_path / 'set'}#0") == 0
    assert "2 episodes in" in capsys.readouterr().out


def test_only_success_keeps_nothing_else(record, capsys):
    assert record("--policy", "hold", "--only-success") == 0
    said = capsys.readouterr().out
    assert "not kept" in said
    assert "0 episodes in" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "somewhere"], "DATASET#EPISODE"),
        (["--call", "drift"], "write MODULE:FUNCTION"),
        (["--call", "no.such.module:drift"], "no.such.module"),
        (["--policy", "nonsense"], "nonsense"),
        (["--policy", "hold", "--env", "dzrobot/none-v0"], "unknown environment"),
        (["--policy", "hold", "--env-arg", "colour=red"], "colour"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_moves(words, said, record, capsys):
    assert record(*words) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_doctor_names_what_is_wrong_with_a_workcell(tmp_path, capsys):
    (tmp_path / "cell.yaml").write_text("adress: 172.16.0.2\n")
    assert main(["doctor", "franka", "--config", str(tmp_path / "cell.yaml")]) == 2
    assert "adress" in capsys.readouterr().err
    assert main(["doctor", "franka", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    assert main(["doctor", "franka", "--config", "fake"]) == 2
    assert "--config emulated" in capsys.readouterr().err


def test_doctor_finds_no_arm_where_there_is_none(tmp_path, capsys):
    # Nothing listens on this port of this machine.
    assert main(["doctor", "franka", "--address", "127.0.0.1"]) == 1
    said = capsys.readouterr().out
    assert any(line.startswith("fail") for line in said.splitlines())
    assert "Traceback" not in said


@pytest.mark.robot
def test_doctor_finds_the_emulated_cell_in_order(capsys):
    assert main(["doctor", "franka", "--config", "emulated"]) == 0
    said = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in said.splitlines()]
    assert "fail" not in {verdict for verdict, _ in lines}
    found = [rest for _, rest in lines]
    for name in ("franky-control", "kernel", "latency", "mode", "pose", "gripper"):
        assert any(line.startswith(name) for line in found), said
    assert sum(line.startswith("camera ") for line in found) == 2
