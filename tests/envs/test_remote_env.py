"""A served environment is the local one, bit for bit, and faults on either side are named."""

import contextlib
import copy
import functools
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium.utils.env_checker import check_env

from dzrobot.cli import main
from dzrobot.commands.serve_env import make_hosted
from dzrobot.envs.remote.env_server import EnvServer, EnvServerOptions
from dzrobot.envs.remote.exchange import Facts, read_space
from dzrobot.errors import (
    ConfigError,
    ModalityError,
    ProtocolError,
    ServerError,
    SimulatorError,
    UnknownNameError,
)
from dzrobot.rollout.environment import EnvironmentFacts, facts_of

pytestmark = pytest.mark.copies

FOREIGN = ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "served_envs:make_odd"]
"""Environments of Gymnasium's own, with numbers, tables and tuples for observations."""


@contextlib.contextmanager
def serving(env, fixed=None, **options):
    """Yield the address of a server of ``env`` in this process; environments are made in others."""
    maker = functools.partial(make_hosted, env, fixed or {})
    server = EnvServer(maker, EnvServerOptions(port=0, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.port}"
    finally:
        server.stop()
        thread.join()


def remote(address, **arguments):
    return gym.make("dzrobot/remote-v0", server=address, disable_env_checker=True, **arguments)


def local(env):
    if env == "served_envs:make_odd":
        from served_envs import make_odd

        return make_odd()
    return gym.make(env, disable_env_checker=True)


def assert_same(one, other, place="observation"):
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place}[{key}]")
    elif isinstance(one, tuple | list):
        assert len(one) == len(other), place
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{place}[{number}]")
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other, place


def assert_steps_alike(here, there, *, seeds, steps, omit=False):
    """Run both with the same actions; every image is left out of every second step if ``omit``."""
    here.action_space.seed(0)
    for seed in seeds:
        assert_same(here.reset(seed=seed)[0], there.reset(seed=seed)[0])
        for step in range(steps):
            if omit and step % 2:
                here.unwrapped.omit_frames()
                there.unwrapped.omit_frames()
            action = here.action_space.sample()
            ours, theirs = here.step(action), there.step(action)
            assert_same(ours[0], theirs[0])
            assert [float(ours[1]), *map(bool, ours[2:4])] == [theirs[1], *theirs[2:4]]
            assert_same({k: v for k, v in ours[4].items() if k != "odd"}, theirs[4], "info")
            if theirs[2] or theirs[3]:
                break


@pytest.mark.parametrize("name", FOREIGN)
def test_gymnasiums_own_environments_are_the_same_when_served(name):
    with serving(name) as address, contextlib.closing(remote(address)) as there:
        here = local(name)
        assert there.observation_space == here.observation_space
        assert there.action_space == here.action_space
        assert_steps_alike(here, there, seeds=range(3), steps=20)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dzrobot/point-v0", {"task_id": 2}),
        pytest.param("dzrobot/lift-v0", {"resolution": 64}, marks=pytest.mark.long),
    ],
)
def test_our_environments_are_the_same_when_served(name, arguments):
    with serving(name) as address:
        there = remote(address, render_mode="rgb_array", **arguments)
        here = gym.make(name, render_mode="rgb_array", disable_env_checker=True, **arguments)
        assert there.observation_space == here.observation_space
        expected = facts_of(here)
        known = {f: getattr(expected, f) for f in Facts.model_fields}
        found = facts_of(there)
        assert {f: getattr(found, f) for f in known} == known
        assert found.hand_position == expected.hand_position
        assert_steps_alike(here, there, seeds=(3, 7), steps=12, omit=True)
        assert_same(here.render(), there.render())
        for env in (here, there):
            env.reset(options={"init_state_id": 5})
        assert_same(here.step(np.zeros(7, np.float32))[0], there.step(np.zeros(7, np.float32))[0])
        here.close()
        there.close()


def test_every_fact_of_an_environment_is_sent_or_is_an_arms():
    ours = {"moves_an_arm", "is_real", "workcell", "remote", "hand_position", "libraries"}
    # What the environment here is able to do follows from its own methods.
    ours |= {"omits_frames", "holds", "draws"}
    # Compared with recordings, which are replayed where the simulator is.
    ours |= {"scene_objects"}
    assert set(Facts.model_fields) == set(EnvironmentFacts.__dataclass_fields__) - ours


