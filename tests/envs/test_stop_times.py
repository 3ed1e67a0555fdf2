"""How long an arm takes to come to rest while its program cannot act, in real time.

``pytest -s -m "robot and long" tests/envs/test_stop_times.py`` prints the table of ten times each.
"""

import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from emulated import need_libraries, printer

from dzrobot.cli import STOPPED
from dzrobot.envs.emulators.launcher import EmulatorLauncher, LauncherAddress
from dzrobot.envs.emulators.timebase import SCENE_PERIOD_MS

sys.path.insert(0, str(Path(__file__).parents[1] / "commands"))

from operated import Operated

PROGRAM = '''
"""Resets a real arm at an address, then drives it forward; freezes when it is told to."""

import contextlib, ctypes, os, sys, threading, time
from pathlib import Path

import numpy as np
from test_franka_processes import DrawnCamera

from dzrobot.cli import STOPPED
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.make import load_workcell
from dzrobot.envs.franka.operator.console import OperatorConsole
from dzrobot.envs.franka.workcells import RealWorkcell
from dzrobot.errors import StoppedError

folder = Path(sys.argv[2])

class Marked(FrankyArm):
    def connect(self):
        (folder / "connecting").touch()
        super().connect()

class Patient(RealWorkcell):
    """Its drivers may take long to start, on a busy machine."""

    patience = 5.0

def hold_interpreter():
    freeze = folder / "freeze"
    while True:
        time.sleep(0.005)
        if freeze.exists():
            freeze.unlink()
            # A call through PyDLL keeps the interpreter, as some native extensions do.
            ctypes.PyDLL(None).sleep(int(os.environ["HELD_S"]))

config = load_workcell(None, {
    "address": sys.argv[1], "lock_folder": str(folder), "reward": {"rule": "none"},
    "reset": {"lift_m": 0.0}, "limits": {"frame_age_s": 20.0, "state_age_s": 20.0},
    "gripper": {"kind": "none"},
})
cameras = [DrawnCamera(key) for key in config.robot.video_keys]
console = OperatorConsole(log=folder / "log.jsonl")
env = FrankaEnv(Marked(Patient(sys.argv[1]), config), cameras, config, operator=console)
threading.Thread(target=hold_interpreter, daemon=True).start()
try:
    for left in reversed(range(int(sys.argv[3]))):
        with contextlib.suppress(StoppedError):
            env.reset()
            while not env.step(np.array([0.3, 0, 0, 0, 0, 0, 0], np.float32))[3]:
                pass
        # The key has come in the meantime, too, and is the stop of this attempt.
        time.sleep(2 if left else 0)
        env.acknowledge()
        (folder / "acknowledged").touch()
finally:
    env.close()
sys.exit(STOPPED)
'''

AWAY = (0.45, 0.25, 0.35)
"""Where the hand is guided to before each run, so that it has some way home (m)."""

MOVING_M_S = 0.02
RESTING_M_S = 0.005
OBSERVED_S = 3.0
GUIDED_S = 0.3
HELD_S = 10


class Truth:
    """Where the emulated hand is, by its arm's clock, which a busy machine slows down."""

    def __init__(self, page):
        self._page = page
        self._seen = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def now_s(self):
        return self._page.clock_ms / 1000

    def end(self):
        self._ending.set()
        self._thread.join()

    def speed(self, at_ms=None):
        """Return the hand's speed (m/s) over the 50 ms of the arm's before a time."""
        at_ms = max(self._seen, default=0) if at_ms is None else at_ms
        rows = [(ms, self._seen[ms]) for ms in range(at_ms - 50, at_ms + 1) if ms in self._seen]
        if len(rows) < 2:
            return 0.0
        (first_ms, first), (last_ms, last) = rows[0], rows[-1]
        return 1000 * float(np.linalg.norm(last - first)) / (last_ms - first_ms)

    def place(self):
        """Return where the hand is (m)."""
        return self._seen[max(self._seen)]

    def rested_s(self, since_s):
        """Return when the hand moved last, at or after ``since_s``."""
        times = [ms for ms in list(self._seen) if ms >= 1000 * since_s]
        moving = [ms for ms in times if self.speed(ms) > RESTING_M_S]
        return max(moving, default=1000 * since_s) / 1000

    def _run(self):
        while not self._ending.wait(0.002):
            at_ms = self._page.clock_ms // SCENE_PERIOD_MS * SCENE_PERIOD_MS - SCENE_PERIOD_MS
            self._seen[at_ms] = self._page.scene_at(at_ms)[:3]


