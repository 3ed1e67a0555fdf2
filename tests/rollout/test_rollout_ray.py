"""A real Ray: the table and the hashes are those of one process, whatever is killed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from interrupted import EPISODES, PATIENCE_S, RUN, left_behind, wait_for

from dzrobot.cluster import ClusterOptions, Needs, connected
from dzrobot.errors import ConfigError
from dzrobot.rollout.records import RecordFile

pytest.importorskip("ray", reason="no Ray: pip install -e '.[cluster]'")
pytestmark = pytest.mark.long

EVAL = ("-m", "dzrobot.cli", "eval", *RUN, "--workers", "1")
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@pytest.fixture(autouse=True, scope="module")
def quiet(policies):
    """Let Ray stay on this machine, and write nothing into the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def alone(command, tmp_path_factory):
    """Return what a run in one process leaves behind."""
    folder = tmp_path_factory.mktemp("alone")
    return finished(command("--output", folder / "run", program=EVAL), folder / "run")


@pytest.fixture
def on_ray(command, tmp_path):
    """Return a function that starts an evaluation on Ray."""
    return lambda *words: command("--output", tmp_path / "run", *words, program=EVAL)


def finished(process, folder):
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    films = {path.name: path.read_bytes() for path in (folder / "videos").glob("*.mp4")}
    return *left_behind(out, folder), films


def descendants(pid, word):
    """Return the processes below ``pid`` whose command line has ``word`` in it."""
    found, parents = [], {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            line = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        parents[int(stat.parent.name)] = parent
        if word in line:
            found.append(int(stat.parent.name))
    return sorted(one for one in found if pid in lineage(one, parents))


def lineage(pid, parents):
    while pid in parents:
        yield pid
        pid = parents[pid]


def test_the_table_is_that_of_one_process(alone, on_ray, tmp_path):
    assert finished(on_ray("--ray", "--actors", "2"), tmp_path / "run") == alone


@pytest.mark.parametrize("victim", ["ray::EvaluationActor", "multiprocessing.spawn"])
def test_a_killed_process_loses_no_case(alone, on_ray, tmp_path, victim):
    process = on_ray("--ray", "--actors", "2")
    wait_for(2, tmp_path / "run", process)
    os.kill(descendants(process.pid, victim)[0], signal.SIGKILL)
    assert finished(process, tmp_path / "run") == alone
    assert len(RecordFile(tmp_path / "run").records) == EPISODES


def test_killed_altogether_the_same_command_goes_on(alone, on_ray, tmp_path):
    process = on_ray("--ray", "--actors", "2")
    wait_for(2, tmp_path / "run", process)
    own = [*descendants(process.pid, "ray::"), *descendants(process.pid, "raylet/raylet")]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while alive := [pid for pid in own if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    assert finished(on_ray("--ray"), tmp_path / "run") == alone


@pytest.fixture
def machines():
    """Return the address of a cluster of two raylets, and a function that kills the second."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []

    def start(*words):
        # Short paths: Ray's sockets lie there.
        log = (folder / f"log{len(started)}").open("w")
        own = ("--num-cpus", "2", "--num-gpus", "0", "--object-store-memory", str(100 * 2**20))
        words = (*RAY, "start", "--block", "--node-ip-address", "127.0.0.1", *own, *words)
        started.append(
            subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        )
        deadline = time.monotonic() + PATIENCE_S
        while "Ray runtime started" not in Path(log.name).read_text():
            assert time.monotonic() < deadline, log.name
            assert started[-1].poll() is None, Path(log.name).read_text()
            time.sleep(0.1)

    start("--head", "--port", str(port), "--include-dashboard", "false",
          "--temp-dir", str(folder / "ray"))  # fmt: skip
    start("--address", f"127.0.0.1:{port}")

    def kill_second():
        [raylet] = descendants(started[1].pid, "raylet/raylet")
        os.kill(raylet, signal.SIGKILL)

    yield f"127.0.0.1:{port}", kill_second
    for process in reversed(started):
        process.terminate()
        process.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_killed_machine_loses_no_case(alone, on_ray, machines, tmp_path):
    address, kill_second = machines
    process = on_ray("--ray", address)
    wait_for(2, tmp_path / "run", process)
    kill_second()
    assert finished(process, tmp_path / "run") == alone


def test_where_no_ray_is_the_message_says_what_to_do(on_ray):
    process = on_ray("--ray", "127.0.0.1:1")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "dzrobot eval: --ray 127.0.0.1:1: " in err
    assert "ray start --head" in err


def test_a_ray_that_does_not_start_in_time_is_one_message(monkeypatch):
    import ray

    def late(**_):
        # Ray waits 30 s, and raises this; see ray._private.node.
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(ConfigError, match=r"--ray local: The current node.*leave --ray out"):
        connected(ClusterOptions(), Needs(cpus=1)).__enter__()
