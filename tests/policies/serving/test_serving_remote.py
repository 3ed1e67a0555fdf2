"""The policy on another machine acts as it would here, and never continues a lost session."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from serving_peers import (
    ARENA,
    DROID,
    MINI,
    Remembering,
    droid_request,
    droid_seen,
    frame,
    read,
    serving,
)
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from dzrobot.cli import main
from dzrobot.code_identity import CODE, package_code
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import View
from dzrobot.errors import (
    ConfigError,
    InvalidActionError,
    ModalityError,
    ServerError,
    SessionError,
    SessionLostError,
)
from dzrobot.policies.base import Policy, blank
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.serving.connection import ConnectOptions
from dzrobot.policies.serving.remote_policy import RemotePolicy

QUICK = ConnectOptions(connect_s=60, first_s=30, later_s=30)
GONE = ConnectOptions(connect_s=3, first_s=30, later_s=30)
"""For a server that ends: no answer is waited for this long, so it is as short as a connection on a
busy machine allows."""

PLAN = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
OPENPI_DROID = {
    "observation/exterior_image_1_left",
    "observation/wrist_image_left",
    "observation/joint_position",
    "observation/gripper_position",
    "prompt",
}
"""All that openpi's policies of DROID read (``droid_policy.py`` of openpi-client's repository)."""


def address(server):
    return f"ws://127.0.0.1:{server.ports[0]}"


def seen(seed):
    return droid_seen(droid_request(seed))


def test_remote_actions_are_those_of_the_policy_here():
    """The bundled policy over three plans: one frame, then the four that it would be shown."""
    local = DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment=MINI)
    draws = np.random.default_rng(0)
    observations = [
        {
            "video.image": draws.integers(0, 256, (128, 128, 3), dtype=np.uint8),
            "video.wrist_image": draws.integers(0, 256, (128, 128, 3), dtype=np.uint8),
            "state.state": draws.normal(size=8).astype(np.float32),
            "annotation.task": "pick up the cube",
        }
        for _ in range(7)
    ]
    expected = [local.act(obs, session="here") for obs in observations]
    with serving(local) as server:
        remote = RemotePolicy(address(server), MINI, options=QUICK)
        assert isinstance(remote, Policy)
        actions = [remote.act(obs) for obs in observations]
        timing = remote.timing
        remote.close()
    assert np.array_equal(actions, expected)
    assert timing.plans == 3
    assert timing.round_trip_p50 >= timing.server_p50 > 0
    assert timing.sent_bytes > 9 * 2 * 128 * 128 * 3


def test_images_are_only_needed_where_they_are_sent():
    """A server without memory: of the plans' own steps, which are every third."""
    options = PolicyOptions(history="off")
    local = DreamZeroPolicy.from_pretrained(default_checkpoint(), embodiment=MINI, options=options)
    draws = np.random.default_rng(0)
    state = {"state.state": np.zeros(8, np.float32), "annotation.task": "pick up the cube"}
    whole = [
        {
            **{v.key: draws.integers(0, 256, (128, 128, 3), dtype=np.uint8) for v in MINI.views},
            **state,
        }
        for _ in range(5)
    ]
    expected = [local.act(obs, session="here") for obs in whole]
    with serving(local) as server:
        remote = RemotePolicy(address(server), MINI, options=QUICK)
        remote.reset("a")
        actions, looked = [], []
        for obs in whole:
            looked.append(remote.reads_frames(session="a"))
            if looked[-1]:
                with pytest.raises(ModalityError, match="missing"):
                    remote.act(state, session="a")
            actions.append(remote.act(obs if looked[-1] else state, session="a"))
        remote.observe(state, session="a")
        with pytest.raises(ModalityError, match=r"without video\.image"):
            remote.ask(session="a")
        remote.close()
    assert looked == [True, False, False, True, False]
    assert np.array_equal(actions, expected)


def test_sessions_of_one_client_do_not_mix_and_reset_forgets():
    with serving(Remembering()) as server:
        remote = RemotePolicy(address(server), DROID, options=QUICK)
        alone = remote.infer(seen(0), session="a")["actions"]
        remote.infer(seen(5), session="b")
        remote.reset("a", episode=0)
        assert np.array_equal(remote.infer(seen(0), session="a")["actions"], alone)
        assert not np.array_equal(remote.infer(seen(0), session="a")["actions"], alone)
        remote.end_all()
        assert np.array_equal(remote.infer(seen(0), session="a")["actions"], alone)
        remote.close()


@pytest.mark.parametrize("named", [(), ("default",)])
def test_every_reset_is_the_next_episode_for_the_server_too(named):
    """As in this process: an episode that begins without a reset is the first one."""
    with serving(Remembering()) as server:
        remote = RemotePolicy(address(server), DROID, options=QUICK)
        episodes = []
        for _ in range(3):
            remote.reset(*named)
            episodes.append(remote.infer(seen(0))["actions"].tobytes())
        remote.reset(*named, episode=1)
        assert remote.infer(seen(0))["actions"].tobytes() == episodes[1]
        remote.end_all()
        assert remote.infer(seen(0))["actions"].tobytes() == episodes[0]
        remote.close()
    assert len(set(episodes)) == 3