@pytest.mark.long
def test_a_perturbed_scene_is_the_same_when_served():
    with serving("dzrobot/lift-v0") as address:
        there = remote(address, resolution=64)
        here = gym.make("dzrobot/lift-v0", resolution=64, disable_env_checker=True)
        plain = here.reset(seed=1)[0]["video.image"]
        for env in (here, there):
            env.unwrapped.perturb("light", 5, 3)
        changed = here.reset(seed=1)[0]
        assert not np.array_equal(changed["video.image"], plain)
        assert_same(changed, there.reset(seed=1)[0])
        here.close()
        there.close()


def test_a_copy_is_an_environment_of_its_own():
    with serving("dzrobot/point-v0") as address, contextlib.closing(remote(address)) as env:
        first = env.reset(seed=3)[0]
        for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
            assert other.observation_space == env.observation_space
            assert_same(other.reset(seed=3)[0], first)
            other.close()
        env.step(env.action_space.sample())


def test_without_a_server_it_says_what_to_give(capsys):
    with pytest.raises(ConfigError, match="needs the address that `dzrobot serve-env` prints"):
        gym.make("dzrobot/remote-v0")
    assert main(["eval", "--env", "dzrobot/remote-v0", "--policy", "random"]) == 2
    assert "--env-arg server=ws://HOST:PORT" in capsys.readouterr().err


def test_gymnasium_finds_nothing_wrong():
    with serving("dzrobot/point-v0") as address, contextlib.closing(remote(address)) as env:
        check_env(env.unwrapped, skip_render_check=True)


def test_evaluations_write_the_same_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["--policy", "served_envs:Straight", "--episodes", "6", "--videos", "none"]
    with serving("dzrobot/point-v0") as address:
        code = main(
            ["eval", "--env", "dzrobot/remote-v0", "--env-arg", f"server={address}", *common,
             "--workers", "2", "--output", "there"]
        )  # fmt: skip
    assert code == 0, capsys.readouterr()
    assert main(["eval", "--env", "dzrobot/point-v0", *common, "--output", "here"]) == 0
    there, here = (_records(Path(name)) for name in ("there", "here"))
    for key in ("action_sha256", "success", "steps", "measures"):
        assert [r[key] for r in there] == [r[key] for r in here], key
    assert all(r["success"] for r in there)
    (suite,) = json.loads(Path("there/card.json").read_text())["suites"].values()
    assert suite["arguments"] == {}
    assert suite["remote"]["env"] == "dzrobot/point-v0"
    assert suite["remote"]["versions"]["gymnasium"] == gym.__version__


