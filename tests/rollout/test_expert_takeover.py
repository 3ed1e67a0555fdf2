"""An expert takes over from a policy in simulation: when, how late, for how long."""

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies import Plan, Policy
from dzrobot.recording.catalog import episode_facts
from dzrobot.rollout.demonstrations.takeover import ExpertHelp, Takeover
from dzrobot.rollout.episode import Actor, PolicyActor
from dzrobot.rollout.predictions import frame_steps, tiled

ROBOT = load_embodiment("libero_sim")
HZ = 10


def hand(observation):
    return observation[ROBOT.state[0].key][:3]


class Says(Actor):
    """Always the same number; counts how often it was begun."""

    def __init__(self, number):
        self.number, self.begun = number, 0

    def begin(self, env):
        self.begun += 1

    def act(self, observation):
        return np.full(7, self.number, np.float32), 0.0


class Start(gym.Env):
    """An environment that was reset with a seed."""

    def __init__(self, seed=0):
        self.reset(seed=seed)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return None, {}


def helped(text, places, seed=0):
    """Return who acted at every place of the hand (p, E), the policy and the expert."""
    policy, expert = Says(0.0), Says(1.0)
    takeover = Takeover.parsed(text)
    actor = ExpertHelp(policy, lambda env: expert, takeover, hand, HZ)
    actor.begin(Start(seed))
    who = ""
    for place in places:
        state = np.zeros(8, np.float32)
        state[0] = place
        action, _ = actor.act({ROBOT.state[0].key: state})
        assert actor.intervened == (action[6] == 1)
        who += "E" if actor.intervened else "p"
    return who, policy, expert


def test_an_expert_takes_over_from_a_hand_that_is_stuck():
    moves, stays = [0.01 * row for row in range(5)], [0.04] * 12
    assert helped("expert:stuck=0.5,delay=0", moves)[0] == "ppppp"
    who, policy, expert = helped("expert:stuck=0.5,delay=0", moves + stays)
    # Six places within 5 mm are half a second.
    assert who == "p" * 9 + "E" * 8
    assert (policy.begun, expert.begun) == (1, 1)
    late, _, _ = helped("expert:stuck=0.5,delay=0.3", moves + stays)
    assert late == "p" * 12 + "E" * 5


def test_an_expert_lets_go_and_the_policy_begins_anew():
    who, policy, expert = helped("expert:stuck=0.3,delay=0,lasts=0.2", [0.0] * 14)
    assert who == "pppEEpppEEpppE"
    assert (policy.begun, expert.begun) == (3, 3)


def test_chance_follows_from_the_start_alone():
    ran = [helped("expert:random=0.5,delay=0,lasts=0.5", range(200), seed)[0] for seed in (1, 1, 2)]
    assert ran[0] == ran[1] != ran[2]
    assert 0 < ran[0].count("pE") < 20
    assert helped("expert:random=1,delay=0", range(200))[0].count("E") > 100


class Dreamer(Policy):
    """Predicts that what it sees stays as it is; an image is its brightness to it."""

    def __init__(self):
        self.embodiment, self.begun = load_embodiment("libero_mini"), 0

    def reset(self, session="default", *, episode=None):
        super().reset(session, episode=episode)
        self.begun += 1

    def plan(self, asks):
        (ask,) = asks
        self.seen = tiled(ask.observation, self.embodiment)
        return [Plan.of(np.zeros((self.embodiment.timing.action_horizon, 7), np.float32))]

    def imagine(self, session="default"):
        return np.stack([self.seen] * len(frame_steps(self.embodiment.timing)))

    def encode_images(self, images):
        return images.mean(axis=(1, 2, 3), keepdims=True, dtype=np.float32) / 255


