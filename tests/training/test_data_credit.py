"""What is learned from runs of a policy: a person's rows are imitated, the mistakes are given."""

import dataclasses
import json

import cv2
import numpy as np
import pytest
import torch
from data_worlds import RELATIVE, ROBOT, record, step
from pydantic import ValidationError

from dzrobot.cli import main
from dzrobot.embodiments.spec import HOLD_ZERO
from dzrobot.errors import ConfigError, DatasetError
from dzrobot.recording import EpisodeWriter
from dzrobot.training.data import (
    DatasetReader,
    LoaderPlan,
    ReaderOptions,
    SourceSpec,
    TrainingData,
    build_loader,
)
from dzrobot.training.data.credit import (
    Credits,
    EpisodeMarks,
    Reason,
    moves_nothing,
    reasons,
)
from dzrobot.training.data.normalization import measure
from dzrobot.training.sft_config import CreditConfig, DataConfig

CODES = dict(zip(Reason, "DPSRBHFU", strict=True))
"""Demonstration, person, success, person at rest, before a takeover, helped, failure, unknown."""


def spelled(person, *, success=True, rests="", by_policy=True, before=2):
    """Return the reasons of rows in which a person acted (#) or a policy did (.), as letters."""
    marks = EpisodeMarks(
        person=np.array([row == "#" for row in person]),
        rests=np.array([row == "r" for row in rests.ljust(len(person), ".")]),
        by_policy=by_policy, success=success,
    )  # fmt: skip
    return "".join(CODES[Reason(code)] for code in reasons(marks, before).tolist())


@pytest.mark.parametrize(
    ("person", "options", "expected"),
    [
        # Whole episodes.
        ("....", {"by_policy": False}, "DDDD"),
        ("....", {"by_policy": False, "success": None}, "DDDD"),
        ("....", {"by_policy": False, "success": False}, "FFFF"),
        ("....", {}, "SSSS"),
        ("....", {"success": False}, "FFFF"),
        # Nobody said how it ended: not imitated, and said.
        ("....", {"success": None}, "UUUU"),
        # The rows before a takeover led to it; the others succeeded because of a person.
        ("....##", {}, "HHBBPP"),
        ("....##..", {}, "HHBBPPHH"),
        (".##.", {"before": 5}, "BPPH"),
        ("##..", {}, "PPHH"),
        # The blamed rows do not reach into what a person did.
        ("##.##", {"before": 3}, "PPBPP"),
        ("..##", {"before": 0}, "HHPP"),
        # A person who has taken over and does not move yet hesitates; later rests are meant.
        ("..####", {"rests": "..rr.r"}, "BBRRPP"),
        ("..###.", {"rests": "..rrr."}, "BBRRRH"),
        # Only whoever acted last is to blame for the failure.
        (".##...", {"success": False}, "BPPFFF"),
        ("..##", {"success": False}, "BBFF"),
        ("##..##", {"success": False}, "PPBBFF"),
        ("####", {"success": False}, "FFFF"),
        ("####", {}, "PPPP"),
    ],
)
def test_who_acted_and_how_it_ended_decide_what_is_learned(person, options, expected):
    assert spelled(person, **options) == expected