def test_the_number_of_an_episode_reaches_the_policy():
    policy = Remembering()
    with serving(policy) as server:
        remote = RemotePolicy(address(server), DROID, options=QUICK)
        policy.episodes.clear()
        for number in (4, 9):
            remote.reset("a", episode=number)
            remote.infer(seen(0), session="a")
        remote.close()
    assert policy.episodes == [4, 9]


def test_an_episode_whose_connection_broke_is_over():
    with serving(Remembering()) as server:
        remote = RemotePolicy(address(server), DROID, options=QUICK)
        before = remote.infer(seen(0), session="a")["actions"]
        remote._connections[""]._socket.close()
        for _ in range(2):
            with pytest.raises(SessionLostError):
                remote.infer(seen(3), session="a")
        remote.reset("a", episode=0)
        assert np.array_equal(remote.infer(seen(0), session="a")["actions"], before)
        remote.close()


def test_a_server_that_dies_is_said_and_one_that_is_not_there():
    with serving(Remembering()) as server:
        remote = RemotePolicy(address(server), DROID, options=GONE)
        where = address(server)
        remote.infer(seen(0))
    with pytest.raises(SessionLostError):
        remote.infer(seen(0))
    remote.reset("default")
    with pytest.raises(ServerError, match="is the server running"):
        remote.infer(seen(0))
    with pytest.raises(ServerError, match="no connection"):
        RemotePolicy(where, DROID, options=GONE)
    with pytest.raises(ConfigError, match="no server address"):
        RemotePolicy("http://127.0.0.1:1", DROID, options=GONE)


def test_another_robot_or_key_is_refused_at_the_door():
    with serving(Remembering(), api_key="right") as server:
        with pytest.raises(ServerError, match="401"):
            RemotePolicy(address(server), DROID, options=QUICK)
        options = ConnectOptions(api_key="right")
        assert "right" not in repr(options)
        with pytest.raises(ConfigError, match="serves oxe_droid"):
            RemotePolicy(address(server), MINI, options=options)
        with pytest.raises(ConfigError, match="execute=25"):
            RemotePolicy(address(server), DROID, execute=25, options=options)


class OddView(View):
    """Code of a lab's own, which data cannot express."""


def test_a_client_without_a_robot_takes_the_one_that_is_served():
    """A built-in one by its name, another as the server describes it; or it says what to give."""
    odd = [OddView(**vars(view)) for view in MINI.views]
    own = replace(MINI, tag="own_arm")
    for robot in (MINI, own):
        with serving(Remembering(robot)) as server:
            client = RemotePolicy(address(server), options=QUICK)
            assert client.embodiment == robot
            client.reset("a")
            assert client.act(blank(robot, None), session="a").shape == (robot.action_dim,)
    told = r"serves own_arm, .*does not describe it.*--embodiment"
    with serving(Remembering(replace(own, views=tuple(odd)))) as server:
        where = address(server)
        with pytest.raises(ConfigError, match=told):
            RemotePolicy(where, options=QUICK)
    told = "does not say which robot"
    with stub({}, plan_or_reset) as (where, _), pytest.raises(ConfigError, match=told):
        RemotePolicy(where, options=QUICK)
    with pytest.raises(ConfigError, match="does not say which robot"):
        RemotePolicy("zmq://127.0.0.1:5555", options=QUICK)


@contextmanager
def stub(greeting, answer):
    """Serve like a foreign server: greet, then answer each message with ``answer(message)``."""
    heard = []

    def talk(socket):
        socket.send(msgpack.packb(greeting))
        try:
            for message in socket:
                heard.append(read(message))
                socket.send(answer(heard[-1]))
        except ConnectionClosed:
            return

    with serve(talk, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", heard
        finally:
            server.shutdown()
            thread.join(60)


def plan_or_reset(message):
    return "reset successful" if message.get("endpoint") == "reset" else frame(PLAN)


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: frame({"actions": PLAN, "server_timing": {"infer_ms": 3.0}}),
        lambda _: frame({"action": PLAN}),
        lambda _: frame(PLAN.astype(np.float64)),
    ],
    ids=["a map", "Cosmos' map", "an array"],
)
def test_openpis_server_has_one_session_for_each_connection(answer):
    with stub({"anything": 1}, answer) as (where, heard):
        remote = RemotePolicy(where, DROID, actions="joint_position", options=QUICK)
        for name in ("a", "b"):
            assert np.array_equal(remote.infer(seen(0), session=name)["actions"], PLAN)
        assert np.array_equal(remote.infer(seen(0), session="a")["actions"], PLAN)
        assert all(set(message) == OPENPI_DROID for message in heard)
        assert all(message["observation/wrist_image_left"].ndim == 3 for message in heard)
        remote.end_all()
        remote.close()


