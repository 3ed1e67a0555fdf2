"""The checks of ``dzrobot doctor franka``; none of them moves the arm."""

import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.franka.arm_model import pose_and_jacobian
from dzrobot.envs.franka.cameras.realsense import Device, list_cameras
from dzrobot.envs.franka.cameras.uvc import list_uvc
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import camera_of
from dzrobot.envs.franka.motion.reach import JointBox, solve_within, unreachable_part
from dzrobot.envs.franka.safeguards.arm_check import (
    compared,
    is_small_load,
    load_at_rest,
    wrench_text,
)
from dzrobot.envs.franka.safeguards.limits import Workspace
from dzrobot.envs.franka.sensing import fit
from dzrobot.envs.franka.streaming import (
    ArmStream,
    Together,
    shared_controllers,
    stream_together,
    waits_ms,
)
from dzrobot.envs.franka.workcells import Camera, Workcell
from dzrobot.envs.panda.state import ArmState, GripperState
from dzrobot.errors import MissingDependencyError, RobotError
from dzrobot.importing import install

Verdict = Literal["ok", "warn", "fail"]

LISTEN_S = 10.0
"""How long arm and cameras are read together."""

_SLOW_READ_S = 0.05
_OF_ROBOTIQ = "pyrobotiqgripper"
_OLDEST = {"franky-control": (2, 0), "pyrealsense2": (2, 55), _OF_ROBOTIQ: (3, 3)}


_LEAST_MBIT_S = 1000
_DISCARD_PORT = 9
_SIOCGIFADDR = 0x8915
"""Linux: ask for the address of a network port."""

_RATE = 0.8
"""Share of its rate below which a camera is slow."""

_LOST = 0.02
"""Share of its frames that a camera may lose."""

_DRIFT = 5e-3
"""Share of the time by which clocks may drift apart."""

_LEAST_FREEDOM = 0.03
"""Yoshikawa's measure (m, rad) below which the arm is near a singularity."""


_PAGES: Mapping[str, tuple[str, ...]] = {
    "the-machine": ("franky-control", "pyrealsense2", _OF_ROBOTIQ, "kernel", "priority", "locked",
                    "processor"),
    "the-wire": ("address", "network", "arm", "latency", "clocks"),
    "the-lamp": ("mode",),
    "what-it-carries": ("end", "wrench"),
    "where-it-begins": ("task", "workspace", "limits", "pose", "start", "reach", "joint"),
    "the-hand": ("gripper",),
    "cameras": ("camera", "cameras", "usb"),
}  # fmt: skip
"""Part of the page -> first words of the checks that belong to it; views belong to the cameras."""


@dataclass(frozen=True)
class Diagnosis:
    """One check and its result."""

    verdict: Verdict
    what: str
    found: str

    @property
    def page(self) -> str:
        """Where the guide says what to do about it, below ``docs/guides``."""
        first = self.what.split()[0]
        named = next((part for part, names in _PAGES.items() if first in names), "cameras")
        return f"first-day.md#{named}"


def diagnose(
    workcell: Workcell,
    config: FrankaConfig,
    images: Path | None = None,
    listen_s: float = LISTEN_S,
) -> Iterator[Diagnosis]:
    """Yield one line per check; devices are checked only if an address is known.

    Args:
        workcell: Where they are.
        config: The workcell.
        images: Folder that takes what each camera shows, as the policy sees it. None: nowhere.
        listen_s: How long arm and cameras are read together.
    """
    practice = isinstance(workcell, EmulatedWorkcell)
    of_machine = {*_OF_MACHINE, *config.robot.video_keys}
    for one in _checks(workcell, config, images, listen_s):
        harmless = practice and one.verdict == "warn" and one.what in of_machine
        yield replace(one, found=f"{one.found} (harmless on `emulated`)") if harmless else one


_OF_MACHINE = {"kernel", "priority", "locked memory", "processor", "latency", "clocks"}
"""Checks of how fast and steadily this machine works, which an emulated arm waits for."""


def _checks(
    workcell: Workcell, config: FrankaConfig, images: Path | None, listen_s: float
) -> Iterator[Diagnosis]:
    yield from _libraries(config)
    yield _kernel()
    yield _priority()
    yield _locked_memory()
    yield from _governor()
    yield from _limits(config)
    try:
        workcell.open()
    except RobotError as error:
        yield Diagnosis("fail", "address", str(error))
        return
    yield from _network(workcell.address)
    yield from _devices(workcell, config, images, listen_s)


