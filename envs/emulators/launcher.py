"""An emulated workcell: arm, gripper and cameras as child processes on the loopback interface."""

import contextlib
import ipaddress
import json
import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from dzrobot.envs.driver_process import python_environment
from dzrobot.envs.emulators.camera_server import bus_settings
from dzrobot.envs.emulators.kinematics import describe
from dzrobot.envs.emulators.scenes import EMPTY, SERIALS, check_scene
from dzrobot.envs.emulators.timebase import Timebase
from dzrobot.errors import ConfigError, RobotError

LARGEST_DOMAIN = 232
"""The bus computes its ports from the domain, and these end there."""

START_TIMEOUT_S = 20.0
SCENE_TIMEOUT_S = 180.0
"""The same where a scene is loaded first, which takes seconds of processor time."""


@dataclass(frozen=True, kw_only=True)
class LauncherAddress:
    """Where an emulated workcell listens: nothing leaves the loopback interface."""

    host: str
    """Loopback address of the robot and gripper servers."""

    domain: int
    """Domain of the camera bus; a new one per launcher avoids stale peers."""

    def __post_init__(self) -> None:
        """Refuse an address that others can reach: whoever connects moves the emulated arm."""
        try:
            fits = ipaddress.IPv4Address(self.host).is_loopback
        except ValueError:
            fits = False
        if not fits:
            raise ConfigError(
                f"host {self.host!r} is not a loopback address: emulators listen within this "
                "machine alone, on 127.0.0.1 or any other 127.x.y.z"
            )
        if not 0 <= self.domain <= LARGEST_DOMAIN:
            raise ConfigError(f"domain {self.domain} must lie between 0 and {LARGEST_DOMAIN}")

    @classmethod
    def for_process(cls, offset: int = 0) -> Self:
        """Return an address that no other process of this machine is likely to use."""
        number = (os.getpid() * 7 + offset) % 60000
        return cls(
            host=f"127.{64 + offset % 8}.{1 + number // 250}.{1 + number % 250}",
            domain=1 + number % 200,
        )


class EmulatorLauncher:
    """Starts the emulators, injects faults, and stops them with the context.

    Args:
        address: Where to listen.
        serials: Camera serial numbers; an empty sequence starts no camera process.
        rate: Robot seconds per wall second, at most; infinity is as fast as the client answers.
        page: The clock that arm and cameras share with an environment. None: they share none.
        scene: What surrounds the arm; see :mod:`dzrobot.envs.emulators.scenes`.
        arm: Kind of arm, ``fr3`` or ``fer``, or a YAML file that describes one.
    """

    def __init__(  # noqa: PLR0913 (what its processes are started with)
        self,
        address: LauncherAddress,
        serials: Sequence[str] = SERIALS,
        rate: float = 1.0,
        page: Timebase | None = None,
        scene: str = EMPTY,
        arm: str = "fr3",
    ) -> None:
        if not rate > 0 or math.isnan(rate):
            raise ConfigError(f"rate {rate} must be positive: robot seconds per wall second")
        self.address = address
        self.serials = tuple(serials)
        self.page = page or Timebase.create()
        self._rate = rate
        self._scene = scene
        self._kind = arm
        self._arm: subprocess.Popen[str] | None = None
        self._cameras: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start the processes and wait until they listen.

        Raises:
            UnknownNameError: there is no such kind of arm.
            MissingDependencyError: the scene needs a simulator that is not installed.
            SimulatorError: the simulator has the wrong version.
            RobotError: a process does not start.
        """
        check_scene(self._scene)
        describe(self._kind)
        self.start_arm()
        if self.serials:
            self.start_cameras()
        return self

    def start_arm(self) -> None:
        """Start the arm and gripper process."""
        self._arm = self._spawn(
            "arm_server", "--host", self.address.host, "--rate", str(self._rate),
            "--arm", self._kind,
        )  # fmt: skip

    def kill_arm(self) -> None:
        """Kill the arm and gripper process, as if the controller lost its power."""
        if self._arm is not None:
            _kill(self._arm)
            self._arm = None
        self.page.arm_is_alive = False

    def start_cameras(self) -> None:
        """Start (or restart) the camera process."""
        self._cameras = self._spawn(
            "camera_server", "--domain", str(self.address.domain), *self.serials
        )

    def kill_cameras(self) -> None:
        """Kill the camera process, as if both cables were pulled."""
        if self._cameras is not None:
            _kill(self._cameras)
            self._cameras = None
        self.page.camera_is_alive = False

    def call(self, name: str, *arguments: Any) -> None:
        """Run a named call of the arm process, such as ``trip`` or ``press_user_stop``."""
        self._request({"call": name, "arguments": arguments})

    def set(self, **faults: Any) -> None:
        """Set fields of :class:`~dzrobot.envs.emulators.dynamics.Faults`."""
        self._request({"set": faults})

    def camera_settings(self) -> dict[str, Any]:
        """Return the RealSense context settings that find these cameras."""
        return {"dds": bus_settings(self.address.domain)}

    def close(self) -> None:
        """Stop every process; closing twice is harmless."""
        for process in (self._arm, self._cameras):
            if process is not None:
                _stop(process)
        self._arm = self._cameras = None
        self.page.arm_is_alive = self.page.camera_is_alive = False

    def __enter__(self) -> Self:
        """Start the processes."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the processes."""
        self.close()

    def _spawn(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        timeout_s = START_TIMEOUT_S if self._scene == EMPTY else SCENE_TIMEOUT_S
        process = _begin(module, self.page, ("--scene", self._scene, *arguments))
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        if not ready:
            _kill(process)
            raise RobotError(
                f"the emulator process {module} did not start within {timeout_s:.0f} s; is the "
                "machine out of memory or processor time?"
            )
        if not process.stdout.readline():
            raise RobotError(f"the emulator process {module} ended with code {process.wait()}")
        return process

    def _request(self, message: dict[str, Any]) -> None:
        if self._arm is None or self._arm.stdin is None or self._arm.stdout is None:
            raise RobotError("the emulated arm is not running: call start() first")
        self._arm.stdin.write(json.dumps(message) + "\n")
        self._arm.stdin.flush()
        answer = json.loads(self._arm.stdout.readline())
        if "error" in answer:
            raise RobotError(answer["error"])


def _begin(module: str, page: Timebase, arguments: Sequence[str]) -> subprocess.Popen[str]:
    # The kernel ends a child with the thread that has started it: only the main one lasts.
    lasts = threading.current_thread() is threading.main_thread()
    return subprocess.Popen(
        [
            sys.executable, "-m", f"dzrobot.envs.emulators.{module}",
            "--timebase", str(page.descriptor), "--parent", str(os.getpid()),
            *(["--end-at-once"] if lasts else []), *arguments,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=python_environment(),
        pass_fds=[page.descriptor],
        # A Ctrl-C at the terminal is for the program that drives the arm, which then closes us.
        start_new_session=True,
    )  # fmt: skip


def _stop(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(timeout=3.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # A line that was never read is of no interest any more.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
