"""A run that hangs is found within minutes and named; what takes long by nature is not."""

import json
import subprocess
import sys

import pytest
import torch
import train_worker

from dzrobot.training.run.heartbeat import (
    HANG_FILE,
    HUNG,
    PERIOD_S,
    Heartbeat,
    Member,
    _compiling_is_long,
)
from dzrobot.training.run.trainer import Trainer

PATIENCE_S = 300.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Run:
    """Processes of one run, each with its heartbeat, on a clock of the test."""

    def __init__(self, folder, size=3, patience_s=PATIENCE_S, launch="one"):
        self.clock = Clock()
        self.folder = folder
        self.ranks = [
            Heartbeat(folder, Member(launch, rank, size), patience_s=patience_s, clock=self.clock)
            for rank in range(size)
        ]
        for _ in range(3):
            self.step(self.ranks)

    def step(self, ranks, seconds=PERIOD_S):
        for rank in ranks:
            rank.at("reading data", 7)
            rank.at("forward and backward")
        self.wait(seconds)

    def wait(self, seconds, frozen=()):
        """Let time pass; return after how many seconds a hang was found, and what."""
        passed = 0.0
        while passed < seconds:
            self.clock.now += PERIOD_S
            passed += PERIOD_S
            # The main process looks last, and so sees what the others have just written.
            for rank in reversed(self.ranks):
                if rank not in frozen and (found := rank.tick()):
                    return passed, found
        return passed, ""


LONG = ("compiling", "export", "loading and encoding", "checkpoint", "evaluation", "rollouts")


@pytest.mark.sampled
@pytest.mark.parametrize("phase", LONG)
@pytest.mark.parametrize("who", [0, 2])
def test_a_phase_of_twenty_minutes_is_no_hang(tmp_path, phase, who):
    run = Run(tmp_path)
    with run.ranks[who].long(phase):
        assert run.wait(1200) == (1200, "")
    run.step(run.ranks)
    assert run.wait(PATIENCE_S - PERIOD_S)[1] == ""


def test_the_one_that_hangs_is_named_with_its_phase(tmp_path):
    run = Run(tmp_path)
    for rank in run.ranks:
        rank.at("reading data", 8)
    for rank in (run.ranks[0], run.ranks[2]):
        rank.at("forward and backward")
    seconds, found = run.wait(3600)
    assert PATIENCE_S < seconds <= PATIENCE_S + 2 * PERIOD_S
    assert "no process has gone on for 5 min: behind is rank 1 (" in found
    assert "in step 8: reading data; the others: 2 in step 8: forward and backward" in found
    # All of them learn it, and so can end.
    run.clock.now += PERIOD_S
    assert [rank.tick() for rank in run.ranks] == [found] * 3


def test_after_a_long_phase_a_hang_is_found_as_soon_as_ever(tmp_path):
    run = Run(tmp_path)
    with run.ranks[0].long("export"):
        run.wait(1200)
    run.step(run.ranks)
    seconds, found = run.wait(3600)
    assert seconds <= PATIENCE_S + 2 * PERIOD_S
    assert "all are at the same place" in found


@pytest.mark.parametrize("who", [0, 2])
def test_a_process_that_is_frozen_or_gone_is_named(tmp_path, who):
    run = Run(tmp_path)
    frozen = run.ranks[who]
    for _ in range(40):
        run.clock.now += PERIOD_S
        others = [rank for rank in run.ranks if rank is not frozen]
        # The others still go through their phases, as where nothing is waited for.
        for rank in others:
            rank.at("forward and backward")
        if said := [found for rank in reversed(others) if (found := rank.tick())]:
            break
    assert said[0].startswith(f"no sign of life for 5 min: rank {who} (")
    assert "last seen in step 7: forward and backward" in said[0]


def test_a_slow_machine_is_no_hang(tmp_path):
    run = Run(tmp_path)
    run.step(run.ranks, seconds=120)
    run.step(run.ranks, seconds=PERIOD_S)
    # Ten times what a phase has taken before.
    assert run.wait(1100)[1] == ""
    assert run.wait(200)[1] != ""


def test_a_job_that_was_suspended_is_no_hang(tmp_path):
    run = Run(tmp_path)
    run.clock.now += 7200
    assert run.wait(PATIENCE_S - PERIOD_S)[1] == ""
    assert run.wait(2 * PATIENCE_S)[1] != ""


def test_what_an_earlier_run_left_is_not_believed(tmp_path):
    before = Run(tmp_path)
    before.wait(3600)
    assert (tmp_path / "heartbeat" / HANG_FILE).exists()
    after = Run(tmp_path, launch="two")
    assert after.wait(PATIENCE_S - 2 * PERIOD_S)[1] == ""


def test_where_a_process_was_never_heard_of_nothing_is_judged(tmp_path):
    run = Run(tmp_path)
    path = tmp_path / "heartbeat" / "rank_2.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "launch": "another"}))
    assert run.wait(3600, frozen=[run.ranks[2]])[1] == ""


def test_without_a_limit_it_is_told_and_nothing_ends(tmp_path, caplog):
    run = Run(tmp_path, patience_s=None)
    assert run.wait(3600)[1] != ""
    assert "no process has gone on" in caplog.text
    assert not (tmp_path / "heartbeat" / HANG_FILE).exists()


def test_compiling_is_marked_by_the_compiler_itself():
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    heart = Heartbeat()
    heart.at("forward and backward", 3)
    with _compiling_is_long(heart):
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            assert (heart._beat.phase, heart._beat.is_long) == ("compiling", True)
        assert (heart._beat.phase, heart._beat.is_long) == ("forward and backward", False)
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/1"):
        assert heart._beat.phase == "forward and backward"


def test_a_training_says_what_it_does(train_root, solo, tmp_path):
    class Told(Heartbeat):
        def __init__(self):
            super().__init__()
            self.told = []

        def at(self, phase, step=None, *, is_long=False):
            super().at(phase, step, is_long=is_long)
            self.told.append((phase, self._beat.step, is_long))

    class Quick(Trainer):
        """Computes nothing."""

        def prepare(self, batch):
            return None

        def forward_backward(self, prepared, batch, counts):
            return torch.zeros(2)

    changes = {"runner__output_dir": tmp_path, "data__num_workers": 0}
    run = Quick(train_worker.trainer(solo, train_root, **changes).components)
    run.heartbeat = Told()
    batches = run.batches(2)
    for _ in range(2):
        run.train_step(batches)
        run.step += 1
    told = run.heartbeat.told
    assert told[:2] == [("reading data", 1, True), ("forward and backward", 1, True)]
    assert told[-1] == ("optimizer step", 2, False)


def test_a_hang_ends_the_process_and_says_where_it_was(tmp_path):
    program = f"""
import time
from pathlib import Path
from dzrobot.training.run import heartbeat
heartbeat.PERIOD_S = 0.05
heart = heartbeat.Heartbeat(Path({str(tmp_path)!r}), patience_s=0.3)
def reads_for_ever():
    heart.at("reading data", 5)
    time.sleep(60)
with heart.running():
    reads_for_ever()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == HUNG == 75
    assert "in step 5: reading data" in done.stderr
    assert "runner.resume_dir=auto" in done.stderr
    assert "reads_for_ever" in (tmp_path / "heartbeat" / "rank_0.stacks.txt").read_text()
