"""The clients that exist: the genuine openpi-client, and the messages of the others."""

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from serving_peers import (
    MINI,
    Remembering,
    alone,
    ask,
    droid_request,
    frame,
    image,
    read,
    serving,
    talking,
)
from websockets.exceptions import ConnectionClosed, InvalidStatus

from conftest import skip_or_fail
from dzrobot.policies.base import blank

VLLM = "/v1/realtime/robot/openpi"


@pytest.fixture(scope="module")
def openpi():
    """Return the modules of the genuine client."""
    try:
        from openpi_client import action_chunk_broker, websocket_client_policy
    except ImportError as error:
        skip_or_fail("openpi", f"no openpi-client: {error}")
    return websocket_client_policy.WebsocketClientPolicy, action_chunk_broker.ActionChunkBroker


@pytest.fixture
def server():
    with serving(Remembering()) as running:
        yield running


def mini_request(seed):
    draws = np.random.default_rng(seed)
    return {
        "observation/image": draws.integers(0, 256, (128, 128, 3), dtype=np.uint8),
        "observation/wrist_image": draws.integers(0, 256, (128, 128, 3), dtype=np.uint8),
        "observation/state": draws.normal(size=8),
        "prompt": "pick up the cube",
    }


def test_openpi_infers_and_its_broker_hands_out_the_plan(openpi):
    client, broker = openpi
    policy = Remembering(MINI)
    with serving(policy) as server:
        plain = client("127.0.0.1", server.ports[0])
        assert plain.get_server_metadata()["embodiment"] == "libero_mini"
        plans = [plain.infer(mini_request(seed)) for seed in range(3)]
        assert all(plan["actions"].shape == (8, 7) for plan in plans)
        assert all(plan["server_timing"]["infer_ms"] >= 0 for plan in plans)
        stepping = broker(client("127.0.0.1", server.ports[0]), 8)
        steps = [stepping.infer(mini_request(0))["actions"] for _ in range(8)]
        assert np.array_equal(np.stack(steps), plans[0]["actions"])
        plain._ws.close()
        stepping._policy._ws.close()


def test_openpi_is_told_what_is_wrong_and_let_go(openpi):
    client, _ = openpi
    with serving(Remembering(MINI)) as server:
        plain = client("127.0.0.1", server.ports[0])
        with pytest.raises(RuntimeError, match="observation/state missing"):
            plain.infer({key: v for key, v in mini_request(0).items() if "state" not in key})
        with pytest.raises(ConnectionClosed) as closed:
            plain.infer(mini_request(0))
        assert closed.value.rcvd.code == 1011


def test_openpi_presents_its_key(openpi):
    client, _ = openpi
    with serving(Remembering(MINI), api_key="right") as server:
        for wrong in (None, "wrong", "rightright"):
            with pytest.raises(InvalidStatus, match="401"):
                client("127.0.0.1", server.ports[0], api_key=wrong)
        plain = client("127.0.0.1", server.ports[0], api_key="right")
        assert plain.infer(mini_request(0))["actions"].shape == (8, 7)
        plain._ws.close()


def test_openpi_pings_through_a_slow_first_call(openpi, monkeypatch):
    client, _ = openpi
    policy = Remembering(MINI)
    with serving(policy) as server:
        import websockets.sync.client as library

        genuine = library.connect

        def impatient(*args, **kwargs):
            return genuine(*args, **kwargs, ping_interval=0.2, ping_timeout=60)

        monkeypatch.setattr(library, "connect", impatient)
        plain = client("127.0.0.1", server.ports[0])
        policy.gate.clear()
        plans = []
        asking = threading.Thread(target=lambda: plans.append(plain.infer(mini_request(0))))
        asking.start()
        assert policy.began.acquire(timeout=60)
        policy.began.acquire(timeout=60)
        policy.began.acquire(timeout=60)
        # The policy is at work: three answered pings show that the loop is not.
        first = plain._ws.latency
        seen = {first}
        for _ in range(600):
            seen.add(plain._ws.latency)
            if len(seen) >= 3:
                break
            threading.Event().wait(0.1)
        assert len(seen) >= 3
        assert not plans
        policy.gate.set()
        asking.join(60)
        assert plans[0]["actions"].shape == (8, 7)
        plain._ws.close()


