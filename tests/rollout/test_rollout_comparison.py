"""Evaluations of the same episodes are compared pair by pair; unlike ones are refused."""

import json
import shutil

import pytest

from dzrobot import cli
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.rollout.evaluation.comparison import compare, read_results
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec

pytest.importorskip("statsmodels")


def run(folder, policy="rollout_policies:Steer", **changes):
    spec = EvalSpec(
        protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 2), episodes=3,
        max_steps=20, **{"arguments": {"resolution": 32}, **changes},
    )  # fmt: skip
    evaluation = EvaluationRequest(spec=spec, policy=PolicySpec(name=policy))
    evaluate(prepare(evaluation), folder, RunOptions(workers=0, videos="none"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a policy that steers and of one that stands still."""
    root = tmp_path_factory.mktemp("compared")
    run(root / "steer")
    run(root / "again")
    run(root / "still", "hold")
    run(root / "other", seed=1)
    run(root / "larger", arguments={"resolution": 48})
    return root


def test_what_only_one_solved_is_named(folders):
    steer, still = (read_results(folders / name) for name in ("steer", "still"))
    won = [name for name, record in steer.finished.items() if record.success]
    assert 0 < len(won) < len(steer.finished)
    (found,) = compare([still, steer])
    assert found.second_only == tuple(won)
    assert not found.first_only
    assert found.total.difference == len(won) / 6
    assert sum(counts.episodes for counts in found.tasks.values()) == 6
    assert found.p == found.p_holm == pytest.approx(2 * 0.5 ** len(won))


def test_equal_runs_do_not_differ(folders):
    (found,) = compare([read_results(folders / "steer"), read_results(folders / "again")])
    assert (found.low, found.high, found.p, found.e) == (0, 0, 1, 1)
    assert found.adjusted[0] < 0 < found.adjusted[1]


def test_several_are_adjusted_together(folders):
    runs = [read_results(folders / name) for name in ("still", "steer", "again")]
    first, second = compare(runs)
    assert first.p_holm == pytest.approx(min(1, 2 * first.p))
    assert second.second.folder == folders / "again"


def test_unlike_runs_are_refused_with_the_difference(folders):
    with pytest.raises(ProtocolError, match=r"seed: 0 in .* 1 in .*other"):
        compare([read_results(folders / "steer"), read_results(folders / "other")])
    with pytest.raises(ProtocolError, match=r"Alike with: --seed 0$"):
        compare([read_results(folders / "steer"), read_results(folders / "other")])
    with pytest.raises(ConfigError, match="two or more"):
        compare([read_results(folders / "steer")])


def test_the_size_of_images_is_the_policys_own(folders):
    runs = [read_results(folders / name) for name in ("steer", "larger")]
    assert [run.card["images"]["dzrobot/point-v0"]["resolution"] for run in runs] == [32, 48]
    (found,) = compare(runs)
    assert found.total.episodes == 6


def test_images_of_an_earlier_card_are_the_policys_too(folders, tmp_path):
    shutil.copytree(folders / "larger", tmp_path / "earlier")
    path = tmp_path / "earlier" / "card.json"
    card = json.loads(path.read_text())
    card["suites"]["dzrobot/point-v0"]["arguments"] |= card.pop("images")["dzrobot/point-v0"]
    path.write_text(json.dumps(card))
    (found,) = compare([read_results(str(folders / "steer")), read_results(tmp_path / "earlier")])
    assert found.total.episodes == 6


def test_a_refused_report_leaves_no_folder(folders, capsys):
    pair = [str(folders / "still"), str(folders / "other")]
    assert cli.main(["report", *pair]) == 2
    assert "Alike with: --seed 0" in capsys.readouterr().err
    assert not (folders / "still" / "report").exists()


def test_a_run_beside_an_unlike_one_is_told_so_when_it_begins(tmp_path, capsys):
    def evaluated(folder, *more):
        line = ["eval", "--env", "dzrobot/point-v0", "--episodes", "1", "--workers", "0"]
        line += ["--videos", "none", "--output", str(tmp_path / folder)]
        assert cli.main([*line, *more]) == 0
        return capsys.readouterr().out

    assert "note:" not in evaluated("first", "--policy", "hold", "--seed", "3")
    # Another policy with other pictures is compared.
    same = ("--policy", "random", "--seed", "3", "--env-arg", "resolution=48")
    assert "note:" not in evaluated("same", *same)
    (note,) = [line for line in evaluated("other", "--policy", "random").splitlines()
               if line.startswith("note:")]  # fmt: skip
    assert "seed (3 there, 0 here)" in note
    assert note.endswith("alike with: --seed 3")
    # What is resumed has been told; a damaged neighbor stops nothing.
    (tmp_path / "same" / "card.json").write_text("{")
    assert "note:" not in evaluated("other", "--policy", "random")
    shown = evaluated("another", "--policy", "hold", "--seed", "3")
    assert f"compare with {tmp_path / 'other'}" in shown


def test_at_the_command_line(folders, tmp_path, capsys):
    out = tmp_path / "numbers.json"
    both = [str(folders / "still"), str(folders / "steer")]
    assert cli.main(["compare", *both, "--flips", "--published", "9/10", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "published 9/10" in printed
    assert json.loads(out.read_text())[0]["pairs"] == 6
    one = ["compare", both[0]]
    for wrong in (one, [*one, "--published", "11/10"], [*one, "--published", "²/3"], [*one, "/no"]):
        assert cli.main(wrong) == 2
    assert "Traceback" not in capsys.readouterr().err
