"""What a policy predicts is kept, changes nothing, and reaches the page."""

import json
import shutil

import av
import numpy as np
import pytest

from dzrobot import DreamZeroPolicy, cli
from dzrobot.policies.base import Policy
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.rollout.evaluation.card import read_card
from dzrobot.rollout.evaluation.comparison import read_results
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import (
    EvaluationRequest,
    RunOptions,
    predicting,
    prepare,
)
from dzrobot.rollout.pages.predicted import decode_predictions, quick_scores, read_parts
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.predictions import (
    decode,
    latent_errors,
    prediction_files,
    read_predictions,
    undecoded_files,
)
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.records import RecordFile, predictions_size

pytestmark = pytest.mark.copies
STEPS = 8
POINT = EvalSpec(
    protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=1, max_steps=STEPS,
    arguments={"resolution": 128},
)  # fmt: skip

EVAL = (
    "eval", "--env", POINT.env, "--env-arg", "resolution=128", "--episodes", "1", "--max-steps",
    str(STEPS), "--checkpoint", str(default_checkpoint()), "--embodiment", "libero_mini",
    "--workers", "0", "--videos", "none",
)  # fmt: skip
"""The same as a command."""


@pytest.fixture(scope="module")
def opened():
    """Return an evaluation of a policy that predicts, ready to run."""
    player = PolicySpec(name=str(default_checkpoint()), embodiment="libero_mini")
    return prepare(EvaluationRequest(spec=POINT, policy=player))


@pytest.fixture(scope="module")
def results(tmp_path_factory, opened):
    """Return the folders of one episode with and without its predictions."""
    root = tmp_path_factory.mktemp("predicted")
    for name, wanted, workers in (("with", None, 1), ("without", False, 0)):
        evaluate(opened, root / name, RunOptions(workers=workers, predictions=wanted))
    shutil.copytree(root / "with", root / "undecoded")
    decode_predictions(read_results(root / "with"))
    return root


def test_actions_are_the_same_and_the_files_tell_of_every_plan(results):
    kept, plain = (RecordFile(results / name).records for name in ("with", "without"))
    (case,) = kept
    assert kept[case].result() == plain[case].result()
    for record in (kept[case], plain[case]):
        # Most actions come from a plan that is there: a plan takes far longer than the median.
        assert record.plan_ms["p50"] > 10 * record.policy_ms["p50"] > 0
    assert predictions_size(results / "without") == 0
    assert predictions_size(results / "with") > 0
    found = read_predictions(results / "with", case)
    assert found is not None
    assert len(found.executed) == len(found.states) == STEPS
    assert {len(row) for row in found.states} == {8}
    assert len(set(found.states)) > 1, "the point moves"
    # Three actions of each plan are executed, then it plans again.
    assert [chunk.step for chunk in found.chunks] == [0, 3, 6]
    assert [chunk.frames for chunk in found.chunks] == [(1, 2, 3), (1, 2, 3), (1,)]
    for chunk in found.chunks:
        executed = np.array(found.executed[chunk.step : chunk.step + 3])
        np.testing.assert_array_equal(np.array(chunk.planned)[: len(executed)], executed)
        assert chunk.timing["generate_ms"] > 0
    assert not list((results / "with" / "predictions").glob("unfinished/*"))


def test_the_page_scores_predictions_beside_a_copy_of_the_last_frame(results, tmp_path):
    pytest.importorskip("plotly", reason="no plotly: pip install -e '.[report]'")
    pytest.importorskip("skimage", reason="no scikit-image: pip install -e '.[report]'")
    assert cli.main(["report", str(results / "with"), "-o", str(tmp_path)]) == 0
    (script,) = tmp_path.glob("media/a/*-predicted.js")
    case, content = script.read_text().split(", ", 2)[1:]
    told = json.loads(content.removesuffix(");\n"))
    assert json.loads(case) in RecordFile(results / "with").records
    for chunk in told["chunks"]:
        scores = chunk["scores"]
        assert set(scores) == {
            "psnr", "ssim", "copy_psnr", "copy_ssim", "latent_error", "copy_latent_error",
            "moving_psnr", "copy_moving_psnr",
        }  # fmt: skip
        assert 0 < scores["psnr"] < 60
        assert -1 <= scores["ssim"] <= 1
    assert (tmp_path / f"media/a/{json.loads(case)}-predicted.mp4").stat().st_size > 0
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Predicted video and success</h2>" in page
    assert "too little to tell" in page, "one episode"


def test_moving_pixels_are_scored_alone(results):
    found = read_results(results / "with")
    (case,) = found.finished
    (scores,) = quick_scores(found).values()
    kept = read_predictions(found.folder, case)
    own, copied = [], []
    for start, seen, predicted in read_parts(kept, prediction_files(found.folder, case)[1]):
        moves = np.abs(seen.astype(int) - start).max(-1) > 16
        assert 0 < moves.mean() < 0.2, "the point is small"
        for into, others in ((own, predicted), (copied, [start] * len(seen))):
            errors = [
                np.square((real[moving].astype(float) - other[moving]) / 255).mean()
                for real, other, moving in zip(seen, others, moves, strict=True)
            ]
            into.append(np.mean(-10 * np.log10(errors)))
    assert scores["moving_psnr"] == pytest.approx(np.mean(own))
    assert scores["copy_moving_psnr"] == pytest.approx(np.mean(copied))
    # A copy is right wherever nothing moves, and there alone.
    assert scores["copy_moving_psnr"] < scores["copy_psnr"]