def test_dreamzeros_server_is_sent_one_frame_and_then_four():
    with stub(ARENA, plan_or_reset) as (where, heard):
        remote = RemotePolicy(where, DROID, options=QUICK)
        steps = [remote.act(seen(seed)) for seed in range(49)]
        assert np.array_equal(steps, [*PLAN, *PLAN, PLAN[0]])
        shapes = [message["observation/wrist_image_left"].shape for message in heard]
        assert shapes == [(180, 320, 3), (4, 180, 320, 3), (4, 180, 320, 3)]
        # Offsets -23, -16, -8 and 0 from the newest step, which is number 48.
        for row, step in enumerate((25, 32, 40, 48)):
            shown = heard[2]["observation/wrist_image_left"][row]
            assert np.array_equal(shown, seen(step)["video.wrist_image_left"])
        assert len({message["session_id"] for message in heard}) == 1
        with pytest.raises(SessionError, match="one episode at a time"):
            remote.act(seen(0), session="b")
        remote.reset("default")
        remote.act(seen(0))
        assert heard[3]["endpoint"] == "reset"
        assert heard[4]["session_id"] != heard[0]["session_id"]
        remote.close()


def test_vllm_omnis_server_is_known_by_its_path_and_its_errors_are_told():
    answers = iter([frame(PLAN), frame({"type": "error", "message": "no such thing"})])
    with stub(ARENA, lambda _: next(answers)) as (where, _):
        remote = RemotePolicy(f"{where}/v1/realtime/robot/openpi", DROID, options=QUICK)
        assert remote.card["dialect"] == "vllm"
        assert np.array_equal(remote.infer(seen(0))["actions"], PLAN)
        with pytest.raises(ServerError, match="no such thing"):
            remote.infer(seen(0))
        remote.close()


@pytest.mark.parametrize(
    "answer",
    [
        "Traceback: it broke",
        frame({"actions": PLAN[:, :7]}),
        frame({"actions": PLAN[:3]}),
        frame({"actions": PLAN[:0]}),
        frame({"actions": PLAN * np.nan}),
        frame({"actions": PLAN.astype(np.int32)}),
        frame({"actions": [1, 2]}),
        frame({"else": 1}),
        frame(3),
    ],
    ids=[
        "text",
        "narrow",
        "short",
        "empty",
        "not finite",
        "whole numbers",
        "list",
        "no actions",
        "number",
    ],
)
def test_an_answer_that_is_no_plan_is_an_error(answer):
    with stub({}, lambda _: answer) as (where, _):
        remote = RemotePolicy(where, DROID, execute=4, actions="joint_position", options=QUICK)
        # Numbers that are not finite are the policy's failure, not the server's.
        with pytest.raises((ServerError, InvalidActionError)):
            remote.act(seen(0))
        remote.close()


def test_a_server_of_another_robot_is_refused():
    said = "cartesian_position there, joint_position here"
    with (
        stub({**ARENA, "action_space": "cartesian_position"}, plan_or_reset) as (where, _),
        pytest.raises(ConfigError, match=said),
    ):
        RemotePolicy(where, DROID, options=QUICK)


def test_an_answer_that_does_not_come_is_not_taken_for_the_next_one():
    policy = Remembering()
    with serving(policy) as server:
        waits = ConnectOptions(connect_s=5, first_s=0.2, later_s=0.2)
        remote = RemotePolicy(address(server), DROID, options=waits)
        policy.gate.clear()
        with pytest.raises(ServerError, match="not answered within"):
            remote.infer(seen(0))
        policy.gate.set()
        assert remote._connections[""]._socket is None
        remote.close()


def test_the_command_evaluates_through_a_server(tmp_path, capsys):
    robot = load_embodiment("franka_pnp")
    with serving(Remembering(robot)) as server:
        given = ["eval", "--env", "dzrobot/Franka-PnP-fake-v0", "--server", address(server)]
        assert main([*given, "--dit-steps", "8"]) == 2
        assert "the server decides" in capsys.readouterr().err
        assert main(["eval", "--policy", "remote"]) == 2
        assert "--server URL go together" in capsys.readouterr().err
        short = ["--episodes", "1", "--max-steps", "14", "--videos", "none"]
        assert main([*given, *short, "--output", str(tmp_path / "results")]) == 0
        said = capsys.readouterr().out
    assert "2 plans from the server: round trip" in said
    card = json.loads((tmp_path / "results/card.json").read_text())
    served = card["policy"]["server"]
    assert (served["who"], served[CODE][0]["content"]) == ("test", package_code().content)


def test_serving_needs_no_torch():
    """The packages that the machine beside the robot imports."""
    program = (
        "import sys; import dzrobot.policies.serving.remote_policy; "
        "import dzrobot.policies.serving.server, dzrobot.commands.eval, dzrobot.commands.serve; "
        "import dzrobot.rollout.policy_spec; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["random"], "plans no chunks"),
        (["--host", "0.0.0.0"], "give an API key"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--cert", "nowhere.pem"], "both a certificate and its private key"),
        (["--api-key-file", "nowhere"], "there is no file nowhere"),
        (["--cfg-scale", ".inf"], "a number from 1"),
        (["--memory", "24"], "give --device cuda"),
    ],
)
def test_what_cannot_be_served_is_one_message(given, said, capsys, monkeypatch):
    monkeypatch.delenv("DZROBOT_API_KEY", raising=False)
    assert main(["serve", *given]) == 2
    assert said in capsys.readouterr().err
