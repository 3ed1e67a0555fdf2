"""``dzrobot record`` counts kept successes, over as many runs as it takes."""

import itertools
import json
from contextlib import closing

import numpy as np
import pytest
from fake_operator import FakeOperator
from kill_points import operations, spread, stop

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.franka.operator.operator import OperatorVerdict
from dzrobot.progress import TimeLeft
from dzrobot.recording import EpisodeWriter
from dzrobot.recording.catalog import DatasetCatalog, episode_facts
from dzrobot.recording.lists import lost_attempts
from dzrobot.rollout.arm.attended import Attended, EndedByDriver, OperatorOptions
from dzrobot.rollout.demonstrations.record import CallableActor, RecordedEnv
from dzrobot.rollout.demonstrations.tally import RecordingGoal, Tally, record_session
from dzrobot.rollout.environment import made_environment

ROBOT = load_embodiment("franka_pnp")
STEPS = 3

SUCCESS, FAILURE, DISCARDED = (
    OperatorVerdict.SUCCESS, OperatorVerdict.FAILURE, OperatorVerdict.DISCARDED,
)  # fmt: skip


class Judge(FakeOperator):
    """Says of each episode in turn what came of it, and why; `None`: they leave."""

    def __init__(self, *verdicts):
        super().__init__()
        self.verdicts = iter(verdicts)

    def judge(self):
        said = next(self.verdicts)
        if said is None:
            raise KeyboardInterrupt
        verdict, self.because = said if isinstance(said, tuple) else (said, "")
        return verdict


def still(_):
    return np.zeros(7, np.float32)


def attended(env, operator, *, asks_reason=True):
    return Attended(OperatorOptions(asks_reason=asks_reason), operator).opened(env)


def session(folder, goal, *verdicts, clock=None):
    """Record until ``goal``, judged as told; return what was shown of how far it is."""
    env = made_environment(
        "dzrobot/Franka-PnP-fake-v0", {"reward": {"rule": "operator"}, "max_episode_steps": STEPS}
    )
    shown, left = [], TimeLeft(clock or (lambda: 0.0))
    judged = attended(env, Judge(*verdicts))
    with closing(env), EpisodeWriter(folder, ROBOT, fps=10) as writer:
        recorded = RecordedEnv(judged, writer)
        record_session(
            recorded, CallableActor(still), goal,
            ready=lambda tally: shown.append(tally.shown(goal, left)),
            report=lambda _, tally: shown.append(tally.shown(goal, left)),
        )  # fmt: skip
    return shown


def marks(folder):
    return [(one.success, one.seed, one.reason) for one in episode_facts(folder).values()]


def test_episodes_count_kept_successes_and_go_on_where_they_were(tmp_path):
    goal, folder = RecordingGoal(episodes=3), tmp_path / "set"
    with pytest.raises(KeyboardInterrupt):
        session(folder, goal, SUCCESS, (FAILURE, "slipped"), DISCARDED, SUCCESS, None)
    assert marks(folder) == [(True, 0, ""), (True, 2, "")]
    lost = [(one.outcome, one.seed, one.reason) for one in lost_attempts(folder)]
    # What is discarded is recorded again from the same start.
    assert lost == [("failure", 1, "slipped"), ("discarded", 2, "")]
    seconds = itertools.count(step=60.0)
    shown = session(folder, goal, SUCCESS, clock=lambda: next(seconds))
    assert marks(folder)[2:] == [(True, 3, "")]
    assert shown == [
        "kept 2 of 3, failures 1, discarded 1, 0:00:00 so far",
        "kept 3 of 3, failures 1, discarded 1, 0:00:00 left",
    ]
    # Nothing is left to do: nobody is asked, nothing moves.
    assert session(folder, goal) == []


def test_the_time_left_is_that_of_the_successes_to_come(tmp_path):
    seconds = itertools.count(step=60.0)
    verdicts = (SUCCESS, FAILURE, SUCCESS)
    shown = session(
        tmp_path / "set", RecordingGoal(episodes=2), *verdicts, clock=lambda: next(seconds)
    )
    assert shown[1] == "kept 1 of 2, failures 0, discarded 0, 0:01:00 left"
    # Three more minutes for the failure: it is they who take it.
    assert shown[3] == "kept 1 of 2, failures 1, discarded 0, 0:03:00 left"


def test_failures_are_kept_with_their_reason_if_asked(tmp_path):
    goal = RecordingGoal(attempts=4, keep_failures=True)
    folder = tmp_path / "set"
    session(folder, goal, (FAILURE, "slipped"), DISCARDED, SUCCESS, FAILURE, SUCCESS)
    assert marks(folder) == [
        (False, 0, "slipped"), (True, 1, ""), (False, 2, "failure"), (True, 3, "")
    ]  # fmt: skip
    catalog = DatasetCatalog.open(folder)
    assert len(catalog.episodes) == 4
    assert catalog.left_out("successes").keys() == {0, 2}
    assert catalog.left_out("all") == {}
    tally = Tally.of(folder, 4)
    assert (tally.kept, tally.failures, tally.discarded) == (2, 2, 1)


