"""A robot that does not wait for the plans of another machine: the network there, the arm here."""

import functools

import numpy as np
import pytest
from serving_peers import MINI, Remembering, ask, serving, talking

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, SessionError, SessionLostError
from dzrobot.policies.base import Leftover
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy, PolicyOptions
from dzrobot.policies.serving.connection import ConnectOptions
from dzrobot.policies.serving.dialects import SUBPROTOCOL
from dzrobot.policies.serving.remote_policy import RemotePolicy
from dzrobot.rollout.asynchronous.engine import Engine, ThreadDesk, VirtualDesk
from dzrobot.rollout.asynchronous.execution import ExecutionOptions, parse_latency, schedule

QUICK = ConnectOptions(connect_s=5, first_s=60, later_s=60)
SIM = load_embodiment("libero_sim")
EXECUTE, STEPS = 5, 13
WAYS = (
    (("execution", "naive"),),
    (("execution", "rtc"), ("strength", 2.0), ("weights", "exp")),
    (("execution", "trained"),),
)


def address(server):
    return f"ws://127.0.0.1:{server.ports[0]}"


def seen(step, robot):
    draws = np.random.default_rng(step)
    views = {v.key: draws.integers(0, 256, (*v.resolution, 3), dtype=np.uint8) for v in robot.views}
    state = {p.key: draws.uniform(-1, 1, p.dim).astype(np.float32) for p in robot.state}
    return {**views, **state, robot.language: "lift the cube"}


@pytest.fixture(scope="module")
def network(continuing_checkpoint):
    options = PolicyOptions(dit_steps=5, history="recent", noise="keyed", execute=EXECUTE)
    return DreamZeroPolicy.from_pretrained(continuing_checkpoint, embodiment=SIM, options=options)


@pytest.fixture(scope="module")
def server(network):
    with serving(network) as server:
        yield server


@pytest.fixture(scope="module")
def remote(server):
    """Return a client of the network's server."""
    client = RemotePolicy(address(server), SIM, execute=EXECUTE, options=QUICK)
    yield client
    client.close()


@pytest.fixture(scope="module")
def here(network):
    """Return what the network's episodes are in this process, each run once."""
    return functools.cache(lambda options: acted(network, "here", **dict(options)))


def acted(policy, session, **options):
    """Return the actions of an episode on a virtual clock, and what was measured."""
    policy.reset(session, episode=3)
    said = ExecutionOptions(latency=parse_latency("steps:2"), **options)
    plan = schedule(said, SIM, 20.0, EXECUTE)
    engine = Engine(policy, plan, VirtualDesk(said.latency, plan.hz, ()), session=session)
    actions = np.stack([engine.act(seen(step, SIM)) for step in range(STEPS)])
    return actions, engine.measures()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options", WAYS, ids=lambda options: "-".join(str(value) for _, value in options)
)
def test_plans_of_the_server_are_executed_as_those_made_here(here, remote, options):
    """To the bit: what the network is told of the running plan comes over the wire unchanged."""
    actions, measured = acted(remote, "there", **dict(options))
    np.testing.assert_array_equal(actions, here(options)[0])
    assert measured == here(options)[1]


def test_the_running_plan_makes_a_difference(here):
    """Else the test above would also hold if nobody were told of it."""
    assert len({here(options)[0].tobytes() for options in WAYS}) == len(WAYS)


def test_a_client_can_do_what_its_server_says(network, remote):
    assert remote.can.plans
    assert remote.can.continues == network.can.continues == {"guided": 16, "trained": 4}
    remote.observe(seen(0, SIM))
    rows = np.zeros((9, 7), np.float32)
    with pytest.raises(ConfigError, match=r"5 rows .* given 4: .*rtc_training_max_delay=5"):
        remote.ask(leftover=Leftover(targets=rows, delay=5, method="trained"))


def test_a_server_that_announces_nothing_continues_nothing():
    leftover = Leftover(targets=np.zeros((3, 7), np.float32), delay=1)
    with serving(Remembering(MINI)) as server:
        client = RemotePolicy(address(server), MINI, options=QUICK)
        client.observe(seen(0, MINI))
        with pytest.raises(ConfigError, match="given none: execution 'rtc' needs a network"):
            client.ask(leftover=leftover)
        assert len(client.plan([client.ask()])[0].actions) == MINI.timing.action_horizon
        client.close()


