"""``dzrobot consolidate``: what it packs stays readable wherever it is killed."""

import json
import shutil

import numpy as np
import pytest
from data_worlds import ROBOT, record, step
from kill_points import operations, spread, stop

from dzrobot import cli
from dzrobot.recording import VideoCodec
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.data.films import FrameTable

pytestmark = pytest.mark.kill_points

LENGTHS = (20, 18, 19)


def check(path, cache):
    """Every episode's first state and image are its own."""
    reader = DatasetReader(path, ROBOT, ReaderOptions(cache=cache))
    assert reader.catalog.episodes.length.tolist() == list(LENGTHS)
    source = next(iter(reader.resolution.views.values()))
    for ordinal in range(len(LENGTHS)):
        expected = step(ROBOT, 0, ordinal, 0)[0]
        states = reader.states(ordinal)["state.state"]
        np.testing.assert_array_equal(states[0], expected["state.state"])
        apart = reader.frames(ordinal, source, [0])[0].astype(int) - expected[source.key]
        assert np.abs(apart).mean() < 5


@pytest.mark.parametrize("films", ["kept", pytest.param("exact", marks=pytest.mark.long)])
def test_killed_while_packing(tmp_path, films):
    made = record(tmp_path / "made", lengths=LENGTHS, version="v3.0", video=True)
    path = tmp_path / "set"
    command = lambda: cli.main(["consolidate", str(path), "--films", films])  # noqa: E731
    shutil.copytree(made, path)
    steps = operations(command, path)
    assert len(list(path.glob("data/*/*.parquet"))) == 1
    check(path, tmp_path / "cache-whole")
    for at in spread(len(steps), 5):
        shutil.rmtree(path)
        shutil.copytree(made, path)
        assert stop(command, path, at).code < 0
        check(path, tmp_path / f"cache-{at}")
        assert command() == 0
        check(path, tmp_path / f"cache-{at}-again")
        files = [p.name for p in path.rglob("*") if p.is_file()]
        assert len([name for name in files if name.endswith(".mp4")]) == len(ROBOT.views)
        assert not [name for name in files if "partial" in name], steps[at]


def test_exact_films_hold_key_frames_alone_and_say_what_they_are(tmp_path):
    """Every picture can be decoded first; more can be recorded, and packed, afterwards."""
    path = record(tmp_path / "set", lengths=LENGTHS, version="v3.0", video=True)
    assert cli.main(["consolidate", str(path), "--films", "exact"]) == 0
    films = sorted(path.rglob("*.mp4"))
    assert len(films) == len(ROBOT.views)
    for film in films:
        table = FrameTable.of(film)
        assert table.key_frames.tolist() == list(range(sum(LENGTHS)))
    info = json.loads((path / "meta/info.json").read_text())
    told = [info["features"][view.feature]["info"] for view in ROBOT.views]
    assert {one["video.codec"] for one in told} == {"magicyuv"}
    assert {one["video.written_without_loss_from"] for one in told} == {"h264"}
    shown = [FrameTable.of(film).pts.tolist() for film in films]
    assert cli.main(["consolidate", str(path), "--films", "exact"]) == 0
    assert [FrameTable.of(film).pts.tolist() for film in sorted(path.rglob("*.mp4"))] == shown
    check(path, tmp_path / "cache")


@pytest.mark.parametrize("odd", ["ten bits", "cut", "images"])
def test_films_that_cannot_be_kept_to_the_bit_are_refused(tmp_path, capsys, odd):
    """And stay as they were."""
    video = odd != "images" and VideoCodec(
        pixel_format="yuv420p10le" if odd == "ten bits" else "yuv420p"
    )
    path = record(tmp_path / "set", lengths=(6, 7), version="v3.0", video=video)
    film = None
    if odd == "cut":
        film = sorted(path.rglob("*.mp4"))[-1]
        with_fewer = record(tmp_path / "other", lengths=(6, 5), version="v3.0", video=True)
        shutil.copyfile(sorted(with_fewer.rglob("*.mp4"))[-1], film)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert cli.main(["consolidate", str(path), "--films", "exact"]) == 2
    said = capsys.readouterr().err
    wanted = {"ten bits": "yuv420p10le", "cut": "shows 5 pictures", "images": "no films"}[odd]
    assert wanted in said
    assert "Traceback" not in said
    # The camera before the one that is cut was done when that was met.
    kept = {file: content for file, content in before.items() if odd != "cut" or file == film}
    assert {file: file.read_bytes() for file in kept} == kept


def test_what_cannot_be_packed_is_one_message(tmp_path, capsys):
    old = record(tmp_path / "old", lengths=(5,))
    for words in (
        [str(old)], [str(tmp_path / "none")], [str(old), "--data-mb", "nan"],
        [str(old), "--video-mb", "-1"],
    ):  # fmt: skip
        assert cli.main(["consolidate", *words]) == 2
        said = capsys.readouterr().err
        assert "dzrobot consolidate: " in said
        assert "Traceback" not in said
    assert not (tmp_path / "none").exists()
