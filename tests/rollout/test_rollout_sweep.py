"""``dzrobot sweep``: the best is selected on some episodes and measured on others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dzrobot.cli import main
from dzrobot.errors import ConfigError
from dzrobot.rollout.evaluation.card import read_card, read_cases
from dzrobot.rollout.evaluation.planning import EvaluationRequest, plan
from dzrobot.rollout.evaluation.report import wilson
from dzrobot.rollout.evaluation.studies.series import candidate_folders, read_candidates
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.records import RecordFile

ENV = "dzrobot/point-v0"
ASKED = EvaluationRequest(spec=EvalSpec(protocol=PROTOCOLS["custom"], env=ENV))
GOOD, BAD = "rollout_policies:Steer", "hold"
WORDS = ["--env", ENV, "--env-arg", "resolution=32", "--workers", "0", "--videos",
         "none", "--max-steps", "20", "--episodes", "4"]  # fmt: skip


def swept(folder):
    return json.loads((folder / "sweep.json").read_text())


def test_the_winner_is_measured_on_other_episodes(tmp_path, capsys):
    words = ["sweep", BAD, GOOD, *WORDS, "--output", str(tmp_path)]
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"success; {GOOD} is selected on these episodes" in out
    found = swept(tmp_path)
    assert [(s["policy"], s["selected"]) for s in found["scores"]] == [(BAD, False), (GOOD, True)]
    scored = RecordFile(tmp_path / "rollout_policies-Steer").finished()
    assert scored == RecordFile(tmp_path / BAD).finished()
    fresh = RecordFile(tmp_path / "confirmation")
    assert len(fresh.finished()) == 4
    assert fresh.finished().isdisjoint(scored)
    seeds = [{case.seed for case in read_cases(tmp_path / name)} for name in (BAD, "confirmation")]
    assert seeds[0].isdisjoint(seeds[1]), "other starts, not other names"
    assert read_card(tmp_path / "confirmation")["suites"][ENV]["seeds"] == "4 to 7"
    confirmed = found["confirmation"]
    won = sum(bool(record.success) for record in fresh.records.values())
    assert (confirmed["successes"], confirmed["episodes"]) == (won, 4)
    low, high = wilson(won, 4)
    assert f"{100 * low:.1f} to {100 * high:.1f}" in out
    # The same command again finds everything there.
    before = {path: path.read_bytes() for path in tmp_path.rglob("records.jsonl")}
    assert main(words) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("records.jsonl")} == before
    assert swept(tmp_path) == found


def test_a_tie_is_said_and_a_confirmation_can_be_left_out(tmp_path, capsys):
    assert main(["sweep", BAD, "random", *WORDS, "--confirm", "0", "--output", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{BAD} is selected on these episodes" in out
    assert "as good, but named later: random" in out
    assert swept(tmp_path)["confirmation"] is None
    assert not (tmp_path / "confirmation").exists()


def test_without_all_results_nothing_is_selected(tmp_path, capsys, monkeypatch):
    marker = tmp_path / "marker"
    monkeypatch.setenv("BROKEN", str(marker))
    marker.touch()
    words = ["sweep", BAD, "rollout_policies:Unready", *WORDS, "--max-errors", "9", "--output",
             str(tmp_path / "run")]  # fmt: skip
    assert main([*words, "--seed", "3"]) == 1
    assert "nothing is selected yet" in capsys.readouterr().out
    assert not any(score["selected"] for score in swept(tmp_path / "run")["scores"])
    marker.unlink()
    assert main([*words, "--seed", "3"]) == 0
    assert swept(tmp_path / "run")["confirmation"]["policy"] == "rollout_policies:Unready"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([BAD, GOOD], "--output DIR"),
        ([BAD, BAD, "--output", "x"], "given twice"),
        (["remote", "--output", "x"], "by its server's address"),
        (["radnom", "--output", "x"], "radnom"),
    ],
)
def test_what_cannot_be_swept_is_said(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words, *WORDS]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_suite_without_other_episodes_is_refused_before_anything_runs(tmp_path, capsys):
    words = ["sweep", BAD, GOOD, "--suite", "libero_spatial", "--output", str(tmp_path / "run")]
    assert main(words) == 2
    assert "50 episodes per task after the first 50" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_two_of_one_name_have_folders_of_their_own(tmp_path):
    words = [str(tmp_path / name / "export") for name in ("a", "b")]
    folders = candidate_folders(words)
    assert len(set(folders)) == 2
    assert [folder.rpartition("-")[0][-1] for folder in folders] == ["a", "b"]


def test_a_server_is_one_of_several_by_its_address():
    found = read_candidates(ASKED, ["ws://gpu-1:8000", "ws://gpu-2:8000", "hold"], Path)
    told = [(own.request.policy.name, own.request.policy.server) for own in found.values()]
    assert told == [
        ("remote", "ws://gpu-1:8000"), ("remote", "ws://gpu-2:8000"), ("hold", None),
    ]  # fmt: skip
    assert len({own.folder for own in found.values()}) == 3


def test_a_server_among_several_is_not_told_what_it_decides():
    told = replace(ASKED, policy=PolicySpec(dit_steps=5))
    found = read_candidates(told, ["ws://gpu-1:8000", "hold"], Path)
    with pytest.raises(ConfigError, match="--dit-steps: the server decides"):
        plan(found["ws://gpu-1:8000"].request)
