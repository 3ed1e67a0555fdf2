"""``dzrobot consolidate``: what it packs stays readable wherever it is killed."""

import shutil

import numpy as np
import pytest
from data_worlds import ROBOT, record, step
from kill_points import operations, spread, stop

from dzrobot import cli
from dzrobot.training.data import DatasetReader, ReaderOptions

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


def test_killed_while_packing(tmp_path):
    made = record(tmp_path / "made", lengths=LENGTHS, version="v3.0", video=True)
    path = tmp_path / "set"
    command = lambda: cli.main(["consolidate", str(path)])  # noqa: E731
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
