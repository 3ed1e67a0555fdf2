"""Several policies on an arm, in turns: who judges does not know whose turn it is."""

import json
import re
import sys

import cv2
import pytest
from operated import Operated, operator_environment

from dzrobot.cli import main
from dzrobot.envs.franka.operator.keyboard import Keyboard
from dzrobot.errors import ProtocolError
from dzrobot.rollout.evaluation.card import read_cases
from dzrobot.rollout.evaluation.studies.blind import BLIND_FILE, BlindEvaluation
from dzrobot.rollout.footage import photo_file
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes
from dzrobot.rollout.records import RecordFile

ENV = "dzrobot/Franka-PnP-fake-v0"
NAMES = ("a", "b", "c")
CASES = plan_episodes(EvalSpec(protocol=PROTOCOLS["custom"], env=ENV, episodes=12))


def order(evaluation):
    return [(trial.case.episode, trial.policy) for trial in evaluation.trials(CASES)]


def test_every_policy_acts_from_every_start_in_an_order_drawn_once(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = BlindEvaluation.at(tmp_path / "one", NAMES, NAMES)
    drawn = order(first)
    assert [episode for episode, _ in drawn] == [e for e in range(12) for _ in NAMES]
    assert sorted(drawn) == [(e, policy) for e in range(12) for policy in range(3)]
    assert len({tuple(drawn[i : i + 3]) for i in range(0, 36, 3)}) == 12
    turns = {tuple(policy for _, policy in drawn[i : i + 3]) for i in range(0, 36, 3)}
    assert len(turns) > 2, "not the same order from every start"
    assert order(BlindEvaluation.at(tmp_path / "one", NAMES, NAMES)) == drawn
    # What one evaluation revealed says nothing of the next one.
    assert order(BlindEvaluation.at(tmp_path / "two", NAMES, NAMES)) != drawn
    with pytest.raises(ProtocolError, match="of a, b, c, not of a, c"):
        BlindEvaluation.at(tmp_path / "one", ("a", "c"), ("a", "c"))


def test_folders_bear_numbers_until_they_are_revealed_at_once_or_half_way(tmp_path):
    evaluation = BlindEvaluation.at(tmp_path, NAMES, NAMES)
    places = [evaluation.place(policy) for policy in range(3)]
    assert {place.name for place in places} == {"hidden-1", "hidden-2", "hidden-3"}
    for policy, place in enumerate(places):
        place.mkdir()
        (place / "of").write_text(NAMES[policy])
    # As a kill between two renames leaves it.
    places[1].rename(tmp_path / "b")
    assert evaluation.place(1) == tmp_path / "b"
    assert [folder.name for folder in evaluation.reveal()] == list(NAMES)
    assert [(tmp_path / name / "of").read_text() for name in NAMES] == list(NAMES)
    assert evaluation.reveal() == [tmp_path / name for name in NAMES]


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ProtocolError, match=r"records.jsonl, and no blind.json"):
        BlindEvaluation.at(tmp_path, NAMES, NAMES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--blind", "hold"], "name two or more"),
        (["--blind", "hold", "hold"], "given twice"),
        (["--blind", "hold", "remote"], "by its server's address"),
        (["--blind", "hold", "random", "--unattended"], "without --unattended: a person judges"),
        (["--blind", "hold", "random", "--policy", "hold"], "without --policy"),
        (["--blind", "hold", "random", "--perturb", "camera"], "without --perturb"),
        (["--blind", "hold", "random", "--workers", "2"], "without --workers"),
        (["--blind", "hold", "random", "--shard", "0/2"], "leave out --ray and --shard"),
        (["--blind", "hold", "random"], "Run this in one"),
        (["--blind", "hold", "random", "--env", "dzrobot/point-v0"], "dzrobot sweep"),
    ],
    ids=lambda value: value.split()[-1] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused(words, said, tmp_path, capsys):
    words = ["eval", "--env", ENV, *words, "--episodes", "2", "--output", str(tmp_path / "out")]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_without_a_folder_it_is_refused(capsys):
    assert main(["eval", "--env", ENV, "--blind", "hold", "random"]) == 2
    assert "--output DIR" in capsys.readouterr().err


class Agreeing(Keyboard):
    """Somebody who agrees to every question, and finds every episode a success."""

    def open(self):
        """Listen to nobody."""

    def take(self, which=None):
        return next((key for key in "\nc" if key in (which or "")), "")


