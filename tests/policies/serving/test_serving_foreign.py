"""The client beside openpi's own server, unmodified, from its wheel."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from serving_peers import DROID, droid_request, droid_seen

from conftest import skip_or_fail
from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, ServerError
from dzrobot.policies.serving.connection import ConnectOptions
from dzrobot.policies.serving.remote_policy import RemotePolicy

LIBERO = load_embodiment("libero_sim")
FRANKA = load_embodiment("franka_pnp")
QUICK = ConnectOptions(connect_s=5, first_s=30, later_s=30)


class Numbered:
    """A policy as openpi's server takes one: plans whose rows count the steps they are for.

    Args:
        rows: Of each plan.
        dim: Numbers of an action.
    """

    def __init__(self, rows, dim):
        self._shape = (rows, dim)
        self.heard = []

    def infer(self, obs):
        self.heard.append(obs)
        first = (len(self.heard) - 1) * self._shape[0]
        steps = np.arange(first, first + self._shape[0]) / 1000
        return {"actions": np.repeat(steps[:, None], self._shape[1], 1)}

    def reset(self):
        pass


@contextmanager
def openpi_server(policy, metadata=None):
    """Yield the address of openpi's server of ``policy``."""
    try:
        from openpi_server.websocket_policy_server import WebsocketPolicyServer
    except ImportError as error:
        skip_or_fail("openpi", f"no openpi-server: {error}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = WebsocketPolicyServer(policy, "127.0.0.1", port, metadata)
    loop = asyncio.new_event_loop()
    running = loop.create_task(server.run())

    def serve():
        asyncio.set_event_loop(loop)
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(running)
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    try:
        yield f"ws://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join(60)


def libero_seen(seed):
    draws = np.random.default_rng(seed)
    return {
        **{key: draws.integers(0, 256, (256, 256, 3), dtype=np.uint8) for key in LIBERO.video_keys},
        "state.state": draws.normal(size=8).astype(np.float32),
        "annotation.task": "pick up the cube",
    }


@pytest.mark.parametrize("rows", [1, 5, 10, 50])
def test_a_plan_of_any_length_is_executed_whole(rows):
    """The published policies plan 5, 10 or 50 actions; LIBERO's embodiment plans 16."""
    policy = Numbered(rows, 7)
    with openpi_server(policy) as where:
        remote = RemotePolicy(where, LIBERO, options=QUICK)
        steps = 2 * rows + 1
        actions = [remote.act(libero_seen(seed)) for seed in range(steps)]
        assert remote.card["execute"] is None
        remote.close()
    assert np.array_equal(np.array(actions)[:, 0], np.arange(steps, dtype=np.float32) / 1000)
    assert len(policy.heard) == 3
    names = {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
    assert set(policy.heard[0]) == names
    last = libero_seen(2 * rows)
    assert np.array_equal(policy.heard[2]["observation/image"], last["video.image"])
    assert np.array_equal(policy.heard[2]["observation/state"], last["state.state"])


def test_less_of_a_plan_is_executed_where_asked_and_never_more_than_it_holds():
    policy = Numbered(10, 7)
    with openpi_server(policy) as where:
        remote = RemotePolicy(where, LIBERO, execute=4, options=QUICK)
        actions = [remote.act(libero_seen(seed)) for seed in range(9)]
        expected = [0, 1, 2, 3, 10, 11, 12, 13, 20]
        assert np.allclose(np.array(actions)[:, 0], np.array(expected) / 1000)
        remote.close()
        remote = RemotePolicy(where, LIBERO, execute=12, options=QUICK)
        with pytest.raises(ServerError, match=r"\(10, 7\): a plan of libero_sim holds at least 12"):
            remote.act(libero_seen(0))
        remote.close()


def test_droid_is_seen_by_the_names_that_openpi_reads():
    """Of two exterior cameras the first; openpi reads no other."""
    policy = Numbered(15, 8)
    with openpi_server(policy) as where:
        remote = RemotePolicy(where, DROID, actions="joint_position", options=QUICK)
        seen = droid_seen(droid_request(3))
        remote.act(seen)
        assert remote.card["actions"] == "joint_position"
        remote.close()
    (heard,) = policy.heard
    assert set(heard) == {
        "observation/exterior_image_1_left", "observation/wrist_image_left",
        "observation/joint_position", "observation/gripper_position", "prompt",
    }  # fmt: skip
    for name in ("exterior_image_1_left", "wrist_image_left"):
        assert np.array_equal(heard[f"observation/{name}"], seen[f"video.{name}"])


@pytest.mark.parametrize(
    ("robot", "metadata", "given", "said"),
    [
        (DROID, {}, None, "takes joint_position; others, such as velocities, have the same shape"),
        (DROID, {}, "joint_velocity", "is said to answer 'joint_velocity'"),
        (DROID, {"action_space": "joint_velocity"}, None, "says that it answers 'joint_velocity'"),
        (DROID, {"action_space": "joint_velocity"}, "joint_position", "says that it answers"),
        (FRANKA, {}, None, "--server-actions hand_step"),
    ],
)
def test_an_arm_refuses_actions_of_which_nobody_says_what_they_mean(robot, metadata, given, said):
    policy = Numbered(15, robot.action_dim)
    with openpi_server(policy, metadata) as where, pytest.raises(ConfigError, match=said):
        RemotePolicy(where, robot, actions=given, options=QUICK)
    assert not policy.heard


def test_the_command_refuses_an_arm_and_takes_the_users_word(tmp_path, capsys):
    policy = Numbered(10, FRANKA.action_dim)
    with openpi_server(policy) as where:
        given = ["eval", "--env", "dzrobot/Franka-PnP-fake-v0", "--server", where]
        assert main(given) == 2
        assert "does not say what its actions mean" in capsys.readouterr().err
        short = ["--episodes", "1", "--max-steps", "14", "--videos", "none"]
        said = ["--server-actions", "hand_step", "--output", str(tmp_path)]
        assert main([*given, *said, *short]) == 0
    assert len(policy.heard) == 2
    card = json.loads((tmp_path / "card.json").read_text())["policy"]
    assert card["actions"] == "hand_step"
