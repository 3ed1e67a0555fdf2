"""``dzrobot consolidate``: what it packs stays readable wherever it is killed."""

import json
import shutil
from contextlib import nullcontext

import cv2
import numpy as np
import pytest
from data_worlds import ROBOT, record, step
from kill_points import operations, spread, stop

from dzrobot import cli
from dzrobot.errors import DatasetError
from dzrobot.recording import VideoCodec
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.data.films import FrameTable
from dzrobot.training.data.fingerprint import trained_inputs

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


SMALL = (18, 24)
"""Not a half, where averages over areas and between neighbors are the same."""


def small(path, output, *more):
    size = "x".join(map(str, SMALL))
    words = [str(path), "--films", "small", "--size", size, "--output", str(output), *more]
    return cli.main(["consolidate", *words])


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_small_films_show_the_source_resized_and_say_so(tmp_path, capsys, version):
    path = record(tmp_path / "set", lengths=LENGTHS, version=version, video=True)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    output = tmp_path / "small"
    assert small(path, output) == 0
    said = capsys.readouterr()
    assert "put @18x24 behind the robot's name" in said.out
    assert f"dzrobot push {output} " in said.err
    assert {file: file.read_bytes() for file in before} == before
    assert {file.relative_to(output) for file in output.rglob("*") if file.is_file()} >= {
        file.relative_to(path) for file in before
    }
    for film in output.rglob("*.mp4"):
        table = FrameTable.of(film)
        assert len(table.key_frames) == len(table.pts)
    options = ReaderOptions(cache=tmp_path / "cache")
    source = DatasetReader(path, ROBOT, options)
    reader = DatasetReader(output, ROBOT.at_resolution(*SMALL), options)
    for ordinal, length in enumerate(LENGTHS):
        for view in ROBOT.views:
            rows = [0, length - 1]
            shown = reader.frames(ordinal, reader.resolution.views[view.key], rows)
            recorded = source.frames(ordinal, source.resolution.views[view.key], rows)
            wanted = [
                cv2.resize(one, SMALL[::-1], interpolation=cv2.INTER_AREA) for one in recorded
            ]
            np.testing.assert_array_equal(shown, wanted)
    told = trained_inputs([reader], reader.embodiment)
    assert told.resized_from == {view.key: view.resolution for view in ROBOT.views}
    assert trained_inputs([source], ROBOT).resized_from == {}
    with pytest.raises(DatasetError, match="@18x24"):
        DatasetReader(output, ROBOT, options)


def test_films_that_lie_elsewhere_are_made_small_too(tmp_path):
    """Where a folder's files lie is up to its ``info.json``."""
    path = record(tmp_path / "set", lengths=(20, 18), version="v2.1", video=True)
    (path / "videos").rename(path / "film")
    info = json.loads((path / "meta/info.json").read_text())
    info["video_path"] = info["video_path"].replace("videos/", "film/")
    (path / "meta/info.json").write_text(json.dumps(info))
    assert small(path, tmp_path / "small") == 0
    options = ReaderOptions(cache=tmp_path / "cache")
    reader = DatasetReader(tmp_path / "small", ROBOT.at_resolution(*SMALL), options)
    source = next(iter(reader.resolution.views.values()))
    assert reader.frames(1, source, [0]).shape == (1, *SMALL, 3)


def test_a_folder_that_lacks_films_is_refused_before_anything_is_copied(tmp_path, capsys):
    path = record(tmp_path / "set", lengths=(20, 18), version="v2.1", video=True)
    max(path.rglob("*.mp4")).unlink()
    assert small(path, tmp_path / "small") == 2
    assert "lacks files of 1 episode" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_a_small_copy_that_was_killed_goes_on(tmp_path):
    path = record(tmp_path / "set", lengths=LENGTHS, version="v3.0", video=True)
    output = tmp_path / "small"
    command = lambda: small(path, output)  # noqa: E731
    steps = operations(command, output)
    whole = {file.relative_to(output): file.read_bytes() for file in output.rglob("*.mp4")}
    for at in spread(len(steps), 4):
        shutil.rmtree(output)
        assert stop(command, output, at).code < 0
        # At the last operation all is there but for the removal of a note.
        with nullcontext() if at == len(steps) - 1 else pytest.raises(DatasetError):
            DatasetCatalog.open(output)
        assert command() == 0
        again = {file.relative_to(output): file.read_bytes() for file in output.rglob("*.mp4")}
        assert again == whole, steps[at]
        assert not [file for file in output.rglob("*") if "partial" in file.name], steps[at]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--size": "96x128"}, "would enlarge or distort"),
        ({"--size": "24x24"}, "would enlarge or distort"),
        ({"--size": "24"}, "HEIGHTxWIDTH"),
        ({"--size": None}, "give its --size"),
        ({"--output": None}, "give its --size HEIGHTxWIDTH and its --output"),
        ({"--films": "exact"}, "belong to --films small"),
        ({"--video-mb": "5"}, "--data-mb and --video-mb join files"),
        ({"--output": "here"}, "is not an unfinished copy"),
        ({"images": True}, "no films, only images"),
    ],
)
def test_small_films_that_cannot_be_made_are_refused(tmp_path, capsys, change, said):
    video = "images" not in change
    path = record(tmp_path / "set", lengths=(6, 7), version="v3.0", video=video)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.tex").write_text("mine")
    given = {"--films": "small", "--size": "24x32", "--output": "new", **change}
    given = {flag: value for flag, value in given.items() if value and flag != "images"}
    if "--output" in given:
        given["--output"] = str(tmp_path / given["--output"])
    words = [word for pair in given.items() for word in pair]
    assert cli.main(["consolidate", str(path), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert [one.name for one in (tmp_path / "here").iterdir()] == ["thesis.tex"]
