"""Writes a workcell file beside the arm: taught poses, found cameras, and comments for the rest.

Nothing here moves the arm: it is guided by hand and read.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.cameras.realsense import list_cameras
from dzrobot.envs.franka.cameras.uvc import list_uvc
from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.franka_config import (
    FrankaConfig,
    GripperConfig,
    ResetConfig,
    recorded_preset,
)
from dzrobot.envs.franka.make import connectable, load_workcell, located
from dzrobot.envs.franka.motion.reach import unreachable_part
from dzrobot.envs.franka.workcells import Arm
from dzrobot.envs.panda.poses import Array, euler_of
from dzrobot.errors import ConfigError, RobotError, counted
from dzrobot.files import explained, write_text
from dzrobot.progress import waiting

Ask = Callable[[str], str]
"""Shows a question and returns what was typed."""

_LEAST_SIDE_M = 0.05

_PLACES = ((0.45, 0.0, 0.3), (0.3, -0.25, 0.02), (0.6, 0.25, 0.5))
"""Where the emulated hand is guided to, one question after another: a start and two corners (m)."""

_GUIDED_S = 5.0
_NEAR_M = 0.005


@dataclass(frozen=True, kw_only=True)
class TaughtPose:
    """What was shown on the arm; meters and radians in its base frame."""

    position: tuple[float, ...]
    euler: tuple[float, ...]
    joints: tuple[float, ...]
    """Joint angles at the start: they say where the elbow is."""

    low: tuple[float, ...]
    high: tuple[float, ...]


def write_taught(
    file: Path, described: FrankaConfig, ask: Ask, say: Callable[[str], None], *, task: str
) -> None:
    """Let a person teach a workcell on its arm, and write the file of it.

    Args:
        file: Where to.
        described: The workcell, as far as it is known.
        ask: Asks the person.
        say: Told what was found.
        task: The instruction; empty: it is asked for.

    Raises:
        ConfigError: the file cannot be written.
        RobotError: the arm does not answer, or what was shown spans no workspace.
    """
    workcell, config = located(None, described)
    env = connectable(workcell, config)
    try:
        with waiting("starting the devices"):
            workcell.open()
        with waiting("looking for cameras"):
            listed = list_cameras(workcell.camera_settings())
            found = [device.serial for device in listed] + list_uvc()
        say(f"cameras: {', '.join(found) or 'none'}")
        with waiting("connecting to the arm"):
            env.arm.connect()
        guided: Ask = ask
        if isinstance(workcell, EmulatedWorkcell):
            guided = _Practice(workcell, env.arm, ask, say)
        taught = teach(env.arm, guided)
        hand = env.arm.state().flange_to_ee
        cameras = assign(found, env.embodiment.video_keys, ask)
        while not task:
            # Every recording carries it: a sentence that was not typed would be learned from.
            task = ask("The task, as the policy reads it, such as 'put the cup on the plate': ")
            task = task.strip()
        firmware = ask("System image of the arm, as Desk shows it (Enter: unknown): ").strip()
    finally:
        env.close()
        workcell.close()
    text = workcell_text(described, cameras, taught, task=task, firmware=firmware)
    with explained(f"write {file}", ConfigError):
        write_text(file, text)
    if (beyond := unreachable_part(load_workcell(str(file)), hand)) is not None:
        say(f"note: {beyond}")


class _Practice:
    """Asks as ``ask`` does, and guides the emulated hand, which cannot be held."""

    def __init__(
        self, workcell: EmulatedWorkcell, arm: Arm, ask: Ask, say: Callable[[str], None]
    ) -> None:
        self._workcell, self._arm, self._places = workcell, arm, list(_PLACES)
        self._ask, self._say = ask, say

    def __call__(self, question: str) -> str:
        answer = self._ask(question)
        if self._places and not answer.strip():
            place = self._places.pop(0)
            self._workcell.emulators.call("guide", *place)
            deadline = time.monotonic() + _GUIDED_S
            while np.abs(self._arm.state().pose[:3, 3] - place).max() > _NEAR_M:
                if time.monotonic() > deadline:
                    raise RobotError("the emulated hand is not where it was guided to")
                time.sleep(0.01)
            self._say(f"(practice: the emulated hand was guided to {place} m)")
        return answer


def teach(arm: Arm, ask: Ask) -> TaughtPose:
    """Return the reset pose and the workspace that a person shows by guiding the hand.

    Raises:
        RobotError: the arm does not answer, or the points shown span no box.
    """
    ask("Guide the hand to the pose every episode begins at, fingers down; press Enter: ")
    there = arm.state()
    start = there.pose
    corners = [start[:3, 3]]
    while True:
        typed = ask(
            f"{_kept(corners[1:])}Guide the hand to a corner of the workspace, its lowest point on "
            "the table; press Enter, or type d when at least two opposite corners are shown: "
        )
        if typed.strip().lower() == "d":
            break
        corners.append(arm.state().pose[:3, 3])
    low, high = np.min(corners, axis=0), np.max(corners, axis=0)
    if ((high - low) < _LEAST_SIDE_M).any():
        sides = ", ".join(f"{side:.3f}" for side in high - low)
        raise RobotError(
            f"the points shown span a box of {sides} m; each side has at least {_LEAST_SIDE_M} m: "
            "show two opposite corners, one of them high"
        )
    euler = euler_of(start[:3, :3])
    return TaughtPose(
        position=_rounded(start[:3, 3]), euler=_rounded(euler), joints=_rounded(there.joints),
        low=_rounded(low, np.floor), high=_rounded(high, np.ceil),
    )  # fmt: skip


def _kept(corners: Sequence[NDArray[np.float64]]) -> str:
    """Return how many corners are kept and where the last one is, as the start of a question."""
    if not corners:
        return ""
    place = ", ".join(f"{number:.3f}" for number in corners[-1])
    return f"{counted(len(corners), 'corner')} kept, the last at ({place}) m. "


def assign(serials: Sequence[str], views: Sequence[str], ask: Ask) -> dict[str, str]:
    """Return the serial number or path of every view's camera, asked for where there are several.

    Args:
        serials: Of the cameras that were found; paths of those that are not a RealSense.
        views: Keys of the embodiment's views.
        ask: Asks.

    Raises:
        RobotError: there are fewer cameras than views.
    """
    if len(serials) < len(views):
        raise RobotError(
            f"found {len(serials)} cameras ({', '.join(serials) or 'none'}), needed are "
            f"{len(views)}: check cables and USB ports"
        )
    left, found = list(serials), {}
    for key in views:
        listed = ", ".join(f"{number}: {serial}" for number, serial in enumerate(left))
        typed = ask(f"Which is the camera of {key}? {listed}; type its number: ").strip()
        while not (typed.isdecimal() and int(typed) < len(left)):
            typed = ask(f"Type a number from 0 to {len(left) - 1}: ").strip()
        found[key] = left.pop(int(typed))
    return found


def _camera_text(key: str, device: str) -> str:
    if device.startswith("/"):
        return f"- key: {key}\n  kind: uvc\n  device: {device}"
    return f"- key: {key}\n  serial: '{device}'"


def _gripper_text(gripper: GripperConfig, recorded: str) -> str:
    lines = ["# franka: the Franka Hand; robotiq: a Robotiq 2F-85 at `device`; none: no hand.",
             "gripper:", f"  kind: {gripper.kind}"]  # fmt: skip
    if gripper.device:
        lines.append(f"  device: {_text(gripper.device)}")
    if gripper.kind != "none":
        lines += [
            "  # gentle: 0.1 m/s and 40 N, for first trials and fragile objects.",
            f"  # The published recordings of this embodiment were made with `{recorded}`, at 0.3",
            "  # m/s and 130 N: choose it to compare with published results. Cards name it.",
            "  preset: gentle",
        ]
        if recorded == "droid":
            lines += ["  # As in those recordings, the arm never waits for the fingers.",
                      "  settle_s: 0.0"]  # fmt: skip
    return "\n".join(lines)


def _joints_text(taught: TaughtPose, described: ResetConfig) -> str:
    lines = ["# Joint angles there: every reset brings the arm to them, and draws its elbow there."]
    if described.joints not in (None, ResetConfig().joints):
        home = _list(_rounded(np.array(described.joints)))
        lines.append(f"# The published recordings of this embodiment begin at {home}.")
    lines.append(f"joints: {_list(taught.joints)}")
    return "\n".join(f"  {line}" for line in lines)


def workcell_text(
    config: FrankaConfig,
    cameras: Mapping[str, str],
    taught: TaughtPose,
    *,
    task: str,
    firmware: str,
) -> str:
    """Return the YAML of a workcell, with every value that people change and what it means.

    Args:
        config: Says address and embodiment; its other values are written as they are.
        cameras: Serial number, or path, of every view's camera, by key.
        taught: What was shown on the arm.
        task: The instruction.
        firmware: System image of the arm.
    """
    limits, reset = config.limits, config.reset
    views = "\n".join(_camera_text(key, device) for key, device in cameras.items())
    return f"""\
