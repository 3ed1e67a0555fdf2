"""However a run ends, the same command finishes it, and nobody can tell."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from interrupted import EPISODES, PATIENCE_S, RUN, left_behind, wait_for

from dzrobot.rollout.records import RecordFile


@pytest.fixture(scope="module")
def uninterrupted(command, tmp_path_factory):
    """Return what a run leaves behind that nothing happened to."""
    return finish(command, tmp_path_factory.mktemp("uninterrupted"), workers=2)


def finish(command, folder, workers):
    process = command(*RUN, "--workers", workers, "--output", folder)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return left_behind(out, folder)


def wait_until_gone(group):
    deadline = time.monotonic() + 20
    while _alive(group):
        assert time.monotonic() < deadline, "processes outlive the one that feeds them"
        time.sleep(0.05)


@pytest.mark.long
def test_killed_with_all_its_processes(command, uninterrupted, tmp_path):
    """Two kills, the second while the first's remains are resumed, by other workers."""
    for count, workers in ((2, 2), (6, 1)):
        process = command(*RUN, "--workers", workers, "--output", tmp_path)
        wait_for(count, tmp_path, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = RecordFile(tmp_path).records
    assert 6 <= len(done) < EPISODES
    assert finish(command, tmp_path, 2) == uninterrupted
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    names = [json.loads(line)["case"] for line in lines]
    assert len(names) == len(set(names)) == EPISODES, "an episode was run twice"


def test_workers_end_with_the_main_process(command, tmp_path):
    process = command(*RUN, "--workers", 2, "--output", tmp_path)
    wait_for(1, tmp_path, process)
    process.kill()
    process.wait()
    wait_until_gone(process.pid)


@pytest.mark.long
def test_workers_that_look_at_no_pipe_end_too(command, tmp_path, monkeypatch):
    mark = tmp_path / "asleep"
    monkeypatch.setenv("ASLEEP", str(mark))
    words = ("--policy", "rollout_policies:Asleep", "--privileged", "--workers", 2)
    process = command(*RUN, *words, "--output", tmp_path / "run")
    deadline = time.monotonic() + PATIENCE_S
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    wait_until_gone(process.pid)


@pytest.mark.long
def test_a_worker_killed_in_the_middle_of_a_message_is_an_error_record(command, tmp_path):
    words = ("--policy", "rollout_policies:Torn", "--privileged", "--workers", 1)
    process = command(*RUN, *words, "--max-errors", 2, "--output", tmp_path)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    errors = [record.error for record in RecordFile(tmp_path).records.values()]
    assert errors == ["the worker process died with exit code 9"] * 2


@pytest.mark.long
def test_workers_that_abort_cost_their_episodes_and_no_more(command, uninterrupted, tmp_path):
    """As when a graphics driver aborts or crashes: one by one, in the middle of an episode."""
    process = command(*RUN, "--workers", 2, "--output", tmp_path)
    wait_for(2, tmp_path, process)
    children = psutil.Process(process.pid).children()
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    for worker, number in zip(workers, (signal.SIGABRT, signal.SIGSEGV), strict=True):
        worker.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    errors = {record.error for record in RecordFile(tmp_path).records.values() if record.error}
    told = ("6 (Aborted)", "11 (Segmentation fault)")
    assert errors == {f"the worker process died by signal {name}" for name in told}
    assert finish(command, tmp_path, 2) == uninterrupted


@pytest.mark.long
def test_a_termination_request_finishes_the_line(command, uninterrupted, tmp_path):
    process = command(*RUN, "--workers", 2, "--output", tmp_path)
    wait_for(2, tmp_path, process)
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (143, "dzrobot eval: terminated\n")
    assert (tmp_path / "records.jsonl").read_bytes().endswith(b"\n")
    wait_until_gone(process.pid)
    assert finish(command, tmp_path, 1) == uninterrupted


def test_of_two_runs_started_at_once_one_wins(command, tmp_path):
    """Records and card are of one run, whichever it is."""
    policies = ("random", "hold")
    words = [w for w in RUN if w not in ("--policy", "rollout_policies:Slow")]
    started = [
        command(*words, "--policy", name, "--workers", 1, "--output", tmp_path) for name in policies
    ]
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2], said
    loser = [process.returncode for process in started].index(2)
    assert "another run is writing" in said[loser] or "do not compare" in said[loser]
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["policy"]["policy"] == policies[1 - loser]
    assert len(RecordFile(tmp_path).records) == EPISODES


@pytest.mark.long
def test_interrupted_by_the_keyboard(command, uninterrupted, tmp_path):
    process = command(*RUN, "--workers", 2, "--output", tmp_path)
    wait_for(2, tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    wait_until_gone(process.pid)
    assert finish(command, tmp_path, 1) == uninterrupted


def test_a_second_run_in_the_same_folder_is_refused(command, tmp_path):
    process = command(*RUN, "--workers", 1, "--output", tmp_path)
    wait_for(1, tmp_path, process)
    # It holds on to the folder, however long the second takes to start.
    os.killpg(process.pid, signal.SIGSTOP)
    second = command(*RUN, "--workers", 1, "--output", tmp_path)
    _, err = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert "another run is writing" in err
    os.killpg(process.pid, signal.SIGKILL)


def _alive(group):
    """Return whether any process of ``group`` is left; one that nobody waited for is not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own_group) == group and state != "Z":
            return True
    return False
