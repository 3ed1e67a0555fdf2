"""The commands around a robot cell: ``record``, ``replay`` and ``doctor``."""

import io
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated import KeptCell, need_libraries

from dzrobot.cli import main
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.emulators.scenes import SERIALS
from dzrobot.envs.franka.diagnostics import diagnose
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import load_workcell
from dzrobot.envs.franka.operator.keyboard import Keyboard
from dzrobot.envs.panda.state import REMEDIES, Mode
from dzrobot.errors import DatasetError
from dzrobot.recording import EpisodeWriter
from dzrobot.rollout.arm.attended import EndedByDriver
from dzrobot.rollout.arm.teleoperation import KeyboardActor
from dzrobot.rollout.demonstrations.record import RecordedEnv, record_episode
from dzrobot.rollout.environment import made_environment
from dzrobot.rollout.protocol import EpisodeRules
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


def attempts(count):
    """Return the words for so many episodes of an arm that reaches nothing."""
    return ["--attempts", str(count), "--keep-failures"]


def drift(observation):
    """Move slowly along x; named by ``--call``."""
    assert set(ROBOT.state_keys) <= set(observation)
    return np.array([0.2, 0, 0, 0, 0, 0, 1], dtype=np.float32)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_recordings_are_what_training_reads(version, record, tmp_path, capsys):
    words = ["--call", f"{__name__}:drift", "--version", version]
    assert record(*words, *attempts(2)) == 0
    assert "2 episodes in" in capsys.readouterr().out
    assert record(*words, *attempts(3)) == 0
    assert "3 episodes in" in capsys.readouterr().out
    options = ReaderOptions(cache=tmp_path / "reader", episodes="all")
    reader = DatasetReader(tmp_path / "set", ROBOT, options)
    assert reader.catalog.episodes.length.tolist() == [56, 56, 56]


def test_replay_sends_the_same_actions(record, tmp_path, capsys):
    assert record("--call", f"{__name__}:drift", *attempts(1)) == 0
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "set"), "--workcell", "fake"]) == 0
    said = capsys.readouterr().out
    assert "56 of 56 recorded steps carried out" in said
    (line,) = [line for line in said.splitlines() if line.startswith("hand")]
    assert float(line.split()[-4]) < 1e-3
    assert record("--replay", f"{tmp_path / 'set'}#0", *attempts(2)) == 0
    assert "2 episodes in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("action={frame: base}", "frame"),
        ("control_hz=20", "10 actions per second"),
        ("action={translation_m: 0.06}", "action.translation_m = 0.03"),
        ("action={anchor: measured}", "action.anchor = target"),
    ],
)
def test_a_recording_made_in_another_way_is_not_repeated(changed, said, record, tmp_path, capsys):
    assert record("--policy", "hold", *attempts(1), steps=3) == 0
    folder = str(tmp_path / "set")
    words = ["--workcell", "fake", "--env-arg", changed]
    assert main(["replay", folder, *words]) == 2
    assert said in capsys.readouterr().err
    again = ["record", "--output", str(tmp_path / "again"), "--replay", f"{folder}#0"]
    assert main([*again, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["action={frame: base}", "control_hz=20"])
def test_a_recording_of_other_axes_or_another_rate_is_not_continued(changed, record, capsys):
    assert record("--policy", "hold", *attempts(1), steps=3) == 0
    assert record("--policy", "hold", *attempts(2), "--env-arg", changed, steps=3) == 2
    assert "cannot be continued" in capsys.readouterr().err


def test_a_recording_of_other_axes_is_not_read_as_the_robots(record, tmp_path):
    base = ("--env-arg", "action={frame: base}")
    assert record("--policy", "hold", *attempts(1), *base, steps=56) == 0
    options = ReaderOptions(cache=tmp_path / "reader", episodes="all")
    with pytest.raises(DatasetError, match="frame 'base'"):
        DatasetReader(tmp_path / "set", ROBOT, options)
    DatasetReader(tmp_path / "set", replace(ROBOT, action_frame="base"), options)


def recipe(folder, **model):
    """Return a file that says of a run what its samples depend on."""
    path = folder / "recipe.yaml"
    path.write_text(f"model: {json.dumps(model)}\n")
    return path


def test_an_episode_too_short_to_train_on_is_said_when_it_is_recorded(record, tmp_path, capsys):
    needed = ROBOT.timing.rows_needed
    assert record("--policy", "hold", *attempts(1), steps=needed) == 0
    assert "too short" not in capsys.readouterr().out
    assert record("--policy", "hold", *attempts(2), steps=needed - 1) == 0
    said = capsys.readouterr().out
    assert f"too short to train on: {needed - 1} frames, a sample of franka_pnp takes" in said
    # A recipe may cut other samples.
    words = [*attempts(3), "--recipe", str(recipe(tmp_path, max_chunk_size=2))]
    assert record("--policy", "hold", *words, steps=needed - 1) == 0
    assert "too short" not in capsys.readouterr().out
    assert record("--policy", "hold", *words[:-2], "--recipe", "nonsense", steps=3) == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_recording_keeps_what_the_arm_said(record, tmp_path):
    assert record("--policy", "hold", *attempts(1), "--env-arg", "firmware=5.8.0", steps=3) == 0
    (line,) = (tmp_path / "set/meta/recording_facts.jsonl").read_text().splitlines()
    facts = json.loads(line)
    assert (facts["firmware"], facts["recoveries"], facts["abort"]) == ("5.8.0", 0, "")
    assert facts["measured_hz"] == pytest.approx(10.0)


def test_the_key_that_ends_an_episode_is_no_time_limit(tmp_path):
    keyboard = Keyboard()
    actor = KeyboardActor(keyboard)
    env = made_environment("dzrobot/Franka-PnP-fake-v0", {"max_episode_steps": 50})

    def ends():
        keyboard.press("x")
        return actor.wants_end()

    with closing(env), EpisodeWriter(tmp_path / "set", ROBOT, fps=10) as writer:
        recorded = RecordedEnv(EndedByDriver(env, ends), writer)
        done = record_episode(recorded, actor, writer, EpisodeRules(seed=0), keep_all=True)
    assert (done.outcome.ended, done.frames, done.kept) == ("ended by key", 1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "somewhere"], "DATASET#EPISODE"),
        (["--call", "drift"], "write MODULE:FUNCTION"),
        (["--call", "no.such.module:drift"], "no.such.module"),
        (["--policy", "nonsense"], "nonsense"),
        (["--policy", "hold", "--env", "dzrobot/none-v0"], "unknown environment"),
        (["--policy", "hold", "--env-arg", "color=red"], "color"),
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
    (stops,) = (line for line in said.splitlines() if line.startswith("stop  arm "))
    assert stops.endswith("[first-day.md#the-wire]")
    assert "Traceback" not in said
    page = (Path(__file__).parents[2] / "docs/guides/first-day.md").read_text()
    titles = {line[3:].lower().replace(" ", "-") for line in page.splitlines() if line[:3] == "## "}
    named = {line.rsplit("#", 1)[1].rstrip("]") for line in said.splitlines()}
    assert named <= titles


