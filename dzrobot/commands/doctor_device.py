"""``dzrobot doctor device``: what a device says that people steer with, and how a leader stands."""

import argparse
import time
from collections.abc import Iterator
from contextlib import closing

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import add_teleop_settings
from dzrobot.configuration import load_config
from dzrobot.envs.teleop.device import TeleopDevice, TeleopReading
from dzrobot.envs.teleop.devices import DEVICES, load_device
from dzrobot.envs.teleop.leader import offsets_at
from dzrobot.envs.teleop.settings import LeaderConfig
from dzrobot.errors import ConfigError
from dzrobot.rollout.demonstrations.checkup import Finding

_PERIOD_S = 0.2
_JOINTS = 7


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot doctor device``."""
    parser.description = (
        "Open a device, as `dzrobot record --teleop` does, and show what it says whenever that "
        "changes. Nothing moves."
    )
    parser.add_argument(
        "device", type=flags.text, help=f"{', '.join(DEVICES)}, or module:factory of an own device"
    )
    add_teleop_settings(parser)
    parser.add_argument(
        "--seconds", type=flags.number(0, 3600), default=20.0, help="how long to listen"
    )
    parser.add_argument(
        "--stands-at", type=flags.angles(_JOINTS), metavar="J1,...,J7",
        help="leader: the joint angles (rad) that it stands in; prints its offsets_rad",
    )  # fmt: skip


def readings(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield what the device says whenever that changes, then what is missing.

    Raises:
        DzrobotError: the device is not there, or was lost; or only a leader stands somewhere.
    """
    kind = DEVICES.get(arguments.device)
    is_leader = kind is not None and kind.settings is LeaderConfig
    if arguments.stands_at is not None and not is_leader:
        raise ConfigError(f"--stands-at is for a leader arm, {arguments.device} has no joints")
    device = load_device(arguments.device, arguments.teleop_arg)
    with closing(device):
        device.open()
        first, was_held = device.read(), False
        until_s, said = time.monotonic() + arguments.seconds, ""
        while True:
            reading = device.read()
            was_held = was_held or reading.active
            if (text := _text(reading)) != said:
                said = text
                yield Finding("ok", "reading", text)
            if time.monotonic() >= until_s:
                break
            time.sleep(_PERIOD_S)
    yield from _verdicts(device, first, reading, was_held=was_held)
    if arguments.stands_at is not None:
        config = load_config(LeaderConfig, None, arguments.teleop_arg)
        offsets = offsets_at(config, reading.joints or (), arguments.stands_at)
        listed = ",".join(f"{offset:.3f}" for offset in offsets)
        yield Finding("ok", "offsets", f"--teleop-arg 'offsets_rad=[{listed}]'")


def _verdicts(
    device: TeleopDevice, first: TeleopReading, last: TeleopReading, *, was_held: bool
) -> Iterator[Finding]:
    if not device.has_deadman:
        yield Finding("warn", "deadman", "none is set: an arm refuses this device")
    elif not was_held:
        yield Finding("warn", "deadman", "it was never held")
    if last.closed is None and last.presses == first.presses:
        yield Finding("warn", "gripper", "its button was never pressed")


def _text(reading: TeleopReading) -> str:
    """Return a reading in a line."""
    parts = ["held" if reading.active else "let go"]
    if reading.motion is not None:
        parts.append("motion " + " ".join(f"{value:+.2f}" for value in reading.motion))
    if reading.joints is not None:
        parts.append("joints " + " ".join(f"{value:+.2f}" for value in reading.joints))
    if reading.closed is None:
        parts.append(f"gripper pressed {reading.presses} times")
    else:
        parts.append("gripper closed" if reading.closed else "gripper open")
    shown = (f"{name} {value:.2f}" for name, value in reading.shown.items() if abs(value) > 0.005)
    return "; ".join([*parts, ", ".join(shown)])
