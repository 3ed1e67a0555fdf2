"""A person takes over from a policy while they hold a button, and the recording says where."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from dzrobot.cli import main
from dzrobot.envs.teleop.device import DeviceLostError, TeleopReading
from dzrobot.policies.wrapping import adapted
from dzrobot.recording.catalog import DatasetCatalog, episode_facts
from dzrobot.rollout.arm.teleoperation import Teleoperator, WatchedPolicy
from dzrobot.rollout.environment import made_environment
from dzrobot.rollout.episode import PolicyActor

REST = TeleopReading(active=False, motion=(0.0,) * 6)
PUSH = TeleopReading(active=True, motion=(0.5, 0.0, 0.0, 0.0, 0.0, 0.0))
POLICY = np.array([-0.2, 0, 0, 0, 0, 0, -1], np.float32)


class Device:
    """Says one thing after another, then for ever the last; lost where a reading is None."""

    gives, has_deadman = "motion", True

    def __init__(self, *readings):
        self.readings = list(readings)

    def check(self):
        pass

    def open(self):
        pass

    def read(self):
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if reading is None:
            raise DeviceLostError("the cable is out")
        return reading

    def close(self):
        pass


class Policy:
    """Closes the gripper and draws back; counts how often it was begun and asked."""

    def __init__(self, env=None):
        self.begun, self.asked = 0, 0

    def reset(self, session=None):
        self.begun += 1

    def act(self, observation, *, session="default"):
        self.asked += 1
        return POLICY.copy()


@pytest.fixture
def hand():
    env = made_environment("dzrobot/Franka-PnP-fake-v0", {"action": {"frame": "base"}})
    with closing(env):
        yield env


def driven(env, *readings):
    policy = Policy()
    actor = WatchedPolicy(PolicyActor(policy=adapted(policy)), Teleoperator(Device(*readings), env))
    seen, _ = env.reset(seed=0)
    actor.begin(env)
    actions, whose = [], []
    for _ in readings:
        actions.append(actor.act(seen)[0])
        whose.append(actor.intervened)
        seen = env.step(actions[-1])[0]
    return np.array(actions), whose, policy, actor


def test_a_person_acts_while_they_hold_the_button(hand):
    actions, whose, policy, _ = driven(hand, REST, PUSH, PUSH, REST, REST)
    assert whose == [False, True, True, False, False]
    np.testing.assert_allclose(actions[:, 0], (-0.2, 0.5, 0.5, -0.2, -0.2))
    # The gripper stays as the policy had it.
    np.testing.assert_array_equal(actions[:, 6], -1)
    # It is not asked meanwhile, and begins anew: its plan was made for another place.
    assert (policy.asked, policy.begun) == (3, 2)


def test_a_lost_device_ends_in_holding_still(hand):
    actions, whose, policy, actor = driven(hand, REST, PUSH, None)
    np.testing.assert_array_equal(actions[2], (0, 0, 0, 0, 0, 0, -1))
    assert whose == [False, True, False]
    assert actor.person.why_over() == "device lost"
    assert policy.asked == 1


def takes_over():
    return Device(REST, *[PUSH] * 2, *[REST] * 2, replace(PUSH, ends=True))


def only_watches():
    return Device(REST)


def lost_soon():
    return Device(REST, PUSH, None)


def record(tmp_path, device, *words):
    return main(
        ["record", "--workcell", "fake", "--policy", f"{__name__}:Policy", "--max-steps", "7",
         "--teleop", f"{__name__}:{device}", "--keep-failures", "--output", str(tmp_path / "set"),
         *words]
    )  # fmt: skip


def test_every_row_says_whose_action_it_holds(tmp_path, capsys):
    assert record(tmp_path, "takes_over", "--attempts", "1") == 0
    assert "6 frames, ended by key, kept; a person acted in 3 of them" in capsys.readouterr().out
    assert record(tmp_path, "only_watches", "--attempts", "2") == 0
    rows = [
        pq.read_table(tmp_path / f"set/data/chunk-000/episode_{number:06d}.parquet")
        for number in (0, 1)
    ]
    assert rows[0]["intervention"].to_pylist() == [False, True, True, False, False, True]
    assert not any(rows[1]["intervention"].to_pylist())
    facts = [*episode_facts(tmp_path / "set").values()]
    assert [one.interventions for one in facts] == [3, 0]
    assert [one.takeovers for one in facts] == [[(1, 2), (5, 5)], []]
    assert {one.policy for one in facts} == {f"{__name__}:Policy"}
    hz = DatasetCatalog.open(tmp_path / "set").fps
    assert [one.person_s for one in facts] == [pytest.approx(3 / hz, abs=1e-3), 0]
    assert all(one.robot_s > 0 for one in facts)
    # They outlive a change of the verdict.
    assert main(["relabel", str(tmp_path / "set"), "--episode", "0-1", "--success"]) == 0
    assert episode_facts(tmp_path / "set")[0].takeovers == [(1, 2), (5, 5)]


def test_a_folder_without_the_column_is_not_continued(tmp_path, capsys):
    words = ["record", "--workcell", "fake", "--policy", "hold", "--keep-failures"]
    words += ["--max-steps", "2", "--output", str(tmp_path / "set")]
    assert main([*words, "--attempts", "1"]) == 0
    assert record(tmp_path, "only_watches", "--attempts", "2") == 2
    assert "intervention" in capsys.readouterr().err


def test_a_device_that_is_lost_ends_the_run(tmp_path, capsys):
    assert record(tmp_path, "lost_soon", "--attempts", "3") == 2
    assert "the cable is out" in capsys.readouterr().err
    (facts,) = episode_facts(tmp_path / "set").values()
    assert (facts.success, facts.reason, facts.interventions) == (False, "device lost", 1)


def test_who_acts_is_said_once(tmp_path, capsys):
    words = ["record", "--workcell", "fake", "--output", str(tmp_path / "set")]
    for more in (
        [],
        ["--call", "a:b", "--teleop", "gamepad"],
        ["--keyboard", "--teleop", "gamepad"],
    ):
        assert main([*words, *more]) == 2
        assert "say what acts" in capsys.readouterr().err
    for more, said in (
        (["--keyboard", "--teleop", "keyboard"], "are the same; give one"),
        (["--policy", "hold", "--teleop", "keyboard"], "it is not known when it takes over"),
        (["--teleop", "keyboard", "--teleop-arg", "port=1"], "--teleop-arg is a setting"),
    ):
        assert main([*words, *more]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "set").exists()
