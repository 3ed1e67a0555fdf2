"""Evaluations: the same results however they are run, and errors that stay errors."""

import json
import sys
from dataclasses import replace

import av
import gymnasium as gym
import pytest

from dzrobot import cli
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, ProtocolError, SetupError, UnknownNameError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.rollout.environment import check_fits
from dzrobot.rollout.evaluation.evaluate import evaluate, merge
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, plan, prepare
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.records import RecordFile

pytestmark = pytest.mark.copies

SPEC = EvalSpec(
    protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 2), episodes=3,
    max_steps=20, arguments={"resolution": 32},
)  # fmt: skip


def planned(policy="Steer", *, batched=False, **changes):
    wanted = PolicySpec(name=f"rollout_policies:{policy}", privileged=policy == "Deadly")
    spec = replace(SPEC, **changes)
    return prepare(EvaluationRequest(spec=spec, policy=wanted, batched=batched))


def run(folder, prepared=None, **options):
    options = {"videos": "none", "workers": 0, **options}
    return evaluate(prepared or planned(), folder, RunOptions(**options))


def results(folder):
    return {name: record.result() for name, record in RecordFile(folder).records.items()}


@pytest.fixture
def alone(tmp_path):
    """Return folder and summary of a run in one process."""
    folder = tmp_path / "alone"
    return folder, run(folder)


def test_results_do_not_depend_on_the_workers(alone, tmp_path):
    folder, summary = alone
    assert 0 < summary.total.successes < summary.total.episodes == 6
    assert len({record["action_sha256"] for record in results(folder).values()}) == 6
    other = tmp_path / "two"
    assert run(other, workers=2).results() == summary.results()
    assert results(other) == results(folder)


def test_waiting_episodes_can_share_a_call(alone, tmp_path):
    folder, _ = alone
    run(tmp_path / "batch", planned("Together", batched=True), workers=3)
    assert results(tmp_path / "batch") == results(folder)
    assert set(sys.modules["rollout_policies"].Together.batches) & {2, 3}


def test_a_finished_run_is_not_run_again(alone):
    folder, summary = alone
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert run(folder).results() == summary.results()
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_policy_that_fails_on_the_way_has_failed_and_is_not_run_again(
    alone, tmp_path, workers, monkeypatch
):
    _, expected = alone
    marker, folder = tmp_path / "marker", tmp_path / "broken"
    monkeypatch.setenv("BROKEN", str(marker))
    marker.touch()
    summary = run(folder, planned("Broken"), workers=workers)
    failures = expected.total.episodes - expected.total.successes
    broken = [one for one in RecordFile(folder).records.values() if one.policy_error]
    assert len(broken) == failures > 0
    assert {(one.success, one.ended, one.steps, one.error) for one in broken} == {
        (False, "policy_error", 14, None)
    }
    assert {one.policy_error for one in broken} == {"RuntimeError: the policy broke"}
    assert "the policy broke" in (folder / "errors" / f"{broken[0].case}.txt").read_text()
    assert summary.complete
    assert summary.total.failure_classes == {"the policy failed": failures}
    before = (folder / "records.jsonl").read_bytes()
    marker.unlink()
    assert run(folder, planned("Broken"), workers=workers).results() == summary.results()
    assert (folder / "records.jsonl").read_bytes() == before


