"""One episode: what is done, counted and hashed."""

import hashlib

import gymnasium as gym
import numpy as np
import pytest

import dzrobot  # noqa: F401 (registers the ids)
from dzrobot.errors import (
    InvalidActionError,
    ModalityError,
    RobotError,
    ServerError,
    SimulatorError,
)
from dzrobot.policies.base import Plan
from dzrobot.policies.wrapping import adapted
from dzrobot.rollout.episode import PolicyActor, percentiles, run_episode
from dzrobot.rollout.protocol import EpisodeRules


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
            share = None if self.plan is None else 0.5
            self.plan = Plan(actions=rows, targets=rows, normalized=rows, timing={}, clipped=share)
        return super().act(obs, session=session)

    def last_plan(self, session):
        return self.plan


def test_plans_are_timed_apart_from_the_actions_that_were_there_already():
    actor = PolicyActor(policy=adapted(Planner()))
    outcome = run_episode(point(task_id=1), actor, EpisodeRules(seed=3))
    assert len(actor.plan_ms) == -(-outcome.steps // 3)
    assert outcome.plan_ms == percentiles(actor.plan_ms)
    # The first plan does not say it.
    assert outcome.clipped == actor.clipped == 0.5
    plain = run_episode(point(), Steer(), EpisodeRules(seed=3))
    assert (plain.plan_ms, plain.clipped) == (None, None)


class Saying(gym.Wrapper):
    """Says of every episode how it failed, or something else."""

    def __init__(self, env, said, key="failure_class"):
        super().__init__(env)
        self.said = {key: said}

    def step(self, action):
        *rest, info = self.env.step(action)
        return *rest, {**info, **self.said}


def test_how_it_failed_is_what_the_environment_says():
    still, rules = Fixed(np.zeros(7, np.float32)), EpisodeRules(seed=3, max_steps=2)
    assert run_episode(point(), still, rules).failure_class == "never reached"
    assert run_episode(Saying(point(), "fell over"), still, rules).failure_class == "fell over"
    assert run_episode(Saying(point(), None), still, rules).failure_class is None
    assert run_episode(point(), Steer(), EpisodeRules(seed=3)).failure_class is None
    for nonsense in (3, "", "x" * 101):
        with pytest.raises(ModalityError, match="failure_class"):
            run_episode(Saying(point(), nonsense), still, rules)


def test_what_ended_an_episode_is_a_text_of_the_environments():
    still, rules = Fixed(np.zeros(7, np.float32)), EpisodeRules(seed=3, max_steps=2)
    for said, ended in (("", "time limit"), ("fell over", "fell over")):
        assert run_episode(Saying(point(), said, "reset_reason"), still, rules).ended == ended
    for nonsense in (None, 3):
        with pytest.raises(ModalityError, match="reset_reason"):
            run_episode(Saying(point(), nonsense, "reset_reason"), still, rules)


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


class Failing(Steer):
    """Stands still, and at its third action does what it is told."""

    def __init__(self, does):
        super().__init__()
        self.does = does

    def act(self, obs, *, session="default"):
        self.actions.append(np.zeros(7, np.float32))
        return self.does() if len(self.actions) == 3 else self.actions[-1]


def raises(error):
    def act():
        raise error

    return act


BAD = {
    "nan": (lambda: np.full(7, np.nan), "invalid_action", "(7,) finite numbers"),
    "infinite": (lambda: np.full(7, np.inf), "invalid_action", "inf"),
    "short": (lambda: np.zeros(6), "invalid_action", "an action is (7,)"),
    "nested": (lambda: np.zeros((1, 7)), "invalid_action", "an action is (7,)"),
    "none": (lambda: None, "invalid_action", "returned None"),
    "text": (lambda: "left", "invalid_action", "returned 'left'"),
    "predicted nan": (raises(InvalidActionError("not finite")), "invalid_action", "not finite"),
    "exception": (raises(RuntimeError("diverged")), "policy_error", "RuntimeError: diverged"),
    "observation": (raises(ModalityError("no such key")), "policy_error", "no such key"),
}


@pytest.mark.parametrize(("does", "ended", "said"), BAD.values(), ids=BAD)
def test_what_a_policy_does_wrong_ends_its_episode_as_a_failure(does, ended, said):
    outcome = run_episode(point(), Failing(does), EpisodeRules(seed=0))
    assert (outcome.success, outcome.steps, outcome.fault) == (False, 2, "")
    assert (outcome.ended, outcome.failure_class) == (ended, "the policy failed")
    assert said in outcome.policy_failure.error
    assert ("Traceback" in outcome.policy_failure.details) == (ended == "policy_error")


def test_a_success_before_the_policy_failed_stays_one():
    class Arrives(Steer):
        def act(self, obs, *, session="default"):
            if len(self.actions) > 20:
                raise RuntimeError("done with it")
            return super().act(obs, session=session)

    class GoesOn(gym.Wrapper):
        def step(self, action):
            observation, reward, _, truncated, info = self.env.step(action)
            return observation, reward, False, truncated, info

    rules = EpisodeRules(seed=3)
    outcome = run_episode(GoesOn(point()), Arrives(), rules, stop_at_success=False)
    assert (outcome.success, outcome.ended, outcome.steps) == (True, "success", 21)
    assert "done with it" in outcome.policy_failure.error


class OutOfMemoryError(RuntimeError):
    """Called as torch's."""


@pytest.mark.parametrize(
    "error",
    [
        RobotError("the device is lost"),
        ServerError("the server is gone"),
        OSError("disk"),
        OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_devices_servers_and_the_machine_do_is_no_result_of_the_policy(error):
    with pytest.raises(type(error), match=str(error)):
        run_episode(point(), Failing(raises(error)), EpisodeRules(seed=0))


def test_a_policy_that_never_acted_has_no_result():
    class Broken(Steer):
        def act(self, obs, *, session="default"):
            raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        run_episode(point(), Broken(), EpisodeRules(seed=0))
    # What it says at once, it has said.
    assert run_episode(point(), Fixed(np.full(7, np.nan)), EpisodeRules(seed=0)).steps == 0


def test_exceptions_of_the_environment_are_raised():
    with pytest.raises(SimulatorError, match="step 2"):
        run_episode(point(crash_at=2), Fixed(np.zeros(7)), EpisodeRules(seed=0))
