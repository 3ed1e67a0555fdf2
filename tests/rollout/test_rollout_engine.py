"""Executing one plan while the next is made, with plans that say where they are from."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from dzrobot.embodiments.action_conventions import hold_command
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.base import Abilities, Ask, Plan, Policy
from dzrobot.rollout.asynchronous.engine import (
    Engine,
    EngineActor,
    ThreadDesk,
    VirtualDesk,
    jerk,
    log_dimensionless_jerk,
    path_ratio,
    seam_jump,
)
from dzrobot.rollout.asynchronous.execution import ExecutionOptions, parse_latency, schedule

ROBOT = load_embodiment("libero_mini")
HORIZON = ROBOT.timing.action_horizon


@dataclass(frozen=True, eq=False, kw_only=True)
class Numbers(Ask):
    episode: int
    step: int


@dataclass
class Numbered(Policy):
    """Row i of the plan made from step t holds t and i; keeps what it was asked."""

    embodiment = ROBOT
    trained: int = 0
    seen: int = 0
    asked: list = field(default_factory=list)
    episode: int = 0
    gate: threading.Event | None = None

    def act(self, obs, *, session="default"):
        raise AssertionError("the engine asks for plans")

    @property
    def can(self):
        return Abilities(plans=True, continues={"guided": HORIZON, "trained": self.trained})

    def reset(self, session="default", *, episode=None):
        self.seen, self.asked = 0, []
        self.episode += 1

    def observe(self, obs, *, session="default"):
        self.seen += 1

    def ask(self, *, session="default", leftover=None):
        self.asked.append((self.seen - 1, leftover))
        return Numbers(observation=seen(), episode=self.episode, step=self.seen - 1)

    def plan(self, asks):
        if self.gate is not None:
            assert self.gate.wait(60)
        [numbers] = asks
        assert numbers.episode == self.episode, "whatever is asked is answered in its episode"
        return [self.numbered(numbers.step)]

    def numbered(self, step):
        rows = np.zeros((HORIZON, ROBOT.action_dim), np.float32)
        rows[:, 0], rows[:, 1] = step, np.arange(HORIZON)
        rows[:, 6] = 1
        return Plan(actions=rows, targets=rows.copy(), normalized=rows, timing={})


def started(execution="sync", latency="zero", *, really=None, execute=None, policy=None, **more):
    policy = policy or Numbered()
    said = ExecutionOptions(execution=execution, latency=parse_latency(latency), **more)
    plan = schedule(said, ROBOT, 20.0, execute)
    takes = parse_latency(really or latency)
    desk = VirtualDesk(takes, plan.hz, ("key",), first_free=said.first_plan == "free")
    return Engine(policy, plan, desk, hand=slice(0, 3)), policy


def seen(step=0):
    return {"state.state": np.full(8, 0.01 * step, np.float32)}


def rows_of(engine, steps):
    """Return (made at, row) of every step, or None where it was held."""
    found = []
    for step in range(steps):
        before = engine.measures().held_steps
        action = engine.act(seen(step))
        held = engine.measures().held_steps > before
        found.append(None if held else (int(action[0]), int(action[1])))
    return found


@pytest.mark.parametrize("execution", ["sync", "naive", "rtc"])
def test_without_latency_all_are_one(execution):
    engine, policy = started(execution, execute=3)
    assert rows_of(engine, 7) == [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2), (6, 0)]
    # Nothing is left over where nothing is executed meanwhile.
    assert policy.asked == [(0, None), (3, None), (6, None)]
    assert engine.measures().held_steps == engine.measures().stale_steps == 0


def test_sync_holds_while_it_thinks_and_drops_nothing():
    engine, _ = started("sync", "steps:2", execute=3)
    first, second = [(0, 0), (0, 1), (0, 2)], [(5, 0), (5, 1), (5, 2)]
    assert rows_of(engine, 12) == [None, None, *first, None, None, *second, None, None]
    measured = engine.measures()
    assert (measured.held_steps, measured.late) == (6, 0)
    assert measured.delay_steps == (2, 2)
    assert measured.latency_s == (0.1, 0.1)


def test_rows_are_dropped_by_the_step_they_were_meant_for():
    engine, policy = started("naive", "steps:2", execute=3)
    made = rows_of(engine, 13)
    # The first plan is waited for, so nothing of it has passed; then every row is in its step.
    assert made[:2] == [None, None]
    assert made[2:7] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
    assert made[7:10] == [(5, 2), (5, 3), (5, 4)]
    assert all(step == sum(row) for step, row in enumerate(made) if row and row[0])
    assert [step for step, _ in policy.asked] == [0, 5, 8, 11]
    measured = engine.measures()
    assert (measured.held_steps, measured.late) == (2, 0)
    # Two of three steps are executed while the next plan is being made.
    assert measured.stale_steps == 6


def test_the_first_plan_may_be_free():
    engine, _ = started("naive", "steps:2", execute=3, first_plan="free")
    assert rows_of(engine, 3) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(("execution", "method"), [("rtc", "guided"), ("trained", "trained")])
def test_the_running_plan_is_handed_on_from_the_step_of_the_request(execution, method):
    engine, policy = started(execution, "steps:2", execute=3, policy=Numbered(trained=2))
    rows_of(engine, 9)
    (_, first), (step, leftover), (_, third) = policy.asked
    assert (first, step) == (None, 5)
    assert (leftover.delay, leftover.method) == (2, method)
    # The next row to be executed comes first, and there are H - s of them.
    assert leftover.targets[:, 1].tolist() == [3, 4, 5, 6, 7]
    assert third.targets[:, 1].tolist() == [3, 4, 5, 6, 7]


def test_an_ensemble_weighs_every_plan_of_a_step():
    """Zhao et al.: weights exp(-m i), the oldest plan has i = 0; here written out by hand."""
    engine, policy = started("ensemble", decay=0.5)
    for step in range(2 * HORIZON):
        action = engine.act(seen(step))
        made = range(max(0, step - HORIZON + 1), step + 1)
        weights = np.array([np.exp(-0.5 * i) for i in range(len(made))])
        weights /= weights.sum()
        assert action[0] == pytest.approx(sum(w * t for w, t in zip(weights, made, strict=True)))
        assert action[1] == pytest.approx(
            sum(w * (step - t) for w, t in zip(weights, made, strict=True))
        )
    # Every step asks, and no plan is given another's rows.
    assert policy.asked == [(step, None) for step in range(2 * HORIZON)]
    assert engine.measures().reaction_mean_s > 0


def test_an_ensemble_waits_and_skips_rows_as_one_plan_does():
    """The mean of numbers that say their step is that step, whatever the latency."""
    engine, _ = started("ensemble", "steps:2", execute=3)
    sums = [float(action[0] + action[1]) for action in (engine.act(seen(s)) for s in range(40))]
    # The first plan was waited for, so its rows come two steps late.
    assert sums[:7] == [0, 0, 0, 1, 2, 3, 4]
    assert sums[2 + HORIZON :] == pytest.approx(range(2 + HORIZON, 40))
    assert engine.measures().held_steps == 2


@pytest.mark.parametrize(("votes", "command"), [((0.9, -0.2), 1.0), ((-0.9, 0.2), -1.0)])
def test_grippers_of_an_ensemble_are_averaged_as_predicted(votes, command):
    class Undecided(Numbered):
        def numbered(self, step):
            plan = super().numbered(step)
            plan.targets[:, 6] = votes[step % 2]
            plan.actions[:, 6] = np.where(plan.targets[:, 6] > 0, 1, -1)
            return plan

    engine, _ = started("ensemble", policy=Undecided(), decay=0.0)
    assert engine.act(seen(0))[6] == np.sign(votes[0])
    assert engine.act(seen(1))[6] == command


def test_only_an_ensemble_has_a_decay():
    with pytest.raises(ConfigError, match="'ensemble', not of 'naive'"):
        started("naive", decay=0.1)
    with pytest.raises(ConfigError, match="-100 to 100"):
        started("ensemble", decay=1000.0)
    engine, _ = started("ensemble", "steps:2")
    assert engine._schedule.execute == 2
    assert engine._schedule.card()["decay"] == 0.01
    for decay in (100.0, -100.0):
        engine, _ = started("ensemble", decay=decay)
        assert all(np.isfinite(engine.act(seen(step))).all() for step in range(20))


def test_an_answer_that_is_later_than_foreseen_is_counted(tmp_path):
    times = tmp_path / "times.csv"
    times.write_text("0.05\n" * 30 + "0.2\n" * 9)
    engine, _ = started("rtc", f"file:{times}", execute=4)
    rows_of(engine, 400)
    measured = engine.measures()
    assert measured.late > 0
    assert set(measured.delay_steps) == {1, 4}


def test_a_plan_that_runs_dry_is_held():
    engine, _ = started("naive", "steps:1", really="steps:6", execute=4)
    made = rows_of(engine, 20)
    assert made[6:14] == [(0, row) for row in range(8)]
    # Asked for at row 4, answered six steps later: four rows were executed, two steps were held.
    assert made[14:16] == [None, None]
    assert made[16] == (10, 4)
    assert engine.measures().late > 0


@pytest.mark.parametrize(
    ("latency", "execute", "numbers"),
    [("steps:3", 2, "d=3.*s=2.*H=8"), ("steps:3", 6, "d=3.*s=6.*H=8"),
     ("steps:5", None, "d=5.*H=8"), ("0.25", 3, "d=5.*s=3.*H=8")],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_three_numbers(latency, execute, numbers):
    with pytest.raises(ConfigError, match=numbers):
        started("rtc", latency, execute=execute)
    started("sync", latency, execute=execute)


def test_an_unknown_latency_needs_the_number_of_steps():
    with pytest.raises(ConfigError, match="--execute"):
        started("naive", "measured")
    started("naive", "measured", execute=4)


def test_the_plan_of_an_episode_that_is_over_is_dropped():
    policy, desk = Numbered(gate=threading.Event()), ThreadDesk()
    plan = schedule(ExecutionOptions(execution="naive", latency=None), ROBOT, 20.0, 4)
    actor = EngineActor(policy=policy, schedule=plan, desk=desk)
    actor.begin(None)
    assert not actor.act(seen())[0].any()
    policy.gate.set()
    actor.begin(None)
    assert not desk.busy
    while actor.measures().held_steps == len(actor.measures().latency_s) == 0:
        actor.act(seen())
    assert actor.measures().late == 0


def test_an_error_on_the_thread_is_raised_where_actions_are_taken():
    class Broken(Numbered):
        def plan(self, asks):
            raise RuntimeError("the network broke")

    plan = schedule(ExecutionOptions(execution="naive", latency=None), ROBOT, 20.0, 4)
    actor = EngineActor(policy=Broken(), schedule=plan, desk=ThreadDesk())
    actor.begin(None)

    def go_on():
        while True:
            actor.act(seen())

    with pytest.raises(RuntimeError, match="the network broke"):
        go_on()


def test_draws_are_a_function_of_their_key():
    latency = parse_latency("lognormal:0.2,0.6")
    drawn = [latency.seconds(("a", i), 20, 0.0) for i in range(2000)]
    assert drawn == [latency.seconds(("a", i), 20, 0.0) for i in range(2000)]
    assert drawn[:5] != [latency.seconds(("b", i), 20, 0.0) for i in range(5)]
    assert np.median(drawn) == pytest.approx(0.2, rel=0.1)
    assert np.percentile(drawn, 95) == pytest.approx(0.6, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "soon", "-1", "1e9", "nan", "steps:", "steps:-1", "steps:1.5", "lognormal:1",
             "lognormal:0.5,0.2", "lognormal:0,1", "file:", "file:/nowhere", "zero:1"],
)  # fmt: skip
def test_what_is_no_latency_is_refused(text):
    with pytest.raises(ConfigError):
        parse_latency(text)


def test_a_quarter_of_a_second_is_five_steps():
    assert parse_latency("0.25").known_steps(20) == 5
    assert parse_latency("0.25").known_steps(15) == 4
    assert parse_latency("0.3").known_steps(10) == 3


def test_robots_are_held_as_they_say():
    last = np.arange(1, 8, dtype=np.float32)
    assert hold_command(ROBOT, seen(), None).tolist() == [0] * 7
    assert hold_command(ROBOT, seen(), last).tolist() == [0] * 6 + [7]
    droid = load_embodiment("oxe_droid")
    state = {"state.joint_position": np.arange(7.0), "state.gripper_position": np.ones(1)}
    assert hold_command(droid, state, None).tolist() == [0, 1, 2, 3, 4, 5, 6, 1]
    repeated = np.full(8, 0.3, np.float32)
    np.testing.assert_array_equal(hold_command(droid, state, repeated), repeated)


def test_measures_of_known_paths():
    hz, times = 20.0, np.arange(40) / 20.0
    cubic = np.stack([times**3, 0 * times, 0 * times], axis=1)
    assert jerk(cubic, hz) == pytest.approx(6.0)
    straight = np.stack([times, 0 * times, 0 * times], axis=1)
    assert path_ratio(straight) == pytest.approx(1.0)
    assert path_ratio(np.zeros((5, 3))) is None
    shaken = cubic + 0.01 * np.random.default_rng(0).normal(size=cubic.shape)
    assert log_dimensionless_jerk(shaken, hz) < log_dimensionless_jerk(cubic, hz)
    # Scaled in space and time, it is the same movement.
    twice = log_dimensionless_jerk(2 * cubic, hz)
    assert twice == pytest.approx(log_dimensionless_jerk(cubic, hz))
    ramps = [np.arange(4.0)[:, None], np.arange(5.0, 9.0)[:, None]]
    assert seam_jump(ramps) == pytest.approx(2.0)
