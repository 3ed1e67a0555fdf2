"""What a teleoperation device reports, and the joint offsets of a leader arm."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from dzrobot.configuration import load_config
from dzrobot.diagnostics.checkup import Finding
from dzrobot.envs.teleop.device import TeleopDevice, TeleopReading
from dzrobot.envs.teleop.devices import DEVICES, load_device
from dzrobot.envs.teleop.leader import offsets_at
from dzrobot.envs.teleop.settings import LeaderConfig
from dzrobot.errors import ConfigError

_PERIOD_S = 0.2


def readings(
    name: str, settings: Sequence[str], seconds: float, posture: Sequence[float] | None
) -> Iterator[Finding]:
    """Yield what the device reports whenever that changes, then what is missing.

    Args:
        name: Of the device.
        settings: Of the device, each as ``KEY=VALUE``.
        seconds: How long to listen.
        posture: Joint angles (rad) that a leader arm is in; its offsets are yielded then.

    Raises:
        DzrobotError: the device is not there, or was lost; or a posture is given of no leader.
    """
    kind = DEVICES.get(name)
    is_leader = kind is not None and kind.settings is LeaderConfig
    if posture is not None and not is_leader:
        raise ConfigError(f"--stands-at is for a leader arm, {name} has no joints")
    device = load_device(name, settings)
    with closing(device):
        device.open()
        first, was_held = device.read(), False
        until_s, shown = time.monotonic() + seconds, ""
        while True:
            reading = device.read()
            was_held = was_held or reading.active
            if (text := _text(reading)) != shown:
                shown = text
                yield Finding("ok", "reading", text)
            if time.monotonic() >= until_s:
                break
            time.sleep(_PERIOD_S)
    yield from _verdicts(device, first, reading, was_held=was_held)
    if posture is not None:
        config = load_config(LeaderConfig, None, settings)
        offsets = offsets_at(config, reading.joints or (), posture)
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