def _libraries(config: FrankaConfig) -> Iterator[Diagnosis]:
    machine = f"{platform.system()} {platform.machine()}"
    for name, oldest in _OLDEST.items():
        if name == _OF_ROBOTIQ and config.gripper.kind != "robotiq":
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            extra = "robotiq" if name == _OF_ROBOTIQ else "franka"
            remedy = (
                install(extra)
                if machine == "Linux x86_64"
                else f"it has no wheel for {machine}; use an x86_64 Linux machine"
            )
            yield Diagnosis("fail", name, f"not installed: {remedy}")
            continue
        numbers = tuple(int(part) for part in version.split(".")[:2])
        wanted = ".".join(map(str, oldest))
        found = version if numbers >= oldest else f"{version}, needed is {wanted} or newer"
        yield Diagnosis("ok" if numbers >= oldest else "fail", name, found)


def _kernel() -> Diagnosis:
    flag = Path("/sys/kernel/realtime")
    realtime = "PREEMPT_RT" in os.uname().version or (
        flag.exists() and flag.read_text().strip() == "1"
    )
    if realtime:
        return Diagnosis("ok", "kernel", f"{os.uname().release}, real-time")
    return Diagnosis(
        "warn",
        "kernel",
        f"{os.uname().release} is not real-time: communication reflexes are likely under load; "
        "install a PREEMPT_RT kernel",
    )


def _priority() -> Diagnosis:
    limit = resource.getrlimit(resource.RLIMIT_RTPRIO)[0]
    if os.geteuid() == 0 or limit >= 99 or limit == resource.RLIM_INFINITY:
        return Diagnosis("ok", "priority", "real-time priority is permitted")
    return Diagnosis(
        "warn", "priority",
        f"real-time priority is limited to {limit}: add '<user> - rtprio 99' to "
        "/etc/security/limits.conf and log in again",
    )  # fmt: skip


def _locked_memory() -> Diagnosis:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() == 0 or limit == resource.RLIM_INFINITY:
        return Diagnosis("ok", "locked memory", "unlimited")
    return Diagnosis(
        "warn", "locked memory",
        f"limited to {limit // 1024} KiB: add '<user> - memlock unlimited' to "
        "/etc/security/limits.conf and log in again",
    )  # fmt: skip


def _governor() -> Iterator[Diagnosis]:
    files = sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    found = sorted({file.read_text().strip() for file in files})
    if found and found != ["performance"]:
        yield Diagnosis(
            "warn", "processor",
            f"its clock is governed by {', '.join(found)}: `cpupower frequency-set -g performance` "
            "keeps it from slowing down between commands",
        )  # fmt: skip


def _network(address: str) -> Iterator[Diagnosis]:
    """Look at the port that leads to the arm; commands go there a thousand times a second."""
    name = _interface(address)
    if name is None:
        yield Diagnosis("warn", "network", f"no port of this machine leads to {address}")
        return
    port = Path("/sys/class/net") / name
    if (port / "wireless").exists():
        yield Diagnosis(
            "fail", "network", f"{name} is wireless: use a cable to the arm's controller"
        )
        return
    try:
        speed = int((port / "speed").read_text())
    except (OSError, ValueError):
        # A port that is none, such as the loopback.
        speed = 0
    if 0 < speed < _LEAST_MBIT_S:
        yield Diagnosis(
            "warn", "network", f"{name} runs at {speed} Mbit/s: use a gigabit port and cable"
        )
    else:
        yield Diagnosis("ok", "network", f"{name}{f', {speed} Mbit/s' if speed > 0 else ''}")


