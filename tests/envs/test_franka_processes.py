"""Drivers in processes of their own: nothing that hangs in there, for ever, freezes the others."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from emulated import KeptCell, need_libraries, printer, rows

from dzrobot.envs.driver_process import DisconnectedError, DriverProcess, Latest
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import FakeArm, FakeCamera
from dzrobot.envs.franka.make import connectable, load_workcell
from dzrobot.envs.franka.safeguards.stop_file import write_stop
from dzrobot.envs.franka.workcells import SystemClock
from dzrobot.errors import DzrobotError, RobotError, StoppedError

GAP_S = 0.2
"""How long the environment's process may be silent, beyond what the machine does to everyone."""

END_S = 5.0
"""How long stop and close may take together, whatever hangs."""

STILL = np.zeros(7, np.float32)
FORWARD = np.array([0.2, 0, 0, 0, 0, 0, 0], np.float32)
CLOSED = np.array([0.2, 0, 0, 0, 0, 0, -1], np.float32)


class Echo:
    """A driver without a device."""

    errors = (ValueError,)

    def __init__(self, latest=None):
        self.latest = latest

    def tick(self):
        return 0.01

    def translate(self, error):
        return RobotError(f"translated {error}")

    def close(self):
        if self.latest is not None:
            self.latest.put(b"closed")

    def echo(self, value):
        return value

    def pid(self):
        return os.getpid()

    def publish(self, count):
        for number in range(count):
            self.latest.put(bytes([number]) * (1000 + number))
            if number % 10 == 0:
                time.sleep(0.001)  # Lets the reader see more than the last, on a busy machine too.

    def fail(self, kind):
        raise kind("broken")

    def hang(self, seconds):
        time.sleep(seconds)


TESTS = Path(__file__).parents[1]
"""Where the child finds what this file imports."""


@pytest.fixture
def echo(monkeypatch):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    driver = DriverProcess("echo", Echo, memory=1 << 16)
    driver.call("pid", timeout_s=30)
    yield driver
    driver.kill()


def test_a_driver_answers_and_its_errors_are_ours(echo):
    assert echo.call("echo", {"a": 1}, timeout_s=60) == {"a": 1}
    assert echo.call("pid", timeout_s=60) == echo.pid != os.getpid()
    with pytest.raises(RobotError, match="translated broken"):
        echo.call("fail", ValueError, timeout_s=60)
    with pytest.raises(DisconnectedError, match=r"^broken"):
        echo.call("fail", DisconnectedError, timeout_s=60)
    assert echo.call("echo", 2, timeout_s=60) == 2
    # What no library raises is a bug: the device is brought to rest, and the process ends.
    with pytest.raises(DisconnectedError, match="has ended"):
        echo.call("fail", LookupError, timeout_s=60)


def test_a_driver_that_hangs_is_killed_by_whoever_waits(echo):
    with pytest.raises(DisconnectedError, match=r"gave no answer within 0\.2 s"):
        echo.call("hang", 60.0, timeout_s=0.2)
    assert not echo.is_running()
    with pytest.raises(DisconnectedError):
        echo.latest.get()


def test_who_waits_for_a_driver_that_another_has_ended_hears_so(echo):
    number = echo._send("hang", (60.0,), 5.0)
    echo.kill()
    with pytest.raises(DisconnectedError, match="has ended"):
        echo._receive(number, time.monotonic() + 60)


def test_beside_an_emulated_arm_an_answer_is_waited_for_longer(echo):
    echo._patience = 100.0
    assert echo.call("hang", 0.5, timeout_s=0.1) is None
    assert echo.try_call("echo", 1) == 1
    echo._patience = 1.0
    with pytest.raises(DisconnectedError, match=r"no answer within 0\.1 s"):
        echo.call("hang", 0.5, timeout_s=0.1)


def ask_until_lost(driver, took, value=1):
    while len(took) < 1000:
        began = time.monotonic()
        assert driver.try_call("echo", value, default="none") == "none"
        took.append(time.monotonic() - began)
        time.sleep(0.02)


def test_a_loop_waits_for_a_stopped_driver_once_and_gives_up_later(echo):
    os.kill(echo.pid, signal.SIGSTOP)
    took = []
    with pytest.raises(DisconnectedError, match="answered nothing"):
        ask_until_lost(echo, took)
    assert took[0] >= 0.1
    assert np.median(took[1:]) < 0.05


