"""Which episodes are used: what is marked as a failure is left out unless it is asked for."""

import json
from dataclasses import replace

import numpy as np
import pytest
from data_worlds import ROBOT, record, step

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, DatasetError
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.run.opening import last_episodes, recorded_anchor

LENGTHS = (20, 21, 22, 23)


def used(path, cache, episodes="successes"):
    reader = DatasetReader(path, ROBOT, ReaderOptions(cache=cache, images=False, episodes=episodes))
    return np.unique(reader.windows.episode).tolist(), reader


def test_failures_are_left_out_unless_asked_for(tmp_path):
    path = record(tmp_path / "set", lengths=LENGTHS, failed=(1, 3))
    known, reader = used(path, tmp_path / "cache")
    assert known == [0, 2]
    assert "marked as failures 2" in reader.report()
    # They are not part of the mixture either.
    assert reader.recorded_windows == len(reader)
    assert used(path, tmp_path / "cache", "all")[0] == [0, 1, 2, 3]
    # A dataset that says nothing is used whole.
    (path / "meta/recording_facts.jsonl").unlink()
    assert used(path, tmp_path / "cache")[0] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"\('successes', 'all'\)"):
        ReaderOptions(episodes="failures")


def test_a_failure_whose_files_are_lost_stops_nobody(tmp_path):
    path = record(tmp_path / "set", lengths=LENGTHS, failed=(1,))
    (path / "data/chunk-000/episode_000001.parquet").unlink()
    assert used(path, tmp_path / "cache")[0] == [0, 2, 3]
    with pytest.raises(DatasetError, match="episode 1"):
        used(path, tmp_path / "cache", "all")


ARM = replace(load_embodiment("franka_pnp"), views=ROBOT.views)


def arm_recording(path, *anchors):
    """Record an episode for each anchor of its actions; None: it does not say."""
    with EpisodeWriter(path, ARM, fps=ARM.timing.control_hz) as writer:
        for episode, anchor in enumerate(anchors):
            for number in range(3):
                writer.add_frame(*step(ARM, 0, episode, number))
            writer.save_episode(**({} if anchor is None else {"action.anchor": anchor}))
    return DatasetCatalog.open(path)


def test_what_steps_are_measured_from_is_said_by_data_then_recipe_then_robot(tmp_path):
    target, silent = arm_recording(tmp_path / "a", "target"), arm_recording(tmp_path / "b", None)

    assert recorded_anchor([target], ARM) == "target"
    assert recorded_anchor([target, silent], ARM, "target") == "target"
    assert recorded_anchor([silent], ARM, "target") == "target"
    assert recorded_anchor([silent], ARM) == "measured"
    assert recorded_anchor([silent], replace(ARM, action_frame=None)) is None
    with pytest.raises(DatasetError, match=r"target in .*a; measured in data.action_anchor"):
        recorded_anchor([target], ARM, "measured")
    for number, anchors in enumerate([("target", "measured"), ("left",)]):
        with pytest.raises(DatasetError, match=r"action\.anchor"):
            recorded_anchor([arm_recording(tmp_path / str(number), *anchors)], ARM)


def test_the_last_successes_are_held_out(tmp_path):
    catalog = DatasetCatalog.open(record(tmp_path / "set", lengths=LENGTHS, failed=(2, 3)))

    def held_out(count, episodes="successes"):
        return last_episodes(catalog, episodes, count)

    assert held_out(1) == {1}
    assert held_out(2, episodes="all") == {2, 3}
    assert held_out(0) == set()
    with pytest.raises(DatasetError, match=r"holdout_episodes=2 holds out every .* which has 2"):
        held_out(2)


def test_statistics_are_of_what_is_used(tmp_path, capsys):
    path = record(tmp_path / "set", lengths=LENGTHS, failed=(1,))
    counts = {}
    for words in ((), ("--episodes", "all")):
        output = tmp_path / f"{len(words)}.json"
        command = ["stats", "data_worlds:ROBOT", "--dataset", str(path), "--output", str(output)]
        assert main([*command, *words]) == 0
        capsys.readouterr()
        counts[words] = json.loads(output.read_text())[ROBOT.tag]["statistics"]
    alone = record(tmp_path / "alone", lengths=LENGTHS)
    assert DatasetCatalog.open(alone).identity != DatasetCatalog.open(path).identity
    output = tmp_path / "alone.json"
    command = ["stats", "data_worlds:ROBOT", "--dataset", str(alone), "--output", str(output)]
    assert main(command) == 0
    capsys.readouterr()
    whole = json.loads(output.read_text())[ROBOT.tag]["statistics"]
    assert counts[("--episodes", "all")] == whole != counts[()]


def test_a_dataset_of_failures_is_one_message(tmp_path, capsys):
    path = record(tmp_path / "set", lengths=(20,), failed=(0,))
    words = ["inspect-data", str(path), "--embodiment", "data_worlds:ROBOT", "--quick"]
    # It reports, and exits with 1 where training would refuse.
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "--episodes all" in shown.out + shown.err
    assert main([*words, "--episodes", "all"]) == 0