# A workcell of dzrobot. Lengths in meters, angles in radians, in the base frame of the arm.
# Every field: `FrankaConfig` in envs/franka/franka_config.py.
# `dzrobot doctor franka --config` checks it.

address: {_text(config.address or "")}

# What the arm is to a policy: its cameras, state and action.
embodiment: {_text(config.embodiment)}

# System image, as Desk shows it (Settings, System); results name it.
firmware: {_text(firmware)}

cameras:
{views}

# The instruction the policy is given.
task: {_text(task)}

# Steps per second; the policy must have been made for this rate.
control_hz: {config.control_hz:g}

{_gripper_text(config.gripper, recorded_preset(config.robot))}

reset:
  # Where every episode begins, taught on the arm.
  position: {_list(taught.position)}
  euler: {_list(taught.euler)}
{_joints_text(taught, config.reset)}
  # Each start is moved by up to this along x and y, and turned by up to this.
  noise_xy_m: {reset.noise_xy_m}
  noise_yaw_rad: {reset.noise_yaw_rad}
  # Speed of the way there.
  speed_m_s: {reset.speed_m_s}

limits:
  # The box that holds every target, taught on the arm. Is the low z above the table?
  workspace_low: {_list(taught.low)}
  workspace_high: {_list(taught.high)}
  # Fastest motion, and the force at which an episode ends.
  speed_m_s: {limits.speed_m_s}
  force_n: {limits.force_n}

reward:
  # operator: a person says so (c, b); pose: the hand is at `position`; callback; none.
  rule: operator

# First trials: share of each action that is carried out while slow (dzrobot eval, no --full-speed).
slow_pace: {config.slow_pace}
"""


def _rounded(values: Array, how: Callable[[Array], Array] = np.round) -> tuple[float, ...]:
    """Return numbers to the millimeter (milliradian)."""
    return tuple(float(value) for value in how(np.asarray(values) * 1000.0) / 1000.0)


def _list(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def _text(value: str) -> str:
    """Return ``value`` as a YAML text."""
    return "'" + value.replace("'", "''") + "'"