@pytest.fixture(scope="module")
def emulators():
    need_libraries()
    with EmulatorLauncher(LauncherAddress.for_process(), serials=()) as emulators:
        yield emulators


class Run:
    """One program on a terminal of its own, which begins anew after a stop."""

    def __init__(self, emulators, folder, times):
        self.emulators, self.folder = emulators, folder
        (folder / "program.py").write_text(PROGRAM)
        tests = Path(__file__).parents[1]
        path = [str(tests), str(tests / "envs"), os.environ.get("PYTHONPATH", "")]
        self.operated = Operated(
            [emulators.address.host, str(folder), str(times)], folder / "log.jsonl",
            {"PYTHONPATH": os.pathsep.join(path), "HELD_S": str(HELD_S)},
            folder / "program.py",
        )  # fmt: skip
        self.truth = Truth(emulators.page)

    def travel(self):
        """Agree; return once the joints are on their way home, by a motion that the arm plans."""
        self.operated.wait_for("question", "stand clear")
        self.emulators.call("guide", *AWAY)
        # The guided hand is there at once, which is no motion of the program's.
        guided_s = self.truth.now_s
        self._until(lambda: self.truth.now_s > guided_s + GUIDED_S)
        assert self.truth.speed() < RESTING_M_S
        assert np.allclose(self.truth.place(), AWAY, atol=0.01)
        self.operated.press("\n")
        self._until(lambda: self.truth.speed() > MOVING_M_S)

    def drive(self):
        """Agree to everything; return once the hand is driven."""
        self.operated.begin()
        self._until(lambda: self.truth.speed() > MOVING_M_S)

    def freeze(self, how):
        """Keep the program from acting."""
        if how == "SIGSTOP":
            self.operated.signal(signal.SIGSTOP)
        else:
            (self.folder / "freeze").touch()
            time.sleep(0.05)

    def time_to_rest(self, press):
        """Return the seconds from now, when space is pressed, until the hand rests."""
        began_s = self.truth.now_s
        if press:
            self.operated.press(" ")
            self._until(lambda: list(self.folder.glob("*.stop")))
        self._until(lambda: self.truth.now_s > began_s + OBSERVED_S)
        assert self.truth.speed() < RESTING_M_S
        took = self.truth.rested_s(began_s) - began_s
        self.operated.signal(signal.SIGCONT)
        self.operated.wait_for_file(self.folder / "acknowledged")
        (self.folder / "acknowledged").unlink()
        # Nothing moves once the program acts again.
        assert self.truth.rested_s(began_s) - began_s == took
        return took

    def time_to_end(self):
        """Return the seconds from a space while devices are connected until the program ends."""
        self.operated.wait_for_file(self.folder / "connecting")
        began, began_s = time.monotonic(), self.truth.now_s
        self.operated.press(" ")
        assert self.operated.end() == STOPPED
        took = time.monotonic() - began
        assert "stand clear" not in (self.folder / "log.jsonl").read_text()
        assert self.truth.rested_s(began_s) == began_s
        return took

    def end(self):
        self.truth.end()
        self.operated.signal(signal.SIGCONT)
        self.operated.__exit__()

    def _until(self, holds):
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)


ROWS = {
    "space, interpreter held, traveling": ("travel", "held", True, 1.0),
    "space, interpreter held, episode": ("drive", "held", True, 1.5),
    "space, SIGSTOP, traveling": ("travel", "SIGSTOP", True, 1.0),
    "no key, SIGSTOP, traveling": ("travel", "SIGSTOP", False, 2.5),
    "space while connecting, to the end of the run": ("", "", True, 60.0),
}
"""What to wait for, how to freeze the program, whether space is pressed, and a limit (s)."""


@pytest.mark.robot
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ROWS)
def test_time_to_rest(name, times, emulators, tmp_path, request, capsys):
    until, freeze, press, limit_s = ROWS[name]
    took = []
    with contextlib.ExitStack() as ending:
        for number in range(times):
            if number == 0 or not until:
                ending.close()
                folder = tmp_path / str(number)
                folder.mkdir()
                run = Run(emulators, folder, times if until else 1)
                ending.callback(run.end)
            if until:
                getattr(run, until)()
                run.freeze(freeze)
                took.append(run.time_to_rest(press))
            else:
                took.append(run.time_to_end())
    printer(request, capsys)(
        f"\n{name:<46}{times:>3} times: min {min(took):.2f}, median {statistics.median(took):.2f}, "
        f"max {max(took):.2f} s"
    )
    assert max(took) < limit_s
