"""The process of the emulated arm and gripper, controlled by JSON lines on standard input.

``python -m dzrobot.envs.emulators.arm_server --host 127.0.0.1`` serves until its standard input
closes. Each line is ``{"call": NAME, "arguments": [...]}`` or ``{"set": {FAULT: VALUE}}``; each is
answered with ``{"ok": true}`` or ``{"error": TEXT}``.
"""

import argparse
import dataclasses
import io
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dzrobot.envs.emulators.dynamics import Faults, dynamics_of
from dzrobot.envs.emulators.fci_protocol import ERRORS, RobotMode
from dzrobot.envs.emulators.kinematics import ArmDescription, describe
from dzrobot.envs.emulators.robot_client import start_repeating
from dzrobot.envs.emulators.robot_server import RobotServer
from dzrobot.envs.emulators.scenes import EMPTY
from dzrobot.envs.emulators.timebase import Timebase
from dzrobot.errors import DzrobotError, UnknownNameError, find
from dzrobot.process import end_with_parent

READY_LINE = "arm and gripper are listening"
_LOOK_S = 0.2
_MODES = {
    "idle": RobotMode.IDLE,
    "brakes_locked": RobotMode.OTHER,
    "guiding": RobotMode.GUIDING,
}


class ArmServer:
    """Arm, gripper and their faults behind one set of named calls.

    Args:
        host: Loopback address to listen on.
        page: The shared clock. None: one of its own.
        rate: Robot seconds per wall second, at most.
        scene: Name of what surrounds the arm; see :mod:`dzrobot.envs.emulators.scenes`.
        description: Which kind of arm it is.
    """

    def __init__(
        self, host: str, page: Timebase | None, rate: float, scene: str, description: ArmDescription
    ) -> None:
        self.faults = Faults()
        dynamics = dynamics_of(scene, self.faults, description)
        self.robot = RobotServer(host, self.faults, page, rate, dynamics)
        self._calls: dict[str, Callable[..., None]] = {
            "trip": self._trip,
            "press_user_stop": self.robot.press_user_stop,
            "release_user_stop": self.robot.release_user_stop,
            "drop_client": self.robot.drop_client,
            "freeze": self.robot.freeze,
            "mode": self._mode,
            "push": self._push,
            "guide": self._guide,
            "prepare": self._prepare,
        }

    def request(self, message: dict[str, Any]) -> None:
        """Carry out one control message; raise UnknownNameError for a name that is not known."""
        if "set" in message:
            fields = {field.name: field for field in dataclasses.fields(Faults)}
            for name, value in message["set"].items():
                find(fields, "fault", name)
                setattr(self.faults, name, value)
            return
        find(self._calls, "call", str(message.get("call")))(*message.get("arguments", ()))

    def _trip(self, *errors: str) -> None:
        for name in errors:
            if name not in ERRORS:
                raise UnknownNameError(f"unknown robot error {name!r}. Known: {', '.join(ERRORS)}.")
        self.robot.trip(*errors)

    def _mode(self, name: str) -> None:
        self.robot.show_mode(find(_MODES, "mode", name))

    def _guide(self, *place: float) -> None:
        arm = self.robot.arm
        if len(place) == 7:
            self.robot.guide(np.array(place, np.float64))
            return
        if len(place) != 3:
            raise DzrobotError(f"guide takes a place (3, m) or joints (7, rad), got {len(place)}")
        self.robot.guide(arm.description.reaching(arm.q, place, arm.settings.flange_to_ee))

    def _prepare(self, start: int) -> None:
        self.robot.prepare(start)

    def _push(self, *numbers: float) -> None:
        if len(numbers) != 7:
            raise DzrobotError(f"push takes 7 numbers (3 N, 3 Nm, s), got {len(numbers)}")
        self.robot.push(np.array(numbers[:6], np.float64), numbers[6])


def main() -> None:
    """Serve on the address of the command line until standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--scene", default=EMPTY)
    parser.add_argument("--arm", default="fr3")
    parser.add_argument("--timebase", type=int, help="descriptor of the shared clock")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process to end with")
    parser.add_argument("--end-at-once", action="store_true", help="even if it is suspended")
    arguments = parser.parse_args()
    if arguments.end_at_once:
        end_with_parent(arguments.parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    page = None if arguments.timebase is None else Timebase(arguments.timebase)
    server = ArmServer(
        arguments.host, page, arguments.rate, arguments.scene, describe(arguments.arm)
    )
    start_repeating([server.robot.states, server.robot.gripper.states])
    server.robot.start()
    try:
        _reply({"ready": READY_LINE})
        for line in _requests(arguments.parent):
            try:
                server.request(json.loads(line))
            except (DzrobotError, ValueError, TypeError) as error:
                _reply({"error": str(error)})
            else:
                _reply({"ok": True})
    finally:
        server.robot.stop()


def _requests(parent: int) -> Iterator[bytes]:
    """Yield the lines of standard input until it closes, or the parent is gone.

    A process that the parent forked may keep it open. A signal that comes just before a read begins
    to wait does not end the wait, so it is short.
    """
    # A buffer would take lines that come together, and the second would not be seen waiting.
    source = io.FileIO(sys.stdin.fileno(), closefd=False)
    while os.getppid() == parent:
        if select.select([source], [], [], _LOOK_S)[0]:
            line = source.readline()
            if not line:
                return
            yield line


def _reply(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
