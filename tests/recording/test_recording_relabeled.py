"""``dzrobot relabel``: a recording is then as one recorded so, wherever that is killed."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_worlds import ROBOT, step
from kill_points import contents, operations, spread, stop

from dzrobot import cli
from dzrobot.errors import DatasetError
from dzrobot.recording import EpisodeWriter, consolidate
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.formats import COLLECTION
from dzrobot.recording.relabel import Relabeling, drop, relabel
from dzrobot.training.data import DatasetReader, ReaderOptions


def formats(quick):
    """Return every format that is written; all but ``quick`` are long forms."""
    every = [(version, video) for version in ("v2.0", "v2.1", "v3.0") for video in (False, True)]
    return [pytest.param(*one, marks=() if one == quick else pytest.mark.long) for one in every]


EPISODES = (
    (0, 18, "lift", ""), (1, 21, "push", "slipped"), (2, 12, "lift", ""), (3, 19, "oush", "")
)  # fmt: skip
"""Content, rows, instruction and why it failed."""


def recorded(folder, episodes=EPISODES, version="v2.1", video=False):
    with EpisodeWriter(folder, ROBOT, fps=20, version=version, video=video) as writer:
        for content, length, task, reason in episodes:
            for number in range(length):
                observation, action = step(ROBOT, 0, content, number)
                done = number == length - 1
                extras = {"next.reward": np.float32(done and not reason), "next.done": done}
                writer.add_frame({**observation, ROBOT.language: task}, action, extras)
            facts = {"reason": reason} if reason else {}
            writer.save_episode(success=not reason, seed=content, **facts)
    return folder


def same(one, other):
    """Everything alike: numbers, images and lists to the bit, tables by what they hold."""
    first, second = contents(one), contents(other)
    assert first.keys() == second.keys()
    for name in first:
        if name.endswith(".parquet"):
            left, right = pq.read_table(one / name), pq.read_table(other / name)
            assert left.equals(right, check_metadata=True), name
        else:
            assert first[name] == second[name], name


@pytest.mark.parametrize(("version", "video"), formats(("v2.1", False)))
def test_a_relabeled_recording_is_one_recorded_so(tmp_path, version, video):
    path = recorded(tmp_path / "set", version=version, video=video)
    relabel(path, [1], Relabeling(success=True))
    relabel(path, [0, 2], Relabeling(success=False, reason="too slow"))
    # The text is of this episode alone: its list entry changes, no row does.
    relabel(path, [3], Relabeling(task="push hard"))
    # Another episode's text: the rows point there.
    relabel(path, [2], Relabeling(task="push"))
    wanted = (
        (0, 18, "lift", "too slow"), (1, 21, "push", ""), (2, 12, "push", "too slow"),
        (3, 19, "push hard", ""),
    )  # fmt: skip
    same(path, recorded(tmp_path / "wanted", wanted, version, video))


@pytest.mark.parametrize(("version", "video"), formats(("v3.0", True)))
def test_dropped_episodes_were_never_there(tmp_path, version, video):
    path = recorded(tmp_path / "set", version=version, video=video)
    drop(path, [0, 2])
    # The instruction stays in the list, and files of v3.0 keep their numbers.
    plain = [EPISODES[1], EPISODES[3]]
    wanted = recorded(tmp_path / "wanted", plain, version, video)
    readers = [
        DatasetReader(one, ROBOT, ReaderOptions(cache=tmp_path / "cache", episodes="all"))
        for one in (path, wanted)
    ]
    assert len(readers[0]) == len(readers[1]) > 0
    for number in (0, len(readers[0]) - 1):
        windows = [reader.window(number) for reader in readers]
        for key, value in windows[1].items():
            np.testing.assert_array_equal(windows[0][key], value)
    assert readers[0].catalog.facts == readers[1].catalog.facts
    assert len(contents(path)) == len(contents(wanted))
    # Rows count on, and what LeRobot's statistics say of them follows.
    numbers = [
        pq.read_table(path / readers[0].catalog.data_file(ordinal), columns=["index"])
        for ordinal in range(2)
    ]
    assert np.concatenate([table["index"] for table in numbers]).tolist() == list(range(40))
    if version == "v2.1":
        lines = (path / "meta/episodes_stats.jsonl").read_text().splitlines()
        stats = [json.loads(line)["stats"] for line in lines]
        assert [one["episode_index"]["mean"] for one in stats] == [[0.0], [1.0]]
        assert stats[1]["index"]["min"] == [21.0]
    # A recording goes on after it.
    with EpisodeWriter(path, ROBOT, fps=20, version=version, video=video) as writer:
        assert writer.episodes == 2


def test_one_of_many_in_a_file(tmp_path):
    path = recorded(tmp_path / "set", version="v3.0", video=True)
    consolidate(path)
    relabel(path, [1], Relabeling(success=True))
    drop(path, [2])
    wanted = [EPISODES[0], (1, 21, "push", ""), EPISODES[3]]
    other = recorded(tmp_path / "wanted", wanted, "v3.0", True)
    (data,) = path.glob("data/*/*.parquet")
    columns = ["observation.state", "action", "index", "episode_index", "next.reward"]
    alone = [pq.read_table(one, columns=columns) for one in sorted(other.glob("data/*/*.parquet"))]
    both = pq.read_table(data, columns=columns)
    assert both.to_pylist() == [row for table in alone for row in table.to_pylist()]
    reader = DatasetReader(path, ROBOT, ReaderOptions(cache=tmp_path / "cache"))
    source = next(iter(reader.resolution.views.values()))
    for ordinal, content in enumerate((0, 1, 3)):
        expected = step(ROBOT, 0, content, 0)[0][source.key].astype(int)
        assert np.abs(reader.frames(ordinal, source, [0])[0] - expected).mean() < 5


def test_a_typing_error_in_all_episodes_leaves_nothing_behind(tmp_path):
    path = recorded(tmp_path / "set", [(n, 18, "lfit", "") for n in range(3)])
    relabel(path, range(3), Relabeling(task="lift"))
    assert DatasetCatalog.open(path).tasks == {0: "lift"}


def test_the_last_fact_goes_with_its_episode(tmp_path):
    with EpisodeWriter(tmp_path / "set", ROBOT, fps=20) as writer:
        for facts in ({"success": False}, {}):
            writer.add_frame(*step(ROBOT, 0, 0, 0))
            writer.save_episode(**facts)
    drop(tmp_path / "set", [0])
    assert DatasetCatalog.open(tmp_path / "set").facts == {}


def test_rewards_that_say_more_than_a_mark_stay(tmp_path):
    with EpisodeWriter(tmp_path / "set", ROBOT, fps=20) as writer:
        for number in range(4):
            writer.add_frame(*step(ROBOT, 0, 0, number), {"next.reward": np.float32(number / 4)})
        writer.save_episode()
    relabel(tmp_path / "set", [0], Relabeling(success=False))
    table = pq.read_table(tmp_path / "set/data/chunk-000/episode_000000.parquet")
    assert table["next.reward"].to_pylist() == [0, 0.25, 0.5, 0.75]


SHORT = ((0, 4, "lift", ""), (1, 3, "push", "slipped"), (2, 5, "lift", ""))
CHANGES = {
    "relabel": ["--episode", "1,2", "--failure", "wrong cube", "--task", "stack"],
    "drop": ["--episode", "0", "--drop"],
}


@pytest.mark.sampled
@pytest.mark.kill_points
@pytest.mark.parametrize(
    ("version", "video", "what"),
    [
        ("v2.1", True, "drop"), ("v3.0", False, "relabel"),
        pytest.param("v2.1", True, "relabel", marks=pytest.mark.long),
        pytest.param("v3.0", False, "drop", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_killed_while_it_changes(tmp_path, what, version, video):
    """The recording is as it was, or as it was to be; in between it says what finishes it."""
    before = recorded(tmp_path / "before", SHORT, version, video)
    path, after = tmp_path / "set", tmp_path / "after"
    command = lambda: cli.main(["relabel", str(path), *CHANGES[what]])  # noqa: E731
    shutil.copytree(before, path)
    steps = operations(command, path)
    shutil.move(path, after)
    seen = set()
    moves = [at for at, one in enumerate(steps) if one.startswith(("rename", "replace"))]
    for at in sorted({*spread(len(steps), 3), *moves[-2:]}):
        shutil.copytree(before, path)
        assert stop(command, path, at).code < 0
        if (path / ".aside/change").exists():
            seen.add("between")
            with pytest.raises(DatasetError, match=f"`dzrobot relabel {path}` finishes it"):
                DatasetCatalog.open(path)
        assert cli.main(["relabel", str(path)]) == 0
        there = contents(path)
        assert there in (contents(before), contents(after)), steps[at]
        seen.add("before" if there == contents(before) else "after")
        shutil.rmtree(path)
    assert seen == {"before", "between", "after"}


def test_another_recording_finishes_it_too(tmp_path):
    path = recorded(tmp_path / "set", EPISODES[1:3])
    after = shutil.copytree(path, tmp_path / "after")
    command = lambda: cli.main(["relabel", str(path), *CHANGES["drop"]])  # noqa: E731
    assert cli.main(["relabel", str(after), *CHANGES["drop"]]) == 0
    copy = shutil.copytree(path, tmp_path / "copy")
    steps = operations(command, path)
    shutil.rmtree(path)
    shutil.copytree(copy, path)
    last = max(at for at, one in enumerate(steps) if one.startswith("replace"))
    assert stop(command, path, last).code < 0
    with EpisodeWriter(path, ROBOT, fps=20) as writer:
        assert writer.episodes == 1
    assert contents(path) == contents(after)


def test_a_command_lists_and_changes(tmp_path, capsys):
    path = str(recorded(tmp_path / "set"))
    assert cli.main(["relabel", path, "--episode", "2-3", "--failure", "too slow"]) == 0
    assert "2 episodes marked as failures" in capsys.readouterr().out
    assert cli.main(["relabel", path, "--episode", "1", "--success", "--task", "lift"]) == 0
    assert "1 episode marked as successes, given the instruction 'lift'" in capsys.readouterr().out
    assert cli.main(["relabel", path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0: 18 frames, success, 'lift'", "1: 21 frames, success, 'lift'",
        "2: 12 frames, failure (too slow), 'lift'", "3: 19 frames, failure (too slow), 'oush'",
    ]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--episode", "4", "--success"], "has no episode 4; it has 0 to 3"),
        (["--episode", "1"], "give --episode N with"),
        (["--success"], "give --episode N with"),
        (["--episode", "0-3", "--drop"], "no episode of"),
        (["--episode", "1", "--drop", "--task", "lift"], "no --task"),
        (["--episode", "1", "--task", " "], "allowed: a name"),
        (["--episode", "1", "--success", "--drop"], "not allowed with"),
    ],
)
def test_what_cannot_be_changed_is_one_message(tmp_path, words, said, capsys):
    path = recorded(tmp_path / "set")
    before = contents(path)
    assert cli.main(["relabel", str(path), *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message
    assert contents(path) == before


def test_recordings_of_others_and_of_plans_are_left_alone(tmp_path):
    path = recorded(tmp_path / "set")
    with pytest.raises(DatasetError, match=r"episode 0 .* is not marked as a failure"):
        relabel(path, [0], Relabeling(reason="slow"))
    (path / COLLECTION).write_text("{}")
    with pytest.raises(DatasetError, match="follows a plan"):
        drop(path, [0])
    with (
        EpisodeWriter(path, ROBOT, fps=20),
        pytest.raises(DatasetError, match="another writer"),
    ):
        drop(path, [0])
    (path / "meta/recording.json").unlink()
    with pytest.raises(DatasetError, match="was not recorded by dzrobot"):
        relabel(path, [0], Relabeling(success=False))
    with pytest.raises(DatasetError, match="holds no meta"):
        relabel(tmp_path / "none", [0], Relabeling(success=False))
    assert not (tmp_path / "none").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("listed", ["../kept", "{outside}", "meta"])
@pytest.mark.parametrize("planted", ["list", "link"])
def test_a_planted_change_reaches_nothing_outside(tmp_path, listed, planted):
    path, outside = tmp_path / "set", tmp_path / "kept"
    recorded(path)
    outside.write_text("mine")
    before = sorted(path.rglob("*"))
    committed = path / ".aside/change"
    committed.mkdir(parents=True)
    names = [listed.format(outside=outside)] if planted == "list" else []
    (committed / "removed.json").write_text(json.dumps(names))
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        (path / "more").symlink_to(tmp_path / "elsewhere")
        (committed / "more").mkdir()
        (committed / "more/file").write_text("theirs")
    with pytest.raises(DatasetError, match="not made by dzrobot"):
        drop(path, [0])
    assert outside.read_text() == "mine"
    assert set(before) <= set(path.rglob("*"))
    assert not list(tmp_path.glob("elsewhere/*"))
