import dataclasses
import json
import shutil
import tempfile

import av
import numpy as np
import pytest
from data_worlds import RELATIVE, ROBOT, TASKS, record, robot, step

from dzrobot.errors import DatasetError, UnknownNameError
from dzrobot.recording import EpisodeWriter, VideoCodec, consolidate
from dzrobot.training.data import DatasetReader, EpisodeSelection, ReaderOptions, reading_pool
from dzrobot.training.data.dataset import alike
from dzrobot.training.data.films import FrameTable
from dzrobot.training.data.reading_pool import ReadingPool, decode_all, first_frames
from dzrobot.training.data.video_decoding import PyAvDecoder

LENGTHS = (30, 25, 40, 12, 33)
FORMS = {
    "v2.0 images": {"version": "v2.0"},
    "v2.1 images": {"version": "v2.1"},
    "v3.0 images": {"version": "v3.0"},
    "v2.1 h264": {"version": "v2.1", "video": True},
    "v3.0 h264": {"version": "v3.0", "video": True},
    "v3.0 av1": {"version": "v3.0", "video": VideoCodec(name="av1", gop=4)},
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The same five episodes in every form."""
    root = tmp_path_factory.mktemp("forms")
    folders = {}
    for name, options in FORMS.items():
        folders[name] = record(root / name.replace(" ", "_"), lengths=LENGTHS, **options)
    for name in ("v3.0 h264", "v3.0 av1", "v3.0 images"):
        packed = root / f"{name.replace(' ', '_')}_packed"
        shutil.copytree(folders[name], packed)
        consolidate(packed)
        folders[f"{name} packed"] = packed
    for name in ("v3.0 h264", "v3.0 av1"):
        exact = root / f"{name.replace(' ', '_')}_exact"
        shutil.copytree(folders[name], exact)
        consolidate(exact, films="exact")
        folders[f"{name} exact"] = exact
    return folders


@pytest.fixture
def options(tmp_path):
    return ReaderOptions(cache=tmp_path / "cache")


def lost_column(path):
    columns = path / "columns.json"
    known = json.loads(columns.read_text())
    columns.write_text(json.dumps({**known, "widths": {}}))


DAMAGES = {
    "half": lambda path: (path / "columns.json").write_text('{"widths": {"acti'),
    "empty": lambda path: (path / "columns.json").write_text(""),
    "binary": lambda path: (path / "columns.json").write_bytes(b"\xff" * 64),
    "null": lambda path: (path / "columns.json").write_text("null"),
    "no columns": lost_column,
    "gone": lambda path: (path / "columns.json").unlink(),
    "numbers torn": lambda path: (path / "action.npy").write_bytes(b"\x93NUMPY"),
    "numbers gone": lambda path: (path / "first_row.npy").unlink(),
    "other numbers": lambda path: np.save(path / "action.npy", np.zeros((3, 7), np.float32)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_cache_is_built_anew(recorded, options, caplog, what):
    path = recorded["v2.1 images"]
    whole = DatasetReader(path, ROBOT, options).vectors(0)
    (kept,) = options.cache.rglob("columns-*")
    before = {file.name: file.read_bytes() for file in kept.iterdir()}
    DAMAGES[what](kept)
    again = DatasetReader(path, ROBOT, options).vectors(0)
    np.testing.assert_equal(again, whole)
    assert [folder.name for folder in options.cache.rglob("columns-*")] == [kept.name]
    assert {file.name: file.read_bytes() for file in kept.iterdir()} == before
    assert "are damaged and are copied again" in caplog.text


def windows(reader, numbers):
    return [reader.window(number) for number in numbers]


def numeric(window):
    return {key: value for key, value in window.items() if not key.startswith("video.")}


def test_all_forms_give_the_same_samples(recorded, options):
    """A13: numbers exact everywhere; images exact for PNG, and for the same compressed frames."""
    readers = {name: DatasetReader(path, ROBOT, options) for name, path in recorded.items()}
    assert {len(reader) for reader in readers.values()} == {14 + 9 + 24 + 17}
    reference = {name: windows(reader, range(0, 64, 5)) for name, reader in readers.items()}
    for name, found in reference.items():
        for ours, plain in zip(found, reference["v2.0 images"], strict=True):
            assert ours.keys() == plain.keys()
            for key, value in numeric(plain).items():
                np.testing.assert_array_equal(ours[key], value, err_msg=f"{name} {key}")
    for one, other in (
        ("v2.1 images", "v2.0 images"),
        ("v3.0 images", "v2.0 images"),
        ("v3.0 images packed", "v2.0 images"),
        ("v3.0 h264", "v2.1 h264"),
        ("v3.0 h264 packed", "v2.1 h264"),
        ("v3.0 av1 packed", "v3.0 av1"),
        ("v3.0 h264 exact", "v3.0 h264"),
        ("v3.0 av1 exact", "v3.0 av1"),
    ):
        for ours, plain in zip(reference[one], reference[other], strict=True):
            for key in ROBOT.video_keys:
                np.testing.assert_array_equal(ours[key], plain[key], err_msg=f"{one} {key}")


def test_samples_are_what_was_recorded(recorded, options):
    for name, path in recorded.items():
        reader = DatasetReader(path, ROBOT, options)
        for number in (0, 20, 63):
            ordinal, start = reader.windows.locate(number)
            window = reader.window(number)
            frames = range(start, start + 17, 1)
            steps = [step(ROBOT, 0, ordinal, frame) for frame in frames]
            assert window["annotation.task"] == TASKS[ordinal % 2]
            np.testing.assert_array_equal(
                window["state.state"], [steps[i][0]["state.state"] for i in (0, 8)]
            )
            np.testing.assert_array_equal(
                window["action.actions"], [steps[i][1]["action.actions"] for i in range(16)]
            )
            for key in ROBOT.video_keys:
                shown = np.stack([observation[key] for observation, _ in steps])
                apart = np.abs(window[key].astype(int) - shown.astype(int))
                # A neighboring frame differs by about 17 on average.
                assert apart.mean() < (5 if "h264" in name or "av1" in name else 1e-9), name


def test_columns_may_share_and_move(tmp_path, options):
    """Parts of one column are found where modality.json says, else where the embodiment says."""
    path = record(tmp_path / "droid", RELATIVE, lengths=(20,), version="v3.0")
    reader = DatasetReader(path, RELATIVE, options)
    observation, action = step(RELATIVE, 0, 0, 0)
    window = reader.vectors(0)
    for key in RELATIVE.state_keys:
        np.testing.assert_array_equal(window[key][0], observation[key])
    for key in RELATIVE.action_keys:
        np.testing.assert_array_equal(window[key][0], action[key])
    (path / "meta/modality.json").unlink()
    with pytest.raises(DatasetError, match=r"action is 8 wide and has no \[14:21\]") as error:
        DatasetReader(path, RELATIVE, options)
    for text in ("observation.state float32 8", "language_features=()", "state.joint_position"):
        assert text in str(error.value)


def test_ambiguous_and_unfitting_columns_are_refused(tmp_path, options):
    path = record(tmp_path / "set", lengths=(20,))
    (path / "meta/modality.json").unlink()
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["state"] = info["features"]["observation.state"]
    info["features"]["action"]["shape"] = [6]
    info["features"]["observation.images.image"]["shape"] = [50, 64, 3]
    (path / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError) as error:
        DatasetReader(path, ROBOT, options)
    message = str(error.value)
    assert "state.state: observation.state, state all exist" in message
    assert "is 6 wide, the embodiment says 7" in message
    assert "recorded at 50x64" in message


@pytest.mark.parametrize("wrist", ["wrist_image", "observation.images.image2", "image2"])
def test_published_column_names_are_known(tmp_path, options, wrist):
    """The LIBERO dataset in use since 2024: v2.0 images, short names, no modality.json.

    LeRobot's own LIBERO environment calls the second camera image2.
    """
    names = {"video.image": "image", "video.wrist_image": wrist}
    views = tuple(
        dataclasses.replace(view, feature=names[view.key], aliases=()) for view in ROBOT.views
    )
    parts = {
        kind: tuple(
            dataclasses.replace(part, feature=name, aliases=()) for part in getattr(ROBOT, kind)
        )
        for kind, name in (("state", "state"), ("action", "actions"))
    }
    short = dataclasses.replace(ROBOT, views=views, **parts)
    path = record(tmp_path / "set", short, lengths=(20,), version="v2.0")
    (path / "meta/modality.json").unlink()
    reader = DatasetReader(path, ROBOT, options)
    assert {source.stated_by for source in reader.resolution.views.values()} == {"alias"}
    expected = step(ROBOT, 0, 0, 3)[0]
    window = reader.window(3)
    np.testing.assert_array_equal(window["video.wrist_image"][0], expected["video.wrist_image"])
    np.testing.assert_array_equal(window["state.state"][0], expected["state.state"])


def test_windows_are_reported(recorded, options):
    reader = DatasetReader(recorded["v2.1 h264"], ROBOT, options)
    assert reader.windows.report() == "episodes 5, usable 4, windows 64, dropped: too short 1"
    chosen = DatasetReader(
        recorded["v2.1 h264"], ROBOT, options, EpisodeSelection(without=frozenset({0, 2}))
    )
    assert len(chosen) == 9 + 17
    assert "not selected 2" in chosen.windows.report()
    with pytest.raises(DatasetError, match="no complete sample of 2 blocks of 64 actions"):
        DatasetReader(recorded["v2.1 h264"], robot(horizon=64), options)


def test_missing_and_corrupt_files_are_named(recorded, tmp_path, options):
    path = tmp_path / "damaged"
    shutil.copytree(recorded["v2.1 h264"], path)
    video = path / "videos/chunk-000/observation.images.image/episode_000002.mp4"
    video.unlink()
    (path / "data/chunk-000/episode_000001.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DatasetError) as error:
        DatasetReader(path, ROBOT, options)
    for text in (
        "2 of 5 episodes",
        "episode_000002.mp4 missing",
        "episode_000001.parquet has no end",
    ):
        assert text in str(error.value)
    counted = DatasetReader(path, ROBOT, ReaderOptions(cache=options.cache, damaged="count"))
    assert len(counted) == 14 + 17
    assert counted.windows.report().endswith("dropped: damaged 2, too short 1")


def test_every_file_can_be_checked(recorded, tmp_path, options, monkeypatch):
    reader = DatasetReader(recorded["v3.0 h264 packed"], ROBOT, options)
    assert reader.faults() == []
    assert [look.blank for look in first_frames(reader)] == [False, False]
    path = tmp_path / "short"
    shutil.copytree(recorded["v2.1 h264"], path)
    videos = path / "videos/chunk-000/observation.images.wrist_image"
    shutil.copy(videos / "episode_000001.mp4", videos / "episode_000000.mp4")
    (videos / "episode_000004.mp4").write_bytes(b"no video at all")
    counting = dataclasses.replace(options, damaged="count")
    found = DatasetReader(path, ROBOT, counting)
    first, last = found.faults()
    assert "episode_000000.mp4 has 25 frames, the list says 30" in first
    assert "episode_000004.mp4 is not a readable video" in last
    assert found.windows.report().endswith("dropped: damaged 2, too short 1")
    monkeypatch.setattr(reading_pool, "EPISODES_AT_ONCE", 1)
    shown = []
    for processes in (1, 2):
        with ReadingPool([found], processes) as pool:
            shown.append([(one.pictures, one.faults) for one in decode_all(pool)])
    assert shown == [[(50, ()), (80, ())]] * 2


def test_faults_that_differ_in_numbers_alone_are_one_line():
    faults = [f"episode {n}: film {n}.mp4 has {n + 9} frames" for n in range(20)]
    other = ["episode 3: every action is zero", "a list is odd", "row 1 is blank", "row 2 is blank"]
    first, *rest = alike([*faults, *other])
    numbers = ", ".join(map(str, range(1, 13)))
    assert first == f"{faults[0]} (and 19 episodes like it: {numbers}, ...)"
    assert rest == [*other[:2], "row 1 is blank (and 1 like it)"]
    assert alike(faults[4:6]) == [f"{faults[4]} (and 1 episode like it: 5)"]


def test_interrupted_lists_are_cut_to_what_was_committed(recorded, tmp_path, options):
    for name in ("v2.1 h264", "v3.0 h264"):
        path = tmp_path / name.replace(" ", "_")
        shutil.copytree(recorded[name], path)
        info = json.loads((path / "meta/info.json").read_text())
        (path / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 3}))
        reader = DatasetReader(path, ROBOT, options)
        assert len(reader.catalog.episodes) == 3
        assert reader.catalog.uncommitted == 2
        (path / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 9}))
        short = DatasetReader(path, ROBOT, options)
        assert len(short.catalog.episodes) == 5
        assert "info.json counts 9 episodes, the list has 5: 4 episodes" in short.faults()[0]


def test_annotation_columns_and_choices(tmp_path):
    """Several instructions: one is drawn; empty ones never; without any, no window."""
    path = tmp_path / "set"
    columns = ("annotation.first", "annotation.second")
    with EpisodeWriter(path, ROBOT, fps=10, version="v3.0") as writer:
        for episode, texts in enumerate((("a", "b"), ("", "only"), ("", ""))):
            for number in range(20):
                extras = dict(zip(columns, texts, strict=True))
                writer.add_frame(*step(ROBOT, 0, episode, number), extras)
            writer.save_episode()
    several = dataclasses.replace(ROBOT, language_features=columns)
    reader = DatasetReader(path, several, ReaderOptions(cache=tmp_path / "cache"))
    assert reader.windows.report().endswith("dropped: no instruction 1")
    assert [reader.vectors(0, choice)["annotation.task"] for choice in (0, 0.49, 0.5, 0.99)] == [
        "a", "a", "b", "b",
    ]  # fmt: skip
    assert {reader.vectors(4, choice)["annotation.task"] for choice in (0, 0.99)} == {"only"}


def test_frames_are_addressed_by_number(recorded):
    for name in ("v2.1 h264", "v3.0 av1 packed"):
        path = next((recorded[name] / "videos").rglob("*.mp4"))
        table = FrameTable.of(path)
        hz = ROBOT.timing.control_hz
        everything = PyAvDecoder(path, table).frames(range(len(table.pts)))
        rng = np.random.default_rng(0)
        decoder = PyAvDecoder(path, table)
        for _ in range(12):
            numbers = rng.integers(0, len(table.pts), size=5)
            np.testing.assert_array_equal(decoder.frames(numbers), everything[numbers])
        with pytest.raises(DatasetError, match="frames, asked for"):
            decoder.frames([len(table.pts)])
        asked = [round(table.at(t / hz), 6) for t in range(len(table.pts))]
        assert asked == list(range(len(table.pts)))


def test_b_frames_and_long_gops_are_reached(tmp_path):
    """Files of other programs: B frames, one key frame, reading order unlike showing order."""
    path = tmp_path / "b.mp4"
    with av.open(str(path), "w") as container:
        options = {"bf": "3", "g": "12", "b_strategy": "2", "crf": "10"}
        stream = container.add_stream("libx264", rate=15, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(40):
            image = step(ROBOT, 0, 0, i)[0]["video.image"]
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    table = FrameTable.of(path)
    with av.open(str(path)) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(plain) == len(table.pts) == 40
    decoder = PyAvDecoder(path, table)
    for numbers in ([39], [0, 3, 30], [12, 11, 12], [25, 24, 13], list(range(0, 40, 3))):
        np.testing.assert_array_equal(
            decoder.frames(numbers), np.stack([plain[i] for i in numbers])
        )


def test_unknown_decoder_lists_the_known():
    with pytest.raises(UnknownNameError, match="Did you mean 'pyav'"):
        ReaderOptions(decoder="pyaw")


def test_torchcodec_gives_the_same_frames(recorded):
    pytest.importorskip("torchcodec", reason="torchcodec is not installed")
    from dzrobot.training.data.video_decoding import TorchcodecDecoder

    path = next((recorded["v2.1 h264"] / "videos").rglob("*.mp4"))
    table = FrameTable.of(path)
    numbers = [0, 3, 9, 10, 24, 2]
    ours, theirs = PyAvDecoder(path, table), TorchcodecDecoder(path, table)
    np.testing.assert_array_equal(ours.frames(numbers), theirs.frames(numbers))


def test_a_dataset_is_read_where_the_cache_cannot_be_written(recorded, tmp_path, monkeypatch):
    """As with a home that is mounted read-only; a file in its place stops even root."""
    (tmp_path / "home").touch()
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "home/.cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(DatasetReader(recorded["v2.1 h264"], ROBOT))
    assert next(tmp_path.glob("dzrobot-*/*/*"))


def test_a_list_without_episodes_is_read_as_such(tmp_path):
    record(tmp_path, lengths=(20,))
    (tmp_path / "meta/episodes.jsonl").write_text("\n")
    with pytest.raises(DatasetError, match="episodes 0, usable 0"):
        DatasetReader(tmp_path, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
