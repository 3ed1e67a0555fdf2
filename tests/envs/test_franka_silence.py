"""A busy machine that keeps the emulated arm from answering, and what is waited for, how long."""

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from emulated import KeptCell, need_libraries

from dzrobot.envs.driver_process import DisconnectedError
from dzrobot.envs.emulators import fci_protocol as wire
from dzrobot.envs.emulators.dynamics import Faults
from dzrobot.envs.emulators.launcher import LauncherAddress
from dzrobot.envs.emulators.robot_server import RobotServer
from dzrobot.envs.emulators.timebase import ArmClock, Timebase
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.emulated import TimedCamera
from dzrobot.envs.franka.make import load_workcell
from dzrobot.envs.franka.workcells import Frame

SILENCE_S = 1.6
"""The client library gives up after 1 s without a state."""

LONG_S = 60.0
"""How long a busy machine may take."""

READY = np.array([0, -np.pi / 4, 0, -3 * np.pi / 4, 0, np.pi / 2, np.pi / 4])


class LateImage:
    """A camera whose newest image was lost on the bus, until it is asked for once more."""

    config = CameraConfig(key="video.image", serial="1")

    def __init__(self, page):
        self.page = page

    def latest(self):
        image = np.zeros((1, 1, 3), np.uint8)
        stamp_s = 0.2 if self.page.again else 0.1
        return Frame(image, 1 + self.page.again, stamp_s, stamp_s, stamp_s)


def test_an_image_that_the_bus_lost_is_asked_for_once_more():
    page = Timebase.create()
    page.camera_is_alive = True
    page.clock_ms = 200
    page.publish(0, 200)
    frame = TimedCamera(LateImage(page), 0, ArmClock(page)).latest()
    assert (frame.at_s, page.again) == (0.2, 1)


def request(command, body):
    return wire.ROBOT_HEADER.pack(command, 1, wire.ROBOT_HEADER.size + len(body)) + body


def answer(state):
    """Return the command that answers a state: stay."""
    joints = state["q"].astype(float)
    return wire.COMMAND.pack(
        int(state["message_id"]), *joints, *np.zeros(7), *state["O_T_EE"], *np.zeros(8), 0, 0,
        *np.zeros(7), 0,
    )  # fmt: skip


def test_a_state_that_nobody_answers_is_sent_again():
    page, host = Timebase.create(), LauncherAddress.for_process(9).host
    # An environment shares the clock, so that the arm waits long for an answer.
    page.limit_ms = 1_000_000
    # The state holds single precision, too rough for its own limits.
    robot = RobotServer(host, Faults(limits=False), page)
    robot.start()
    with (
        socket.create_connection((host, wire.ROBOT_PORT)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        udp.settimeout(LONG_S)
        version, port = wire.ROBOT_VERSION, udp.getsockname()[1]
        tcp.sendall(request(wire.Command.CONNECT, wire.CONNECT_REQUEST.pack(version, port)))
        motion = wire.Generator.JOINT_POSITION
        tcp.sendall(
            request(wire.Command.MOVE, wire.MOVE_REQUEST.pack(1, motion, *np.zeros(6), 0, *READY))
        )
        answered: list[int] = []
        deadline = time.monotonic() + LONG_S
        while len(answered) < 5:
            assert time.monotonic() < deadline
            message, arm = udp.recvfrom(4096)
            state = np.frombuffer(message, wire.ROBOT_STATE)[0]
            if state["robot_mode"] == wire.RobotMode.MOVE:
                udp.sendto(answer(state), arm)
                answered.append(int(state["message_id"]))
        # On a busy machine an answered state was itself sent twice before the answer came.
        while np.frombuffer(message, wire.ROBOT_STATE)[0]["message_id"] <= answered[-1]:
            message = udp.recv(4096)
        assert udp.recv(4096) == message
    robot.stop()


def starve(cell, seconds=SILENCE_S):
    """Keep the emulated arm from running for a while, as a busy machine may."""
    pid = cell.emulators._arm.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


@pytest.fixture(scope="module", params=[True, False], ids=["lockstep", "as beside hardware"])
def cell(request):
    need_libraries()
    cell = KeptCell(lockstep=request.param)
    cell.open()
    if request.param:
        # An environment shares the clock.
        cell.clock.page.limit_ms = 10**9
    yield cell
    cell.end()


def advances(arm):
    """Return the next state that is newer than the newest one now."""
    before, deadline = arm.state().robot_time_s, time.monotonic() + LONG_S
    while (state := arm.state()).robot_time_s <= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return state


def ahead(state):
    """Return a target 2 cm from where the arm is."""
    target = state.pose.copy()
    target[0, 3] += 0.02
    return target


def home(arm):
    arm.home(READY, 0.2)
    return lambda state: np.abs(state.joints - READY).max() < 0.01


def track(arm):
    arm.start()
    target = ahead(arm.state())
    arm.command(target, 0.2)

    def is_there(state):
        arm.command(target, 0.2)
        return np.linalg.norm(state.pose[:3, 3] - target[:3, 3]) < 0.01

    return is_there


def rest(arm):
    return lambda state: True


def reflex(arm):
    arm.start()
    arm._workcell.emulators.call("trip", "joint_reflex")
    while not arm.state().errors:
        time.sleep(0.01)
    recovered = []

    def is_clear(state):
        recovered[:] = recovered or [arm.recover() is None]
        return not arm.state().errors

    return is_clear


def ask_on(question, deadline):
    while time.monotonic() < deadline:
        question()


@pytest.mark.robot
@pytest.mark.parametrize("doing", [rest, track, home, reflex])
def test_a_machine_that_keeps_the_emulated_arm_silent_ends_nothing(cell, doing):
    arm = FrankyArm(cell, load_workcell("emulated:empty"))
    arm.connect()
    try:
        arm.recover()
        is_done = doing(arm)
        driver = arm.driver.pid
        starve(cell)
        time.sleep(SILENCE_S / 4)
        deadline = time.monotonic() + LONG_S
        if cell.patience == 1.0:
            # Beside hardware a second of silence is a lost arm.
            with pytest.raises(DisconnectedError):
                ask_on(lambda: is_done(arm.state()), deadline)
            return
        while not is_done(advances(arm)):
            assert time.monotonic() < deadline
        assert arm.state().controlled == (doing in (track, home))
        assert arm.driver.pid == driver
    finally:
        time.sleep(SILENCE_S)
        arm.close()
