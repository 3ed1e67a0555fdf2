"""Sets that other people made: named by file and episode, or read as they are."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import ROBOT, record

from dzrobot.errors import DatasetError
from dzrobot.training.data import DatasetReader, ReaderOptions

EPISODES, ROWS = 10, 30
FOREIGN = {"observation": {"state": ["observation.state"]}, "action": ["action"]}
"""A modality.json that is not GR00T's."""


def change_list(path, change):
    """Rewrite the list of episodes of a v3.0 set."""
    (file,) = (path / "meta/episodes").glob("*/*.parquet")
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        change(row)
    pq.write_table(pa.Table.from_pylist(rows), file)


def on_one_film(path):
    """Write a set with a film for each episode and a list that gives all of them the first one.

    So does a public set made by hand, whose numbers lie in files of other names, too.
    """
    record(path, lengths=(ROWS,) * EPISODES, version="v3.0", video=True)

    def first_film(row):
        for name in row:
            if name.startswith("videos/") and name.endswith("/file_index"):
                row[name] = 0
            elif name.startswith("videos/") and name.endswith("_timestamp"):
                row[name] = ROWS / ROBOT.timing.control_hz if "to_" in name else 0.0

    change_list(path, first_film)
    files = sorted(path.glob("data/*/*.parquet"))
    (path / "data/train").mkdir()
    for number, file in enumerate(files):
        file.rename(path / f"data/train/episode_{number:06d}.parquet")
    info = json.loads((path / "meta/info.json").read_text())
    info["data_path"] = "data/train/episode_{episode_index:06d}.parquet"
    (path / "meta/info.json").write_text(json.dumps(info))
    return path


def test_episodes_on_one_film_are_named_together_and_none_is_used(tmp_path):
    path = on_one_film(tmp_path / "set")
    (path / "meta/modality.json").write_text(json.dumps(FOREIGN))
    everyone = "episodes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 claim the same"
    for damaged in ("refuse", "count"):
        with pytest.raises(DatasetError, match=everyone):
            DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "c", damaged=damaged))
    options = ReaderOptions(cache=tmp_path / "c", damaged="count", empty="count")
    said = "\n".join(DatasetReader(path, ROBOT, options).faults())
    assert "9 films of observation.images.wrist_image belong to no episode" in said


def test_a_foreign_description_and_another_folder_of_videos_are_said(tmp_path):
    path = record(tmp_path / "set", lengths=(ROWS,) * 2, video=True)
    plain = DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "plain"))
    expected = plain.views(0)
    (path / "meta/modality.json").write_text(json.dumps(FOREIGN))
    (path / "videos").rename(path / "video")
    reader = DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
    assert len(reader) == len(plain) > 0
    for key, frames in reader.views(0).items():
        np.testing.assert_array_equal(frames, expected[key])
    said = "\n".join(reader.faults())
    assert "meta/modality.json is not of GR00T's form" in said
    assert "video/ is used" in said


def test_an_episode_whose_entry_has_a_gap_is_named_and_left_out(tmp_path):
    path = record(tmp_path / "set", lengths=(ROWS,) * 4, version="v3.0", video=True)
    places = {
        "data": ["data/file_index"],
        "film": ["videos/observation.images.image/file_index"],
        "time": ["videos/observation.images.wrist_image/from_timestamp"],
    }
    for number, (_, names) in enumerate(places.items()):
        change_list(path, lambda row, at=number, names=names: row.update(
            dict.fromkeys(names) if row["episode_index"] == at else {}
        ))  # fmt: skip
    with pytest.raises(DatasetError, match="3 of 4 episodes") as refused:
        DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
    for said in ("what meta/episodes says of data", "what meta/episodes says of videos/"):
        assert said in str(refused.value)
    options = ReaderOptions(cache=tmp_path / "cache", damaged="count")
    reader = DatasetReader(path, ROBOT, options)
    assert set(reader.windows.episode.tolist()) == {3}
