"""What a bad policy does on an arm is a result: the arm holds, and a person looks."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_operator import FakeOperator

from dzrobot.cli import STOPPED, main
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import FakeArm, FakeCamera
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.operator.operator import ArmPhase
from dzrobot.envs.franka.safeguards.limits import FAR
from dzrobot.envs.panda.poses import distance_between
from dzrobot.errors import StoppedError
from dzrobot.policies.base import DEFAULT_SESSION
from dzrobot.rollout.episode import run_episode
from dzrobot.rollout.protocol import EpisodeRules

AHEAD = np.array([0.5, 0, 0, 0, 0, 0, 0], np.float32)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_LOCK_FOLDER", str(tmp_path))


class Bad:
    """Drives ahead; at the third action of its first episode it does what a test says."""

    does = None

    def __init__(self, robot):
        self.steps = 0

    def reset(self, session=None, *, episode=None):
        self.steps = 0

    def act(self, obs, *, session=DEFAULT_SESSION):
        self.steps += 1
        if self.steps == 3 and Bad.does is not None:
            does, Bad.does = Bad.does, None
            return does()
        return AHEAD


def diverged():
    raise ArithmeticError("it diverged")


WRONG = {
    "nan": (lambda: np.full(7, np.nan), "invalid_action", "finite numbers"),
    "shape": (lambda: np.zeros(6), "invalid_action", "an action is (7,)"),
    "far": (lambda: AHEAD * 1e30, "invalid_action", "statistics"),
    "exception": (diverged, "policy_error", "ArithmeticError: it diverged"),
}
wrong = pytest.mark.parametrize(("does", "ended", "said"), WRONG.values(), ids=WRONG)


def make(operator=None, **values):
    arm = FakeArm()
    cameras = [FakeCamera(key, arm) for key in ("video.image", "video.wrist_image")]
    config = FrankaConfig.model_validate({"reward": {"rule": "none"}} | values)
    return FrankaEnv(arm, cameras, config, clock=arm.clock, operator=operator), arm


@wrong
def test_the_arm_holds_and_the_operator_is_asked(does, ended, said):
    operator = FakeOperator()
    env, arm = make(operator)
    Bad.does = does
    outcome = run_episode(env, Bad(None), EpisodeRules(seed=0, max_steps=8))
    assert (outcome.success, outcome.ended, outcome.fault, outcome.stop) == (False, ended, "", "")
    assert said in outcome.robot["abort_message"]
    assert distance_between(arm.moves[-1], arm.state().pose) < 1e-9
    operator.shown.clear()
    operator.refuses = ArmPhase.STOPPED
    with pytest.raises(StoppedError):
        env.reset()
    operator.refuses = None
    env.reset()
    env.close()


def evaluate(tmp_path, *words):
    return main(
        ["eval", "--env", "dzrobot/Franka-PnP-fake-v0", "--policy", f"{__name__}:Bad",
         "--episodes", "2", "--max-steps", "8", "--output", str(tmp_path / "results"), *words]
    )  # fmt: skip


def records(tmp_path):
    lines = (tmp_path / "results/records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@wrong
def test_an_evaluation_counts_it_and_does_not_roll_it_again(does, ended, said, tmp_path, capsys):
    Bad.does = does
    assert evaluate(tmp_path, "--unattended") == 0
    first, second = records(tmp_path)
    assert (first["success"], first["ended"], first["error"]) == (False, ended, None)
    assert said in first["robot"]["abort_message"]
    assert second["ended"] == "time limit"
    capsys.readouterr()
    assert evaluate(tmp_path, "--unattended") == 0
    assert len(records(tmp_path)) == 2


def test_without_an_operator_the_run_ends_and_the_failure_stays(tmp_path, capsys):
    Bad.does = diverged
    assert evaluate(tmp_path) == STOPPED
    assert "it diverged" in capsys.readouterr().err
    assert evaluate(tmp_path) == 0
    assert [one["ended"] for one in records(tmp_path)] == ["policy_error", "time limit"]


@wrong
def test_a_recording_keeps_it_as_a_failure_with_its_reason(does, ended, said, tmp_path, capsys):
    Bad.does = does
    assert main(
        ["record", "--workcell", "fake", "--policy", f"{__name__}:Bad", "--attempts", "2",
         "--keep-failures", "--max-steps", "8", "--unattended", "--output", str(tmp_path / "set")]
    ) == 1  # fmt: skip
    lines = (tmp_path / "set/meta/recording_facts.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["success"], first["ended"]) == (False, ended)
    assert said in first["reason"]
    assert second["ended"] == "time limit"


@pytest.mark.parametrize("at", range(7))
def test_an_action_near_its_range_is_cut_and_one_far_outside_refused(at):
    env, arm = make()
    env.reset()
    action = np.zeros(7, np.float32)
    action[at] = -1.2
    *_, truncated, info = env.step(action)
    assert not truncated
    assert info["executed_action"].tolist() == np.clip(action, -1, 1).tolist()
    assert info["robot"]["limited"].get("action", 0) == int(at < 6)
    action[at] = -FAR - 0.01
    sent, asked = len(arm.moves), len(arm.gripper.requests)
    *_, truncated, info = env.step(action)
    assert (truncated, info["abort"], info["fault"]) == (True, "invalid_action", "")
    assert "-1.51" in info["abort_message"]
    assert len(arm.gripper.requests) == asked
    # It holds, and went nowhere else.
    assert all(distance_between(move, arm.state().pose) < 1e-9 for move in arm.moves[sent:])


def test_nothing_is_added_to_an_action_that_is_carried_out_as_it_is():
    env, _ = make()
    env.reset()
    *_, info = env.step(np.array([1, -1, 0.3, 0, 0, 0, 1], np.float32))
    assert "executed_action" not in info
    assert "action" not in info["limited"]


def test_the_hand_does_not_move_for_a_joint_angle_that_is_refused():
    from dzrobot.envs.franka.make import make_franka

    env = make_franka(workcell="fake", embodiment="oxe_droid", reward={"rule": "none"})
    env.reset()
    asked = len(env.arm.gripper.requests)
    *_, info = env.step(np.array([9, 0, 0, 0, 0, 0, 0, 1], np.float32))
    assert info["abort"] == "invalid_action"
    assert len(env.arm.gripper.requests) == asked
    env.close()


class Strong(Bad):
    def act(self, obs, *, session=DEFAULT_SESSION):
        return AHEAD * 2.6


def test_a_recording_holds_what_was_carried_out(tmp_path):
    assert main(
        ["record", "--workcell", "fake", "--policy", f"{__name__}:Strong", "--attempts", "1",
         "--keep-failures", "--max-steps", "4", "--unattended", "--output", str(tmp_path / "set")]
    ) == 0  # fmt: skip
    (path,) = (tmp_path / "set/data").rglob("*.parquet")
    actions = np.stack(pq.read_table(path)["action"].to_numpy())
    assert actions[:, 0].tolist() == [1.0] * 4
