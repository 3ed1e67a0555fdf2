"""What ``dzrobot doctor franka`` looks at: nothing here moves the arm."""

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dzrobot.envs.franka.arm import Arm, ArmState, Mode
from dzrobot.envs.franka.camera import list_cameras
from dzrobot.envs.franka.cells import Cell
from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.envs.franka.franky_arm import FrankyArm
from dzrobot.envs.franka.safety import Workspace
from dzrobot.errors import MissingDependencyError, RobotError

Verdict = Literal["ok", "warn", "fail"]

LISTEN_S = 2.0
"""How long states are read."""

_READ_S = 0.01
_SLOW_READ_S = 0.05
_OLDEST = {"franky-control": (2, 0), "pyrealsense2": (2, 55)}


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    verdict: Verdict
    what: str
    found: str


def checkup(cell: Cell, config: FrankaConfig) -> Iterator[Line]:
    """Yield one line per thing; devices are looked at only where an address is known."""
    yield from _libraries()
    yield _kernel()
    yield _priority()
    yield from _limits(config)
    try:
        cell.open()
    except RobotError as error:
        yield Line("fail", "address", str(error))
        return
    yield from _cameras(cell, config)
    yield from _arm(FrankyArm(cell, config), cell, config)


def _libraries() -> Iterator[Line]:
    machine = f"{platform.system()} {platform.machine()}"
    for name, oldest in _OLDEST.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            remedy = (
                "pip install 'dzrobot[franka]'"
                if machine == "Linux x86_64"
                else f"it has no wheel for {machine}; use an x86_64 Linux machine"
            )
            yield Line("fail", name, f"not installed: {remedy}")
            continue
        numbers = tuple(int(part) for part in version.split(".")[:2])
        wanted = ".".join(map(str, oldest))
        found = version if numbers >= oldest else f"{version}, needed is {wanted} or newer"
        yield Line("ok" if numbers >= oldest else "fail", name, found)


def _kernel() -> Line:
    flag = Path("/sys/kernel/realtime")
    realtime = "PREEMPT_RT" in os.uname().version or (
        flag.exists() and flag.read_text().strip() == "1"
    )
    if realtime:
        return Line("ok", "kernel", f"{os.uname().release}, real-time")
    return Line(
        "warn",
        "kernel",
        f"{os.uname().release} is not real-time: communication reflexes are likely under load; "
        "install a PREEMPT_RT kernel",
    )


def _priority() -> Line:
    limit = resource.getrlimit(resource.RLIMIT_RTPRIO)[0]
    if os.geteuid() == 0 or limit >= 99 or limit == resource.RLIM_INFINITY:
        return Line("ok", "priority", "real-time priority is permitted")
    return Line(
        "warn", "priority",
        f"real-time priority is limited to {limit}: add '<user> - rtprio 99' to "
        "/etc/security/limits.conf and log in again",
    )  # fmt: skip


def _limits(config: FrankaConfig) -> Iterator[Line]:
    limits = config.limits
    yield Line(
        "ok",
        "workspace",
        f"{limits.workspace_low} to {limits.workspace_high} m, start {config.reset.position}",
    )
    yield Line(
        "ok",
        "limits",
        f"{limits.speed_m_s} m/s, {limits.turn_rad_s} rad/s, {limits.step_m} m a step, "
        f"{limits.force_n} N, {limits.torque_nm} Nm; controller {config.controller.kind}",
    )


def _cameras(cell: Cell, config: FrankaConfig) -> Iterator[Line]:
    wanted = {camera.serial: camera.key for camera in config.cameras}
    try:
        found = list_cameras(cell.camera_settings(), wanted)
    except (RobotError, MissingDependencyError) as error:
        yield Line("fail", "cameras", str(error))
        return
    for device in found:
        use = wanted.get(device.serial, "in no view")
        verdict: Verdict = "ok" if device.serial in wanted else "warn"
        yield Line(verdict, f"camera {device.serial}", use)
    if missing := sorted(set(wanted) - {device.serial for device in found}):
        yield Line("fail", "cameras", f"not found: {', '.join(missing)}; check cables and serials")
    if not wanted:
        yield Line("fail", "cameras", "the workcell names none: put these serials in `cameras`")


def _arm(arm: Arm, cell: Cell, config: FrankaConfig) -> Iterator[Line]:
    began = time.monotonic()
    try:
        arm.connect()
        yield Line("ok", "arm", f"{cell.address}, connected in {time.monotonic() - began:.2f} s")
        yield from _states(arm, config)
        arm.gripper.connect()
        yield Line("ok", "gripper", f"{arm.gripper.state().width_m:.3f} m wide")
    except (RobotError, MissingDependencyError) as error:
        yield Line("fail", "arm", str(error))
    finally:
        arm.close()


def _states(arm: Arm, config: FrankaConfig) -> Iterator[Line]:
    took: list[float] = []
    first = state = arm.state()
    began = time.monotonic()
    while time.monotonic() < began + LISTEN_S:
        asked = time.monotonic()
        state = arm.state()
        took.append(time.monotonic() - asked)
        time.sleep(_READ_S)
    advanced = (state.robot_time_s - first.robot_time_s) / (time.monotonic() - began)
    slowest, usual = max(took), float(np.median(took))
    steady = slowest < _SLOW_READ_S and advanced > 0.95
    yield Line(
        "ok" if steady else "warn",
        "latency",
        f"a state takes {1000 * usual:.1f} ms, {1000 * slowest:.1f} ms at most; the arm's clock "
        f"runs at {advanced:.2f} of ours over {LISTEN_S:g} s",
    )
    yield _mode(state)
    inside = Workspace(config).contains(state.pose, slack=config.limits.margin_m)
    place = ", ".join(f"{value:.3f}" for value in state.pose[:3, 3])
    where = "within" if inside else "outside"
    yield Line("ok" if inside else "warn", "pose", f"({place}) m, {where} the workspace")


def _mode(state: ArmState) -> Line:
    if state.errors or state.mode in (Mode.REFLEX, Mode.USER_STOPPED):
        shown = ", ".join(state.errors) or "no error"
        return Line("warn", "mode", f"{state.mode} ({shown}): release the user stop; reset clears")
    return Line("ok", "mode", str(state.mode))