def test_an_evaluation_in_which_no_action_could_be_taken_says_why_and_fails(tmp_path, capsys):
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "rollout_policies:Nonsense"]
    words += ["--episodes", "2", "--max-steps", "5", "--workers", "0", "--videos", "none"]
    assert cli.main([*words, "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "the policy failed in 2 episodes, first in dzrobot_point-v0-task00-episode000" in said
    assert "(6,)" in said
    assert "this is not a score" in said


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_an_exception_before_the_first_action_is_an_error_and_is_run_again(
    alone, tmp_path, workers, monkeypatch
):
    whole, expected = alone
    marker, folder = tmp_path / "marker", tmp_path / "broken"
    monkeypatch.setenv("BROKEN", str(marker))
    marker.touch()
    summary = run(folder, planned("Unready"), workers=workers, max_errors=50)
    broken = [record for record in RecordFile(folder).records.values() if record.error]
    assert len(broken) == summary.total.errors == 6
    assert {record.error for record in broken} == {"RuntimeError: the policy is not ready"}
    assert all(record.success is None for record in broken)
    assert not summary.complete
    marker.unlink()
    assert run(folder, planned("Unready"), workers=workers).results() == expected.results()
    assert results(folder) == results(whole)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_an_exit_of_a_policy_is_an_error_of_its_episode(tmp_path, workers):
    summary = run(tmp_path, planned("Leaving"), workers=workers, max_errors=50)
    assert not summary.complete
    assert {record.error for record in RecordFile(tmp_path).records.values()} == {"SystemExit: 0"}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_what_no_episode_could_escape_ends_the_run_at_once(alone, tmp_path, workers, monkeypatch):
    whole, _ = alone
    marker, folder = tmp_path / "marker", tmp_path / "broken"
    monkeypatch.setenv("BROKEN", str(marker))
    marker.touch()
    with pytest.raises(SetupError, match=r"OpenGL does not work\nNo episode"):
        run(folder, planned("Deviceless"), workers=workers, max_errors=50)
    assert not RecordFile(folder).records
    marker.unlink()
    run(folder, planned("Deviceless"), workers=workers)
    assert results(folder) == results(whole)


def test_a_run_gives_up_after_too_many_errors(tmp_path):
    crashing = planned(arguments={"resolution": 32, "crash_at": 2})
    summary = run(tmp_path, crashing, max_errors=2)
    assert (summary.total.errors, summary.total.missing) == (2, 4)
    assert "set to fail at step 2" in summary.errors[0][1]


def test_a_worker_that_dies_is_replaced(tmp_path):
    summary = run(tmp_path, planned("Deadly", episodes=1), workers=2)
    assert summary.total.errors == 2
    assert {message for _, message in summary.errors} == {
        "the worker process died with exit code 7"
    }


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed: 0 in"),
        ({"max_steps": 21}, "max_steps: 20 in"),
        ({"tasks": (0,)}, "tasks: [0, 2] in"),
        ({"arguments": {"resolution": 48}}, "resolution: 32 in"),
    ],
)
def test_unlike_runs_are_refused_in_one_folder(alone, change, told):
    folder, _ = alone
    before = results(folder)
    with pytest.raises(ProtocolError) as caught:
        run(folder, planned(**change))
    assert told in str(caught.value)
    with pytest.raises(ProtocolError, match=r"policy\.policy"):
        run(folder, planned("Slow"))
    assert results(folder) == before


def test_shards_merge_to_the_whole(alone, tmp_path):
    folder, whole = alone
    parts = [tmp_path / f"part{i}" for i in range(4)]
    for i, part in enumerate(parts):
        run(part, shard=(i, 4), videos="all" if i == 0 else "none")
    some = merge(tmp_path / "some", parts[:3])
    assert some.total.missing == 1
    assert not some.complete
    merged = merge(tmp_path / "merged", parts)
    assert merged.results() == whole.results()
    assert results(tmp_path / "merged") == results(folder)
    videos = [record.video for record in RecordFile(tmp_path / "merged").records.values()]
    assert all((tmp_path / "merged" / video).is_file() for video in videos if video)
    # Merging again, or on top of a part of it, changes nothing.
    assert merge(tmp_path / "some", parts).results() == whole.results()
    run(tmp_path / "other", planned(seed=5))
    with pytest.raises(ProtocolError, match="seed"):
        merge(tmp_path / "wrong", [parts[0], tmp_path / "other"])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_films_can_be_played(tmp_path, workers):
    run(tmp_path, planned(arguments={"resolution": 48}), workers=workers, videos="all")
    records = RecordFile(tmp_path).records.values()
    assert len({record.video for record in records}) == len(records)
    for record in records:
        with av.open(str(tmp_path / record.video)) as container:
            stream = container.streams.video[0]
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
            assert stream.codec_context.name == "h264"
            assert float(stream.average_rate) == 20
        # One frame per observation: what people see, then the two views.
        assert len(frames) == record.steps + 1
        assert {frame.shape for frame in frames} == {(48, 3 * 48, 3)}
    kept = {path.name for path in (tmp_path / "videos").iterdir()}
    assert kept == {record.video.rpartition("/")[2] for record in records}


def test_films_of_failures_only(tmp_path):
    summary = run(tmp_path, videos="failures")
    filmed = [record for record in RecordFile(tmp_path).records.values() if record.video]
    assert len(filmed) == summary.total.episodes - summary.total.successes
    assert not any(record.success for record in filmed)


def test_the_card_says_what_a_score_depends_on(alone):
    folder, _ = alone
    card = json.loads((folder / "card.json").read_text())
    assert card == planned().card
    assert card["suites"]["dzrobot/point-v0"]["arguments"] == {}
    assert card["images"] == {"dzrobot/point-v0": {"resolution": 32}}
    assert {"protocol", "policy", "versions", "seed", "repeats", "assets"} <= card.keys()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["card"] == card
    assert summary["complete"]