def test_an_expert_takes_over_where_the_predicted_video_is_wrong():
    policy = Dreamer()
    robot = policy.embodiment
    every = robot.timing.action_horizon
    takeover = Takeover.parsed("expert:prediction=0.01,delay=0.1,lasts=0.3")
    actor = ExpertHelp(PolicyActor(policy=policy), lambda env: Says(1.0), takeover, hand, HZ)
    actor.begin(Start())
    who = ""
    for step in range(4 * every):
        # It becomes brighter by 0.08 and later by 0.16: squared, less and more than 0.01.
        level = round(255 * (0.2 + 0.08 * (step >= every) + 0.16 * (step >= 2 * every)))
        seen = {key: np.full((128, 128, 3), level, np.uint8) for key in robot.video_keys}
        seen |= {part.key: np.zeros(part.dim, np.float32) for part in robot.state}
        actor.act(seen)
        who += "E" if actor.intervened else "p"
    # Known with the plan at two horizons, taken over a row later, and a row of delay.
    assert who.startswith("p" * (2 * every + 2) + "EEE" + "p" * every)
    assert who.count("E") == 3
    assert policy.begun == 2


@pytest.mark.parametrize(
    "text",
    ["", "expert", "expert:", "person:stuck", "expert:error=1", "expert:stuck=x", "expert:random=2",
     "expert:random=0", "expert:stuck,delay", "expert:stuck,delay=1,delay=2", "expert:stuck,late=1",
     "expert:stuck=1e9", "expert:prediction", "expert:prediction=-1",
     "expert:stuck=-1", "expert:stuck,", "expert:stuck=1.2.3"],
)  # fmt: skip
def test_another_rule_is_refused(text):
    with pytest.raises(ConfigError, match=r"write expert:stuck=2"):
        Takeover.parsed(text)


def test_defaults_and_noise():
    assert Takeover.parsed("expert:stuck") == Takeover(rule="stuck", amount=2.0)
    actor = ExpertHelp(
        Says(0.0), lambda env: Says(1.0), Takeover.parsed("expert:stuck=0,delay=0,noise=0.1"),
        hand, HZ,
    )  # fmt: skip
    actor.begin(Start())
    action, _ = actor.act({ROBOT.state[0].key: np.zeros(8, np.float32)})
    assert 0 < np.abs(action[:6] - 1).max() < 0.5
    assert action[6] == 1


def test_what_does_not_go_together_is_refused(tmp_path, capsys):
    words = ["record", "--output", str(tmp_path / "set")]
    point, stuck = ["--env", "dzrobot/point-v0"], ["--takeover", "expert:stuck"]
    for more, said in (
        ([*point, "--teleop", "gamepad", *stuck], "give --policy, and no --teleop"),
        ([*point, "--policy", "hold", *stuck], "whose simulator an expert can look into"),
        (["--workcell", "fake", "--policy", "hold", *stuck], "on an arm a person takes over"),
        ([*point, "--policy", "hold", "--takeover", "stuck"], "write expert:stuck=2"),
        (
            ["--env", "dzrobot/lift-v0", "--policy", "hold", "--takeover", "expert:prediction=0.1"],
            "HoldPolicy predicts no video in latents",
        ),
    ):
        assert main([*words, *more]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "set").exists()


@pytest.mark.long
def test_an_expert_ends_what_a_policy_left_undone(tmp_path):
    words = [
        "record",
        "--env",
        "dzrobot/lift-v0",
        "--env-arg",
        "resolution=128",
        "--policy",
        "hold",
    ]
    words += [
        "--takeover",
        "expert:stuck=0.5",
        "--episodes",
        "1",
        "--output",
        str(tmp_path / "set"),
    ]
    assert main(words) == 0
    (facts,) = episode_facts(tmp_path / "set").values()
    rows = pq.read_table(tmp_path / "set/data/chunk-000/episode_000000.parquet")["intervention"]
    marks = rows.to_pylist()
    first = marks.index(True)
    # Half a second without motion, and half a second to react.
    assert 15 <= first <= 25
    assert all(marks[first:])
    assert (facts.success, facts.policy) == (True, "hold")
    assert facts.takeovers == [(first, len(marks) - 1)]
