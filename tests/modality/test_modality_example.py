"""The example in which a user adds a robot runs as it stands."""

import runpy
from pathlib import Path

from dzrobot.embodiments.registry import load_embodiment

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_adding_an_embodiment(capsys):
    runpy.run_path(str(EXAMPLES / "add_an_embodiment.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "ur5_tabletop: state 7, action 7, (256, 512) pixels" in said
    assert "a robot put the red cup on the plate The video" in said
    assert "commands: (16, 7)" in said


def test_the_examples_robot_is_found_by_name(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    assert load_embodiment("add_an_embodiment:UR5").tag == "ur5_tabletop"