def _interface(address: str) -> str | None:
    """Return the name of the port that leads to ``address``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if own.startswith("127.") and name == "lo":
                return name
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None


def _limits(config: FrankaConfig) -> Iterator[Diagnosis]:
    limits = config.limits
    if not config.task.strip():
        yield Diagnosis("fail", "task", "none: the workcell has no `task`, the instruction")
    box = f"{limits.workspace_low} to {limits.workspace_high} m"
    yield Diagnosis("ok", "workspace", f"{box}, start {config.reset.position}")
    yield Diagnosis(
        "ok",
        "limits",
        f"{limits.speed_m_s} m/s, {limits.turn_rad_s} rad/s, {limits.step_m} m a step, "
        f"{limits.force_n} N, {limits.torque_nm} Nm; controller {config.controller.kind}",
    )


def _cameras(workcell: Workcell, config: FrankaConfig, found: list[Camera]) -> Iterator[Diagnosis]:
    """Look for the cameras, and add those that are there to ``found``."""
    wanted = {camera.serial: camera.key for camera in config.cameras if camera.kind == "realsense"}
    ports: dict[str, str] = {}
    if wanted or not config.cameras:
        try:
            devices = list_cameras(workcell.camera_settings(), wanted)
            ports = {device.serial: device.port for device in devices}
            yield from _realsense(devices, wanted)
        except (RobotError, MissingDependencyError) as error:
            yield Diagnosis("fail", "cameras", str(error))
    used = {Path(camera.place).resolve() for camera in config.cameras if camera.kind == "uvc"}
    for path in list_uvc():
        if Path(path).resolve() not in used:
            yield Diagnosis("warn", f"camera {path}", "kind: uvc, in no view")
    if not config.cameras:
        yield Diagnosis("fail", "cameras", "the workcell names none: put these in `cameras`")
    known = [camera for camera in config.cameras if camera.kind == "uvc" or camera.serial in ports]
    places = {
        camera.key: camera.place if camera.kind == "uvc" else ports[camera.serial]
        for camera in known
    }
    for controller, names in shared_controllers(places):
        yield Diagnosis(
            "ok", "usb",
            f"{', '.join(names)} share the USB controller {controller}; where they lose frames "
            "together, plug one into another controller",
        )  # fmt: skip
    found += [
        camera_of(camera, workcell.camera_settings, patience=workcell.patience) for camera in known
    ]


def _realsense(found: Sequence[Device], wanted: Mapping[str, str]) -> Iterator[Diagnosis]:
    for device in found:
        use = wanted.get(device.serial, "in no view")
        verdict: Verdict = "ok" if device.serial in wanted else "warn"
        text = f"{device.name}, firmware {device.firmware or 'unknown'}, {use}"
        text += f"; it offers {device.offers}" if device.offers else ""
        if device.is_slow:
            verdict, text = "fail", f"{text}: on USB {device.usb}; use a USB 3 port and cable"
        yield Diagnosis(verdict, f"camera {device.serial}", text)
    if missing := sorted(set(wanted) - {device.serial for device in found}):
        yield Diagnosis(
            "fail", "cameras", f"not found: {', '.join(missing)}; check cables and serials"
        )


def stream_lines(heard: Together, robot: Embodiment, images: Path | None) -> Iterator[Diagnosis]:
    """Say what each camera sent while all of them and the arm were read, and keep an image."""
    for stream in heard.cameras:
        config = stream.camera.config
        if stream.fault or stream.last is None:
            yield Diagnosis("fail", config.key, stream.fault or "it has sent no frame")
            continue
        text = (
            f"{stream.rate_hz:.1f} of {config.fps} frames per second for {heard.seconds:g} s, "
            f"{stream.lost} lost, all cameras together"
        )
        if images is not None:
            images.mkdir(parents=True, exist_ok=True)
            path, size = images / f"{config.key}.png", robot.view(config.key).resolution
            image = fit(stream.last.image, config, size)
            cv2.imwrite(str(path), cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
            text += f"; what the policy sees: {path}"
        few = stream.rate_hz < _RATE * config.fps or stream.lost > _LOST * stream.frames
        yield Diagnosis("warn" if few else "ok", config.key, text)


def clock_lines(heard: Together) -> Iterator[Diagnosis]:
    """Compare the clocks of arm and cameras with this machine's."""
    ahead = {
        stream.camera.config.key: stream.ahead_s
        for stream in heard.cameras
        if not stream.fault and stream.frames
    }
    if heard.arm is not None:
        ahead["the arm"] = heard.arm.ahead_s
    if not ahead:
        return
    drifts = max(map(abs, ahead.values())) > _DRIFT * heard.seconds
    shown = ", ".join(f"{name} {1000 * by:+.0f} ms" for name, by in ahead.items())
    yield Diagnosis(
        "warn" if drifts else "ok", "clocks",
        f"gained on this machine's in {heard.seconds:g} s: {shown}" + (
            ": ages of what a policy sees are not to be trusted; is the machine busy, or does NTP "
            "set its clock?" if drifts else ""
        ),
    )  # fmt: skip


def _hand(arm: FrankyArm, config: FrankaConfig) -> Iterator[Diagnosis]:
    """Look at what the arm believes it carries, and whether that is so."""
    about = arm.about()
    state, limits = arm.state(), config.limits
    yield Diagnosis("ok", "joint limits", compared(about, limits))
    if (beyond := unreachable_part(config, state.flange_to_ee)) is not None:
        yield Diagnosis("warn", "reach", f"{beyond}; targets there are not arrived at")
    place, own = (
        ", ".join(f"{value:.3f}" for value in pose[:3, 3])
        for pose in (state.flange_to_ee, about.nominal_to_ee)
    )
    yield Diagnosis(
        "ok", "end effector",
        f"({place}) m from the flange, ({own}) m from Desk's; {about.hand_kg:.2f} kg, load "
        f"{about.load_kg:.2f} kg",
    )  # fmt: skip
    found = load_at_rest(state, limits)
    verdict: Verdict = "warn" if is_small_load(state, limits) else "fail"
    usual = (
        f"at rest and free {limits.resting_force_n} N and {limits.resting_torque_nm} Nm are usual"
    )
    yield Diagnosis(verdict if found else "ok", "wrench", f"{found or wrench_text(state)}; {usual}")


