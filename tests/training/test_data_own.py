"""Sets that other people made, in all commands: named by file and episode, or read as they are."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import ROBOT, record

from dzrobot.cli import main
from dzrobot.commands import train
from dzrobot.errors import DatasetError
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.data.normalization import measure
from dzrobot.training.recipes.check import start_faults
from dzrobot.training.recipes.read import read_recipe

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


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("columns", "damaged"), [("GR00T's", "refuse"), ("foreign", "count"), ("none", "refuse")]
)
def test_episodes_on_one_film_are_named_by_every_command(
    columns, damaged, tmp_path, monkeypatch, capsys
):
    hand_made = on_one_film(tmp_path / "set")
    if columns == "foreign":
        (hand_made / "meta/modality.json").write_text(json.dumps(FOREIGN))
    elif columns == "none":
        (hand_made / "meta/modality.json").unlink()
    monkeypatch.chdir(tmp_path)
    robot, folder = "data_worlds:ROBOT", str(hand_made)
    fields = [
        f"model.embodiment_tag={robot}", f"data.train_data_paths={folder}",
        f"data.on_corrupt={damaged}", "runner.output_dir=run",
    ]  # fmt: skip
    commands = [
        ["inspect-data", folder, "--embodiment", robot],
        ["stats", robot, "--dataset", folder, "--output", "s.json", "--damaged", damaged],
        ["plan", "tiny_cpu", "model.preset=5b", *fields],
        ["train", "tiny_cpu", *fields],
        ["init-robot", folder, "--output", "drafted_robot.py"],
    ]
    for words in commands:
        code = main(words)
        said = "".join(capsys.readouterr())
        # What is drafted is measured on numbers, which are right.
        assert code == (0 if words[0] == "init-robot" else 1 if "inspect" in words[0] else 2), words
        assert "episodes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 claim the same" in said, words
        assert "file-000.mp4" in said, words
        if words[0] == "inspect-data":
            assert "9 films of observation.images.wrist_image belong to no episode" in said
        assert "Traceback" not in said
    assert not (tmp_path / "s.json").exists()
    assert not (tmp_path / "run/start").exists()


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


@pytest.mark.long
def test_train_makes_what_is_not_given_and_says_so(tmp_path, monkeypatch, capsys):
    """Statistics for every recipe; start weights for those of small networks alone."""
    monkeypatch.chdir(tmp_path)
    begun = []
    monkeypatch.setattr(train, "main", lambda words: begun.append(words) or 0)
    monkeypatch.setattr(train, "end_process", lambda code: None)
    for steps in ("_STILL_STEPS", "_CLIP_STEPS"):
        monkeypatch.setattr(train, steps, 3)
    folder = record(tmp_path / "set", lengths=(ROWS, 3, ROWS))
    fields = [
        "model.embodiment_tag=data_worlds:ROBOT", f"data.train_data_paths={folder}",
        "runner.output_dir=run", "model.action_horizon=8", "model.max_chunk_size=2",
    ]  # fmt: skip
    for said in ("measured on", "measured before"):
        assert main(["train", "tiny_cpu", *fields]) == 0
        printed = capsys.readouterr().out
        assert f"statistics: run/start/metadata.json, {said}" in printed
        assert "start weights: run/start/weights, " in printed
    assert begun[0] == begun[1]
    _, config = read_recipe("tiny_cpu", begun[0][1:])
    assert not start_faults(config, 1)
    made = json.loads((tmp_path / "run/start/metadata.json").read_text())[ROBOT.tag]
    reader = DatasetReader(folder, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
    measured = measure([reader], ROBOT)
    assert made["statistics"] == json.loads(json.dumps(measured["statistics"]))
    assert DreamZeroPolicy.from_pretrained(
        tmp_path / "run/start/weights", embodiment=ROBOT
    ).embodiment.tag


def test_a_large_network_does_not_start_from_a_new_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "end_process", lambda code: None)
    folder = record(tmp_path / "set", lengths=(ROWS,))
    fields = [
        "model.embodiment_tag=data_worlds:ROBOT", f"data.train_data_paths={folder}",
        "runner.output_dir=run", "model.action_horizon=8", "model.max_chunk_size=2",
    ]  # fmt: skip
    assert main(["train", "libero_sft_dreamzero_5b", *fields]) == 2
    said = capsys.readouterr().err
    assert "model.model_path" in said
    assert "dzrobot download" in said
    assert not (tmp_path / "run").exists()
