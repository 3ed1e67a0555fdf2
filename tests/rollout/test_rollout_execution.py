"""Evaluations in which time passes while the policy thinks, through the command line."""

import json
import re
import sys

import pytest

from dzrobot.cli import main
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.rollout.records import RecordFile

pytestmark = pytest.mark.copies
SHORT = (
    "eval", "--env", "dzrobot/point-v0", "--episodes", "2", "--max-steps", "12", "--videos",
    "none", "--dit-steps", "5", "--checkpoint", str(default_checkpoint()),
)  # fmt: skip


def evaluated(folder, *words, workers=0):
    code = main([*SHORT, "--output", str(folder), "--workers", str(workers), *words])
    assert code == 0
    return list(RecordFile(folder).records.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return folder and records of a few runs, by name."""
    root = tmp_path_factory.mktemp("runs")
    words = {
        "plain": (),
        "zero": ("--execution", "naive", "--latency", "zero"),
        "sync": ("--execution", "sync", "--latency", "steps:2"),
        "rtc": ("--execution", "rtc", "--latency", "0.1"),
        "drawn": ("--execution", "rtc", "--latency", "lognormal:0.05,0.1"),
    }
    return {name: (root / name, evaluated(root / name, *said)) for name, said in words.items()}


def hashes(records):
    return [record.action_sha256 for record in records]


def test_without_latency_it_is_the_ordinary_evaluation(runs):
    assert hashes(runs["zero"][1]) == hashes(runs["plain"][1])
    assert runs["plain"][1][0].measures is None
    measures = runs["zero"][1][0].measures
    assert (measures.held_steps, measures.late, set(measures.delay_steps)) == (0, 0, {0})


def test_held_steps_count_and_are_recorded(runs):
    records = runs["sync"][1]
    assert len(set(hashes(records) + hashes(runs["plain"][1]))) == 4
    for record in records:
        # Two held, three executed: five to a plan.
        held = sum(step % 5 < 2 for step in range(record.steps))
        assert record.measures.held_steps == held
        assert set(record.measures.latency_s) == {0.1}


def test_the_summary_and_the_card_say_it(runs):
    folder, records = runs["rtc"]
    card = json.loads((folder / "card.json").read_text())
    assert card["execution"] == {
        "execution": "rtc", "latency": "0.1", "first_plan": "charged", "execute": 3,
        "control_hz": 20, "delay_steps": 2, "hold": ["zero"], "strength": "solver steps",
        "weights": "linear",
    }  # fmt: skip
    assert card["policy"]["execute"] == 3
    means = json.loads((folder / "summary.json").read_text())["results"]["measures"]
    ratios = [record.measures.held_steps / record.steps for record in records]
    assert means["idle_ratio"]["mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert {"seam_jump", "stale_ratio", "reaction_p95_s", "seconds"} <= set(means)


@pytest.mark.long
def test_draws_do_not_depend_on_the_workers(runs, tmp_path):
    _, records = runs["drawn"]
    again = evaluated(
        tmp_path / "two", "--execution", "rtc", "--latency", "lognormal:0.05,0.1", workers=2
    )
    by_case = {record.case: record.result() for record in again}
    assert by_case == {record.case: record.result() for record in records}
    assert len(set(records[0].measures.latency_s + records[1].measures.latency_s)) > 4


def test_unlike_runs_are_not_mixed(runs, capsys):
    folder, _ = runs["rtc"]
    words = ("--execution", "rtc", "--latency", "0.15", "--output", str(folder))
    assert main([*SHORT, *words]) == 2
    assert "execution.latency" in capsys.readouterr().err
    both = [str(folder), str(runs["sync"][0])]
    assert main(["compare", *both]) == 2
    assert "execution" in capsys.readouterr().err
    assert main(["compare", "--force", *both]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--execution", "rtc", "--latency", "0.25"), "d=5 .*H=8.*0.2 s"),
        (("--execution", "naive", "--latency", "steps:3", "--execute", "6"), "d=3 .*s=6 .*H=8"),
        (("--execution", "trained", "--latency", "steps:1"), "rtc_training_max_delay=1"),
        (("--execution", "naive", "--latency", "measured"), "--execute"),
        (("--execution", "naive", "--batch"), "--batch"),
        (("--latency", "soon"), "soon"),
        (("--latency", "0.1", "--rtc-strength", "3"), "execution 'rtc'"),
    ],
)
def test_what_cannot_be_is_refused(words, message, capsys, tmp_path):
    assert main([*SHORT, "--output", str(tmp_path / "run"), *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said


def test_policies_without_plans_are_refused(capsys, tmp_path):
    words = ("--policy", "random", "--latency", "0.1", "--output", str(tmp_path / "run"))
    assert main(["eval", "--env", "dzrobot/point-v0", "--episodes", "1", *words]) == 2
    assert "a subclass of dzrobot.Policy that overrides plan" in " ".join(
        capsys.readouterr().err.split()
    )


ARM = ("eval", "--env", "dzrobot/Franka-PnP-v0", "--env-arg", "workcell=fake", "--videos", "none",
       "--policy", "rollout_policies:Paced", "--episodes", "2", "--max-steps", "25")  # fmt: skip


def test_an_arm_moves_on_while_another_thread_plans(tmp_path):
    words = ("--execution", "rtc", "--execute", "6", "--output", str(tmp_path / "arm"))
    assert main([*ARM, *words]) == 0
    policy = sys.modules["rollout_policies"].Paced.last
    assert len(policy.threads) == 1
    assert not any("MainThread" in name for name in policy.threads)
    # The first plan of an episode starts over, the others continue what is left of H - s rows.
    left = [leftover for leftover in policy.leftovers if leftover is not None]
    assert policy.leftovers.count(None) == 2
    assert {len(one.targets) for one in left} == {6}
    for record in RecordFile(tmp_path / "arm").records.values():
        measures = record.measures
        assert measures.hz == 10
        assert measures.held_steps < record.steps == 25
        assert measures.reaction_mean_s > 0
    card = json.loads((tmp_path / "arm/card.json").read_text())
    assert card["execution"]["latency"] == "real time"


def test_an_arm_has_no_virtual_clock(tmp_path, capsys):
    words = ("--execution", "naive", "--latency", "0.1", "--output", str(tmp_path / "arm"))
    assert main([*ARM, *words]) == 2
    assert "real time" in capsys.readouterr().err
