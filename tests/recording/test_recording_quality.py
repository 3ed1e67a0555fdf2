"""What training cannot use of an episode is said while it is recorded, and by ``inspect-data``."""

from dataclasses import replace

import numpy as np
import pytest
from data_worlds import ROBOT, step

from dzrobot.cli import main
from dzrobot.embodiments.spec import Gripper, Part
from dzrobot.embodiments.timing import Timing
from dzrobot.policies.base import blank
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.checks import EpisodeWatch, idle, too_short, unfit

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
    # Zeros are neither of the hand's two commands.
    assert "the threshold is not between" in said
    assert "faults: 2" in said


HAND = Part(key="action.hand", feature="action", dim=2, start=0)
TWO_WAY = np.repeat([0.0, 1.0], 20)
NOISE = np.random.default_rng(0).normal(0.02, 0.005, 40)


@pytest.mark.parametrize(
    ("gripper", "values", "said"),
    [
        (Gripper(threshold=0.5, low=0, high=1), TWO_WAY, None),
        (Gripper(threshold=50, low=10, high=90), 10 + 80 * TWO_WAY, None),
        (Gripper(threshold=0.5, low=0, high=1), np.linspace(0, 1, 40), None),
        # A hand that is never moved, with and without noise.
        (Gripper(threshold=0.5, low=0, high=1), 0 * TWO_WAY, None),
        (Gripper(threshold=0.5, low=0, high=1), NOISE, None),
        (Gripper(threshold=0.5, low=0, high=1), 10 + 80 * TWO_WAY, "every command would be 1"),
        (Gripper(threshold=0.5, low=0, high=1), np.linspace(10, 90, 40), "every command would be"),
        (Gripper(threshold=0.5, low=0, high=1), 0.04 * TWO_WAY, "every command would be 0"),
        (Gripper(threshold=0.5, low=0, high=1), 255 * TWO_WAY, "about 255, not high"),
        (Gripper(threshold=0.5, low=0, high=1), np.linspace(0, 100, 4000), "not high"),
        (Gripper(threshold=0.5, low=0, high=255), 255 * TWO_WAY, "the threshold is not between"),
        (Gripper(threshold=0, low=-1, high=1), TWO_WAY, "not low"),
        (Gripper(threshold=0.5, low=0, high=1), 2 * TWO_WAY - 1, "not low"),
        (Gripper(threshold=0.5, low=1, high=0), TWO_WAY, "not low"),
        (Gripper(threshold=0.5, low=0, high=1), 50 + 0 * TWO_WAY, "no value is near low or high"),
    ],
)
def test_a_gripper_is_held_against_what_was_recorded(gripper, values, said):
    robot = replace(ROBOT, action=(replace(HAND, gripper=replace(gripper, index=1)),))
    table = np.stack([np.arange(40.0).repeat(len(values) // 40), values], axis=1)
    found = list(unfit(robot, {"action.hand": table.astype(np.float32)}))
    if said is None:
        assert found == []
    else:
        assert len(found) == 1
        assert "action.hand number 1" in found[0]
        assert said in found[0]


@pytest.mark.parametrize(
    ("scale", "fits"), [(1, True), (3, True), (180 / np.pi, False), (1 / 1000, False)]
)
def test_an_action_and_its_reference_are_in_one_unit(scale, fits):
    state = next(part for part in ROBOT.state if part.dim >= 2)
    states = np.random.default_rng(0).normal(size=(60, state.dim))
    action = replace(HAND, dim=state.dim, reference=state.key)
    robot = replace(ROBOT, action=(action,))
    found = list(unfit(robot, {action.key: scale * states, state.key: states}))
    assert [text.count("not in one unit") for text in found] == ([] if fits else [1])


@pytest.mark.parametrize("verb", ["inspect-data", "stats", "train"])
def test_a_robot_that_does_not_fit_the_data_is_refused_by_every_reader(verb, tmp_path, capsys):
    with EpisodeWriter(tmp_path / "set", ROBOT, fps=ROBOT.timing.control_hz) as writer:
        for number in range(30):
            observation, action = step(ROBOT, 0, 0, number)
            action["action.actions"][6] = 10 + 80 * (number > 15)
            writer.add_frame(observation, action)
        writer.save_episode()
    data, robot = str(tmp_path / "set"), "data_worlds:ROBOT"
    words = {
        "inspect-data": ["inspect-data", data, "--embodiment", robot, "--quick"],
        "stats": ["stats", robot, "--dataset", data, "--output", str(tmp_path / "m.json")],
        "train": ["train", "tiny_cpu", f"model.embodiment_tag={robot}",
                  f"data.train_data_paths={data}", f"runner.output_dir={tmp_path / 'run'}"],
    }  # fmt: skip
    assert main(words[verb]) in (1, 2)
    out, err = capsys.readouterr()
    assert "action.actions number 6" in out + err
    assert "every command would be 1" in out + err


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


def test_rows_that_are_not_saved_and_episodes_that_are_there_are_told(tmp_path, caplog):
    def write(*, saved):
        caplog.clear()
        with EpisodeWriter(tmp_path / "set", "libero_mini", fps=20) as writer:
            writer.add_frame(blank(writer.embodiment, None), np.zeros(7, np.float32))
            if saved:
                writer.save_episode()
        return caplog.text

    assert "1 row after the last save_episode() is dropped" in write(saved=False)
    assert write(saved=True) == ""
    assert "holds 1 episode: continuing after it" in write(saved=True)
    assert "holds 2 episodes: continuing after them" in write(saved=True)