def test_openpi_sees_the_server_die_in_the_middle(openpi):
    client, _ = openpi
    policy = Remembering(MINI)
    failures = []

    def infer(plain):
        try:
            plain.infer(mini_request(0))
        except (ConnectionClosed, RuntimeError) as error:
            failures.append(error)

    with serving(policy, drain_s=0.1) as server:
        plain = client("127.0.0.1", server.ports[0])
        for _ in range(2):
            policy.began.acquire(timeout=60)
        policy.gate.clear()
        asking = threading.Thread(target=infer, args=(plain,))
        asking.start()
        assert policy.began.acquire(timeout=60)
    asking.join(60)
    policy.gate.set()
    assert len(failures) == 1


def test_roboarena(server):
    """Six keys to greet, a map back, and a text for a reset."""
    with talking(server) as socket:
        assert set(socket.hello) == {
            "image_resolution", "needs_wrist_camera", "n_external_cameras", "needs_stereo_camera",
            "needs_session_id", "action_space",
        }  # fmt: skip
        request = droid_request(
            0, endpoint="infer", session_id="one",
            **{"observation/cartesian_position": np.zeros(6)},
        )  # fmt: skip
        answer = ask(socket, request)
        assert np.array_equal(answer["actions"], alone([request])[0])
        assert ask(socket, {"endpoint": "reset"}) == "reset successful"
        assert np.array_equal(ask(socket, request)["actions"][0].shape, (8,))


def test_dreamzeros_test_client(server):
    """One frame, then stacks of four; a bare array back; at the end ``reset({})``."""
    requests = [droid_request(0, session_id="s", endpoint="infer")]
    requests += [droid_request(seed, 4, session_id="s", endpoint="infer") for seed in (3, 6)]
    with talking(server, array=True) as socket:
        assert socket.hello["n_external_cameras"] == 2
        answers = [ask(socket, request) for request in requests]
        assert ask(socket, {"endpoint": "reset"}) == "reset successful"
    for answer, expected in zip(answers, alone(requests), strict=True):
        assert answer.dtype == np.float32
        assert answer.shape == (24, 8)
        assert np.array_equal(answer, expected)


def test_sim_eval_takes_a_new_id_for_every_episode_and_never_resets(server):
    with talking(server, array=True) as socket:
        for episode in range(3):
            requests = [
                droid_request(seed, session_id=f"episode-{episode}", endpoint="infer")
                for seed in (10 * episode, 10 * episode + 3)
            ]
            answers = [ask(socket, request) for request in requests]
            for answer, expected in zip(answers, alone(requests), strict=True):
                assert np.array_equal(answer, expected)


def test_arena_asks_for_one_environment_after_the_other(server):
    """Float32 state, Cartesian zeros, a list of ids to reset, None at the end; under 1 MiB back."""
    zeros = {"observation/cartesian_position": np.zeros(6, np.float32)}
    of = {
        name: [
            droid_request(
                seed + 100 * i, state=np.float32, session_id=name, endpoint="infer", **zeros
            )
            for seed in (0, 3)
        ]
        for i, name in enumerate(("left", "right"))
    }
    with talking(server, array=True) as socket:
        answers = {name: [] for name in of}
        for turn in range(2):
            for name, requests in of.items():
                socket.send(frame(requests[turn]))
                answer = socket.recv(timeout=60)
                assert len(answer) < 2**20
                answers[name].append(read(answer))
        for name, requests in of.items():
            for answer, expected in zip(answers[name], alone(requests), strict=True):
                assert np.array_equal(answer, expected)
        assert ask(socket, {"endpoint": "reset", "session_ids": ["left"]}) == "reset successful"
        assert ask(socket, {"endpoint": "reset", "session_ids": None}) == "reset successful"


