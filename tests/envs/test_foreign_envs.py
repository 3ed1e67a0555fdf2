"""Simulators that nobody here wrote, served from an environment of their own.

``make foreign`` makes it: robosuite 1.5, gym-aloha and gym-pusht, with versions of NumPy and MuJoCo
that this package excludes. ``DZROBOT_SIMULATORS`` names its Python.
"""

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import dzrobot_simulators
import foreign_simulators
import gymnasium as gym
import pytest

import dzrobot
from dzrobot.cli import main

PYTHON = os.environ.get("DZROBOT_SIMULATORS")
pytestmark = [
    pytest.mark.simulators,
    pytest.mark.skipif(PYTHON is None, reason="opt-in: run `make foreign`"),
]
HERE = Path(__file__).parent
MAKERS = ["make_robosuite", "make_aloha", "make_pusht"]


@contextlib.contextmanager
def served(maker, tmp_path):
    """Yield the address of a server that runs in the other Python."""
    command = [PYTHON, "-m", "dzrobot", "serve-env", f"foreign_simulators:{maker}", "--port=0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=there(), stdout=subprocess.PIPE, text=True
    ) as process:
        said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
        try:
            yield re.search(r"server=(ws://\S+)", said)[1]
        finally:
            process.terminate()


def there():
    paths = [str(HERE), str(Path(dzrobot.__file__).parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("maker", MAKERS)
def test_episodes_are_those_that_the_simulator_plays_alone(maker, tmp_path):
    with served(maker, tmp_path) as address:
        env = gym.make("dzrobot/remote-v0", server=address, disable_env_checker=True)
        found = foreign_simulators.digests(env, 3)
        versions = env.unwrapped.remote["versions"]
        env.close()
    alone = subprocess.run(
        [PYTHON, HERE / "foreign_simulators.py", maker, "3"],
        env=there(), capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert found == alone[-len(found) :]
    assert versions["numpy"].startswith("1."), "the same NumPy as here: nothing is shown"


@pytest.mark.parametrize("maker", MAKERS)
def test_a_policy_is_evaluated_in_it(maker, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    robot = maker.removeprefix("make_")
    with served(maker, tmp_path) as address:
        code = main(
            ["eval", "--env", f"dzrobot_simulators:{robot}", "--env-arg", f"server={address}",
             "--policy", "random", "--episodes", "3", "--max-steps", "15", "--workers", "2",
             "--output", "results"]
        )  # fmt: skip
    assert code == 0, capsys.readouterr()
    rows = [json.loads(line) for line in Path("results/records.jsonl").read_text().splitlines()]
    assert [(row["steps"], row["error"]) for row in rows] == [(15, None)] * 3
    (suite,) = json.loads(Path("results/card.json").read_text())["suites"].values()
    assert suite["remote"]["env"] == f"foreign_simulators:{maker}"
    assert main(["report", "results", "--output", "page"]) == 0
    assert Path("page/report.html").stat().st_size > 100_000
    assert robot in dzrobot_simulators.ROBOTS
