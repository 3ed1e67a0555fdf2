"""``dzrobot init-workcell``: write the file of a workcell, taught on the arm."""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from dzrobot.commands.options import flags
from dzrobot.envs.franka.cameras.realsense import list_cameras
from dzrobot.envs.franka.cameras.uvc import list_uvc
from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.make import connectable, load_workcell, located
from dzrobot.envs.franka.motion.reach import unreachable_part
from dzrobot.envs.franka.teaching import assign, teach, workcell_text
from dzrobot.envs.franka.workcells import Arm
from dzrobot.errors import ConfigError, RobotError
from dzrobot.files import explained, write_text

_PLACES = ((0.45, 0.0, 0.3), (0.3, -0.25, 0.02), (0.6, 0.25, 0.5))
"""Where the emulated hand is guided to, one question after another: a start and two corners (m)."""

_GUIDED_S = 5.0
_NEAR_M = 0.005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot init-workcell``."""
    parser.description = (
        "Write a commented workcell file. You guide the arm by hand to its start pose and to the "
        "corners of its workspace; serial numbers are read from the cameras. Nothing moves by "
        "itself."
    )
    parser.add_argument("file", type=flags.path, help="such as cell.yaml; must not exist yet")
    parser.add_argument(
        "--address",
        type=flags.text,
        required=True,
        help="of the arm; `emulated` to practice without one",
    )
    parser.add_argument(
        "--embodiment",
        type=flags.text,
        default="franka_pnp",
        help="what the arm is to a policy: a tag, or module:NAME (default: franka_pnp)",
    )
    parser.add_argument(
        "--gripper",
        choices=("franka", "robotiq", "none"),
        default="franka",
        help="the Franka Hand, a Robotiq 2F-85, or no hand (default: franka)",
    )
    parser.add_argument(
        "--gripper-device",
        type=flags.text,
        help="serial port of a Robotiq, such as /dev/serial/by-id/usb-FTDI_...",
    )
    parser.add_argument("--task", type=flags.text, help="the instruction (default: asked for)")


def run(arguments: argparse.Namespace) -> int:
    """Teach and write; 0 when the file can be read back."""
    file: Path = arguments.file
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file}: a workcell file ends in .yaml")
    if file.exists():
        raise ConfigError(f"{file} exists: edit it, or name another")
    given = {
        "address": arguments.address,
        "embodiment": arguments.embodiment,
        "gripper": {"kind": arguments.gripper, "device": arguments.gripper_device or ""},
    }
    described = load_workcell(None, given)
    workcell, config = located(None, described)
    env = connectable(workcell, config)
    try:
        workcell.open()
        found = [device.serial for device in list_cameras(workcell.camera_settings())] + list_uvc()
        print(f"cameras: {', '.join(found) or 'none'}")
        env.arm.connect()
        ask = _Practice(workcell, env.arm) if isinstance(workcell, EmulatedWorkcell) else _ask
        taught = teach(env.arm, ask)
        hand = env.arm.state().flange_to_ee
        cameras = assign(found, env.embodiment.video_keys, _ask)
        task = arguments.task or _ask("The task, as the policy reads it: ").strip()
        firmware = _ask("System image of the arm, as Desk shows it (Enter: unknown): ").strip()
    finally:
        env.close()
        workcell.close()
    text = workcell_text(described, cameras, taught, task=task or described.task, firmware=firmware)
    with explained(f"write {file}", ConfigError):
        write_text(file, text)
    if (beyond := unreachable_part(load_workcell(str(file)), hand)) is not None:
        print(f"note: {beyond}")
    print(f"wrote {file}; look it over, then: dzrobot doctor franka --config {file}")
    return 0


class _Practice:
    """Asks as :func:`_ask` does, and guides the emulated hand, which cannot be held."""

    def __init__(self, workcell: EmulatedWorkcell, arm: Arm) -> None:
        self._workcell, self._arm, self._places = workcell, arm, list(_PLACES)

    def __call__(self, question: str) -> str:
        answer = _ask(question)
        if self._places and not answer.strip():
            place = self._places.pop(0)
            self._workcell.emulators.call("guide", *place)
            deadline = time.monotonic() + _GUIDED_S
            while np.abs(self._arm.state().pose[:3, 3] - place).max() > _NEAR_M:
                if time.monotonic() > deadline:
                    raise RobotError("the emulated hand is not where it was guided to")
                time.sleep(0.01)
            print(f"(practice: the emulated hand was guided to {place} m)")
        return answer


def _ask(question: str) -> str:
    sys.stdout.write(question)
    sys.stdout.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise ConfigError("there is no answer: standard input has ended; run this in a terminal")
    return answer.rstrip("\n")
