"""What a policy can do: by its base class, through a wrapper, and of a plain object."""

import re
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from dzrobot import (
    DreamZeroPolicy,
    Policy,
    PolicyOptions,
    default_checkpoint,
    load_embodiment,
    run_episode,
)
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, InvalidActionError, SessionError
from dzrobot.policies.base import Abilities, Ask, Leftover, Plan, blank, end_all
from dzrobot.policies.serving.endpoint import ServeOptions
from dzrobot.policies.serving.server import PolicyServer, in_background
from dzrobot.policies.serving.sessions import check_plan
from dzrobot.policies.wrapping import adapted
from dzrobot.rollout.protocol import EpisodeRules

ROBOT = load_embodiment("libero_sim")
PAGE = Path(__file__).parents[2] / "docs/extend/policy.md"


class Counting(Policy):
    """Plans three rows that say how many plans were made, and of which session."""

    execute = 2

    def __init__(self, embodiment: Embodiment = ROBOT) -> None:
        self.embodiment = embodiment
        self.calls: list[list[str]] = []

    def plan(self, asks):
        self.calls.append([ask.session for ask in asks])
        return [Plan.of(np.full((3, 7), len(self.calls), np.float32)) for _ in asks]


def seen():
    return blank(ROBOT, None)


def test_a_policy_that_overrides_plan_acts_batches_and_can_be_served():
    policy = Counting()
    assert policy.can == Abilities(plans=True, batches=True, serves=True)
    assert [policy.act(seen())[0] for _ in range(5)] == [1, 1, 2, 2, 3]
    policy.reset()
    assert policy.last_plan() is None
    assert policy.act(seen())[0] == 4
    assert policy.last_plan().actions[2, 0] == 4
    policy.calls.clear()
    for _ in range(2):
        policy.act_batch([seen(), seen(), seen()], ["default", "a", "b"])
    # The default session had a row left; the others planned together.
    assert policy.calls == [["a", "b"], ["default"]]
    assert PolicyServer(policy).options
    policy.observe(seen())
    with pytest.raises(ConfigError, match="given none"):
        policy.ask(leftover=Leftover(targets=np.zeros((2, 7), np.float32), delay=1))
    end_all(policy)
    with pytest.raises(SessionError, match="observed nothing"):
        policy.ask()


def test_a_policy_that_overrides_act_alone_can_do_no_more():
    class Still(Policy):
        def act(self, obs, *, session="default"):
            return np.zeros(7, np.float32)

    policy = Still()
    assert policy.can == Abilities()
    assert len(policy.act_batch([seen(), seen()], ["a", "b"])) == 2
    assert policy.reads_frames()
    assert policy.last_plan() is None
    with pytest.raises(ConfigError, match="class Still cannot be served, because it lacks plan"):
        PolicyServer(policy)
    assert repr(policy) == "<Still of any robot>"
    with pytest.raises(NotImplementedError, match="Policy overrides neither act nor plan"):
        Policy().act(seen())


@pytest.fixture(scope="module")
def bundled():
    return DreamZeroPolicy.from_pretrained(
        default_checkpoint(), options=PolicyOptions(noise="keyed", history="off")
    )


def abilities(policy):
    """Return the answers to eleven questions; each was a protocol of its own once."""
    robot = load_embodiment("libero_mini")
    policy.reset("asked", episode=0)
    policy.act(blank(robot, None), session="asked")
    return {
        **vars(policy.can),
        "plans next": policy.plans_next(session="asked"),
        "reads frames": policy.reads_frames(session="asked"),
        "shows plans": policy.last_plan("asked") is not None,
        "counts plans": policy.planning is not None,
    }


def documented(name):
    """Return what the page defines as ``name``."""
    (code,) = re.findall(rf"```python\n((?:(?!```).)*class {name}\(.*?)```", PAGE.read_text(), re.S)
    given = {"Nod": lambda robot: Counting(robot), "load_embodiment": load_embodiment}
    exec(code, given)
    return given[name], code


def test_the_loggers_ten_lines_keep_every_ability(bundled):
    Logged, code = documented("Logged")
    lines = re.search(r"class Logged.*?return actions\n", code, re.S)[0].splitlines()
    assert len([line for line in lines if line.strip()]) <= 10
    logged = Logged(bundled)
    whole = abilities(bundled)
    assert len(whole) == 11
    assert whole == {
        "plans": True, "batches": True, "serves": True, "predicts": True, "defers": True,
        "encodes": True, "continues": {"guided": 8}, "plans next": False, "reads frames": False,
        "shows plans": True, "counts plans": True,
    }  # fmt: skip
    assert abilities(logged) == whole
    assert [session for session, _ in logged.kept] == ["asked"]
    bundled.reset("there", episode=4)
    wanted = bundled.act(blank(bundled.embodiment, None), session="there")
    logged.reset("there", episode=4)
    [given] = logged.act_batch([blank(bundled.embodiment, None)], ["there"])
    np.testing.assert_array_equal(given, wanted)
    assert logged.policy is bundled


class Plain:
    """A user's logger of two methods."""

    def __init__(self, inner):
        self.inner, self.kept = inner, []

    def act(self, obs, *, session="default"):
        self.kept.append(session)
        return self.inner.act(obs, session=session)

    def reset(self, session="default", *, episode=None):
        self.inner.reset(session, episode=episode)