def _records(folder):
    lines = (folder / "records.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda record: record["case"])


def test_a_wrong_argument_is_named_as_it_is_here():
    with serving("dzrobot/point-v0", {"resolution": 32}) as address:
        with pytest.raises(UnknownNameError, match="Did you mean 'task_id'"):
            remote(address, task=1)
        with pytest.raises(ConfigError, match="the server's user has set resolution"):
            remote(address, resolution=64)
        with pytest.raises(ModalityError, match="task_id=9 does not exist"):
            remote(address, task_id=9)
        with contextlib.closing(remote(address)) as env:
            assert env.observation_space["video.image"].shape == (32, 32, 3)
            with pytest.raises(ModalityError, match="init_state_id=99 does not exist"):
                env.reset(options={"init_state_id": 99})
            env.reset(seed=0)
            with pytest.raises(ProtocolError, match=r"the action is .*which cannot be sent"):
                env.step(object())


def test_what_of_info_cannot_be_sent_stays_behind(capfd):
    with serving("served_envs:make_odd") as address, contextlib.closing(remote(address)) as env:
        for _ in range(2):
            assert env.reset(options={"a": (1, 2)})[1] == {"options": {"a": [1, 2]}, "color": "red"}
        env.close()
    assert capfd.readouterr().err.count("left out: info['odd']") == 1


def test_a_fault_of_the_environment_is_its_own_and_it_goes_on():
    with serving("served_envs:make_odd") as address, contextlib.closing(remote(address)) as env:
        env.reset(seed=0)
        with pytest.raises(SimulatorError, match="ValueError: a fault of its own"):
            env.step(11)
        assert env.step(0)[4] == {"got": 0}


def test_an_environment_that_dies_is_made_again_at_the_next_reset():
    with serving("served_envs:make_odd") as address, contextlib.closing(remote(address)) as env:
        first = env.reset(seed=3)[0]
        with pytest.raises(ServerError, match="process ended"):
            env.step(12)
        assert_same(env.reset(seed=3)[0], first)


def test_a_step_that_takes_too_long_is_given_up_and_its_process_ends():
    with (
        serving("served_envs:make_odd") as address,
        contextlib.closing(remote(address, step_s=0.3)) as env,
    ):
        first = env.reset(seed=3)[0]
        (slow,) = _environments()
        with pytest.raises(ServerError, match=r"has not answered 'step' within 0.3 s"):
            env.step(13)
        slow.wait(20)
        assert_same(env.reset(seed=3)[0], first)


def _environments():
    """Return the processes of environments that this process serves."""
    hosts = [child for child in multiprocessing.active_children() if child.name == "environment"]
    return [psutil.Process(child.pid) for child in hosts]


def test_a_space_that_cannot_be_sent_is_refused():
    with (
        serving("served_envs:make_unsendable") as address,
        pytest.raises(ProtocolError, match="a space Sequence cannot be sent"),
    ):
        remote(address)


def test_an_arm_is_not_served():
    with (
        serving("dzrobot/Franka-PnP-fake-v0") as address,
        pytest.raises(ConfigError, match="drives an arm, which is driven by the machine beside it"),
    ):
        remote(address)


def test_a_full_server_says_so_and_lets_the_next_one_in():
    with serving("dzrobot/point-v0", most=1) as address:
        first = remote(address)
        with pytest.raises(ServerError, match="all 1 environments are in use"):
            remote(address, connect_s=0.5)
        threading.Timer(0.5, first.close).start()
        remote(address, connect_s=60).close()


def test_a_silent_client_gives_its_seat_up_and_begins_anew():
    with serving("dzrobot/point-v0", most=1, idle_s=0.5) as address:
        silent = remote(address)
        other = remote(address, connect_s=60)
        other.close()
        with pytest.raises(ServerError, match="no request within"):
            silent.reset()
        silent.reset(seed=1)
        silent.close()


def test_a_server_with_a_key_wants_it(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    with serving("dzrobot/point-v0", api_key="secret") as address:
        with pytest.raises(ServerError, match=r"HTTP 401.*give the key with --api-key-file"):
            remote(address)
        remote(address, api_key_file=str(key)).close()


def test_other_machines_need_a_key():
    with pytest.raises(ConfigError, match="lets other machines use this environment"):
        EnvServerOptions(host="0.0.0.0")


def test_a_server_of_a_policy_is_no_server_of_environments():
    from serving_peers import Remembering
    from serving_peers import serving as serving_policy

    with (
        serving_policy(Remembering()) as server,
        pytest.raises(ServerError, match="serves no environment"),
    ):
        remote(f"ws://127.0.0.1:{server.ports[0]}")


def test_the_command_serves_until_it_is_stopped_and_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "dzrobot", "serve-env", "dzrobot/point-v0", "--port=0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
        assert "with the keys of libero_sim" in said
        env = remote(re.search(r"server=(ws://\S+)", said)[1])
        env.reset(seed=0)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        psutil.wait_procs(children, 10)
        assert not any(child.is_running() for child in children)
        with pytest.raises(ServerError, match="broke"):
            env.step(env.action_space.sample())


@pytest.mark.long
def test_killing_the_server_ends_its_environments(tmp_path):
    command = [sys.executable, "-m", "dzrobot", "serve-env", "served_envs:make_odd", "--port=0"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:  # fmt: skip
        said = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
        env = remote(re.search(r"server=(ws://\S+)", said)[1], step_s=60)
        env.reset(seed=0)
        children = psutil.Process(process.pid).children(recursive=True)
        threading.Timer(0.5, process.kill).start()
        with pytest.raises(ServerError, match="broke"):
            env.step(13)
        _, alive = psutil.wait_procs(children, 10)
        assert not alive


@pytest.mark.parametrize("arguments", [["nothing-v0"], ["served_envs:nothing"]])
def test_an_environment_that_does_not_exist_is_refused_at_start(arguments, capsys):
    assert main(["serve-env", *arguments, "--port=0"]) == 2
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{}, {"kind": "box"}, {"kind": "dict", "parts": 3}])
def test_what_is_no_space_is_refused(given):
    with pytest.raises(ProtocolError, match="description of a space is not one"):
        read_space(given)