def test_the_error_in_latents_is_of_seen_frames_and_a_copy_has_its_own(results):
    (case,) = RecordFile(results / "with").records
    policy = DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment="libero_mini")
    kept = read_predictions(results / "with", case)
    parts = read_parts(kept, prediction_files(results / "with", case)[1])
    for chunk, (start, seen, predicted) in zip(kept.chunks, parts, strict=True):
        # The video has lost what rounding to YUV takes.
        found = latent_errors(policy, start, list(seen), list(predicted))
        assert found == pytest.approx(chunk.latents, rel=0.1)
        assert chunk.latents["latent_error"] > 0
        perfect = latent_errors(policy, start, list(seen), list(seen))
        assert perfect["latent_error"] == 0
        # A copy as the prediction, and the other way round.
        copied = latent_errors(policy, start, list(seen), [start] * len(seen))
        assert copied["latent_error"] == pytest.approx(copied["copy_latent_error"])
        assert latent_errors(policy, start, [], []) == {}


def test_the_command_tells_how_predictions_go_along_with_success(results, capsys):
    pytest.importorskip("scipy", reason="no scipy: pip install -e '.[report]'")
    assert cli.main(["compare", str(results / "with"), "--predictions"]) == 0
    out = capsys.readouterr().out
    assert "predicted video and success" in out
    assert "too few" in out


def test_without_films_predictions_are_kept_where_they_are_asked_for(opened):
    for videos, wanted, kept in (
        ("all", None, "later"), ("all", False, "off"), ("none", None, "off"),
        ("none", True, "later"),
    ):  # fmt: skip
        assert predicting(opened, RunOptions(videos=videos, predictions=wanted)) == kept


@pytest.fixture
def undecoded(results, tmp_path):
    """Return a copy of the results with predictions that are still to be decoded, and its case."""
    folder = shutil.copytree(results / "undecoded", tmp_path / "undecoded")
    (case,) = RecordFile(folder, writable=False).records
    return folder, case


def same_files(one, other, case):
    pairs = zip(prediction_files(one, case), prediction_files(other, case), strict=True)
    return all(own.read_bytes() == others.read_bytes() for own, others in pairs)


def test_predictions_are_decoded_when_they_are_read_and_only_once(undecoded, results, capsys):
    pytest.importorskip("scipy", reason="no scipy: pip install -e '.[report]'")
    folder, case = undecoded
    assert read_predictions(folder, case) is None
    assert all(file.is_file() for file in undecoded_files(folder, case))
    assert cli.main(["compare", str(folder), "--predictions"]) == 0
    said = capsys.readouterr().out
    assert same_files(folder, results / "with", case)
    assert not any(file.exists() for file in undecoded_files(folder, case))
    assert cli.main(["compare", str(folder), "--predictions"]) == 0
    assert capsys.readouterr().out == said


def test_a_decoding_that_was_cut_off_is_done_again(undecoded, results):
    folder, case = undecoded
    before = [file.read_bytes() for file in undecoded_files(folder, case)]

    plans = iter(range(2))

    def broken(latents, without):
        return np.zeros((9, 64, 128, 3), np.uint8) if next(plans) == 0 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        decode(folder, case, Policy(), broken)
    assert [file.read_bytes() for file in undecoded_files(folder, case)] == before
    assert read_predictions(folder, case) is None
    decode_predictions(read_results(folder))
    assert same_files(folder, results / "with", case)


@pytest.mark.parametrize("absent", ["gone", "changed"])
def test_without_the_checkpoint_the_page_says_what_it_lacks(
    undecoded, tmp_path, capsys, caplog, absent
):
    pytest.importorskip("plotly", reason="no plotly: pip install -e '.[report]'")
    folder, _ = undecoded
    card = json.loads((folder / "card.json").read_text())
    if absent == "gone":
        card["request"]["policy"]["name"] = str(tmp_path / "nowhere")
        wanted = "nowhere"
    else:
        card["policy"]["weights"] = "0" * 64
        wanted = "has other weights than when it was evaluated"
    (folder / "card.json").write_text(json.dumps(card))
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "page")]) == 0
    assert "predictions are left out" in caplog.text
    assert wanted in caplog.text
    assert "-predicted.mp4" not in (tmp_path / "page/report.html").read_text()
    assert cli.main(["compare", str(folder), "--predictions"]) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1, 2])
def test_damaged_predictions_that_are_not_decoded_are_refused_by_name(
    undecoded, tmp_path, capsys, number
):
    folder, case = undecoded
    path = undecoded_files(folder, case)[number]
    path.write_bytes(path.read_bytes()[:-100])
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "page")]) == 2
    assert path.name in capsys.readouterr().err


