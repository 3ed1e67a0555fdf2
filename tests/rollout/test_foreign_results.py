"""Results of other programs beside ours.

The files were written by those programs' own code: vla-eval 0.8.0's recording store, LeRobot
0.4.4's ``eval_policy_all`` and MolmoSpaces 0.2.9's ``create_video_results_table``.
"""

import json
from pathlib import Path

import pytest

from dzrobot.cli import main
from dzrobot.errors import ProtocolError
from dzrobot.rollout.evaluation.foreign import read_foreign

FILES = Path(__file__).parent / "foreign_results"
VLA_EVAL = FILES / "vla_eval-0.8.0.sqlite"
LEROBOT = FILES / "lerobot-0.4.4-eval_info.json"
MOLMOSPACES = FILES / "molmospaces-0.2.9.csv"
POINT = "dzrobot/point-v0"
RED = "move the point to the red mark"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return an evaluation of ten episodes in which nothing succeeds."""
    root = tmp_path_factory.mktemp("own") / "hold"
    words = ["eval", "--env", POINT, "--workers", "0", "--videos", "none"]
    words += ["--policy", "hold", "--episodes", "10", "--max-steps", "5", "--output", str(root)]
    assert main(words) == 0
    return root


@pytest.mark.parametrize(
    ("path", "program", "tasks", "errors"),
    [
        (VLA_EVAL, "vla-eval", {RED: (7, 9), "open the drawer": (1, 2)}, 1),
        (
            LEROBOT,
            "LeRobot",
            {(POINT, 0): (7, 10), (POINT, 1): (1, 5), ("other", 0): (1, 1)},
            0,
        ),
        (MOLMOSPACES, "MolmoSpaces", {RED: (6, 9)}, 0),
    ],
)  # fmt: skip
def test_counts_by_task(path, program, tasks, errors):
    found = read_foreign(path)
    assert (found.program, dict(found.tasks), found.errors) == (program, tasks, errors)


def test_stand_beside_ours_in_a_comparison(results, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = [word for path in (VLA_EVAL, LEROBOT, MOLMOSPACES) for word in ("--foreign", str(path))]
    before = VLA_EVAL.read_bytes()
    assert main(["compare", str(results), *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "against vla-eval's 8/11" in out
    assert "against LeRobot's 9/16" in out
    assert "1 of its 2 tasks are not in" in out
    assert "1 of its episodes ended with an error" in out
    assert "6/9" in out
    assert VLA_EVAL.read_bytes() == before
    assert sorted(path.name for path in FILES.iterdir()) == sorted(
        path.name for path in (VLA_EVAL, LEROBOT, MOLMOSPACES)
    ), "no journal is left"


def test_stand_beside_ours_on_the_page(results, tmp_path):
    assert main(["report", str(results), "-o", str(tmp_path), "--foreign", str(LEROBOT)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert '<b class="letter LeRobot">LeRobot</b>' in page
    assert "7/10" in page
    assert "9/16 over 3 tasks" in page


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"{}", "per_task"),
        ("b.json", b'{"per_task": []}', "no finished episode"),
        ("c.csv", b"a,b\n1,2\n", "no column task_description or result"),
        ("d.csv", b"task_description,result\nx,maybe\n", "d.csv:2: result is"),
        ("e.sqlite", VLA_EVAL.read_bytes()[:6000], "not a whole recording"),
        ("f.json", None, "f.json"),
    ],
)
def test_what_is_no_result_is_one_message(results, tmp_path, capsys, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["compare", str(results), "--foreign", str(path)]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_numbers_are_no_successes(tmp_path):
    info = json.loads(LEROBOT.read_text())
    info["per_task"][0]["metrics"]["successes"][0] = 0.5
    path = tmp_path / "eval_info.json"
    path.write_text(json.dumps(info))
    with pytest.raises(ProtocolError, match="successes"):
        read_foreign(path)