@pytest.mark.parametrize(
    ("of_protocol", "asked", "said"),
    [
        (None, None, []),
        (None, "off", []),
        (None, "recent", ["history recent, not off"]),
        ("grid", None, []),
        ("grid", "off", ["history off, not grid"]),
    ],
)
def test_a_history_that_is_not_the_protocols_or_the_robots_is_said(of_protocol, asked, said):
    protocol = replace(PROTOCOLS["custom"], name="named", history=of_protocol)
    spec = EvalSpec(protocol=protocol, env="dzrobot/point-v0")
    policy = PolicySpec(name="random", embodiment="libero_sim", history=asked)
    card = prepare(EvaluationRequest(spec=spec, policy=policy)).card
    assert card["changes"] == said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, ()),
        ({"execute": 3, "seed": 1140, "dtype": "float32", "solver_steps": 16}, ()),
        ({"execute": 8}, ("execute 8, not 3",)),
        ({"solver_steps": 4}, ("dit steps 4, not 8", "solver steps 4, not 16")),
        ({"dit_steps": 5}, ("dit steps 5, not 8",)),
        ({"cfg_scale": 2.5}, ("cfg scale 2.5, not {cfg}",)),
        ({"video": "skip", "seed": 7}, ("video skip, not full", "seed 7, not 1140")),
        ({"dtype": "bfloat16"}, ("dtype bfloat16, not float32",)),
        ({"quantize": "int8"}, ("quantize int8",)),
    ],
)  # fmt: skip
def test_how_a_checkpoint_acts_is_said_where_it_is_not_as_usual(asked, said):
    protocol = PROTOCOLS["custom"]
    spec = EvalSpec(protocol=protocol, env="dzrobot/point-v0", arguments={"resolution": 128})
    policy = PolicySpec(name=str(default_checkpoint()), device="cpu", **asked)
    planned = plan(EvaluationRequest(spec=spec, policy=policy))
    usual = planned.found.robot.cfg_scale
    assert planned.changes == tuple(text.format(cfg=usual) for text in said)


def test_a_bundled_policy_that_acts_as_it_was_scored_departs_from_nothing():
    protocol = PROTOCOLS["custom"]
    spec = EvalSpec(protocol=protocol, env="dzrobot/point-v0", arguments={"resolution": 128})
    own = PolicySpec(name=str(default_checkpoint("libero_object")), solver_steps=4)
    assert plan(EvaluationRequest(spec=spec, policy=own)).changes == ()
    other = replace(own, solver_steps=8)
    said = plan(EvaluationRequest(spec=spec, policy=other)).changes
    assert "solver steps 8, not 4" in said


@pytest.mark.parametrize("kind", ["shuffle", "other-start"])
def test_corrupted_images_reach_the_policy_alone(alone, tmp_path, kind):
    folder, summary = alone
    blind = prepare(replace(planned().plan.request, ablation=kind))
    # This policy looks at the state only: it must not notice, and the folder must.
    assert run(tmp_path / kind, blind).results() == summary.results()
    assert results(tmp_path / kind) == results(folder)
    with pytest.raises(ProtocolError, match="ablation"):
        run(folder, blind)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "rollout_policies:Ster"], "Did you mean 'Steer'?"),
        (["--policy", "radnom"], "Did you mean 'random'?"),
        (["--policy", "hold", "--checkpoint", "x"], "not both"),
        (["--policy", "hold", "--tasks", "1-"], "0,1,5-7"),
        (["--policy", "hold", "--shard", "3"], "I/N"),
        (["--policy", "hold", "--shard", "2/2"], "shard"),
        (["--policy", "hold", "--env-arg", "quality=x"], "takes no argument 'quality'"),
        (["--policy", "hold", "--embodiment", "oxe_droid"], "does not fit oxe_droid"),
        (["--policy", "hold", "--tasks", "7"], "task_id=7"),
    ],
)
def test_misuse_is_explained_before_anything_runs(words, message, tmp_path, capsys):
    output = tmp_path / "output"
    given = ["--env", "dzrobot/point-v0", "--output", str(output), *words]
    assert cli.main(["eval", *given]) == 2
    assert message in capsys.readouterr().err
    assert not (output / "records.jsonl").exists()


def test_images_of_another_size_name_the_argument_that_sets_it():
    env, robot = gym.make("dzrobot/point-v0", resolution=32), load_embodiment("libero_sim")
    with pytest.raises(ProtocolError, match=r"\(256, 256, 3\): make it with resolution=256"):
        check_fits("the point", env, robot, needed=robot.observation_keys)
    env.close()
    fits = gym.make("dzrobot/point-v0", resolution=256)
    check_fits("the point", fits, robot, needed=robot.observation_keys)
    fits.close()


def test_names_that_do_not_exist():
    with pytest.raises(UnknownNameError, match="point-v0"):
        planned(env="dzrobot/piont-v0")
    with pytest.raises(ConfigError):
        RunOptions(workers=-1)