def test_a_person_is_asked_for_the_reason_of_what_they_call_a_failure_alone(tmp_path):
    """An episode that a rule ends, or a time limit, has its own reason."""
    env = made_environment("dzrobot/Franka-PnP-fake-v0", {"max_episode_steps": STEPS})
    operator = Judge()
    operator.because = "asked"
    judged = attended(env, operator)
    with closing(env), EpisodeWriter(tmp_path / "set", ROBOT, fps=10) as writer:
        goal = RecordingGoal(attempts=1, keep_failures=True)
        record_session(RecordedEnv(judged, writer), CallableActor(still), goal)
        # Said while the episode runs.
        goal = RecordingGoal(attempts=2, keep_failures=True)

        def fails(_):
            operator.said = FAILURE
            return np.zeros(7, np.float32)

        record_session(RecordedEnv(judged, writer), CallableActor(fails), goal)
    assert [reason for _, _, reason in marks(tmp_path / "set")] == ["time limit", "asked"]


def test_what_its_driver_ended_is_judged_whatever_the_rule(tmp_path):
    env = made_environment("dzrobot/Franka-PnP-fake-v0", {"max_episode_steps": 50})
    judged = attended(EndedByDriver(env, lambda: True), Judge(SUCCESS))
    with closing(env), EpisodeWriter(tmp_path / "set", ROBOT, fps=10) as writer:
        goal = RecordingGoal(episodes=1)
        record_session(RecordedEnv(judged, writer), CallableActor(still), goal)
    assert marks(tmp_path / "set") == [(True, 0, "")]


def test_an_arm_that_nobody_judges_ends_in_one_message(tmp_path, capsys):
    words = ["record", "--workcell", "fake", "--policy", "hold", "--max-steps", "1"]
    assert main([*words, "--output", str(tmp_path / "set")]) == 2
    said = capsys.readouterr()
    assert "40 attempts of this run gave 0 successes of 1" in said.err
    assert "time limit, not kept" in said.out
    assert "kept 0 of 1, failures 40" in said.out
    assert main([*words, "--only-success", "--output", str(tmp_path / "set")]) == 2
    assert "--keep-failures" in capsys.readouterr().err


def test_successes_that_are_missing_after_so_many_attempts_are_an_exit_code(tmp_path, capsys):
    words = ["record", "--workcell", "fake", "--policy", "hold", "--max-steps", "1"]
    words += ["--attempts", "2", "--output", str(tmp_path / "set")]
    assert main(words) == 0
    assert main([*words, "--episodes", "1"]) == 1
    assert "0 episodes in" in capsys.readouterr().out


@pytest.mark.kill_points
def test_killed_anywhere_it_ends_with_as_many_successes(tmp_path):
    """The verdicts follow from the seed, so an attempt that is made again comes out alike."""

    def job(folder):
        verdicts = (SUCCESS, FAILURE, SUCCESS)
        done = Tally.of(folder, 0)
        if (folder / "meta/info.json").exists():
            done = Tally.of(folder, len(DatasetCatalog.open(folder).episodes))
        session(folder, RecordingGoal(episodes=2), *verdicts[done.attempts :])

    whole = tmp_path / "whole"
    steps = operations(lambda: job(whole), whole)
    for at in spread(len(steps), 3):
        folder = tmp_path / f"{at}"
        assert stop(lambda: job(folder), folder, at).code < 0  # noqa: B023
        job(folder)
        assert marks(folder) == marks(whole) == [(True, 0, ""), (True, 2, "")], steps[at]
        assert lost_attempts(folder) == lost_attempts(whole)


def test_nobody_is_asked_for_a_reason_elsewhere(tmp_path):
    env = made_environment(
        "dzrobot/Franka-PnP-fake-v0", {"reward": {"rule": "operator"}, "max_episode_steps": 1}
    )
    operator = Judge((FAILURE, "asked"))
    with closing(env), EpisodeWriter(tmp_path / "set", ROBOT, fps=10) as writer:
        judged = attended(env, operator, asks_reason=False)
        goal = RecordingGoal(attempts=1, keep_failures=True)
        record_session(RecordedEnv(judged, writer), CallableActor(still), goal)
    assert marks(tmp_path / "set") == [(False, 0, "failure")]


def test_lines_of_attempts_are_checked(tmp_path, capsys):
    folder = tmp_path / "set"
    session(folder, RecordingGoal(attempts=1), FAILURE)
    path = folder / "meta/recording_attempts.jsonl"
    path.write_text(json.dumps({"outcome": "maybe", "seed": 0}) + "\n")
    words = ["record", "--workcell", "fake", "--policy", "hold", "--output", str(folder)]
    assert main(words) == 2
    assert "recording_attempts.jsonl:1" in capsys.readouterr().err
