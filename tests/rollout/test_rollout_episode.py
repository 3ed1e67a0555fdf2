"""One episode: what is done, counted and hashed."""

import hashlib

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot.errors import ModalityError, SimulatorError
from dzrobot.policies.base import Plan
from dzrobot.rollout.episode import EpisodeRules, PolicyActor, percentiles, run_episode


class Steer:
    """Moves the point straight to the mark; keeps what it did and was told."""

    def __init__(self):
        self.actions, self.resets = [], []

    def reset(self, session=None, *, episode=None):
        self.resets.append((session, episode))

    def act(self, obs, *, session="default"):
        state = obs["state.state"]
        action = np.zeros(7, np.float32)
        action[:2] = np.clip((state[3:5] - state[:2]) / 0.1, -1, 1)
        self.actions.append(action)
        return action


class Fixed(Steer):
    def __init__(self, action):
        super().__init__()
        self.action = action

    def act(self, obs, *, session="default"):
        return self.action


def point(**arguments):
    return gym.make("dzrobot/point-v0", disable_env_checker=True, **arguments)


def test_outcome_tells_what_happened():
    policy, seen = Steer(), []
    outcome = run_episode(point(task_id=1), policy, EpisodeRules(seed=3), watch=seen.append)
    assert outcome.success
    assert outcome.ended == "success"
    assert outcome.steps == len(policy.actions)
    assert len(seen) == outcome.steps + 1
    assert outcome.init_state_id == 3
    assert outcome.task == "move the point to the green mark"
    expected = hashlib.sha256(np.stack(policy.actions).tobytes()).hexdigest()
    assert outcome.action_sha256 == expected
    assert policy.resets == [("default", None)]
    assert 0 <= outcome.policy_ms["p50"] <= outcome.policy_ms["p95"]


class Planner(Steer):
    """Makes a plan at every third step, and a new one of the same numbers is another plan."""

    def __init__(self):
        super().__init__()
        self.plan = None

    def act(self, obs, *, session="default"):
        if len(self.actions) % 3 == 0:
            rows = np.zeros((3, 2), np.float32)
            self.plan = Plan(actions=rows, targets=rows, normalized=rows, timing={})
        return super().act(obs, session=session)

    def last_plan(self, session):
        return self.plan


def test_plans_are_timed_apart_from_the_actions_that_were_there_already():
    actor = PolicyActor(policy=Planner())
    outcome = run_episode(point(task_id=1), actor, EpisodeRules(seed=3))
    assert len(actor.plan_ms) == -(-outcome.steps // 3)
    assert outcome.plan_ms == percentiles(actor.plan_ms)
    assert run_episode(point(), Steer(), EpisodeRules(seed=3)).plan_ms is None


class Saying(gym.Wrapper):
    """Says of every episode how it failed."""

    def __init__(self, env, said):
        super().__init__(env)
        self.said = said

    def step(self, action):
        *rest, info = self.env.step(action)
        return *rest, {**info, "failure_class": self.said}


def test_how_it_failed_is_what_the_environment_says():
    still, rules = Fixed(np.zeros(7, np.float32)), EpisodeRules(seed=3, max_steps=2)
    assert run_episode(point(), still, rules).failure_class == "never reached"
    assert run_episode(Saying(point(), "fell over"), still, rules).failure_class == "fell over"
    assert run_episode(Saying(point(), None), still, rules).failure_class is None
    assert run_episode(point(), Steer(), EpisodeRules(seed=3)).failure_class is None
    for nonsense in (3, "", "x" * 101):
        with pytest.raises(ModalityError, match="failure_class"):
            run_episode(Saying(point(), nonsense), still, rules)


def test_start_is_the_one_asked_for():
    seen = []
    rules = EpisodeRules(seed=3, init_state_id=17, max_steps=1)
    outcome = run_episode(point(), Steer(), rules, watch=seen.append)
    assert outcome.init_state_id == 17
    other = []
    run_episode(point(), Steer(), EpisodeRules(seed=17, max_steps=1), watch=other.append)
    np.testing.assert_array_equal(seen[0]["state.state"], other[0]["state.state"])


@pytest.mark.parametrize(("limit", "steps"), [(5, 5), (None, 60)])
def test_time_limits_end_an_episode(limit, steps):
    policy = Fixed(np.zeros(7, np.float32))
    outcome = run_episode(point(), policy, EpisodeRules(seed=0, max_steps=limit))
    assert (outcome.steps, outcome.success, outcome.ended) == (steps, False, "time limit")


@pytest.mark.parametrize(
    "action", [np.full(7, np.nan), np.zeros(6), np.zeros((1, 7))], ids=["nan", "short", "nested"]
)
def test_bad_actions_do_not_reach_the_environment(action):
    with pytest.raises(ModalityError, match="7"):
        run_episode(point(), Fixed(action), EpisodeRules(seed=0))


def test_exceptions_of_the_environment_are_raised():
    with pytest.raises(SimulatorError, match="step 2"):
        run_episode(point(crash_at=2), Fixed(np.zeros(7)), EpisodeRules(seed=0))