def test_robolabs_reset_of_nobody_touches_nobody_else():
    """Its environments reset with ``session_ids: None`` before they have a session."""
    policy = Remembering()
    with serving(policy, api_key="token") as server:
        bearer = {"additional_headers": {"Authorization": "Bearer token"}}
        requests = [droid_request(seed, session_id="a", endpoint="infer") for seed in (0, 3)]
        with (
            talking(server, array=True, **bearer) as one,
            talking(server, array=True, **bearer) as two,
        ):
            answers = [ask(one, requests[0])]
            assert ask(two, {"endpoint": "reset", "session_ids": None}) == "reset successful"
            assert ask(two, {"endpoint": "reset", "session_ids": ["a"]}) == "reset successful"
            answers.append(ask(one, requests[1]))
        for answer, expected in zip(answers, alone(requests), strict=True):
            assert np.array_equal(answer, expected)


def test_molmospaces_sends_its_request_again_after_a_reconnect(server):
    request = droid_request(0, 4, session_id="m", endpoint="infer")
    answers = []
    for _ in range(2):
        with talking(server, array=True) as socket:
            answers.append(ask(socket, request))
    assert np.array_equal(answers[0], answers[1])
    assert np.array_equal(answers[0], alone([request])[0])


def test_vllm_omnis_path_packs_everything_and_stays_open_after_an_error(server):
    with talking(server, path=VLLM) as socket:
        assert len(socket.hello) == 6
        request = droid_request(0, session_id="v")
        assert np.array_equal(ask(socket, request), alone([request])[0])
        refused = ask(socket, droid_request(0, session_id="v") | {"seed": 3})
        assert refused["type"] == "error"
        assert "unexpected seed" in refused["message"]
        assert ask(socket, {"endpoint": "reset", "session_ids": ["v"]}) == {
            "status": "reset successful"
        }
        assert np.array_equal(ask(socket, request).shape, (24, 8))


def test_images_of_another_size_are_refused_by_name(server):
    request = droid_request(0) | {"observation/wrist_image_left": image(0)[:100]}
    with talking(server) as socket:
        assert "(100, 320, 3)" in ask(socket, request)


def test_blank_observations_are_what_the_policy_takes():
    policy = Remembering(MINI)
    policy.reset("s")
    assert policy.infer_batch([blank(MINI, 4)], ["s"])[0]["actions"].shape == (8, 7)


@pytest.fixture(scope="module")
def molmospaces():
    """Return the client's class from MolmoSpaces' wheel, without what its module imports beside.

    The wheel pins its own torch and simulator, which the class does not use.
    """
    spec = importlib.util.find_spec("molmo_spaces")
    if spec is None or importlib.util.find_spec("msgpack_numpy") is None:
        skip_or_fail("molmospaces", "no molmo-spaces or msgpack-numpy")
    folder = Path(spec.submodule_search_locations[0])
    left_out = {
        "molmo_spaces.configs.abstract_exp_config": "MlSpacesExpConfig",
        "molmo_spaces.policy.base_policy": "InferencePolicy",
        "molmo_spaces.policy.learned_policy.utils": "resize_with_pad",
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, name in left_out.items():
            stub = ModuleType(module)
            setattr(stub, name, object)
            patch.setitem(sys.modules, module, stub)
        path = folder / "policy/learned_policy/dreamzero_policy.py"
        loading = importlib.util.spec_from_file_location("molmospaces_client", path)
        module = importlib.util.module_from_spec(loading)
        loading.loader.exec_module(module)
    return module.DreamZeroWebsocketClient


def test_molmospaces_infers_with_arrays_as_its_library_writes_them(molmospaces):
    requests = [droid_request(seed) for seed in range(3)]
    extra = {"observation/cartesian_position": np.zeros(6), "session_id": "one"}
    with serving(Remembering()) as server:
        client = molmospaces("127.0.0.1", server.ports[0])
        plans = [client.infer({**request, **extra})["actions"] for request in requests]
        for plan, expected in zip(plans, alone(requests), strict=True):
            assert plan.dtype == np.float32
            np.testing.assert_array_equal(plan, expected)
        client.reset({"session_id": "one"})
        np.testing.assert_array_equal(
            client.infer({**requests[0], "session_id": "two"})["actions"], plans[0]
        )
        client._ws.close()


def test_molmospaces_is_told_what_is_wrong(molmospaces):
    with serving(Remembering(MINI)) as server:
        client = molmospaces("127.0.0.1", server.ports[0])
        with pytest.raises(
            RuntimeError, match="observation/state, observation/wrist_image missing"
        ):
            client.infer(droid_request(0))
