"""``dzrobot curve``: sets of options on the same episodes, with and without the time of plans."""

import io
import json
import re
import shlex

import pytest
from rich.console import Console

from dzrobot.cli import build_parser, main
from dzrobot.commands import curve
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.rollout.evaluation.card import read_card
from dzrobot.rollout.evaluation.comparison import compare, read_results
from dzrobot.rollout.evaluation.evaluate import EvaluationSession
from dzrobot.rollout.evaluation.studies.curve import (
    OptionSet,
    curve_table,
    draw_curve,
    evaluate_curve,
)

pytest.importorskip("statsmodels")
BUNDLED = shlex.quote(str(default_checkpoint()))
WORDS = ("--env", "dzrobot/point-v0", "--episodes", "2", "--max-steps", "9", "--videos", "none",
         "--workers", "0")  # fmt: skip


def read(text, *more, output="x"):
    parser = build_parser("dzrobot curve", curve)
    arguments = parser.parse_intermixed_args([text, *WORDS, "--output", str(output), *more])
    return curve._request(text, arguments)


def test_a_set_is_written_like_the_flags_of_eval():
    request = read("solver-steps=4 history=off checkpoint=A execution=rtc", "--policy-seed", "3")
    options = request.policy
    assert (options.solver_steps, options.history, options.seed) == (4, "off", 3)
    assert (request.policy.name, request.execution.execution) == ("A", "rtc")
    # What a set leaves out is as the command says.
    other = read("dit-steps=5", "--history", "off").policy
    assert (other.dit_steps, other.history, other.solver_steps) == (5, "off", None)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dit-steps=16", "--output", "x", "--latency", "soon"), "'soon' is not a time"),
        (("dit-steps=16",), "--output DIR"),
        (("dit-stepz=16", "--output", "x"), "options 'dit-stepz=16': unrecognized"),
        (("dit-steps=some", "--output", "x"), "options 'dit-steps=some'.*some"),
        (("latency=soon", "--output", "x"), "'soon' is not a time"),
        (('history="off', "--output", "x"), "No closing quotation"),
        (("dit-steps=16", "dit-steps=16", "--output", "x"), "keep one"),
        ((f"dit-steps=9 checkpoint={BUNDLED}", "--output", "x"), "no plan runs 9 of 16 steps"),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anything_runs(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["curve", *words, *WORDS, "--rounds", "0"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_nothing_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dzrobot.importing.find_spec", lambda _: None)
    assert main(["curve", "dit-steps=16", *WORDS, "--output", str(tmp_path / "x")]) == 2
    assert "a plot needs matplotlib: pip install -e '.[report]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return folder and points of three sets; of one, nothing says how long its plans take."""
    root = tmp_path_factory.mktemp("curve")
    sets = [
        OptionSet(
            name=name, folder=name,
            request=read(f"{name}{latency} checkpoint={default_checkpoint()}"),
            ratio=ratio, chunk_ms=100 * ratio,
        )
        for name, ratio, latency in (
            ("solver-steps=4", 1.0, " latency=0.16"), ("solver-steps=1", 0.4, " latency=steps:1"),
            ("history=off", 0.9, ""),
        )
    ]  # fmt: skip
    session = EvaluationSession(output=root, console=Console(file=io.StringIO()))
    return root, evaluate_curve(session, sets), sets, session


def test_every_set_is_evaluated_with_and_without_time(drawn):
    root, points, _, _ = drawn
    assert [p.options for p in points] == ["solver-steps=4", "solver-steps=1", "history=off"]
    assert [p.latency for p in points] == ["0.16", "steps:1", None]
    assert "execution" not in read_card(root / "solver-steps=1") or (
        read_card(root / "solver-steps=1")["execution"] is None
    )
    assert read_card(root / "solver-steps=1-timed")["execution"]["latency"] == "steps:1"
    assert not (root / "history=off-timed").exists()
    assert points[2].timed is None
    for kind, pick in (("", "still"), ("-timed", "timed")):
        runs = [
            read_results(root / f"{name}{kind}") for name in ("solver-steps=4", "solver-steps=1")
        ]
        found = compare(runs, any_execution=True)[0]
        score = getattr(points[1], pick)
        assert (score.lost, score.won, score.p) == (
            found.total.first_only, found.total.second_only, found.p
        )  # fmt: skip
        won = sum(bool(record.success) for record in runs[1].finished.values())
        assert (score.successes, score.episodes) == (won, 2)
    assert json.loads((root / "curve.json").read_text()) == [p.model_dump() for p in points]


def test_the_same_sets_again_run_nothing(drawn):
    root, points, sets, session = drawn
    before = {path: path.read_bytes() for path in root.rglob("records.jsonl")}
    assert evaluate_curve(session, sets) == points
    assert {path: path.read_bytes() for path in root.rglob("records.jsonl")} == before


def test_table_and_plot(drawn, tmp_path):
    _, points, _, _ = drawn
    console = Console(file=io.StringIO(), width=140)
    console.print(curve_table(points, "success"))
    rows = [line for line in console.file.getvalue().splitlines() if "steps=" in line]
    assert rows[0].split()[1:3] == ["100", "1.00"]
    assert "0.16" in rows[0]
    assert rows[1].split()[1:3] == ["40", "0.40"]
    files = draw_curve(points, "success", tmp_path)
    assert [path.name for path in files] == ["curve.png", "curve.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    unknown = points[0].model_copy(update={"chunk_ms": None})
    with pytest.raises(ConfigError, match="chunks were not measured"):
        draw_curve([*points, unknown], "success", tmp_path)


@pytest.mark.long
def test_the_command_measures_evaluates_and_draws(tmp_path):
    sets = (f"dit-steps=16 checkpoint={BUNDLED}", f"solver-steps=2 checkpoint={BUNDLED}")
    words = ("curve", *sets, *WORDS, "--rounds", "1", "--latency", "0.1", "--output")
    assert main([*words, str(tmp_path)]) == 0
    full, few = json.loads((tmp_path / "curve.json").read_text())
    assert full["ratio"] == 1
    assert few["ratio"] < 1
    assert few["chunk_ms"] < full["chunk_ms"]
    assert few["latency"] == "0.1"
    assert few["timed"]["episodes"] == 2
    assert (tmp_path / "curve.svg").is_file()
