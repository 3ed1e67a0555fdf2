"""`dzrobot improve`: what is kept, when it ends, and that a kill at any point changes neither."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import train_worlds
from kill_points import operations, stop

from dzrobot.cli import main
from dzrobot.documents import read_json
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.tiny import TinyOptions, write_tiny_checkpoint
from dzrobot.rollout.evaluation.report import STEPS_FILE, Score
from dzrobot.rollout.evaluation.significance import PairCounts, adjusted_interval, mcnemar_p
from dzrobot.training.improve.improve_settings import (
    SETTINGS_FILE,
    ImproveSettings,
    settle,
    write_settings,
)
from dzrobot.training.improve.rounds import Paired, Recorded, Round, decided, why_over
from dzrobot.training.improve.steps import CANDIDATE, ROUND_FILE, Improvement, has_waited

SETTINGS = ImproveSettings(
    checkpoint="start", demos=("demos",), recipe="tiny_cpu", env="dzrobot/point-v0",
    overrides=("runner.max_steps=10", "checkpoint.save_interval=4"),
)  # fmt: skip
HELPED = replace(SETTINGS, record_flags="--takeover expert:stuck=2")


def paired(won, lost, both=60, neither=20, name="test"):
    counts = PairCounts(both=both, first_only=lost, second_only=won, neither=neither)
    low, high = adjusted_interval(counts)
    return Paired(
        name=name, before=Score(successes=both + lost, episodes=counts.episodes),
        after=Score(successes=both + won, episodes=counts.episodes), lost=lost, won=won, low=low,
        high=high, p=mcnemar_p(lost, won), e=1.0,
    )  # fmt: skip


def recorded(takeovers=10, person_s=60.0):
    return Recorded(episodes=40, alone=20, takeovers=takeovers, robot_s=600.0, person_s=person_s)


def judged(test, *others, settings=SETTINGS, number=1, **changes):
    return decided(number, 4, recorded(**changes), [test, *others], settings)


def test_a_policy_is_kept_where_it_is_better_over_all_rounds():
    # Exact p of 9 to 0 is 0.0039, of 7 to 0 0.0156, which three rounds bring to 0.047.
    assert judged(paired(7, 0)).kept
    assert judged(paired(7, 0)).p == pytest.approx(3 * 2 / 2**7)
    assert not judged(paired(6, 0)).kept
    assert judged(paired(6, 0), settings=replace(SETTINGS, rounds=1)).kept
    # Worse at the same level is not better.
    assert not judged(paired(0, 20)).kept


def test_a_policy_that_may_have_forgotten_is_refused_by_name():
    same = paired(1, 1, both=180, name="libero_goal")
    assert judged(paired(20, 2), same).kept
    worse = paired(0, 8, both=180, name="libero_goal")
    found = judged(paired(20, 2), worse)
    assert not found.kept
    assert "libero_goal: -3.8 points" in found.why
    assert judged(paired(20, 2), worse, settings=replace(SETTINGS, margin=20.0)).kept
    # Few episodes cannot show that nothing was lost.
    few = paired(0, 0, both=10, neither=0, name="camera-3")
    assert "camera-3: +0.0 points" in judged(paired(20, 2), few).why


def test_points_are_counted_by_the_minute_of_help():
    # 18 of 102 starts more, for two minutes.
    assert judged(paired(20, 2), person_s=120).points_per_person_minute == pytest.approx(
        100 * 18 / 102 / 2
    )
    assert judged(paired(20, 2), person_s=0).points_per_person_minute is None


def test_when_there_are_no_more_rounds():
    kept, refused = judged(paired(20, 2)), judged(paired(2, 2))
    alone = judged(paired(20, 2), takeovers=1)
    for rounds, settings, said in (
        ([], HELPED, ""),
        ([kept], HELPED, ""),
        ([refused], HELPED, ""),
        ([kept, refused], HELPED, ""),
        ([refused, refused], HELPED, "2 rounds in a row"),
        ([kept, kept, refused], HELPED, "3 rounds are done"),
        ([alone], HELPED, "helped 1 times in 40 episodes, less than once in 20"),
        # With no one to help, no help says nothing.
        ([alone], SETTINGS, ""),
    ):
        found = why_over(dict(enumerate(rounds, start=1)), settings)
        assert said in found
        assert bool(said) == bool(found)


def written(folder, number, settings, **changes):
    """Leave behind in a folder what a round of this number leaves, kept or not."""
    place = folder / f"round-{number:02d}"
    for name in ("record", "train", "choose", "test"):
        (place / "done").mkdir(parents=True, exist_ok=True)
        (place / "done" / f"{name}.json").write_text("{}")
    (place / "steps").mkdir(exist_ok=True)
    scores = [
        {"successes": n, "episodes": 9, "step": step} for step, n in ((4, 3), (8, 7), (10, 7))
    ]
    (place / "steps" / STEPS_FILE).write_text(json.dumps(scores))
    (place / "credit.json").write_text("{}")
    (place / CANDIDATE).mkdir(exist_ok=True)
    found = judged(paired(*changes["pairs"]), settings=settings, number=number)
    (place / ROUND_FILE).write_text(found.model_dump_json())


def words_of(step):
    said = dict(zip(step.words, step.words[1:], strict=False))
    return {name.partition("=")[0]: name.partition("=")[2] for name in step.words} | said


def test_each_step_follows_from_what_is_there(tmp_path):
    settings = replace(HELPED, perturb=("goal:2",), also=("libero_goal",))

    def next_step():
        return Improvement(tmp_path, settings).next_step()

    (tmp_path / "start/done").mkdir(parents=True)
    for name in ("test", "perturb", "libero_goal"):
        step = next_step()
        assert (step.name, step.round, step.words[0]) == (name, 0, "eval")
        step.finish(1.0)
    # The unperturbed half of the study is the test that is there.
    assert words_of(next_step())["--policy"] == "start"
    written(tmp_path, 1, settings, pairs=(20, 2))
    (tmp_path / "round-01" / ROUND_FILE).unlink()
    for name in ("perturb", "libero_goal"):
        assert next_step().name == name
        assert words_of(next_step())["--checkpoint"] == str(tmp_path / "round-01" / CANDIDATE)
        next_step().finish(1.0)
    assert next_step().name == "decide"
    written(tmp_path, 1, settings, pairs=(20, 2))
    step = next_step()
    assert (step.name, step.round) == ("record", 2)
    # What is kept acts in the next round, from starts of its own.
    assert words_of(step)["--policy"] == str(tmp_path / "round-01" / CANDIDATE)
    assert (words_of(step)["--seed"], words_of(step)["--round"]) == ("2000000", "2")
    step.finish(1.0)
    (tmp_path / "round-02/credit.json").write_text("{}")
    trained = words_of(next_step())
    assert trained["model.model_path"] == str(tmp_path / "round-01" / CANDIDATE)
    assert trained["checkpoint.keep_last_k"] == "3"
    demos, runs = json.loads(trained["data.train_data_paths"])
    assert (demos["dataset_path"], demos["weight"]) == (["demos"], 8)
    assert runs["dataset_path"] == [str(tmp_path / f"round-0{n}/recording") for n in (1, 2)]
    assert (runs["weight"], runs["credit"]) == (2, {})
    # Statistics stay those of the start.
    statistics = "start/experiment_cfg/metadata.json"
    assert {one["metadata_json_path"] for one in (demos, runs)} == {statistics}


def test_a_refused_policy_is_not_gone_on_from(tmp_path):
    Improvement(tmp_path, HELPED).next_step().finish(1.0)
    written(tmp_path, 1, HELPED, pairs=(20, 2))
    written(tmp_path, 2, HELPED, pairs=(2, 2))
    found = Improvement(tmp_path, HELPED)
    assert found.kept(3) == 1
    assert words_of(found.next_step())["--policy"] == str(tmp_path / "round-01" / CANDIDATE)
    (tmp_path / "round-02" / ROUND_FILE).unlink()
    (tmp_path / "round-02" / CANDIDATE).rmdir()
    step = Improvement(tmp_path, HELPED).next_step()
    # Of equals on the development starts, the step with the least training.
    assert (step.name, words_of(step)["--step"]) == ("export", "8")


def test_a_persons_episodes_are_waited_for(tmp_path):
    settings = replace(HELPED, by_person=True, attempts=2)
    Improvement(tmp_path, settings).next_step().finish(1.0)
    step = Improvement(tmp_path, settings).next_step()
    facts = tmp_path / "round-01/recording/meta/recording_facts.jsonl"
    assert not has_waited(step, settings.attempts)
    facts.parent.mkdir(parents=True)
    line = '{"episode_index": %d, "success": false, "seed": %d}\n'
    facts.write_text(line % (0, 1_000_000))
    assert not has_waited(step, settings.attempts)
    facts.write_text(facts.read_text() + line % (1, 1_000_001))
    assert has_waited(step, settings.attempts)


def test_settings_are_said_once(tmp_path):
    with pytest.raises(ConfigError, match="by --checkpoint, --demos, --recipe, --env"):
        settle(tmp_path, {})
    said = {name: vars(HELPED)[name] for name in ("checkpoint", "demos", "recipe", "env")}
    first = settle(tmp_path, dict(said))
    write_settings(tmp_path, first)
    assert settle(tmp_path, {}) == settle(tmp_path, dict(said)) == first
    with pytest.raises(ConfigError, match="attempts is 40 in this improvement, not 5"):
        settle(tmp_path, {"attempts": 5})
    (tmp_path / SETTINGS_FILE).write_text('{"rounds": "many"}')
    with pytest.raises(ConfigError, match=SETTINGS_FILE):
        settle(tmp_path, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flags": "--episodes 3"}, "--flags holds --episodes"),
        ({"record_flags": "--policy=hold"}, "--record-flags holds --policy"),
        ({"eval_flags": "--against x"}, "--eval-flags holds --against"),
        ({"flags": "'"}, "--flags: No closing quotation"),
        ({"also": ("libero_gaol",)}, "Did you mean 'libero_goal'"),
        ({"perturb": ("camera:9",)}, "levels 1 to 5"),
        ({"overrides": ("runner.output_dir=x",)}, "runner.output_dir follows from the folder"),
        ({"episodes": "many"}, "episodes='many'"),
    ],
)
def test_what_the_folder_says_is_said_by_nothing_else(changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        replace(SETTINGS, **changes)


def start(root, folder, *more):
    """Return the first command of a small improvement in a world of `fill`."""
    values = train_worlds.recipe(root, checkpoint__save_interval=2, runner__max_steps=4)
    recipe = root / "recipe.yaml"
    recipe.write_text(json.dumps(values))
    return [
        "improve", str(folder), f"--checkpoint={root / 'tiny'}", f"--demos={root / 'dataset'}",
        f"--recipe={recipe}", "--env=small_world:small-v0", "--episodes=4", "--dev-episodes=2",
        "--attempts=2", "--rounds=1", "--eval-flags=--workers 0 --predictions off",
        "--flags=--embodiment train_worlds:ROBOT --max-steps 20", *more,
    ]  # fmt: skip


def test_the_next_step_is_shown_and_what_would_fail_is_refused_before(
    train_root, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    command = start(train_root, tmp_path / "made")
    assert main([*command, "--show"]) == 0
    assert "before round 1, step 1 of 1: evaluate the start" in capsys.readouterr().out
    for more, said in (
        (["--eval-flags=--works 4"], "unrecognized arguments: --works"),
        (["--record-flags=--round-two x"], "unrecognized arguments: --round-two"),
        (["--eval-flags=--latency soon"], "soon"),
        (["--demos=nowhere"], "nowhere"),
        (["optim.lr=fast"], "optim.lr"),
        (["--checkpoint=nowhere"], "there is no nowhere/experiment_cfg/metadata.json"),
    ):
        assert main([*command, *more]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "made").exists()


@pytest.mark.long
def test_demonstrations_of_another_anchor_are_refused_and_init_takes_theirs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    robot = train_worlds.ARM
    demos = train_worlds.record(tmp_path / "dataset", episodes=1, robot=robot)
    facts = demos / "meta/recording_facts.jsonl"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "action.anchor": "target"}))
    metadata = train_worlds.statistics(demos, tmp_path / "metadata.json", robot)
    write_tiny_checkpoint(tmp_path / "tiny", robot, TinyOptions(variant="5b"))
    where = ["--embodiment", "train_worlds:ARM", "--dataset", str(demos)]
    fit = ["--metadata", str(metadata), "--still-steps", "3", "--clip-steps", "3"]
    assert main(["init", str(tmp_path / "fitted"), *where, *fit]) == 0
    command = [*start(tmp_path, tmp_path / "made"), "model.embodiment_tag=train_worlds:ARM"]
    capsys.readouterr()
    assert main([*command, "--show"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--demos measure actions from target, --checkpoint acts from measured" in said
    assert main([*command, f"--checkpoint={tmp_path / 'fitted'}", "--show"]) == 0


class Killed:
    """An improvement that is killed in each of its steps once, and given again."""

    def __init__(self, command, folder, environment):
        self.command, self.folder, self.environment = command, folder, environment
        self.killed = []

    def run(self, *signs):
        """Run to the end; kill once where each of ``signs``, a step and what it makes, is there."""
        left = dict(signs)
        while True:
            process = subprocess.Popen(
                [sys.executable, "-m", "dzrobot.cli", *self.command, "--all"], text=True,
                env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            while process.poll() is None and (name := self._reached(left)) is None:
                time.sleep(0.02)
            if process.poll() is not None:
                assert process.returncode == 0, process.communicate()[0]
                return
            process.send_signal(signal.SIGKILL)
            process.communicate()
            self.killed.append(name)
            del left[name]

    def _reached(self, left):
        return next((name for name, sign in left.items() if any(self.folder.glob(sign))), None)


@pytest.mark.long
@pytest.mark.timeout(2700)
def test_a_round_that_is_killed_in_every_step_comes_to_the_same(
    train_root, train_environment, tmp_path
):
    environment = {**train_environment, "OMP_NUM_THREADS": "1"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    Killed(start(train_root, whole), whole, environment).run()
    killed = Killed(start(train_root, cut), cut, environment)
    killed.run(
        ("record", "round-01/recording/data/chunk-000/*.parquet"),
        ("credit", "round-01/done/record.json"),
        ("train", "round-01/run/checkpoints/step_00000002"),
        ("choose", "round-01/steps/step_00000002/records.jsonl"),
        ("test", "round-01/unperturbed/records.jsonl"),
    )
    assert killed.killed == ["record", "credit", "train", "choose", "test"]
    one, two = (
        read_json(folder / "round-01" / ROUND_FILE, Round, ConfigError) for folder in (whole, cut)
    )
    same = {"robot_s": 0.0}
    assert one.model_copy(update={"recorded": one.recorded.model_copy(update=same)}) == (
        two.model_copy(update={"recorded": two.recorded.model_copy(update=same)})
    )
    weights = [folder / "round-01" / CANDIDATE / "model.safetensors" for folder in (whole, cut)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    rows = [folder / "round-01/recording/meta/recording_facts.jsonl" for folder in (whole, cut)]
    assert [json.loads(line)["round"] for line in rows[1].read_text().splitlines()] == [1, 1]
    page = (cut / "improve.html").read_text()
    assert "not shown to be better" in page
    films = re.findall(r'<video[^>]*src="([^"]+)"', page)
    assert films
    assert all((cut / film).is_file() for film in films)
    # What is decided is killed at each of its writes.
    found = Improvement(whole, settle(whole, {}))
    path = whole / "round-01" / ROUND_FILE
    wanted = path.read_bytes()
    path.unlink()
    step = Improvement(whole, found.settings).next_step()
    for at in range(len(operations(lambda: found.decide(step), path.parent))):
        path.unlink(missing_ok=True)
        stop(lambda: found.decide(step), path.parent, at)
        assert not path.exists() or path.read_bytes() == wanted
        found.decide(step)
        assert path.read_bytes() == wanted