@pytest.fixture
def cell():
    need_libraries()
    cell = KeptCell()
    cell.open()
    yield cell
    cell.end()


def looked_at(cell, what):
    """Return what the doctor says of one thing of an emulated cell whose cameras do not matter."""
    (line,) = [line for line in diagnose(cell, FrankaConfig(), listen_s=1.0) if line.what == what]
    return line.verdict, line.found


@pytest.mark.long
@pytest.mark.robot
def test_doctor_passes_an_idle_arm_alone_and_says_which_lamp_and_menu(cell):
    for name, mode, said in (
        ("brakes_locked", Mode.OTHER, "unlock the joints"),
        ("guiding", Mode.GUIDING, "white lamp"),
    ):
        cell.emulators.call("mode", name)
        verdict, found = looked_at(cell, "mode")
        assert verdict == "fail"
        assert said in found
        assert REMEDIES[mode] in found
    cell.emulators.call("mode", "idle")
    assert looked_at(cell, "mode")[0] == "ok"


@pytest.mark.long
@pytest.mark.robot
def test_doctor_leaves_a_hand_alone_that_was_never_homed(cell):
    cell.emulators.set(homed=False)
    config = FrankaConfig(gripper={"homing": True})
    lines = {line.what: line for line in diagnose(cell, config, listen_s=1.0)}
    assert lines["gripper"].verdict == "fail"
    assert "homing: true" in lines["gripper"].found
    # Homing sets it: nobody has moved the fingers.
    assert looked_at(cell, "gripper")[0] == "fail"


@pytest.mark.long
@pytest.mark.robot
def test_a_workcell_is_taught_on_the_emulated_arm_and_can_be_used(tmp_path, monkeypatch, capsys):
    need_libraries()
    path = str(tmp_path / "practice.yaml")
    answers = ["", "", "", "d", "1", "0", "", "  ", "stack the cups", "5.8.0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in answers)))
    assert main(["init-workcell", path, "--address", "emulated"]) == 0
    assert f"--config {path}" in capsys.readouterr().err
    config = load_workcell(path)
    assert [camera.serial for camera in config.cameras] == list(reversed(SERIALS))
    np.testing.assert_allclose(config.reset.position, (0.45, 0.0, 0.3), atol=0.006)
    np.testing.assert_allclose(config.limits.workspace_low, (0.3, -0.25, 0.02), atol=0.006)
    np.testing.assert_allclose(config.limits.workspace_high, (0.6, 0.25, 0.5), atol=0.006)
    assert (config.task, config.firmware, config.reward.rule) == (
        "stack the cups", "5.8.0", "operator"
    )  # fmt: skip
    record = ["record", "--workcell", path, "--env-arg", "reward={rule: none}", "--unattended"]
    record += ["--policy", "hold", "--max-steps", "5", "--output", str(tmp_path / "set")]
    record += attempts(1)
    assert main(record) == 0
    reached = load_recording(tmp_path / "set", 0, ROBOT).states
    assert len(reached) == 5


@pytest.mark.robot
def test_doctor_finds_the_emulated_cell_in_order(capsys):
    assert main(["doctor", "franka", "--config", "emulated", "--seconds", "2"]) == 0
    said = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in said.splitlines()]
    assert "stop" not in {verdict for verdict, _ in lines}
    found = [rest for _, rest in lines]
    for name in (
        "franky-control", "kernel", "latency", "clocks", "mode", "pose", "start", "gripper",
    ):  # fmt: skip
        assert any(line.startswith(name) for line in found), said
    assert sum(line.startswith("camera ") for line in found) == 2
