"""Plans that are made while the robot moves: of what was seen when they were asked for."""

import numpy as np
import pytest
import torch

from dzrobot.embodiments.registry import EMBODIMENTS, load_embodiment
from dzrobot.errors import ConfigError, SessionError
from dzrobot.policies.base import Leftover
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy, PolicyOptions
from dzrobot.policies.dreamzero.tiny import write_tiny_checkpoint
from dzrobot.rollout.asynchronous.engine import Engine, VirtualDesk
from dzrobot.rollout.asynchronous.execution import ExecutionOptions, parse_latency, schedule

EXECUTE, STEPS = 5, 17


@pytest.fixture(scope="module")
def policy(continuing_checkpoint):
    options = PolicyOptions(dit_steps=5, history="recent", noise="keyed", execute=EXECUTE)
    return DreamZeroPolicy.from_pretrained(
        continuing_checkpoint, embodiment="libero_sim", options=options
    )


def seen(step, robot=EMBODIMENTS["libero_sim"]):
    draws = np.random.default_rng(step)
    views = {v.key: draws.integers(0, 256, (*v.resolution, 3), dtype=np.uint8) for v in robot.views}
    state = {p.key: draws.uniform(-1, 1, p.dim).astype(np.float32) for p in robot.state}
    return {**views, **state, robot.language: "lift the cube"}


def acted(policy, execution, latency="zero", **options):
    """Return the actions of an episode that the engine runs."""
    policy.reset("engine", episode=3)
    said = ExecutionOptions(execution=execution, latency=parse_latency(latency), **options)
    plan = schedule(said, policy.embodiment, 20.0, EXECUTE)
    desk = VirtualDesk(said.latency, plan.hz, ())
    engine = Engine(policy, plan, desk, session="engine")
    return np.stack([engine.act(seen(step)) for step in range(STEPS)])


def test_without_latency_every_execution_is_the_ordinary_one(policy):
    """To the bit, over four plans: nothing is left over, so nothing is continued."""
    policy.reset("plain", episode=3)
    wanted = np.stack([policy.act(seen(step), session="plain") for step in range(STEPS)])
    for execution in ("sync", "naive", "rtc"):
        np.testing.assert_array_equal(acted(policy, execution), wanted)


def test_guidance_of_no_strength_is_naive(policy):
    naive, none, some = (
        acted(policy, execution, "steps:2", **options)
        for execution, options in (("naive", {}), ("rtc", {"strength": 0.0}), ("rtc", {}))
    )
    np.testing.assert_array_equal(none, naive)
    assert np.abs(some - naive).max() > 1e-3


def test_a_plan_knows_nothing_of_what_comes_after_its_request(policy):
    plans = []
    for later in (0, 3):
        policy.reset("one", episode=0)
        policy.observe(seen(0), session="one")
        policy.plan([policy.ask(session="one")])[0]
        for step in range(1, 4):
            policy.observe(seen(step), session="one")
        ticket = policy.ask(session="one")
        for step in range(4, 4 + later):
            policy.observe(seen(step), session="one")
        plans.append(policy.plan([ticket])[0].actions)
    np.testing.assert_array_equal(*plans)


@pytest.mark.parametrize("method", ["guided", "trained"])
def test_a_plan_begins_with_what_the_robot_executes_meanwhile(policy, method):
    policy.reset("one", episode=0)
    policy.observe(seen(0), session="one")
    first = policy.plan([policy.ask(session="one")])[0]
    policy.observe(seen(1), session="one")
    leftover = Leftover(targets=first.targets[6:], delay=3, method=method)
    given = policy.plan([policy.ask(session="one", leftover=leftover)])[0]
    np.testing.assert_array_equal(given.targets[:3], first.targets[6:9])
    np.testing.assert_array_equal(given.actions[:3], first.actions[6:9])
    assert np.isfinite(given.targets).all()


def test_an_episode_that_is_over_gets_no_plan(policy):
    policy.reset("one", episode=0)
    policy.observe(seen(0), session="one")
    ticket = policy.ask(session="one")
    policy.reset("one", episode=1)
    with pytest.raises(SessionError, match="'one' is over"):
        policy.plan([ticket])


def test_longer_delays_than_trained_are_refused(policy, tmp_path):
    policy.reset("one", episode=0)
    policy.observe(seen(0), session="one")
    rows = np.zeros((9, 7), np.float32)
    policy.ask(session="one", leftover=Leftover(targets=rows, delay=4, method="trained"))
    with pytest.raises(ConfigError, match=r"5 rows .* given 4: .*rtc_training_max_delay=5"):
        policy.ask(session="one", leftover=Leftover(targets=rows, delay=5, method="trained"))
    other = write_tiny_checkpoint(tmp_path / "published", policy.embodiment)
    published = DreamZeroPolicy.from_pretrained(other, embodiment=policy.embodiment)
    assert published.can.continues == {"guided": 16}


@pytest.mark.parametrize("delay", [0, 3])
def test_a_leftover_has_as_many_rows_as_are_executed(delay):
    with pytest.raises(ConfigError, match=f"delay={delay} with 2 rows"):
        Leftover(targets=np.zeros((2, 7), np.float32), delay=delay)


def test_relative_targets_are_measured_from_the_new_state(tmp_path):
    """DROID's joints: the same places, whatever the arm has moved since."""
    robot = load_embodiment("oxe_droid")
    folder = write_tiny_checkpoint(tmp_path / "droid", robot)
    policy = DreamZeroPolicy.from_pretrained(
        folder, embodiment=robot, options=PolicyOptions(dit_steps=5)
    )
    policy.observe(seen(0, robot))
    first = policy.plan([policy.ask()])[0]
    policy.observe(seen(1, robot))
    ticket = policy.ask(leftover=Leftover(targets=first.targets[4:], delay=5))
    known = policy._continuing.leftover(ticket)
    moved = seen(1, robot)["state.joint_position"] - seen(0, robot)["state.joint_position"]
    assert np.abs(moved).max() > 0.1
    # In the network's numbers they differ; back in the robot's, from the new state, they do not.
    back = policy._pipeline.decode_targets(known.action_AM, seen(1, robot))
    np.testing.assert_allclose(back[: known.end], first.targets[4:], rtol=0, atol=1e-5)
    assert not np.allclose(known.action_AM[: known.end, :7], first.normalized[4:, :7], atol=1e-3)
    # What is beyond the running plan repeats its end, with no weight.
    assert torch.equal(known.action_AM[-1], known.action_AM[known.end - 1])
    assert known.end == 20
