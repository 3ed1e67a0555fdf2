"""The client beside GR00T's own server, from a checkout of theirs; only the network is ours."""

import io
import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, ServerError
from dzrobot.policies.serving.connection import ConnectOptions
from dzrobot.policies.serving.groot import _array_of, _npy
from dzrobot.policies.serving.remote_policy import RemotePolicy

CHECKOUT = os.environ.get("DZROBOT_GROOT")
LIBERO = load_embodiment("libero_sim")
QUICK = ConnectOptions(connect_s=60, first_s=30, later_s=30)
AT_ONCE = ConnectOptions(connect_s=0.2)

SERVER = """
import sys
import numpy as np
from gr00t.configs.data.embodiment_configs import MODALITY_CONFIGS
from gr00t.policy.gr00t_policy import Gr00tPolicy
from gr00t.policy.server_client import PolicyServer

class Echo(Gr00tPolicy):
    "Checks as theirs does; its plan repeats the state, and counts the plans since a reset."
    def __init__(self, changes):
        self.strict, self.plans = True, 0
        self.modality_configs = MODALITY_CONFIGS["libero_sim"]
        for kind, steps in changes.items():
            self.modality_configs[kind].delta_indices = steps

    def get_modality_config(self):
        return self.modality_configs

    def _get_action(self, observation, options=None):
        rows = len(self.modality_configs["action"].delta_indices)
        seen = observation["state"]
        plan = {name: np.repeat(seen[name][:, :, :1], rows, 1) for name in seen}
        plan["gripper"] = (np.arange(rows, dtype=np.float32) >= 2)[None, :, None] * np.float32(1)
        images = [view[0, 0].mean() for view in observation["video"].values()]
        plan["x"] = plan["x"] + np.float32(self.plans)
        plan["y"][0, 0] = np.float32(np.mean(images))
        said = observation["language"]["annotation.human.action.task_description"][0][0]
        if said == "fail":
            raise RuntimeError("the network failed")
        self.plans += 1
        return plan, {}

    def check_action(self, action):
        assert sorted(action) == sorted(self.modality_configs["action"].modality_keys)

    def reset(self, options=None):
        self.plans = 0
        return {}

changes, token = eval(sys.argv[2]), sys.argv[3] or None
PolicyServer(Echo(changes), "127.0.0.1", int(sys.argv[1]), token).run()
"""


@contextmanager
def groot_server(token="", **changes):
    """Yield the address of GR00T's server; ``changes``: kind -> its steps."""
    if CHECKOUT is None:
        pytest.skip("opt-in: DZROBOT_GROOT names no checkout of Isaac-GR00T")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", SERVER, str(port), repr(changes), token]
    environment = {**os.environ, "PYTHONPATH": CHECKOUT}
    with subprocess.Popen(words, env=environment) as peer:
        try:
            yield f"zmq://127.0.0.1:{port}"
        finally:
            peer.kill()


def seen(text="lift the cube"):
    state = np.linspace(-0.8, 0.9, 8).astype(np.float32)
    views = {
        key: np.full((256, 256, 3), 90 + n, np.uint8) for n, key in enumerate(LIBERO.video_keys)
    }
    return {**views, "state.state": state, "annotation.task": text}


@pytest.mark.groot
def test_a_plan_of_groots_server_is_executed_whole_in_this_robots_units():
    with groot_server() as address:
        policy = RemotePolicy(address, LIBERO, options=QUICK)
        policy.reset("a")
        actions = np.stack([policy.act(seen(), session="a") for _ in range(41)])
        assert policy.card["dialect"] == "groot"
        assert policy.card["server"]["action_horizon"] == 40
        state = seen()["state.state"]
        np.testing.assert_array_equal(actions[1:40, :6], np.repeat(state[None, :6], 39, 0))
        assert actions[0, 1] == 90.5
        # 0 closes there, and 1 here; the first two rows close.
        np.testing.assert_array_equal(actions[:40, 6], [1.0, 1.0, *[-1.0] * 38])
        assert actions[40, 0] == state[0] + 1
        policy.reset("a")
        assert policy.act(seen(), session="a")[0] == state[0]
        with pytest.raises(ServerError, match=r"refuses: the network failed"):
            policy.infer(seen("fail"), session="b")
        policy.close()


@pytest.mark.groot
def test_a_server_with_a_key_or_of_another_kind_is_refused():
    with groot_server(token="secret") as address:
        with pytest.raises(ServerError, match="Unauthorized"):
            RemotePolicy(address, LIBERO, options=QUICK)
        keyed = ConnectOptions(api_key="secret", connect_s=60)
        RemotePolicy(address, LIBERO, options=keyed).close()
    with (
        groot_server(video=[-1, 0]) as address,
        pytest.raises(ConfigError, match=r"the video of steps \[-1, 0\]"),
    ):
        RemotePolicy(address, LIBERO, options=QUICK)


@pytest.mark.groot
@pytest.mark.libero
def test_it_is_evaluated_in_libero(libero_assets, tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_LIBERO_ASSETS", str(libero_assets))
    with groot_server() as address:
        words = ["--server", address, "--suite", "libero_object", "--tasks", "0", "--episodes", "1"]
        assert main(["eval", *words, "--max-steps", "12", "--output", str(tmp_path / "run")]) == 0


def test_other_robots_wrong_addresses_and_silence_are_refused():
    with pytest.raises(ConfigError, match="the parts of oxe_droid"):
        RemotePolicy("zmq://127.0.0.1:5555", load_embodiment("oxe_droid"), options=AT_ONCE)
    with pytest.raises(ConfigError, match="is not an address zmq://HOST:PORT"):
        RemotePolicy("zmq://nowhere", LIBERO, options=AT_ONCE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"zmq://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerError, match="has not answered within"):
            RemotePolicy(address, LIBERO, options=AT_ONCE)


def test_arrays_are_files_of_numpy():
    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    written = msgpack.unpackb(msgpack.packb(_npy(values)))
    np.testing.assert_array_equal(np.load(io.BytesIO(written["as_npy"])), values)
    file = io.BytesIO()
    np.save(file, np.asfortranarray(values))
    np.testing.assert_array_equal(_array_of({"as_npy": file.getvalue()}), values)


@pytest.mark.parametrize(
    "file",
    [b"", b"no numpy", _npy(np.zeros(3))["as_npy"][:-1], _npy(np.array(["a"]))["as_npy"][:20]],
)
def test_what_is_not_an_array_of_numpys_is_refused(file):
    with pytest.raises(ServerError, match="the server's array cannot be read"):
        _array_of({"as_npy": file})
    assert _array_of(file) is None


def test_features_and_resumed_runs_do_not_depend_on_names_of_a_wire():
    assert LIBERO.wire.groot is not None
    assert "roll" not in repr(LIBERO)