def test_a_loop_does_not_wait_until_a_stopped_driver_takes_a_question(echo):
    os.kill(echo.pid, signal.SIGSTOP)
    took = []
    with pytest.raises(DisconnectedError, match="answered nothing"):
        ask_until_lost(echo, took, bytes(50_000))
    assert np.median(took[1:]) < 0.05
    assert not echo.is_running()


def test_a_late_answer_is_not_taken_for_another_questions(echo):
    os.kill(echo.pid, signal.SIGSTOP)
    assert echo.try_call("echo", "first") is None
    os.kill(echo.pid, signal.SIGCONT)
    assert echo.call("echo", "second", timeout_s=60) == "second"
    echo._patience = 600.0  # On a busy machine a tenth of a second is short for any answer.
    assert echo.try_call("echo", "third") == "third"


def test_a_loop_hears_a_driver_again_that_was_late_once(echo):
    echo._patience = 10.0  # It has a second.
    assert echo.try_call("hang", 1.5) is None
    time.sleep(2.0)
    assert echo.try_call("hang", 0.2, default="no answer") is None


def test_a_driver_ends_with_its_parent():
    script = (
        "import os\n"
        "from dzrobot.envs.driver_process import DriverProcess\n"
        "from test_franka_processes import Echo\n"
        "driver = DriverProcess('echo', Echo, memory=64)\n"
        "print(driver.call('pid', timeout_s=30), flush=True); os.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    pid = int(found.stdout)
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
    assert time.monotonic() < deadline


def test_values_are_read_whole_while_they_are_written(echo):
    seen, deadline = set(), time.monotonic() + 60
    while len(seen) < 10 and time.monotonic() < deadline:
        echo.notify("publish", 200)
        for _ in range(2000):
            value = echo.latest.get()
            if value is not None:
                assert value == bytes([value[0]]) * (1000 + value[0])
                seen.add(value[0])
        # A busy machine may leave the driver behind: no more is asked of it before it has answered.
        echo.call("echo", 0, timeout_s=60)
    assert len(seen) >= 10, seen


def test_shared_memory_shows_nothing_before_the_first_value():
    latest = Latest.create(10)
    assert latest.get() is None
    latest.put(b"ab", b"cd")
    assert (latest.get(), latest.count()) == (b"abcd", 1)
    latest.close()


def beat(stop, gaps):
    """Note the longest silence until ``stop``."""
    last = time.monotonic()
    while not stop.is_set():
        time.sleep(0.005)
        now = time.monotonic()
        gaps.value = max(gaps.value, now - last)
        last = now


class Heartbeats:
    """The longest silence of this process, and of one that does nothing else."""

    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self._stop, self._threads_stop = spawn.Event(), threading.Event()
        self._other, self._own = spawn.Value("d", 0.0), multiprocessing.Value("d", 0.0)
        self._process = spawn.Process(target=beat, args=(self._stop, self._other), daemon=True)
        self._thread = threading.Thread(target=beat, args=(self._threads_stop, self._own))

    def __enter__(self):
        self._process.start()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._threads_stop.set()
        self._thread.join()
        self._process.join(5)

    @property
    def own_s(self):
        return self._own.value

    @property
    def machines_s(self):
        return self._other.value

    def forget(self):
        self._own.value = self._other.value = 0.0


class DrawnCamera(FakeCamera):
    """A camera without a device, on this machine's clock."""

    def __init__(self, key):
        arm = FakeArm(clock=SystemClock())
        arm.connect()
        super().__init__(key, arm)


@pytest.fixture(scope="module")
def cell():
    need_libraries()
    # What is stopped for ever is noticed on the clock of this machine, as beside hardware.
    cell = KeptCell(lockstep=False)
    yield cell
    cell.end()


@pytest.fixture(scope="module")
def beats():
    with Heartbeats() as beats:
        yield beats


PATIENT = {"frame_age_s": 3.0, "state_age_s": 1.0}
PHASES = ("connect", "move", "grasp", "stop", "close")
PEERS = (
    "emulated arm", "emulated cameras", "arm driver", "hand driver", "video.image driver",
    "video.wrist_image driver",
)  # fmt: skip
STOPPED = [(peer, phase) for peer in PEERS for phase in PHASES]
SHORT = {"arm driver-move", "hand driver-grasp"}


def make(cell, *, cameras):
    values = {
        "control_hz": 20.0, "reward": {"rule": "none"}, "limits": PATIENT,
        "gripper": {"timeout_s": 4.0}, "reset": {"speed_m_s": 0.5, "lift_m": 0.0},
    }  # fmt: skip
    env = connectable(cell, load_workcell("emulated:empty", values))
    if not cameras:
        drawn = [DrawnCamera(key) for key in ("video.image", "video.wrist_image")]
        env = FrankaEnv(env.arm, drawn, env.config)
    return env


def pids(env, cell, peer):
    """Return the processes that are stopped."""
    match peer:
        case "emulated arm":
            return [cell.emulators._arm.pid]
        case "emulated cameras":
            return [cell.emulators._cameras.pid]
        case "arm driver":
            return [env.arm.driver.pid]
        case "hand driver":
            return [env.arm.gripper.driver.pid]
    (camera,) = (one for one in env._sensors._cameras if peer == f"{one.config.key} driver")
    return [camera.driver.pid]


def reach(env, cell, phase):
    """Bring the environment to ``phase``."""
    env.reset()
    # The fingers are still on their way when the step is over.
    cell.emulators.set(gripper_latency_s=1.0 if phase == "grasp" else 0.0)
    steps = {"move": [FORWARD] * 3, "grasp": [CLOSED]}.get(phase, [STILL])
    for action in steps:
        assert env.step(action)[4]["abort"] == ""


@pytest.mark.robot
@pytest.mark.parametrize("stopped", rows(STOPPED, ["-".join(row) for row in STOPPED], SHORT))
def test_what_is_stopped_for_ever_freezes_nobody(stopped, cell, beats, request, capsys):
    peer, phase = stopped
    env = make(cell, cameras="camera" in peer or "video" in peer)
    cell.open()
    if phase != "connect" or peer.endswith("driver"):
        reach(env, cell, phase)
    frozen = pids(env, cell, peer)
    beats.forget()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        steps, limits = watch(env, peer, phase)
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        env.close()
        cell.emulators.set(gripper_latency_s=0.0)
    done = ", ".join(f"{name} {took:.2f} s" for name, took in limits.items())
    printer(request, capsys)(
        f"\n{peer:<25} {phase:<8} silent {beats.own_s:.3f} s, machine {beats.machines_s:.3f} s; "
        f"longest step {max(steps, default=0):.2f} s; {done}"
    )
    # Whoever is told to end does so within 5 s, beyond what the machine does to everyone.
    assert limits.get("stop", 0.0) + limits["close"] < END_S + 10 * beats.machines_s
    assert beats.own_s < GAP_S + 2 * beats.machines_s
    # A frame that is overdue is waited for as long as the workcell allows; watchers and keyboard
    # go on meanwhile. Nothing else holds a step up.
    waits = PATIENT["frame_age_s"] if "camera" in peer or "video" in peer else 0.0
    assert all(took < waits + GAP_S + 0.05 + 2 * beats.machines_s for took in steps)
    again = make(cell, cameras=False)
    again.reset()
    assert again.step(STILL)[4]["abort"] == ""
    again.close()


CAMERA = ("stale_frame",)
NOTICED = {
    "emulated": ("stale_state", "stale_frame", "gripper", "connection"),
    "arm": ("stale_state", "connection"),
    "hand": ("gripper",), "video.image": CAMERA, "video.wrist_image": CAMERA,
}  # fmt: skip
"""How an episode may end, by what was stopped."""


def watch(env, peer, phase):
    """Continue beside what was stopped; return how long each step took, and stop, reset, close."""
    steps, limits = [], {}
    if phase in ("move", "grasp"):
        aborted, action = False, CLOSED if phase == "grasp" else FORWARD
        while not aborted and len(steps) < 200:
            began = time.monotonic()
            *_, aborted, info = env.step(action)
            steps.append(time.monotonic() - began)
        assert aborted
        assert info["abort"] in NOTICED[peer.rpartition(" ")[0]]
        with pytest.raises(StoppedError):
            env.reset()
        env.acknowledge()
    if phase == "stop":
        began = time.monotonic()
        env._control.release()
        limits["stop"] = time.monotonic() - began
    if phase != "close":
        began = time.monotonic()
        # A driver is killed and another started; a device that is gone is an error.
        with contextlib.nullcontext() if "driver" in peer else pytest.raises(DzrobotError):
            env.reset()
        limits["reset"] = time.monotonic() - began
        assert limits["reset"] < 60
    began = time.monotonic()
    env.close()
    limits["close"] = time.monotonic() - began
    return steps, limits


@pytest.mark.robot
def test_the_environments_process_imports_no_native_driver_and_ends_beside_a_stuck_hand(tmp_path):
    need_libraries()
    script = textwrap.dedent("""
        import os, signal, sys
        import numpy as np
        from dzrobot.envs.franka.emulated import EmulatedWorkcell
        from dzrobot.envs.franka.make import connectable, load_workcell

        values = {"reward": {"rule": "none"}, "limits": {"frame_age_s": 5.0, "state_age_s": 5.0}}
        cell = EmulatedWorkcell(lockstep=False)
        env = connectable(cell, load_workcell("emulated:empty", values))
        env.reset()
        env.step(np.zeros(7, np.float32))
        cell.emulators.set(gripper_stuck=True)
        env.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
        os.kill(cell.emulators._arm.pid, signal.SIGSTOP)
        print(sorted({"franky", "pyrealsense2"} & set(sys.modules)), flush=True)
    """)
    path = tmp_path / "stuck.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


ENDS = textwrap.dedent("""
    import os, signal, sys, time
    from dzrobot.envs.emulators.launcher import EmulatorLauncher, LauncherAddress
    emulators = EmulatorLauncher(LauncherAddress.for_process()).start()
    pids = [emulators._arm.pid, emulators._cameras.pid]
    if sys.argv[1] == "suspended":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    if sys.argv[1] == "beside a fork" and os.fork() == 0:
        # It has every descriptor of its parent, and outlives it.
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(*pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")


@pytest.mark.robot
@pytest.mark.parametrize("how", ["alone", "suspended", "beside a fork"])
def test_emulators_end_with_the_program_that_started_them(how):
    need_libraries()
    done = subprocess.run([sys.executable, "-c", ENDS, how], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


AWAY = (0.45, 0.25, 0.35)
STOPS = ("silence", "a stop file", "a stop file that somebody has taken away again")


@pytest.fixture(scope="module")
def paused():
    """An emulated arm whose time passes only where the test lets it."""
    need_libraries()
    cell = KeptCell()
    yield cell
    cell.end()


@pytest.mark.robot
@pytest.mark.parametrize("how", STOPS)
def test_the_driver_ends_a_planned_motion_when_the_program_is_silent(how, paused, tmp_path):
    config = load_workcell("emulated:empty", {"gripper": {"kind": "none"}})
    arm, _, clock = paused.keep_time(FrankyArm(paused, config), ())
    stop, home = tmp_path / "stop", np.array(config.reset.joints)
    arm.watch_stop(stop)
    arm.connect()
    paused.emulators.call("guide", *AWAY)
    clock.sleep_until(clock.now() + 0.1)
    try:
        away = np.abs(arm.state().joints - home).max()
        began = clock.now()
        arm.home(home, 0.05)
        # Nobody says anything from here on, as in a program that is suspended.
        clock.sleep_until(began + config.limits.deadman_s / 2)
        if how != "silence":
            write_stop(stop, "operator_stop", "space")
            clock.sleep_until(clock.now() + 0.2)
        if how == STOPS[-1]:
            stop.unlink()
        clock.sleep_until(began + 2 * config.limits.deadman_s)
        rested = arm.state()
        clock.sleep_until(clock.now() + 1.0)
        state = arm.state()
        assert not state.controlled
        assert 0.05 < np.abs(state.joints - home).max() < away - 0.001
        np.testing.assert_allclose(state.joints, rested.joints, atol=1e-3)
        with pytest.raises(StoppedError) if how == STOPS[1] else contextlib.nullcontext():
            arm.start()
    finally:
        arm.close()


@pytest.mark.robot
@pytest.mark.parametrize("how", STOPS)
def test_the_driver_holds_a_hand_that_it_moves(how, paused, tmp_path):
    config = load_workcell("emulated:empty", {"gripper": {"kind": "none"}})
    arm, _, clock = paused.keep_time(FrankyArm(paused, config), ())
    stop = tmp_path / "stop"
    arm.watch_stop(stop)
    arm.connect()
    try:
        arm.start()
        here = arm.state().pose
        goal = here.copy()
        goal[0, 3] += 0.2
        # Far and slow, so that it is on its way for long.
        arm.command(goal, 4.0)
        clock.sleep_until(clock.now() + config.limits.deadman_s / 2)
        if how != "silence":
            write_stop(stop, "operator_stop", "space")
            clock.sleep_until(clock.now() + 0.2)
        if how == STOPS[-1]:
            stop.unlink()
        clock.sleep_until(clock.now() + 2.5)
        held = arm.state()
        assert held.controlled
        assert 0.01 < held.pose[0, 3] - here[0, 3] < 0.12
        assert np.linalg.norm(held.twist) < 0.01
        if how != "silence":
            with pytest.raises(StoppedError):
                arm.command(goal, 1.0)
    finally:
        arm.close()