def test_a_plain_wrapper_says_once_what_it_hides(bundled, caplog):
    policy = adapted(Plain(bundled))
    adapted(Plain(bundled))
    (told,) = caplog.messages
    assert told.startswith("Plain hides what the DreamZeroPolicy in it can do (")
    for ability in ("batches", "plans", "predicts", "serves", "encodes", "defers", "continues"):
        assert ability in told
    assert "dzrobot.policies.Wrapper" in told
    assert policy.can == Abilities()
    # Around something that can do no more, there is nothing to say.
    caplog.clear()
    adapted(Plain(adapted(Plain(None))))
    assert not caplog.messages


class Foreign(Plain):
    """Has methods of these names with another meaning."""

    embodiment = ROBOT
    asked: list

    def infer_batch(self, observations, sessions):
        self.asked = list(sessions)
        rows = np.zeros((ROBOT.timing.action_horizon, 7), np.float32)
        return [{"actions": rows, "timing": {"total_ms": 1.0}} for _ in sessions]

    def evict(self, session):
        self.asked = []

    def stage(self, session):
        return 3

    def footprint(self, session):
        raise AssertionError("nobody has to ask")


class Serving(Foreign):
    serves = True


@pytest.mark.parametrize("member", ["infer_batch", "evict", "stage", "footprint"])
def test_the_member_that_a_servable_policy_lacks_is_named(member):
    with pytest.raises(ConfigError, match=f"because it lacks {member}:"):
        PolicyServer(type("Lacking", (Serving,), {member: None})(None))


@pytest.mark.parametrize(("execute", "least"), [(None, 16), (4, 4)])
def test_a_plan_that_clients_cannot_execute_is_refused_at_the_start(execute, least):
    policy = Counting()
    policy.execute = execute
    with (
        pytest.raises(InvalidActionError, match=rf"float32 \(3, 7\).*at least {least} rows"),
        in_background(PolicyServer(policy, ServeOptions(port=0, array_port=0))),
    ):
        pass


def test_a_plan_as_long_as_the_policy_executes_is_served():
    with in_background(PolicyServer(Counting(), ServeOptions(port=0, array_port=0))) as server:
        assert server.capacity


@pytest.mark.parametrize(
    "rows", [np.zeros((16, 6), np.float32), np.full((16, 7), np.nan, np.float32), None,
             np.zeros((16, 7), int), np.zeros((1, 16, 7), np.float32)],
)  # fmt: skip
def test_only_whole_finite_plans_are_served(rows):
    with pytest.raises(InvalidActionError, match="a served plan of libero_sim"):
        check_plan(rows, ROBOT, 16)


def test_names_alone_make_nothing_servable():
    with pytest.raises(ConfigError, match=r"class Foreign cannot be served.*serves = True"):
        PolicyServer(Foreign(None))
    assert PolicyServer(Serving(None)).options
    policy = adapted(Serving(None))
    assert policy.stage("a") == 3
    (plan,) = policy.plan([Ask(session="a", observation=seen())])
    assert plan.actions.shape == (ROBOT.timing.action_horizon, 7)


class Earlier(Plain):
    """Has the optional methods that were documented before there was a base class."""

    embodiment = ROBOT
    defers_images = True

    def act_batch(self, observations, sessions):
        return [np.full(7, len(sessions), np.float32) for _ in sessions]

    def reads_frames(self, *, session="default", asked=None):
        return asked is True

    def last_plan(self, session):
        return None

    def imagine(self, session):
        return np.zeros((4, 2, 2, 3), np.uint8)

    def imagine_later(self, session):
        return lambda without: self.imagine(session)[without:]

    def observe(self, obs, *, session="default"):
        self.kept.append("observed")

    def request(self, *, session="default", leftover=None):
        return "ticket", leftover

    def result(self, ticket):
        self.kept.append(ticket)
        return None if ticket[1] is None else Plan.of(ticket[1].targets)

    def longest_delay(self, method):
        return 3 if method == "guided" else 0


def test_optional_methods_of_plain_objects_go_on_for_a_version(caplog):
    plain = Earlier(None)
    policy = adapted(plain)
    (told,) = caplog.messages
    assert "Earlier has act_batch, reads_frames" in told
    assert "subclass of dzrobot.Policy" in told
    assert policy.can == Abilities(
        plans=True, batches=True, continues={"guided": 3}, predicts=True, defers=True
    )
    assert policy.act_batch([seen(), seen()], ["a", "b"])[0][0] == 2
    reads = [policy.reads_frames(when=when) for when in ("acting", "planning", "moving")]
    assert reads == [False, True, False]
    assert policy.imagine_later("a")(1).shape == (3, 2, 2, 3)
    policy.observe(seen(), session="a")
    left = Leftover(targets=np.ones((3, 7), np.float32), delay=2)
    (plan,) = policy.plan([policy.ask(session="a", leftover=left)])
    assert plan.actions is left.targets
    with pytest.raises(SessionError, match=r"'a' .* is over"):
        policy.plan([policy.ask(session="a")])


def test_what_is_not_a_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match="a lock has no act and no reset: a policy is"):
        adapted(threading.Lock())
    env = gym.make("dzrobot/point-v0")
    with pytest.raises(ConfigError, match="a dict has no act and no reset"):
        run_episode(env, {}, EpisodeRules(seed=0))
    with pytest.raises(ConfigError, match=r"'random' is a name, as the command line .* take it"):
        run_episode(env, "random")
    with pytest.raises(ConfigError, match=r"DreamZeroPolicy is a class: give one of its objects"):
        run_episode(env, DreamZeroPolicy)
    env.close()
