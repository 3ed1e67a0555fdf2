"""Whether predicted video goes along with success: which episodes count, and what is said."""

from dataclasses import replace
from pathlib import Path

import pytest

from dzrobot import cli
from dzrobot.rollout.evaluation.comparison import Results
from dzrobot.rollout.pages.predicted import ScoredRun, quality_rows
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes
from dzrobot.rollout.records import Record

CASES = plan_episodes(EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=24))
TIMES = {"p50": 1.0, "p95": 2.0}


def scored(name, wins, scores, done=24):
    """Return a run of ``done`` episodes of which those in ``wins`` succeeded."""
    records = {
        case.name: replace(
            Record.failed(case, ""), error=None, success=case.episode in wins, steps=5,
            task="reach", ended="success", action_sha256="0" * 64, policy_ms=TIMES, env_ms=TIMES,
            wall_s=1.0,
        )
        for case in CASES[:done]
    }  # fmt: skip
    records[CASES[0].name] = Record.failed(CASES[0], "an exception")
    results = Results(folder=Path(name), card={}, cases=CASES, records=records)
    kept = {
        case.name: {"psnr": scores(case.episode), "copy_psnr": 20.0} if case.episode != 1 else {}
        for case in CASES
    }
    return ScoredRun(name=name, results=results, scores=kept)


def test_each_run_and_all_together_on_the_starts_they_share():
    first = scored("a", range(12), lambda episode: 40.0 - episode)
    second = scored("b", range(6, 24), lambda episode: 40.0 - episode, done=20)
    one, two, all_ = quality_rows([first, second])
    # Errors and episodes of which no predicted frame was seen do not count.
    assert (one.episodes, one.successes) == (22, 10)
    assert (two.episodes, two.successes) == (18, 14)
    assert (all_.episodes, all_.successes) == (36, 10 + 14)
    along = one.along["psnr"]
    assert along.of_successes == pytest.approx(40 - sum(range(2, 12)) / 10)
    assert along.of_failures == pytest.approx(40 - sum(range(12, 24)) / 12)
    assert along.correlation.rho > 0.8
    assert along.correlation.low > 0
    gain = one.along["gain"]
    assert gain.of_successes == pytest.approx(along.of_successes - 20)
    assert gain.correlation == along.correlation
    assert two.along["psnr"].correlation is None, "four failures are too few"
    assert all_.along["psnr"].correlation is not None


def test_a_run_alone_has_no_row_of_all():
    (row,) = quality_rows([scored("a", [], float)])
    assert (row.successes, row.along["psnr"].of_successes) == (0, None)
    assert row.along["psnr"].correlation is None


def test_errors_in_latents_count_where_they_were_kept():
    first = scored("a", range(12), float)
    older = scored("b", range(12), float)
    with_latents = {
        case: {**scores, "latent_error": scores["psnr"] / 2, "copy_latent_error": 30.0}
        for case, scores in first.scores.items()
        if scores
    }
    first = replace(first, scores=with_latents)
    one, two, all_ = quality_rows([first, older])
    along = one.along["latent_gain"]
    assert along.of_successes == pytest.approx(30 - sum(range(2, 12)) / 20)
    assert along.of_failures == pytest.approx(30 - sum(range(12, 24)) / 24)
    assert along.correlation.rho > 0.8
    for row in (two, all_):
        assert row.along["latent_gain"].of_successes is None
        assert row.along["latent_gain"].correlation is None
        assert row.along["psnr"].of_successes is not None


def test_moving_pixels_count_where_any_moved():
    run = scored("a", range(12), float)
    kept = {
        case: {**scores, "moving_psnr": scores["psnr"] / 2, "copy_moving_psnr": 5.0}
        for case, scores in run.scores.items()
        if scores
    }
    still = kept.popitem()
    (row,) = quality_rows([replace(run, scores={**kept, still[0]: run.scores[still[0]]})])
    assert row.along["moving_gain"].of_successes == pytest.approx(sum(range(2, 12)) / 20 - 5)
    assert row.along["moving_psnr"].of_failures == pytest.approx(sum(range(12, 23)) / 22)


def test_without_predictions_the_command_says_what_to_do(tmp_path, capsys):
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "hold", "--episodes", "1", "--videos",
             "none", "--workers", "0", "--max-steps", "3", "--output", str(tmp_path)]  # fmt: skip
    assert cli.main(words) == 0
    assert cli.main(["compare", str(tmp_path), "--predictions"]) == 2
    assert "run it with --predictions on" in capsys.readouterr().err