def _connected(arm: FrankyArm, workcell: Workcell) -> Diagnosis:
    began = time.monotonic()
    try:
        arm.connect()
    except (RobotError, MissingDependencyError) as error:
        return Diagnosis("fail", "arm", str(error))
    took_s = time.monotonic() - began
    return Diagnosis("ok", "arm", f"{workcell.address}, connected in {took_s:.2f} s")


def _devices(
    workcell: Workcell, config: FrankaConfig, images: Path | None, listen_s: float
) -> Iterator[Diagnosis]:
    """Look at cameras and arm, which are read together."""
    cameras: list[Camera] = []
    arm = FrankyArm(workcell, config)
    with ExitStack() as opened:
        opened.callback(arm.close)
        yield from _cameras(workcell, config, cameras)
        for camera in cameras:
            opened.callback(camera.close)
        yield (found := _connected(arm, workcell))
        is_there = found.verdict == "ok"
        try:
            heard = stream_together(cameras, arm if is_there else None, listen_s)
            yield from stream_lines(heard, config.robot, images)
            yield from clock_lines(heard)
            if heard.arm is not None:
                yield from _states(heard.arm, config)
                yield from _hand(arm, config)
                arm.gripper.connect()
                yield _gripper(arm.gripper.state(), config)
        except RobotError as error:
            yield Diagnosis("fail", "arm", str(error))


def _gripper(hand: GripperState, config: FrankaConfig) -> Diagnosis:
    if config.gripper.kind == "none":
        return Diagnosis("ok", "gripper", "none")
    if not hand.is_homed:
        robotiq = config.gripper.kind == "robotiq"
        done, elsewhere = ("activated", "") if robotiq else ("homed", ", or home it in Desk")
        return Diagnosis(
            "fail", "gripper",
            f"it was never {done}, so it opens and grasps nothing: reset() does it once an "
            f"operator agrees or with gripper: {{homing: true}}{elsewhere}",
        )  # fmt: skip
    held = ", holding something" if hand.is_grasped else ""
    return Diagnosis("ok", "gripper", f"{hand.width_m:.3f} m wide{held}")


def _states(heard: ArmStream, config: FrankaConfig) -> Iterator[Diagnosis]:
    usual, slowest = waits_ms(heard)
    state = heard.last
    advanced = 1.0 + heard.ahead_s / heard.took_s
    steady = slowest < 1000 * _SLOW_READ_S and advanced > 0.95
    yield Diagnosis(
        "ok" if steady else "warn", "latency",
        f"a state takes {usual:.1f} ms, {slowest:.1f} ms at most; the arm's clock runs at "
        f"{advanced:.2f} of ours over {heard.took_s:.1f} s",
    )  # fmt: skip
    yield _mode(state)
    inside = Workspace(config).contains(state.pose, slack=config.limits.margin_m)
    place = ", ".join(f"{value:.3f}" for value in state.pose[:3, 3])
    where = "within" if inside else "outside"
    yield Diagnosis("ok" if inside else "warn", "pose", f"({place}) m, {where} the workspace")
    yield _start(state, config)


def _start(state: ArmState, config: FrankaConfig) -> Diagnosis:
    """Look at how freely the arm moves where episodes begin, and how near its limits it is."""
    limits, given = config.limits, config.reset.joints
    low, high = np.array(limits.joints_low), np.array(limits.joints_high)
    joints = state.joints if given is None else np.array(given)
    box = JointBox(low, high, joints)
    at = solve_within(joints, config.reset.pose, state.flange_to_ee, box)
    if at is None:
        return Diagnosis("fail", "start", "reset.position is out of reach")
    _, jacobian = pose_and_jacobian(at, state.flange_to_ee)
    freedom = float(np.sqrt(max(0.0, np.linalg.det(jacobian @ jacobian.T))))
    room = np.minimum(at - low, high - at)
    nearest = int(np.argmin(room))
    good = freedom >= _LEAST_FREEDOM and room[nearest] >= limits.joint_room_rad
    return Diagnosis(
        "ok" if good else "warn", "start",
        f"manipulability {freedom:.3f} (below {_LEAST_FREEDOM} the arm is near a singularity, and "
        f"small steps turn its joints far); joint {nearest + 1} is {room[nearest]:.2f} rad from "
        "its limit, nearest of all",
    )  # fmt: skip


def _mode(state: ArmState) -> Diagnosis:
    return Diagnosis("ok" if state.is_ready else "fail", "mode", state.description)
