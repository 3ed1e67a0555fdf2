"""What training cannot use of an episode is said while it is recorded, and by ``inspect-data``."""

import numpy as np
import pytest
from data_worlds import ROBOT, step

from dzrobot.cli import main
from dzrobot.embodiments.timing import Timing
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.checks import EpisodeWatch, idle, too_short

HZ = 10.0


def watched(change, rows=15):
    watch = EpisodeWatch(ROBOT, HZ)
    for number in range(rows):
        observation, action = step(ROBOT, 0, 0, number)
        joined = np.concatenate([*action.values()])
        watch.see(*change(number, observation, joined))
    return watch.warnings()


def dark(rows):
    def change(number, observation, action):
        if number < rows:
            image = np.full_like(observation["video.image"], 3)
            image[0, 0] = 9
            observation = {**observation, "video.image": image}
        return observation, action

    return change


def frozen(since, *, moves=True):
    first = step(ROBOT, 0, 0, since)[0]

    def change(number, observation, action):
        if number >= since:
            observation = {**observation, "video.image": first["video.image"].copy()}
        return (observation if moves else {**first, **{
            key: observation[key] for key in ROBOT.video_keys[1:]
        }}), action  # fmt: skip

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _, *seen: seen, []),
        (dark(7), []),
        (dark(8), ["video.image is all one color in 8 of 15 images"]),
        (frozen(6), []),
        (frozen(3), ["video.image did not change for 1.1 s while the robot moved"]),
        # An image in which nothing moves may stay the same.
        (frozen(0, moves=False), ["no number of the state ever changes"]),
        (lambda _, seen, action: (seen, 0 * action), ["every action is zero"]),
        (lambda _, seen, action: (seen, 0 * action + 0.5), ["every action is the same"]),
    ],
)
def test_an_episode_is_looked_at_row_by_row(change, said):
    found = watched(change)
    assert len(found) == len(said), found
    for line, beginning in zip(found, said, strict=True):
        assert line.startswith(beginning)


def test_a_single_row_says_nothing_of_motion():
    assert list(idle(np.zeros((1, 7)), np.zeros((1, 8)))) == []


@pytest.mark.parametrize("pad_tail", [False, True])
def test_whether_an_episode_holds_a_sample(pad_tail):
    timing = Timing(control_hz=10, action_horizon=8, blocks=2, pad_tail=pad_tail)
    assert [too_short(rows, timing) for rows in (timing.rows_needed - 1, timing.rows_needed)] == [
        True, False
    ]  # fmt: skip


def test_a_dataset_is_looked_at_the_same_way(tmp_path, capsys):
    with EpisodeWriter(tmp_path / "set", ROBOT, fps=ROBOT.timing.control_hz) as writer:
        for episode in range(2):
            for number in range(20):
                observation, action = step(ROBOT, 0, episode, number)
                writer.add_frame(observation, {k: v * episode for k, v in action.items()})
            writer.save_episode()
    words = ["inspect-data", str(tmp_path / "set"), "--embodiment", "data_worlds:ROBOT", "--quick"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "FAULT episode 0: every action is zero" in said
    assert "faults: 1" in said


def test_a_recording_that_is_of_no_use_says_so_at_once(tmp_path, capsys):
    words = ["record", "--workcell", "fake", "--policy", "hold", "--attempts", "1"]
    words += ["--max-steps", "15", "--output", str(tmp_path / "set")]
    assert main(words) == 0
    # What is not kept needs no warning.
    assert "WARNING" not in capsys.readouterr().out
    assert main([*words, "--attempts", "2", "--keep-failures"]) == 0
    said = capsys.readouterr().out
    assert "WARNING: every action is zero" in said
    assert "WARNING: no number of the state ever changes" in said
