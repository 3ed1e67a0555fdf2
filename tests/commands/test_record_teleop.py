"""A demonstration from the device to the dataset: real libraries, in processes of their own."""

import math
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated_devices import EmulatedServos, EmulatedSpaceMouse, SourceOfEmulated

from dzrobot.cli import main
from dzrobot.diagnostics.recorded import load_recording
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.teleop.device import DrivenDevice
from dzrobot.envs.teleop.devices import load_device
from dzrobot.envs.teleop.settings import SpaceMouseConfig


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EMULATED_HID", str(tmp_path / "hidraw0"))
    # For the driver's process, which makes the emulated library.
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))


class LetGoAtFirst:
    """A device whose deadman somebody holds from the second look of an episode on.

    A fake arm's episode is over before a thread could press anything.
    """

    has_deadman = True

    def __init__(self, device):
        self.gives = device.gives
        self.check, self.open, self.close = device.check, device.open, device.close
        self._device = device
        self._looks = 0

    def read(self):
        self._looks += 1
        reading = self._device.read()
        # A trigger is open as it takes over, and pulled then.
        closed = reading.closed and self._looks > 2
        return replace(reading, active=reading.active and self._looks > 1, closed=closed)


LEADER_SETTINGS: list[str] = []


def spacemouse():
    """Named by ``--teleop``."""
    config = SpaceMouseConfig(dead_zone=0.0, silent_s=60.0)
    return LetGoAtFirst(
        DrivenDevice(
            "SpaceMouse", SourceOfEmulated, config,
            gives="motion", has_deadman=True, packages=("pyspacemouse",),
        )
    )  # fmt: skip


def leader():
    """Named by ``--teleop``, with settings that a test found."""
    return LetGoAtFirst(load_device("leader", LEADER_SETTINGS))


def record(tmp_path, *words):
    folder = str(tmp_path / "set")
    one = ["--attempts", "1", "--keep-failures", "--max-steps", "8"]
    return main(["record", "--output", folder, *one, *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--workcell", "fake"],
        pytest.param(["--env", "dzrobot/lift-v0", "--env-arg", "quality=draft", "--env-arg",
                      "resolution=64"],
                     marks=pytest.mark.long),
    ],
    ids=["arm", "simulator"],
)  # fmt: skip
def test_a_spacemouse_steers_what_is_recorded(words, tmp_path):
    mouse = EmulatedSpaceMouse(tmp_path / "hidraw0")

    def push():
        mouse.plugged()
        mouse.press(0)
        mouse.push(y=-175, z=-70)

    person = threading.Thread(target=push)
    person.start()
    frame = ["--env-arg", "action={frame: base}"] if "--workcell" in words else []
    assert record(tmp_path, "--teleop", f"{__name__}:spacemouse", *words, *frame) == 0
    person.join()
    robot = load_embodiment("franka_pnp" if frame else "libero_sim")
    recording = load_recording(tmp_path / "set", 0, replace(robot, action_frame="base"))
    opens = 1 if frame else -1
    expected = (0.25, 0, 0.1, 0, 0, 0, opens)
    np.testing.assert_allclose(recording.actions[-1], expected, atol=1e-6)
    if not frame:
        moved = recording.states[-1, :3] - recording.states[0, :3]
        assert moved[0] > 0.01


def test_a_leader_arm_steers_what_is_recorded(tmp_path, capsys):
    start = (0, -math.pi / 5, 0, -4 * math.pi / 5, 0, 3 * math.pi / 5, 0)
    turns = {number: round(value / math.tau * 4096) for number, value in enumerate(start, start=1)}
    # The third joint is a little elsewhere, the trigger is pulled, the lever held.
    servos = EmulatedServos(turns | {3: 100, 8: 500, 9: 300})
    settings = {
        "port": servos.port, "signs": [1] * 7, "offsets_rad": [0] * 7, "silent_s": 60,
        "gripper_open_rad": 0, "gripper_closed_rad": 0.7,
        "deadman_id": 9, "deadman_held_rad": 0.4,
    }  # fmt: skip
    words = [f"--teleop-arg={key}={value}" for key, value in settings.items()]
    env = ["--env", "dzrobot/Franka-DROID-v0", "--workcell", "fake"]
    # The servo of the first joint was mounted a quarter of a turn off: found, and given back.
    at = "--stands-at=" + ",".join(str(turns[number] / 4096 * math.tau) for number in range(1, 8))
    servos.turns.update({1: servos.turns[1] + 1024, 3: 0})
    try:
        assert main(["doctor", "device", "leader", *words, at, "--seconds", "0"]) == 0
        said = capsys.readouterr().out
        assert "held; joints +1.57 -0.63" in said
        assert "servo 8 0.77, servo 9 0.46" in said
        offsets = re.search(r"--teleop-arg '(offsets_rad=.*)'", said)[1]
        words = [*(word for word in words if "offsets" not in word), f"--teleop-arg={offsets}"]
        servos.turns[3] = 100
        # Held from the beginning on, it asks for nothing.
        assert record(tmp_path, "--teleop", "leader", *words, *env) == 0
        held = load_recording(tmp_path / "set", 0, load_embodiment("oxe_droid"))
        assert np.ptp(held.actions, axis=0).max() == 0
        # Neither the joint that stands elsewhere nor the gripper follows.
        np.testing.assert_allclose(held.actions[:, [2, 7]], 0, atol=0.01)
        shutil.rmtree(tmp_path / "set")
        LEADER_SETTINGS[:] = [word.removeprefix("--teleop-arg=") for word in words]
        assert record(tmp_path, "--teleop", f"{__name__}:leader", *env) == 0
    finally:
        servos.close()
    recording = load_recording(tmp_path / "set", 0, load_embodiment("oxe_droid"))
    shown = [turns[number] / 4096 * math.tau for number in range(1, 8)]
    shown[2] = 100 / 4096 * math.tau
    np.testing.assert_allclose(recording.actions[1], [*shown, 0], atol=1e-3)
    np.testing.assert_allclose(recording.actions[2:], [[*shown, 1]] * 6, atol=1e-3)
    assert recording.states[-1, 2] > 0.05


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["spacemouse", "--stands-at=0,0,0,0,0,0,0"], "--stands-at is for a leader arm"),
        (["leader", "--stands-at=0,0"], "allowed: 7 angles (rad)"),
        (["leader", "--stands-at=0,0,0,0,0,0,.inf"], "allowed: a number from -6.28319 to 6.28319"),
        (["leader", "--teleop-arg", "port=/dev/none"], "signs: is needed"),
    ],
)
def test_a_device_that_cannot_be_looked_at_is_one_message(words, said, capsys):
    assert main(["doctor", "device", *words]) == 2
    assert said in capsys.readouterr().err