def test_at_a_terminal_trials_are_run_and_revealed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DZROBOT_LOCK_FOLDER", str(tmp_path))
    monkeypatch.setattr("dzrobot.envs.franka.operator.console.terminal", Agreeing)
    words = ["eval", "--env", ENV, "--env-arg", "reward={rule: operator}", "--blind", "hold",
             "random", "--episodes", "2", "--max-steps", "3", "--videos", "none"]  # fmt: skip
    out = tmp_path / "out"
    for _ in range(2):
        # Captured streams are new ones for every test.
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        assert main([*words, "--output", str(out)]) == 0
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
        assert f"random: {out / 'random'}" in shown.replace("\n", "")
    for name in ("hold", "random"):
        records = RecordFile(out / name).records.values()
        assert [record.success for record in records] == [True, True]
    events = [json.loads(line) for line in (out / "operator.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event["event"] == "progress"]
    assert [text.split(",")[0] for text in told] == [f"trial {i} of 4" for i in (1, 2, 3, 4)]
    assert sum(event["event"] == "scene" for event in events) == 2
    assert not re.search("hold|random", (out / "operator.jsonl").read_text())


def first_session(words, log, environment):
    """Judge one trial, note something, and be killed in the next; return what was shown."""
    with Operated(words, log, environment) as run:
        run.begin()
        run.press("n")
        run.wait_for("typing", "paused")
        run.press("the cup slipped\n")
        run.wait_for("note")
        run.press("\n")
        run.wait_for("phase", "running")
        run.press("c")
        # The second trial from this start is set up by the photo of the first.
        assert run.wait_for("scene")["set_it_as_in"].endswith("task00-episode000.png")
        run.begin()
        run.process.kill()
        run.end()
        return run.screen.decode()


@pytest.mark.long
def test_killed_and_gone_on_with_the_names_come_at_the_end(tmp_path):
    walk(tmp_path, ENV, ["slow_policy:Slow", "slow_policy:Still"])


@pytest.mark.robot
def test_the_same_on_the_emulated_arm(tmp_path):
    pytest.importorskip("franky", reason="needs franky-control (x86_64 Linux)")
    pytest.importorskip("pyrealsense2", reason="needs pyrealsense2 (x86_64 Linux)")
    # A busy machine starves the emulators now and then.
    patient = "limits={state_age_s: 2.0, frame_age_s: 5.0, hold_after_s: 2.0}"
    names = ["slow_policy:Still", "slow_policy:Forward"]
    walk(tmp_path, "dzrobot/Franka-PnP-emulated-v0", names, "--env-arg", patient)


def walk(tmp_path, env, names, *more):
    """Judge trials of two policies, be killed in the second, go on, and see who was who."""
    environment, out = operator_environment(tmp_path), tmp_path / "out"
    words = [
        "eval", "--env", env, "--env-arg", "reward={rule: operator}", *more, "--privileged",
        "--blind", *names, "--episodes", "2", "--max-steps", "100000", "--output", str(out),
    ]  # fmt: skip
    log, labels = out / "operator.jsonl", [name.replace(":", "-") for name in names]
    shown = first_session(words, log, environment)
    drawn = (out / BLIND_FILE).read_bytes()
    assert {path.name for path in out.iterdir()} >= {"hidden-1", "hidden-2", "scenes"}
    assert not re.search("slow_policy", shown + log.read_text())
    assert not any((out / label).exists() for label in labels)
    with Operated(words, log, environment) as run:
        for verdict in "bcb":
            run.begin()
            run.press(verdict)
            run.wait_for("verdict")
        assert run.end() == 0
    assert (out / BLIND_FILE).read_bytes() == drawn
    for name, label in zip(names, labels, strict=True):
        assert f"{name}: {out / label}" in run.screen.decode().replace("\r\n", "")
    check_records(out, names, labels)
    assert main(["compare", *(str(out / label) for label in labels)]) == 0


def check_records(out, names, labels):
    """Check that every verdict stands with the policy whose turn it was, and has its photo."""
    trials = list(BlindEvaluation.at(out, names, labels).trials(read_cases(out / labels[0])))
    records = [RecordFile(out / label).records for label in labels]
    judged = [records[trial.policy][trial.case.name] for trial in trials]
    assert [record.success for record in judged] == [True, False, True, False]
    assert judged[0].robot["notes"] == "the cup slipped"
    assert "notes" not in judged[1].robot
    photos = [photo_file(out / labels[trial.policy], trial.case.name) for trial in trials]
    assert all(cv2.imread(str(photo)).ndim == 3 for photo in photos)
    assert (out / "scenes" / photos[0].name).read_bytes() == photos[0].read_bytes()