def wire(**changes):
    """Return a request with a leftover."""
    left = {"targets": np.zeros((4, 7), np.float32), "delay": 2, "method": "guided", **changes}
    shown = seen(0, SIM)
    return {
        "observation/image": shown["video.image"],
        "observation/wrist_image": shown["video.wrist_image"],
        "observation/state": shown["state.state"],
        "prompt": "lift the cube",
        "leftover": {name: value for name, value in left.items() if value is not None},
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": np.zeros((4, 6), np.float32)}, "1 to 16 rows of 7"),
        ({"targets": np.zeros((17, 7), np.float32)}, "1 to 16 rows of 7"),
        ({"targets": np.zeros((0, 7), np.float32)}, "1 to 16 rows of 7"),
        ({"targets": np.zeros(7, np.float32)}, "1 to 16 rows of 7"),
        ({"targets": np.zeros((4, 7))}, "float64"),
        ({"targets": np.full((4, 7), np.nan, np.float32)}, "finite"),
        ({"targets": [[0.0] * 7]}, "leftover.targets"),
        ({"targets": None}, "leftover.targets"),
        ({"delay": 0}, "leftover.delay"),
        ({"delay": 5}, "delay=5 with 4 rows left"),
        ({"delay": True}, "leftover.delay"),
        ({"method": "hoped"}, "leftover.method"),
        ({"strength": 1e9}, "leftover.strength"),
        ({"strength": float("nan")}, "leftover.strength"),
        ({"weights": "none"}, "leftover.weights"),
        ({"more": 1}, "leftover.more"),
        ({"method": "trained", "targets": np.zeros((9, 7), np.float32), "delay": 5}, "given 4"),
    ],
    ids=str,
)
def test_a_leftover_that_is_none_is_refused(server, changes, said):
    with talking(server, subprotocols=[SUBPROTOCOL]) as socket:
        answer = ask(socket, wire(**changes))
    assert answer["type"] == "error"
    assert said in answer["message"]


def test_openpis_clients_cannot_continue_a_plan(server):
    """Their greeting and answers stay as they were; the same request is fine for our own."""
    with talking(server) as socket:
        assert "continues" not in socket.hello
        assert "no greeting announced that plans can be continued" in ask(socket, wire())
    with talking(server) as socket:
        plain = {name: value for name, value in wire().items() if name != "leftover"}
        assert set(ask(socket, plain)) == {"actions", "server_timing"}
    with talking(server, subprotocols=[SUBPROTOCOL]) as socket:
        assert ask(socket, wire())["targets"].shape == (16, 7)


def test_the_robot_sees_on_while_the_server_thinks():
    """Of what comes after the request, this plan knows nothing, and the next one does."""
    policy = Remembering(MINI)
    policy.history = "off"
    lone = Remembering(MINI)
    lone.reset("lone")
    with serving(policy) as server:
        client = RemotePolicy(address(server), MINI, options=QUICK)
        desk, plans = ThreadDesk(), []
        policy.gate.clear()
        client.observe(seen(0, MINI))
        for step in (1, 5):
            ticket = client.ask()
            desk.submit(step, lambda ticket=ticket: client.plan([ticket])[0])
            for later in range(step, step + 4):
                client.observe(seen(later, MINI))
                assert policy.gate.is_set() or desk.answer(later) is None
            policy.gate.set()
            plans.append(_waited(desk))
        client.close()
    wanted = [lone.infer_batch([seen(step, MINI)], ["lone"])[0]["actions"] for step in (0, 4)]
    np.testing.assert_array_equal([plan.actions for plan in plans], wanted)


def _waited(desk):
    """Return the plan of the thread, however long it takes."""
    desk._future.result(60)
    return desk.answer(0).plan


def test_an_episode_that_is_over_gets_no_plan_and_asks_for_none():
    policy = Remembering(MINI)
    with serving(policy) as server:
        client = RemotePolicy(address(server), MINI, options=QUICK)
        policy.batches.clear()
        with pytest.raises(SessionError, match="observed nothing"):
            client.ask(session="a")
        client.observe(seen(0, MINI), session="a")
        ticket = client.ask(session="a")
        client.reset("a")
        with pytest.raises(SessionError, match="'a' is over"):
            client.plan([ticket])
        assert policy.batches == []
        client.close()


def test_a_connection_that_breaks_while_the_server_thinks_ends_the_episode():
    policy = Remembering(MINI)
    desk = ThreadDesk()
    with serving(policy) as server:
        client = RemotePolicy(address(server), MINI, options=QUICK)
        client.observe(seen(0, MINI))
        client.plan([client.ask()])[0]
        while policy.began.acquire(blocking=False):
            pass
        policy.gate.clear()
        client.observe(seen(1, MINI))
        ticket = client.ask()
        desk.submit(0, lambda: client.plan([ticket])[0])
        assert policy.began.acquire(timeout=60)
        client._connections[""]._socket.close()
        with pytest.raises(SessionLostError, match="of the episode is gone"):
            desk._future.result(60)
        policy.gate.set()
        with pytest.raises(SessionLostError):
            client.observe(seen(2, MINI))
