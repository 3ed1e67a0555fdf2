"""The emulated arm, gripper and cameras against the real client libraries, one process for all."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.envs.emulators import fci_protocol as wire
from dzrobot.envs.emulators.arm import EmulatedArm
from dzrobot.envs.emulators.dynamics import Faults
from dzrobot.envs.emulators.kinematics import FR3, READY
from dzrobot.envs.emulators.launcher import EmulatorLauncher, LauncherAddress
from dzrobot.envs.emulators.robot_client import StateMessage
from dzrobot.envs.emulators.robot_server import RobotServer
from dzrobot.envs.emulators.scenes import SERIALS
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.realsense import RealSenseDriver
from dzrobot.envs.panda.poses import pose_difference
from dzrobot.errors import RobotError


def test_ready_posture_is_where_the_arm_documents_it():
    tip = FR3.forward(READY, FR3.flange_to_hand)[:3, 3]
    np.testing.assert_allclose(tip, (0.3069, 0.0, 0.4869), atol=1e-4)


def test_jacobian_equals_finite_differences():
    hand, step = FR3.flange_to_hand, 1e-6
    q = np.random.default_rng(0).uniform(FR3.joint_low, FR3.joint_high)
    here = FR3.forward(q, hand)
    columns = [
        pose_difference(FR3.forward(q + step * unit, hand), here) / step for unit in np.eye(7)
    ]
    np.testing.assert_allclose(FR3.posture(q, hand).jacobian, np.stack(columns, 1), atol=1e-5)


def test_state_message_shows_errors_in_their_bits():
    arm = EmulatedArm()
    for index, name in enumerate(wire.ERRORS):
        arm.errors.clear()
        arm.trip(name)
        state = np.frombuffer(StateMessage().of(arm), wire.ROBOT_STATE)[0]
        assert np.flatnonzero(state["errors"]).tolist() == [index]
        assert np.flatnonzero(state["reflex_reason"]).tolist() == [index]
        assert state["robot_mode"] == wire.RobotMode.REFLEX


def test_packet_loss_is_repeatable_and_has_the_asked_share():
    lost = [Faults(packet_loss=0.2, loss_seed=3).lost(n) for n in range(2000)]
    assert lost == [Faults(packet_loss=0.2, loss_seed=3).lost(n) for n in range(2000)]
    assert abs(np.mean(lost) - 0.2) < 0.03


def is_served(connection):
    """Return whether the arm keeps ``connection`` open."""
    connection.settimeout(0.02)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


def test_arm_takes_one_client_and_the_next_as_soon_as_it_left():
    host = LauncherAddress.for_process(2).host
    robot = RobotServer(host, Faults())
    robot.start()
    try:
        for _ in range(40):
            first = socket.create_connection((host, wire.ROBOT_PORT))
            assert is_served(first)
            with socket.create_connection((host, wire.ROBOT_PORT)) as second:
                # However long a busy machine takes to close it.
                second.settimeout(60)
                assert second.recv(1) == b""
            first.close()
            with socket.create_connection((host, wire.ROBOT_PORT)) as at_once:
                assert is_served(at_once)
    finally:
        robot.stop()


ROBOT_NOISE = {
    "size 0": wire.ROBOT_HEADER.pack(0, 1, 0),
    "size 1": wire.ROBOT_HEADER.pack(0, 1, 1),
    "size 2^32-1": wire.ROBOT_HEADER.pack(0, 1, 2**32 - 1),
    "unknown command": wire.ROBOT_HEADER.pack(77, 1, 12),
    "short connect": wire.ROBOT_HEADER.pack(0, 1, 13) + b"x",
    "short move": wire.ROBOT_HEADER.pack(1, 1, 20) + b"x" * 8,
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "noise": np.random.default_rng(0).bytes(4096),
}
GRIPPER_NOISE = {
    "size 0": wire.GRIPPER_HEADER.pack(0, 1, 0),
    "size 2^32-1": wire.GRIPPER_HEADER.pack(0, 1, 2**32 - 1),
    "unknown command": wire.GRIPPER_HEADER.pack(77, 1, 10),
    "short connect": wire.GRIPPER_HEADER.pack(0, 1, 11) + b"x",
    "HTTP": ROBOT_NOISE["HTTP"],
    "noise": ROBOT_NOISE["noise"],
}


def test_noise_closes_its_own_connection_and_the_next_client_is_served():
    address = LauncherAddress.for_process(6)
    with EmulatorLauncher(address, serials=()) as bench:
        for port, header, messages in (
            (wire.ROBOT_PORT, wire.ROBOT_HEADER, ROBOT_NOISE),
            (wire.GRIPPER_PORT, wire.GRIPPER_HEADER, GRIPPER_NOISE),
        ):
            for message in messages.values():
                assert not answer_to(address.host, port, message)
                proper = header.pack(0, 7, header.size + 4) + wire.CONNECT_REQUEST.pack(10, 9)
                assert header.unpack_from(answer_to(address.host, port, proper))[:2] == (0, 7)
        before = processor_s(bench)
        time.sleep(0.5)
        # A connection that was given up is not asked again and again.
        assert processor_s(bench) - before < 0.45


def answer_to(host, port, message):
    """Return what is answered before the connection closes or pauses."""
    with socket.create_connection((host, port), timeout=20) as client:
        client.sendall(message)
        try:
            return client.recv(100)
        except ConnectionResetError:
            return b""


def processor_s(bench):
    """Return the processor time of the arm's process (s)."""
    words = Path(f"/proc/{bench._arm.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "8.8.8.8", "::", "", "example.invalid"])
def test_emulators_listen_within_this_machine_alone(host, capsys):
    assert main(["emulate", "franka", "--host", host]) == 2
    said = capsys.readouterr().err
    assert ("loopback" if host else "allowed: a name") in said
    assert repr(host) in said


def test_emulate_ends_on_sigterm_without_children_or_a_traceback():
    host = LauncherAddress.for_process(7).host
    program = subprocess.Popen(
        [sys.executable, "-m", "dzrobot.cli", "emulate", "franka", "--no-cameras", "--host", host],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "Ctrl-C" not in program.stdout.readline():
        assert program.poll() is None
    (child,) = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    # A terminal's Ctrl-C goes to the program's own session.
    assert os.getsid(int(child)) == int(child)
    program.terminate()
    _, said = program.communicate(timeout=60)
    assert program.returncode == 0
    assert said == f"next: dzrobot init-workcell practice.yaml --address {host}\n"
    assert not Path(f"/proc/{child}").exists()


def test_an_arm_server_that_is_terminated_ends_without_a_traceback():
    address = LauncherAddress.for_process(8)
    with EmulatorLauncher(address, serials=()) as bench:
        bench._arm.terminate()
        assert bench._arm.wait(timeout=60) == 0


def test_an_arm_server_ends_on_a_signal_that_does_not_interrupt_its_wait():
    address = LauncherAddress.for_process(9)
    with EmulatorLauncher(address, serials=()) as bench:
        arm = bench._arm.pid
        others = {int(task.name) for task in Path(f"/proc/{arm}/task").iterdir()} - {arm}
        # As when it comes just before the wait begins: Python hears of it, no call is interrupted.
        assert ctypes.CDLL(None).tgkill(arm, others.pop(), signal.SIGTERM) == 0
        assert bench._arm.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def bench():
    pytest.importorskip("franky", reason="needs franky-control (x86_64 Linux)")
    pytest.importorskip("pyrealsense2", reason="needs pyrealsense2 (x86_64 Linux)")
    with EmulatorLauncher(LauncherAddress.for_process(1)) as running:
        yield running


@pytest.fixture(scope="module")
def robot_thread():
    # The client may make the calling thread real-time; one thread owns it, as in the driver.
    with ThreadPoolExecutor(1) as thread:
        yield lambda job: thread.submit(job).result(timeout=20)


@pytest.fixture(scope="module")
def robot(bench, robot_thread):
    import franky

    return robot_thread(
        lambda: franky.Robot(bench.address.host, realtime_config=franky.RealtimeConfig.Ignore)
    )


@pytest.fixture
def ready(robot, robot_thread):
    import franky

    robot_thread(lambda: _recover(robot))
    robot_thread(lambda: robot.move(franky.JointMotion(READY, relative_dynamics_factor=0.5)))
    return robot


def _recover(robot):
    robot.recover_from_errors()
    deadline = time.monotonic() + 1
    while robot.has_errors and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not robot.has_errors


@pytest.mark.robot
def test_cartesian_motion_reaches_its_target(ready, robot_thread):
    import franky

    target = ready.state.O_T_EE.matrix.copy()
    target[:3, 3] += (0.03, -0.02, 0.04)
    robot_thread(
        lambda: ready.move(
            franky.CartesianMotion(franky.Affine(target), relative_dynamics_factor=0.3)
        )
    )
    np.testing.assert_allclose(ready.state.O_T_EE.translation, target[:3, 3], atol=1e-4)


@pytest.mark.robot
def test_impedance_tracker_settles_near_its_target(ready, robot_thread):
    import franky

    def track():
        tracker = franky.CartesianImpedanceTracker(
            ready, translational_stiffness=500.0, rotational_stiffness=40.0
        )
        target = ready.state.O_T_EE.matrix.copy()
        target[1, 3] += 0.02
        tracker.set_target(franky.Affine(target))
        until = ready.state.time.to_sec() + 1.0
        while ready.state.time.to_sec() < until:
            time.sleep(0.01)
        error = ready.state.O_T_EE.translation - target[:3, 3]
        tracker.stop()
        return error

    assert np.linalg.norm(robot_thread(track)) < 2e-3


@pytest.mark.robot
def test_reflex_reaches_the_client_and_recovers(ready, bench, robot_thread):
    import franky

    def run():
        motion = franky.CartesianVelocityMotion(franky.Twist([0.02, 0, 0]), franky.Duration(3000))
        ready.move(motion, asynchronous=True)
        time.sleep(0.1)
        bench.call("trip", "cartesian_reflex")
        with pytest.raises(franky.ControlException, match="cartesian_reflex"):
            ready.join_motion()
        assert ready.state.robot_mode == franky.RobotMode.Reflex
        _recover(ready)

    robot_thread(run)


@pytest.mark.robot
def test_user_stop_refuses_recovery_until_released(ready, bench, robot_thread):
    import franky

    def run():
        bench.call("press_user_stop")
        time.sleep(0.05)
        assert ready.state.robot_mode == franky.RobotMode.UserStopped
        with pytest.raises(franky.CommandException):
            ready.recover_from_errors()
        bench.call("release_user_stop")
        time.sleep(0.05)
        _recover(ready)

    robot_thread(run)


@pytest.mark.robot
def test_lost_commands_barely_slow_a_motion_down(ready, bench, robot_thread):
    import franky

    def timed():
        start = ready.state.time.to_sec()
        ready.move(franky.JointMotion(READY + 0.1, relative_dynamics_factor=0.3))
        moved = ready.state.time.to_sec() - start
        ready.move(franky.JointMotion(READY, relative_dynamics_factor=0.3))
        return moved

    plain = robot_thread(timed)
    bench.set(packet_loss=0.05, loss_seed=1)
    lossy = robot_thread(timed)
    bench.set(packet_loss=0.0)
    assert lossy < 2.0 * plain


@pytest.mark.robot
def test_second_client_is_refused(robot, bench):
    import franky

    errors = []

    def connect():
        try:
            franky.Robot(bench.address.host, realtime_config=franky.RealtimeConfig.Ignore)
        except franky.NetworkException as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(5)
    assert len(errors) == 1


@pytest.mark.robot
def test_gripper_moves_grasps_fails_and_hangs(bench):
    import franky

    gripper = franky.Gripper(bench.address.host)
    assert gripper.move(0.02, 0.2)
    assert gripper.width == pytest.approx(0.02)
    assert gripper.open(0.2)
    bench.set(object_width_m=0.04)
    assert gripper.grasp(0.0, 0.2, 20.0, 1.0, 1.0)
    assert gripper.is_grasped
    bench.set(object_width_m=None, gripper_fails=1)
    with pytest.raises(franky.CommandException):
        gripper.open(0.2)
    # As on the hand, only the width counts: nothing is held, and yet a wide tolerance says so.
    assert not gripper.grasp(0.04, 0.2, 20.0, 0.005, 0.005)
    assert gripper.grasp(0.0, 0.2, 20.0, 0.08, 0.08)
    assert gripper.move(0.09, 0.2)
    assert gripper.width == pytest.approx(0.08)
    bench.set(homed=False)
    assert gripper.max_width == 0.0
    with pytest.raises(franky.CommandException):
        gripper.grasp(0.0, 0.2, 20.0, 0.08, 0.08)
    assert gripper.homing()
    assert gripper.max_width == pytest.approx(0.08)
    bench.set(gripper_stuck=True)
    pending = gripper.move_async(0.08, 0.2)
    assert not pending.wait(0.3)
    bench.set(gripper_stuck=False)
    assert pending.get()


@pytest.mark.robot
def test_both_cameras_are_listed_and_show_where_the_arm_is(ready, bench, robot_thread):
    import franky
    import pyrealsense2 as rs

    context = rs.context(json.dumps(bench.camera_settings()))
    deadline = time.monotonic() + 10
    while len(context.query_devices()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    found = {device.get_info(rs.camera_info.serial_number) for device in context.query_devices()}
    assert found == set(SERIALS)
    pipelines = []
    for serial in SERIALS:
        config = rs.config()
        config.enable_device(serial)
        config.enable_stream(rs.stream.color, 640, 480, rs.format.rgb8, 15)
        pipelines.append(rs.pipeline(context))
        start(pipelines[-1], config)
    before = [taken_after(pipeline, bench.page.clock_ms) for pipeline in pipelines]
    moved = READY + 0.3 * np.eye(7)[0]
    robot_thread(lambda: ready.move(franky.JointMotion(moved, relative_dynamics_factor=0.5)))
    after = [taken_after(pipeline, bench.page.clock_ms) for pipeline in pipelines]
    for pipeline in pipelines:
        pipeline.stop()
    assert before[0].shape == (480, 640, 3)
    assert not np.array_equal(before[0], after[0])
    assert not np.array_equal(after[0], after[1])


def start(pipeline, config):
    """Start a camera; the library gives a busy machine a second to answer, and is asked again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return pipeline.start(config)
        except RuntimeError as error:
            if "timeout" not in str(error) or time.monotonic() > deadline:
                raise


def taken_after(pipeline, clock_ms):
    """Return the first image (480, 640, 3) exposed after a time of the arm's clock."""
    while True:
        frame = pipeline.wait_for_frames(5000).get_color_frame()
        if frame.get_timestamp() > clock_ms:
            return np.asanyarray(frame.get_data()).copy()


class Counted:
    """Where a driver puts its frames."""

    frames = 0

    def put(self, _head, _pixels):
        self.frames += 1


@pytest.mark.robot
@pytest.mark.long
def test_cameras_that_come_back_while_a_client_asks_for_them_start_at_once(monkeypatch):
    """A callback of the bus once waited for the interpreter with the bus's lock in hand."""
    pytest.importorskip("pyrealsense2", reason="needs pyrealsense2 (x86_64 Linux)")
    monkeypatch.setattr("dzrobot.envs.emulators.launcher.START_TIMEOUT_S", 60.0)
    seen = Counted()

    def receive(more):
        wanted = seen.frames + more
        for _ in range(6000):
            if seen.frames >= wanted:
                return
            driver.tick()
            time.sleep(0.01)
        pytest.fail(f"no frame came: {driver.fault()}")

    with EmulatorLauncher(LauncherAddress.for_process(5)) as emulators:
        # Images then follow the clock on the wall.
        emulators.kill_arm()
        camera = CameraConfig(key="view", serial=SERIALS[0], width=320, height=240, fps=15)
        driver = RealSenseDriver(camera, emulators.camera_settings(), 1.0, seen)
        driver.find(60.0)
        driver.stream()
        receive(4)
        for _ in range(10):
            emulators.kill_cameras()
            emulators.start_cameras()
            receive(4)
        driver.close()


def test_unknown_calls_and_faults_are_refused(bench):
    with pytest.raises(RobotError, match="press_user_stop"):
        bench.call("press_user_stopp")
    with pytest.raises(RobotError, match="packet_loss"):
        bench.set(packet_los=1)