def test_what_predicts_nothing_is_refused_where_it_is_asked_for(tmp_path, capsys):
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "hold", "--predictions", "on"]
    assert cli.main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "--predictions on: the policy predicts no video" in capsys.readouterr().err


def test_plans_without_video_have_no_predictions_and_every_page_says_so(results, tmp_path, capsys):
    pytest.importorskip("plotly", reason="no plotly: pip install -e '.[report]'")
    pytest.importorskip("scipy", reason="no scipy: pip install -e '.[report]'")
    folder = tmp_path / "without"
    words = [*EVAL, "--video", "skip"]
    assert cli.main([*words, "--predictions", "on", "--output", str(folder)]) == 2
    assert "--predictions on: with --video skip the policy predicts no video" in (
        capsys.readouterr().err
    )
    assert cli.main([*words, "--output", str(folder)]) == 0
    assert read_card(folder)["policy"]["video"] == "skip"
    assert not (folder / "predictions").exists()
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page/report.html").read_text()
    assert "plans were made with --video skip, which predicts no video" in page
    capsys.readouterr()
    assert cli.main(["compare", str(results / "with"), str(folder)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "was planned with --video full" in out
    assert "with --video skip: the difference is of that as well" in out
    assert cli.main(["compare", str(folder), "--predictions"]) == 2
    assert "planned with --video skip, which predicts no video" in capsys.readouterr().err
    # Nor is it continued in another way.
    assert cli.main([*EVAL, "--output", str(folder)]) == 2
    assert 'policy.video: "skip" in' in capsys.readouterr().err


def test_damaged_predictions_are_refused_by_name(results, tmp_path, capsys):
    (case,) = RecordFile(results / "with").records
    path, _ = prediction_files(results / "with", case)
    whole = path.read_text()
    try:
        path.write_text(whole.replace('"fps"', '"speed"'))
        assert cli.main(["report", str(results / "with"), "-o", str(tmp_path)]) == 2
        assert path.name in capsys.readouterr().err
    finally:
        path.write_text(whole)


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "sound"])
def test_a_damaged_video_of_predictions_is_one_message(results, tmp_path, capsys, damage):
    (case,) = RecordFile(results / "with").records
    _, path = prediction_files(results / "with", case)
    whole = path.read_bytes()
    path.unlink()
    match damage:
        case "empty":
            path.touch()
        case "half":
            path.write_bytes(whole[: len(whole) // 2])
        case "garbage":
            path.write_bytes(b"garbage" * 100)
        case "sound":
            write_sound(path)
    try:
        for more in ([], ["--rerun"]):
            assert cli.main(["report", str(results / "with"), "-o", str(tmp_path), *more]) == 2
            assert path.name in capsys.readouterr().err
    finally:
        path.write_bytes(whole)


def write_sound(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 48000
        container.mux([*stream.encode(frame), *stream.encode(None)])


def test_a_rerun_recording_holds_the_episode(results, tmp_path, capsys):
    reader = pytest.importorskip("rerun.chunk", reason="no Rerun: pip install -e '.[rerun]'")
    words = ["report", str(results / "with"), "--rerun", "-o", str(tmp_path)]
    assert cli.main(words) == 0
    assert "1 recording," in capsys.readouterr().out
    (record,) = RecordFile(results / "with").records.values()
    kept = read_predictions(results / "with", record.case)
    rows, fixed = {}, {}
    for chunk in reader.RrdReader(tmp_path / "rerun" / f"{record.case}.rrd").stream().to_chunks():
        columns = chunk.to_record_batch().to_pydict()
        if chunk.is_static:
            fixed[chunk.entity_path] = columns
            continue
        assert chunk.timeline_names == ["step"]
        [values] = [columns[name] for name in columns if name in VALUES]
        rows.setdefault(chunk.entity_path, {}).update(zip(columns["step"], values, strict=True))
    assert record.task in str(fixed["/episode"]["TextDocument:text"])
    assert json.loads(fixed["/card"]["TextDocument:text"][0][0])["protocol"] == "custom"
    for name, wanted in (("state", kept.states), ("action/executed", kept.executed)):
        assert [rows[f"/{name}"][step] for step in range(STEPS)] == [list(row) for row in wanted]
    for number, chunk in enumerate(kept.chunks):
        planned = rows[f"/action/planned/{number:03d}"]
        wanted = {chunk.step + i: list(row) for i, row in enumerate(chunk.planned)}
        assert planned == wanted
    # Every image that was seen is a prediction's counterpart, or what a plan was made from.
    assert sorted(rows["/network/predicted"]) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(rows["/network/seen"]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rows["/success"] == {STEPS: [float(record.success)]}
    # The film has an image more than there are steps.
    assert sorted(rows["/cameras"]) == list(range(STEPS + 1))


VALUES = ("Scalars:scalars", "EncodedImage:blob", "VideoFrameReference:timestamp")


def test_without_rerun_the_extra_is_named(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dzrobot.importing.find_spec", lambda name: None)
    assert cli.main(["report", str(results / "with"), "--rerun", "-o", str(tmp_path)]) == 2
    assert "needs rerun: pip install -e '.[rerun]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