def test_later_own_rows_of_a_block_are_not_shown_to_rows_that_are_predicted():
    marks = EpisodeMarks(
        person=np.array([row == "#" for row in "...##.....##...."]), rests=np.zeros(16, bool),
        by_policy=True, success=True,
    )  # fmt: skip
    table = Credits({0: marks}, CreditConfig(blame_s=0), hz=20)
    found = table.of(0, np.arange(16), 0, 4)
    asked = found.weight > 0
    #                         ...# #... ..## ....
    assert "".join("g?"[not one] for one in found.given) == "ggg?????gg??gggg"
    assert asked.tolist() == [row == "#" for row in "...##.....##...."]
    # Within a block nothing that is given follows what is predicted.
    for given, block in zip(found.given.reshape(-1, 4), asked.reshape(-1, 4), strict=True):
        if block.any():
            assert not given[block.argmax() :].any()
    # Repeated rows at the end are neither given nor asked for.
    end = table.of(0, np.array([8, 9, 10, 11, 12, 13, 13, 13]), 2, 4)
    assert end.given.tolist() == [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2
    assert end.weight.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert not table.of(0, np.array([12, 13, 14, 15]), 0, 4).imitates


def test_own_successes_weigh_as_the_recipe_says():
    marks = EpisodeMarks(np.zeros(4, bool), np.zeros(4, bool), by_policy=True, success=True)
    for own, given in ((1.0, False), (0.6, False), (0.0, True)):
        found = Credits({0: marks}, CreditConfig(own=own), 20).of(0, np.arange(4), 0, 4)
        assert found.weight.tolist() == [np.float32(own)] * 4
        assert found.given.tolist() == [given] * 4


def test_a_person_rests_where_no_motion_is_commanded():
    """Differences are motions; of absolute numbers the change is; a gripper's is none."""
    rows = np.zeros((5, 7), np.float32)
    rows[2:, 0], rows[:, 6] = (0.5, 0.004, 0), 1
    values = {part.key: rows[:, : part.dim] for part in ROBOT.action}
    assert len(values) == 1
    assert moves_nothing(ROBOT, values).tolist() == [True, True, False, True, True]
    arm = next(part for part in RELATIVE.action if part.hold not in (None, HOLD_ZERO))
    joints = {part.key: np.zeros((5, part.dim), np.float32) for part in RELATIVE.action}
    joints[arm.key][:, 0] = (3, 3, 3.5, 3.5, 4)
    assert moves_nothing(RELATIVE, joints).tolist() == [True, True, False, True, False]
    unknown = dataclasses.replace(
        ROBOT, action=tuple(dataclasses.replace(part, hold=None) for part in ROBOT.action)
    )
    assert not moves_nothing(unknown, values).any()


EPISODES = {0: ("." * 30, True), 1: ("." * 20 + "#" * 10, True), 2: ("." * 30, False)}


def recorded(root, *, column="intervention", episodes=EPISODES):
    """Write runs of a policy; returns the folder."""
    with EpisodeWriter(root, ROBOT, fps=ROBOT.timing.control_hz) as writer:
        for episode, (person, success) in episodes.items():
            for number, row in enumerate(person):
                extras = {} if column is None else {column: np.bool_(row == "#")}
                writer.add_frame(*step(ROBOT, 0, episode, number), extras)
            writer.save_episode(success=success)
    return root


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a folder with demonstrations, runs of a policy, and the statistics of the former."""
    root = tmp_path_factory.mktemp("credit")
    path = record(root / "demos", lengths=(30, 25))
    content = {"libero_sim": measure([opened(root, "demos")], ROBOT)}
    (root / "metadata.json").write_text(json.dumps(content))
    recorded(root / "runs")
    assert path.is_dir()
    return root


def opened(root, name="runs", **more):
    options = ReaderOptions(cache=root / "cache", images=False, **more)
    return DatasetReader(root / name, ROBOT, options)


def data(world, *credited, runs="runs", **more):
    """Return demonstrations, and the runs once for each of ``credited``."""

    def source(name, credit):
        return SourceSpec(
            paths=[world / name], embodiment=ROBOT, metadata=world / "metadata.json",
            credit=credit, inherited=True,
        )  # fmt: skip

    specs = [source("demos", None), *(source(runs, credit) for credit in credited)]
    options = ReaderOptions(cache=world / "cache", images=False, **more)
    return TrainingData.open(specs, seed=0, options=options)


def test_failures_are_read_for_their_video_or_left_out(world):
    assert set(np.unique(opened(world).windows.episode)) == {0, 1}
    assert set(np.unique(opened(world, credit=CreditConfig()).windows.episode)) == {0, 1, 2}
    without = opened(world, credit=CreditConfig(failures="leave_out"))
    assert set(np.unique(without.windows.episode)) == {0, 1}
    reader = opened(world, credit=CreditConfig(blame_s=0.5))
    counted = {CODES[reason]: rows for reason, rows in reader.credits.counted().items()}
    assert counted == {"S": 30, "H": 10, "B": 10, "P": 10, "F": 30}


def test_other_columns_say_it_too_and_two_are_refused(world, tmp_path):
    other = recorded(tmp_path / "rlinf", column="intervene_flag")
    mine, theirs = (
        DatasetReader(path, ROBOT, ReaderOptions(images=False, credit=CreditConfig()))
        for path in (world / "runs", other)
    )
    for number in range(len(mine)):
        for one, two in zip(mine.credit(number), theirs.credit(number), strict=True):
            np.testing.assert_array_equal(one, two)
    # Without a column and without a policy's name an episode is a demonstration.
    plain = recorded(tmp_path / "plain", column=None, episodes={0: ("." * 30, True)})
    reader = DatasetReader(plain, ROBOT, ReaderOptions(images=False, credit=CreditConfig()))
    assert set(reader.credits.counted()) == {Reason.DEMONSTRATION}
    with EpisodeWriter(tmp_path / "two", ROBOT, fps=ROBOT.timing.control_hz) as writer:
        for number in range(30):
            marks = {"intervention": np.bool_(True), "intervene_flag": np.bool_(False)}
            writer.add_frame(*step(ROBOT, 0, 0, number), marks)
        writer.save_episode(success=True)
    with pytest.raises(DatasetError, match="both say where a person acted"):
        DatasetReader(tmp_path / "two", ROBOT, ReaderOptions(credit=CreditConfig()))


@pytest.mark.parametrize(("kind", "odd"), [(np.int64, -1), (np.float32, 0.5)])
def test_a_mark_is_a_truth_value_in_whatever_type(tmp_path, kind, odd):
    def marked(name, last):
        with EpisodeWriter(tmp_path / name, ROBOT, fps=ROBOT.timing.control_hz) as writer:
            for number in range(30):
                mark = kind(last if number == 29 else number >= 20)
                writer.add_frame(*step(ROBOT, 0, 0, number), {"intervention": mark})
            writer.save_episode(success=True)
        options = ReaderOptions(cache=tmp_path / "cache", images=False, credit=CreditConfig())
        return DatasetReader(tmp_path / name, ROBOT, options)

    assert marked("good", 1).credits.counted()[Reason.PERSON] == 10
    with pytest.raises(DatasetError, match=rf"intervention of episode 0 is {odd:g}"):
        marked("odd", odd)


def test_without_credit_nothing_changes(world):
    """The bits of demonstrations, with and without a credited source beside them."""
    plain, beside = data(world), data(world, CreditConfig())
    key = plain.sample_keys(0, [0], 1)[0]
    one, two = plain[key], beside[key]
    assert one.credit is None
    for name, value in one.vectors.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, two.vectors[name])
    # Where another source is credited, its samples are asked for all.
    assert not two.credit.given.any()
    assert (two.credit.weight == 1).all()
    assert next(iter(build_loader(plain, PLAN)))["credit"] is None
    assert plain.identity() != beside.identity() != data(world, CreditConfig(own=0.5)).identity()


PLAN = LoaderPlan(global_batch=4, micro_batch=4, stop_step=8)


def test_a_batch_carries_what_is_asked_of_its_actions(world):
    whole = data(world, CreditConfig(share=None))
    seen = set()
    for batch in build_loader(whole, PLAN):
        for at, number in enumerate(batch["sample_id"].tolist()):
            _, reader, window = whole.locate(number)
            found = reader.credit(window)
            given, weight = batch["credit"].given[at], batch["credit"].weight[at]
            if found is not None:
                np.testing.assert_array_equal(given, found.given)
                np.testing.assert_array_equal(weight, found.weight)
            assert bool(batch["has_real_action"][at]) == bool(weight.any())
            seen.add((bool(given.any()), bool(weight.any())))
    assert seen == {(False, True), (True, True), (True, False)}


def test_samples_without_an_imitated_action_have_a_share_of_their_own(world):
    def drawn(*credited, **more):
        whole = data(world, *credited, **more)
        keys = whole.sample_keys(0, range(2048), 2048)
        found = [whole.locate(key.sample_id) for key in keys]
        runs = [reader.credit(window) for source, reader, window in found if source]
        return np.mean([not one.imitates for one in runs])

    natural = drawn(CreditConfig(share=None))
    assert 0.4 < natural < 0.7
    for share in (0.1, 0.9):
        assert abs(drawn(CreditConfig(share=share)) - share) < 0.02
    # Unless they are asked for, they are not drawn.
    assert drawn(CreditConfig()) == 0
    assert drawn(CreditConfig(share=1)) == 1
    assert drawn(CreditConfig(), start_share=0.2) == 0
    with pytest.raises(ConfigError, match=r"start_share and credit\.share both decide"):
        data(world, CreditConfig(share=0.1), start_share=0.2)


def test_runs_of_which_nothing_is_imitated_are_left_out_and_said(world, caplog):
    recorded(world / "failed", episodes={0: ("." * 30, False)})
    whole = data(world, CreditConfig(), runs="failed")
    keys = whole.sample_keys(0, range(256), 256)
    assert {whole.locate(key.sample_id)[0] for key in keys} == {0}
    assert "failed has no sample with an action to imitate" in caplog.text
    both = data(world, CreditConfig(share=None), runs="failed")
    assert {both.locate(key.sample_id)[0] for key in both.sample_keys(0, range(256), 256)} == {0, 1}


def test_starts_of_which_nothing_is_imitated_are_refused(world):
    recorded(world / "late", episodes={0: ("." * 60 + "#" * 30, True)})
    with pytest.raises(DatasetError, match="no sample with an action to imitate that begins"):
        data(world, CreditConfig(), runs="late", start_share=0.2, start_rows=1)


def test_whole_episodes_with_a_takeover_are_not_imitated(world):
    with pytest.raises(ValidationError, match=r"credit: \{\}"):
        DataConfig.model_validate({"train_data_paths": ["x"], "episodes": "interventions"})
    with pytest.raises(ValidationError):
        CreditConfig(own=1.5)
    with pytest.raises(ValidationError):
        CreditConfig(blame_s=-1)


def test_the_command_says_what_is_learned(world, tmp_path, capsys):
    words = ["credit", str(world / "runs"), "--embodiment", "data_worlds:ROBOT"]
    assert main([*words, "--blame-s", "0.5", "--episode", "1"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "3 episodes, 90 rows",
        "30   33.3%  imitated        policy, succeeded without help",
        "10   11.1%  given           policy, just before a takeover",
        "10   11.1%  imitated        a person acted",
        "rows     0 to 9      given           policy, in an episode with a takeover",
        "rows    10 to 19     given           policy, just before a takeover",
        "rows    20 to 29     imitated        a person acted",
        "credit: {blame_s: 0.5}",
    ):
        assert line in shown
    assert main([*words, "--own", "0", "--failures", "leave_out"]) == 0
    shown = capsys.readouterr().out
    assert "2 episodes, 60 rows" in shown
    assert "given           policy, succeeded without help" in shown
    for more, said in (
        (
            ["--episode", "7"],
            "--episode 7: it is not among the 3 episodes in use, which are 0 to 2",
        ),
        (["--plot", "x.png"], "say which by --episode N"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err


def test_a_round_beyond_the_statistics_is_said(world, tmp_path, capsys):
    words = ["credit", str(world / "demos"), "--embodiment", "data_worlds:ROBOT"]
    words += ["--json", str(tmp_path / "credit.json"), "--statistics"]
    assert main([*words, str(world / "metadata.json")]) == 0
    assert json.loads((tmp_path / "credit.json").read_text())["warnings"] == []
    # The checkpoint knows half the range of the action's fourth number, and all of the others.
    content = json.loads((world / "metadata.json").read_text())
    table = content["libero_sim"]["statistics"]["action"]["actions"]
    table["q99"][3] = (table["q01"][3] + table["q99"][3]) / 2
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    assert main([*words, str(tmp_path / "metadata.json")]) == 0
    (said,) = json.loads((tmp_path / "credit.json").read_text())["warnings"]
    assert said.startswith("action.actions, number 3: these rows reach beyond the bounds of")
    assert f"WARNING: {said}" in capsys.readouterr().out


def test_an_episode_is_drawn_as_a_strip(world, tmp_path):
    words = ["credit", str(world / "runs"), "--embodiment", "data_worlds:ROBOT"]
    assert main([*words, "--episode", "1", "--plot", str(tmp_path / "one.png")]) == 0
    assert cv2.imread(str(tmp_path / "one.png")).std() > 10


def test_an_outcome_that_is_not_marked_is_not_imitated_and_said(tmp_path, capsys):
    path = recorded(tmp_path / "set", episodes={0: ("." * 30, None)})
    assert main(["credit", str(path), "--embodiment", "data_worlds:ROBOT"]) == 0
    shown = capsys.readouterr().out
    assert "WARNING: 30 rows are of episodes of which it is not marked" in shown
    assert "WARNING: nothing is imitated" in shown
