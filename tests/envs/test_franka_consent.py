"""Consent belongs to the environment: whoever makes it, a real arm asks first and begins slowly."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from fake_operator import FakeOperator

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot.cli import main
from dzrobot.envs.franka.safeguards.lock_and_stop import ArmLock
from dzrobot.errors import ConfigError

ADDRESS = "172.16.0.2"
AHEAD = np.array([1, 0, 0, 0, 0, 0, 0], np.float32)
STEP_M = 0.03


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_LOCK_FOLDER", str(tmp_path))


@pytest.fixture
def make(request):
    def made(**values):
        own = {"workcell": "fake", "address": ADDRESS, "reward": {"rule": "none"}}
        env = gym.make("Franka-PnP-v0", disable_env_checker=True, **(own | values))
        request.addfinalizer(env.close)
        return env

    return made


def test_a_real_arm_does_not_move_where_nobody_is_asked(make):
    env = make()
    with pytest.raises(ConfigError) as error:
        env.reset()
    said = str(error.value)
    assert ADDRESS in said
    assert all(way in said for way in ("unattended=True", "attend(", "--unattended"))
    arm = env.unwrapped.arm
    assert arm.moves == arm.gripper.requests == []
    # Not even its lock was taken.
    lock = ArmLock(ADDRESS, None)
    lock.acquire()
    lock.release()


def test_nobody_is_not_who_looks_after_a_real_arm(make):
    env = make(unattended=True).unwrapped
    with pytest.raises(ConfigError, match="no person can be asked"):
        env.attend(None)
    with pytest.raises(ConfigError, match="no person can be asked"):
        env.reset()


@pytest.mark.parametrize("how", ["operator", "unattended", "attended without", "emulated"])
def test_consent_is_an_operator_or_a_word(make, how):
    given = {"unattended": {"unattended": True}, "emulated": {"address": None}}
    env = make(**given.get(how, {}))
    operator = FakeOperator()
    if how == "operator":
        env.unwrapped.attend(operator)
    if how == "attended without":
        env.unwrapped.attend(None, unattended=True)
    env.reset()
    assert len(operator.shown) == (4 if how == "operator" else 0)


def test_a_copy_needs_no_other_consent(make):
    remake = make(unattended=True).unwrapped.remake
    copy = remake()
    copy.reset()
    copy.close()


def moved(env):
    """Return how far the target goes in one step (m)."""
    env.reset()
    before = env.unwrapped.last_target
    env.step(AHEAD)
    return float(np.linalg.norm(env.unwrapped.last_target[:3, 3] - before[:3, 3]))


@pytest.mark.parametrize(
    ("values", "pace"),
    [
        ({}, 0.3),
        ({"slow_pace": 0.5}, 0.5),
        ({"full_speed": True}, 1.0),
        ({"full_speed": True, "slow_first_steps": 1}, 0.3),
        ({"slow_first_steps": 0}, 0.3),
        ({"address": None}, 1.0),
    ],
    ids=str,
)
def test_a_real_arm_is_slow_until_someone_says_otherwise(make, values, pace):
    env = make(unattended=True, action={"frame": "base"}, **values)
    assert moved(env) == pytest.approx(pace * STEP_M, abs=1e-6)
    for _ in range(30):
        env.step(np.zeros(7, np.float32))
    before = env.unwrapped.last_target[:3, 3]
    env.step(AHEAD)
    later = float(np.linalg.norm(env.unwrapped.last_target[:3, 3] - before))
    assert later == pytest.approx(STEP_M * (pace if "full_speed" not in values else 1), abs=1e-6)
    # A result says which of both it is of.
    assert env.unwrapped.workcell["full_speed"] is ("full_speed" in values or "address" in values)


SCRIPT = f"""
import gymnasium as gym, numpy as np, dzrobot
env = gym.make("Franka-PnP-v0", workcell="fake", address="{ADDRESS}", reward=dict(rule="none") MORE)
env.reset()
print("moved", len(env.unwrapped.arm.gripper.requests))
"""


@pytest.mark.parametrize(
    ("more", "code"), [("", 1), pytest.param(", unattended=True", 0, marks=pytest.mark.long)]
)
def test_a_plain_script_without_a_terminal_says_so_first(more, code):
    script = SCRIPT.replace("MORE", more)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stderr
    assert ("no person can be asked" in done.stderr) == bool(code)
    assert ("moved" in done.stdout) == (not code)


@pytest.mark.parametrize("source", ["replay", "call"])
def test_what_no_person_steers_needs_a_word_for_full_speed(source, tmp_path, capsys):
    words = ["--workcell", "fake", "--env-arg", f"address={ADDRESS}", "--unattended"]
    words += ["--max-steps", "4", "--attempts", "1", "--keep-failures"]
    data = str(tmp_path / "set")
    record = ["record", *words, "--policy", "hold", "--output", data]
    assert main([*record, "--full-speed"]) == 0
    acts = {"replay": f"{data}#0", "call": "numpy:zeros"}[source]
    again = ["record", *words, f"--{source}", acts, "--output", str(tmp_path / "other")]
    capsys.readouterr()
    assert main(again) == 2
    assert "say --full-speed" in capsys.readouterr().err
    assert main(["replay", data, *words[:5]]) == 2
    assert "say --full-speed" in capsys.readouterr().err
    assert main(["replay", data, *words[:5], "--full-speed"]) == 0
