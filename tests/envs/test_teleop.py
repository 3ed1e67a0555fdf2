"""Devices that people steer with: the real libraries against devices that are not there."""

import gc
import math
import os
import signal
import time
from pathlib import Path

import easyhid.easyhid
import pygame
import pytest
from emulated_devices import (
    EmulatedGamepad,
    EmulatedHidapi,
    EmulatedServos,
    EmulatedSpaceMouse,
    OffScale,
)
from pygame._sdl2 import controller

from dzrobot.envs.teleop.device import DeviceLostError, DrivenDevice
from dzrobot.envs.teleop.devices import load_device
from dzrobot.envs.teleop.handheld import GamepadSource, SpaceMouseSource
from dzrobot.envs.teleop.leader import LeaderSource
from dzrobot.envs.teleop.settings import GamepadConfig, LeaderConfig, SpaceMouseConfig
from dzrobot.errors import MissingDependencyError, RobotError

WHOLE = {"dead_zone": 0.0, "translation_gain": 1.0, "rotation_gain": 1.0}


@pytest.fixture
def mouse(tmp_path, monkeypatch):
    path = tmp_path / "hidraw0"
    mouse = EmulatedSpaceMouse(path)
    monkeypatch.setattr(easyhid.easyhid, "hidapi", EmulatedHidapi(path))
    yield mouse
    # easyhid closes what is left where the collector finds it.
    gc.collect()


def opened(mouse, **settings):
    source = SpaceMouseSource(SpaceMouseConfig(**settings))
    source.open()
    mouse.plugged()
    return source


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("sent", "motion"),
    [
        (("push", {"y": -350}), (1, 0, 0, 0, 0, 0)),  # away from the person: forward
        (("push", {"x": -350}), (0, 1, 0, 0, 0, 0)),
        (("push", {"z": -350}), (0, 0, 1, 0, 0, 0)),
        (("turn", {"z": -350}), (0, 0, 0, 0, 0, 1)),  # the cap turned to the left
        (("turn", {"y": -350}), (0, 0, 0, 1, 0, 0)),
        (("turn", {"x": -175}), (0, 0, 0, 0, 0.5, 0)),  # tilted away
    ],
)
def test_a_spacemouse_moves_the_hand_as_the_cap_is_moved(mouse, sent, motion):
    source = opened(mouse, **WHOLE)
    getattr(mouse, sent[0])(**sent[1])
    mouse.press(0)
    reading = source.poll()
    assert reading.active
    assert reading.motion == pytest.approx(motion)
    source.close()


def test_dead_zone_gain_and_axes_are_settings(mouse):
    source = opened(
        mouse, dead_zone=0.2, translation_gain=0.4, rotation_gain=0.5,
        axes=("-x", "-y", "z", "none", "pitch", "yaw"),
    )  # fmt: skip
    mouse.push(y=-210, x=70)
    mouse.turn(y=350, x=-350)
    # 0.6 is half of the way beyond the dead zone, and 0.2 its edge.
    assert source.poll().motion == pytest.approx((-0.2, 0, 0, 0, 0.5, 0))


def test_a_button_pressed_and_let_go_between_two_looks_counts(mouse):
    source = opened(mouse, end=0, deadman=None)
    assert source.poll().active
    for _ in range(3):
        mouse.press(1)
        mouse.press()
    mouse.press(0)
    reading = source.poll()
    assert (reading.presses, reading.ends) == (3, True)


def test_an_unplugged_spacemouse_is_an_error(mouse):
    source = opened(mouse)
    mouse.unplug()
    with pytest.raises(RobotError, match="no longer connected"):
        source.poll()


def test_a_spacemouse_that_cannot_be_used_says_why(mouse, tmp_path, monkeypatch):
    with pytest.raises(RobotError, match=r"no button 5; it has 0 \(LEFT\), 1 \(RIGHT\)"):
        SpaceMouseSource(SpaceMouseConfig(gripper=5)).open()
    both = EmulatedHidapi(tmp_path / "hidraw0", tmp_path / "hidraw1")
    monkeypatch.setattr(easyhid.easyhid, "hidapi", both)
    with pytest.raises(RobotError, match=r"several.*hidraw1 \(SpaceNavigator\).*path="):
        SpaceMouseSource(SpaceMouseConfig()).open()
    monkeypatch.setattr(easyhid.easyhid, "hidapi", EmulatedHidapi())
    with pytest.raises(RobotError, match="no SpaceMouse is connected"):
        SpaceMouseSource(SpaceMouseConfig()).open()
    # What easyhid has where the system's library is missing: nothing of it.
    monkeypatch.setattr(easyhid.easyhid, "hidapi", object())
    with pytest.raises(MissingDependencyError, match="libhidapi-hidraw0"):
        SpaceMouseSource(SpaceMouseConfig()).open()


