"""torchrun with one, two and three processes: the table and the hashes are those of one."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interrupted import EPISODES, PATIENCE_S, RUN, left_behind, wait_for

from dzrobot.rollout.records import RecordFile

pytestmark = pytest.mark.long

WORDS = [word.replace(":Slow", ":Signed") for word in RUN]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
EVAL = ("-m", "dzrobot", "eval", *WORDS, "--workers", "1")


@pytest.fixture(autouse=True)
def signed(tmp_path, monkeypatch):
    """Return a function that says which processes acted."""
    path = tmp_path / "signed"
    monkeypatch.setenv("SIGNED", str(path))
    return lambda: set(path.read_text().split())


@pytest.fixture(scope="module")
def alone(command, tmp_path_factory):
    """Return what a run in one process leaves behind."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGNED", str(folder / "signed"))
        process = command(*WORDS, "--workers", "1", "--output", folder / "run")
        return finished(process, folder / "run")


@pytest.fixture
def torchrun(command, tmp_path):
    """Return a function that starts an evaluation in several processes."""
    return lambda count, *more: command(
        *more, "--output", tmp_path / "run", program=(*TORCHRUN, str(count), *EVAL)
    )


def finished(process, folder):
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return left_behind(out, folder)


def ranks_of(launcher):
    """Return the processes that torchrun started, by rank."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            variables = (stat.parent / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        rank = [v for v in variables if v.startswith(b"RANK=")]
        if parent == launcher and rank:
            found[int(rank[0][5:])] = int(stat.parent.name)
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_table_is_that_of_one_process(alone, torchrun, tmp_path, signed, count):
    assert finished(torchrun(count), tmp_path / "run") == alone
    assert signed() == {str(rank) for rank in range(count)}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_launch_and_the_same_command_goes_on(
    alone, torchrun, tmp_path, lost
):
    process = torchrun(2)
    wait_for(2, tmp_path / "run", process)
    os.kill(ranks_of(process.pid)[lost], signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    done = RecordFile(tmp_path / "run").records
    assert 2 <= len(done) < EPISODES
    assert finished(torchrun(2), tmp_path / "run") == alone


def test_torchrun_may_start_them_again(alone, command, tmp_path):
    program = (*TORCHRUN, "2", "--max-restarts", "1", *EVAL)
    process = command("--output", tmp_path / "run", program=program)
    wait_for(2, tmp_path / "run", process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    assert finished(process, tmp_path / "run") == alone


def test_killed_altogether(alone, torchrun, tmp_path):
    process = torchrun(2)
    wait_for(2, tmp_path / "run", process)
    for victim in (process.pid, *ranks_of(process.pid).values()):
        os.kill(victim, signal.SIGKILL)
    process.wait()
    assert finished(torchrun(3), tmp_path / "run") == alone


@pytest.fixture
def machines(tmp_path):
    """Return a function that starts processes as on machines of their own, without torchrun.

    Nobody ends the others when one is lost, and no folder is shared.
    """
    started = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(count):
        for rank in range(count):
            home = tmp_path / f"machine{rank}"
            home.mkdir()
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            numbers = {"RANK": str(rank), "WORLD_SIZE": str(count)}
            words = [sys.executable, *EVAL, "--output", "run"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            variables = {**os.environ, **where, **numbers}
            started.append(subprocess.Popen(words, cwd=home, env=variables, **pipes))
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_cases_of_a_lost_machine_are_run_by_the_others(alone, machines, tmp_path, signed):
    processes = machines(3)
    while "2" not in (signed() if (tmp_path / "signed").exists() else ()):
        time.sleep(0.02)
    processes[2].kill()
    assert finished(processes[0], tmp_path / "machine0" / "run") == alone
    assert signed() == {"0", "1", "2"}
    out, err = processes[1].communicate(timeout=PATIENCE_S)
    assert (processes[1].returncode, out, err) == (0, "", "")
    assert not (tmp_path / "machine1" / "run").exists(), "everything was delivered"


def test_what_is_wrong_is_said_once(command, tmp_path):
    program = (*TORCHRUN, "3", "-m", "dzrobot", "eval", "--env", "dzrobot/piont-v0")
    process = command("--output", tmp_path / "run", program=program)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    # torchrun adds a page of its own.
    [said] = [line for line in err.splitlines() if line.startswith("dzrobot eval")]
    assert said.startswith("dzrobot eval: unknown environment 'dzrobot/piont-v0'")
