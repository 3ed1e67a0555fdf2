"""``dzrobot eval --against``: compared with earlier results, and ended once that is decided."""

import json

import pytest

from dzrobot.cli import main

WORDS = ["eval", "--env", "dzrobot/point-v0", "--workers", "0", "--videos", "none",
         "--max-steps", "40"]  # fmt: skip
GOOD = ["--policy", "rollout_policies:Seeker", "--privileged"]
BAD = ["--policy", "hold"]


@pytest.fixture(scope="module")
def failures(policies, tmp_path_factory):
    """Return results in which nothing succeeds."""
    root = tmp_path_factory.mktemp("base") / "hold"
    assert main([*WORDS, *BAD, "--episodes", "20", "--output", str(root)]) == 0
    return root


def lines(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_a_run_ends_once_the_difference_is_decided(failures, tmp_path, capsys):
    words = [*WORDS, *GOOD, "--episodes", "20", "--output", str(tmp_path / "b"),
             "--against", str(failures), "--stop-early"]  # fmt: skip
    capsys.readouterr()
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    # Eight wins without a loss: 2^8 / 9 = 28 is the first e-value above 20.
    assert len(lines(tmp_path / "b")) == 8
    assert "decided after 8 pairs of 20" in out
    assert "the same command tries them" not in out
    assert main(words) == 0
    assert len(lines(tmp_path / "b")) == 8


def test_equal_runs_go_on_to_the_end(failures, tmp_path, capsys):
    words = [*WORDS, *BAD, "--episodes", "20", "--output", str(tmp_path / "b")]
    assert main([*words, "--against", str(failures), "--stop-early"]) == 0
    assert len(lines(tmp_path / "b")) == 20
    assert "not decided of 20" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--episodes", "20", "--stop-early"], "needs --against"),
        (["--episodes", "19", "--against", "{base}"], "do not compare"),
        (["--episodes", "20", "--against", "{base}/nothing"], "nothing"),
        (["--episodes", "20", "--against", "{base}", "--perturb", "noise"], "give one of them"),
        (["--episodes", "20", "--against", "{base}", "--stop-early", "--shard", "0/2"], "--shard"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_runs(
    words, said, failures, tmp_path, capsys
):
    given = [word.format(base=failures) for word in words]
    assert main([*WORDS, *GOOD, "--output", str(tmp_path / "b"), *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