@pytest.fixture
def pad(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame.display.init()
    controller.init()
    pad = EmulatedGamepad()
    yield pad
    controller.quit()
    pygame.display.quit()


def test_a_gamepad_moves_the_hand(pad):
    source = GamepadSource(GamepadConfig.model_validate(WHOLE))
    source.open()
    pad.axis(pygame.CONTROLLER_AXIS_LEFTY, -32767)
    pad.axis(pygame.CONTROLLER_AXIS_RIGHTX, 16384)
    pad.axis(pygame.CONTROLLER_AXIS_TRIGGERLEFT, 32767)
    pad.button(pygame.CONTROLLER_BUTTON_DPAD_LEFT, down=True)
    reading = source.poll()
    assert not reading.active
    assert reading.motion == pytest.approx((1, 0, -1, -1, 0, -0.5), abs=1e-4)
    pad.button(pygame.CONTROLLER_BUTTON_LEFTSHOULDER, down=True)
    for down in (True, False, True, False):
        pad.button(pygame.CONTROLLER_BUTTON_A, down)
    pad.button(pygame.CONTROLLER_BUTTON_START, down=True)
    reading = source.poll()
    assert (reading.active, reading.presses, reading.ends) == (True, 2, True)
    pad.unplug()
    with pytest.raises(RobotError, match="no longer connected"):
        source.poll()
    with pytest.raises(RobotError, match="no gamepad is connected"):
        GamepadSource(GamepadConfig()).open()


LEADER = {
    "signs": (1, -1, 1, 1, 1, 1, 1),
    "offsets_rad": (0.0, math.pi, 0.0, 0.0, 0.0, -math.pi / 2, 0.0),
    "gripper_open_rad": 0.0, "gripper_closed_rad": -0.8,
    "deadman_id": 9, "deadman_held_rad": 0.5,
}  # fmt: skip


@pytest.fixture
def servos():
    servos = EmulatedServos(dict.fromkeys(range(1, 10), 0))
    yield servos
    servos.close()


def test_a_leader_shows_the_arms_joints(servos):
    source = LeaderSource(LeaderConfig(port=servos.port, silent_s=60.0, **LEADER))
    source.open()
    # Half a turn and a quarter; one turned backwards beyond zero, whose bytes begin like a packet.
    servos.turns.update({1: 1024, 2: 1024, 3: -4096, 6: -1024, 7: -0x20001, 8: 0, 9: 0})
    reading = source.poll()
    quarter = math.pi / 2
    turned = -0x20001 / 4096 * math.tau
    assert reading.joints == pytest.approx((quarter, quarter, -4 * quarter, 0, 0, 0, turned))
    assert (reading.active, reading.closed) == (False, False)
    servos.turns.update({8: -400, 9: 300})
    reading = source.poll()
    assert (reading.active, reading.closed) == (True, True)
    servos.is_silent = True
    source._config = source._config.model_copy(update={"silent_s": 0.1})
    with pytest.raises(RobotError, match="do not answer"):
        source.poll()
    source.close()


def test_a_leader_that_cannot_be_used_says_why(servos):
    del servos.turns[3], servos.turns[9]
    with pytest.raises(RobotError, match="no servo answers as 3, 9"):
        LeaderSource(LeaderConfig(port=servos.port, silent_s=1.0, **LEADER)).open()
    with pytest.raises(RobotError, match="cannot be opened"):
        LeaderSource(LeaderConfig(port="/dev/none", **LEADER)).open()
    with pytest.raises(RobotError, match="baud_rate=12345"):
        LeaderSource(LeaderConfig(port=servos.port, baud_rate=12345, **LEADER)).open()


def leader_arguments(port, **changed):
    values = {"port": port, **LEADER, **changed}
    return [
        f"{key}={list(value) if isinstance(value, tuple) else value}"
        for key, value in values.items()
    ]


def test_a_device_whose_library_hangs_is_lost(servos):
    device = load_device("leader", leader_arguments(servos.port, silent_s=3.0))
    with pytest.raises(RobotError, match="not open"):
        device.read()
    device.open()
    assert device.read().closed is False
    # As a native call that never returns, with Python's lock.
    os.kill(device._driver.pid, signal.SIGSTOP)
    time.sleep(3.5)
    with pytest.raises(DeviceLostError, match="said nothing for"):
        device.read()
    with pytest.raises(RobotError, match="not open"):
        device.read()
    device.close()


def test_a_device_that_shows_no_number_is_lost(monkeypatch):
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    device = DrivenDevice(
        "dial", OffScale, SpaceMouseConfig(silent_s=60.0),
        gives="motion", has_deadman=True, packages=(),
    )  # fmt: skip
    device.open()
    with pytest.raises(DeviceLostError, match=r"not a reading: .* valid number"):
        device.read()
    device.close()
