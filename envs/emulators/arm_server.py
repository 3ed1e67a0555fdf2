"""The emulated arm and gripper in one process, steered by JSON lines on standard input.

``python -m dzrobot.envs.emulators.arm_server --host 127.0.0.1`` serves until its standard input
closes. Each line is ``{"call": NAME, "arguments": [...]}`` or ``{"set": {FAULT: VALUE}}``; each is
answered with ``{"ok": true}`` or ``{"error": TEXT}``.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dzrobot.envs.emulators.faults import Faults
from dzrobot.envs.emulators.gripper_server import GripperServer
from dzrobot.envs.emulators.robot_server import RobotServer
from dzrobot.envs.emulators.wire import ERRORS
from dzrobot.errors import DzrobotError, UnknownNameError, find

READY_LINE = "arm and gripper are listening"


class ArmServer:
    """Arm, gripper and their faults behind one set of named calls."""

    def __init__(self, host: str, rate: float = 1.0) -> None:
        self.faults = Faults()
        self.robot = RobotServer(host, self.faults, rate)
        self.gripper = GripperServer(host, self.faults)
        self._calls: dict[str, Callable[..., None]] = {
            "trip": self._trip,
            "press_user_stop": self.robot.press_user_stop,
            "release_user_stop": self.robot.release_user_stop,
            "drop_client": self.robot.drop_client,
            "freeze": self._freeze,
            "push": self._push,
        }

    def start(self) -> None:
        """Start both servers."""
        self.robot.start()
        self.gripper.start()

    def stop(self) -> None:
        """Stop both servers."""
        self.robot.stop()
        self.gripper.stop()

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

    def _freeze(self, seconds: float) -> None:
        self.faults.frozen_until_s = time.monotonic() + seconds

    def _push(self, *force: float) -> None:
        if len(force) != 6:
            raise DzrobotError(f"push takes 6 numbers (N, then Nm), got {len(force)}")
        self.robot.call(lambda: self._set_force(np.array(force, np.float64)))

    def _set_force(self, force: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        self.robot.arm.external_force = force


def main() -> None:
    """Serve on the address of the command line until standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--rate", type=float, default=1.0)
    arguments = parser.parse_args()
    server = ArmServer(arguments.host, arguments.rate)
    server.start()
    _say({"ready": READY_LINE})
    for line in sys.stdin:
        try:
            server.request(json.loads(line))
        except (DzrobotError, ValueError, TypeError) as error:
            _say({"error": str(error)})
        else:
            _say({"ok": True})
    server.stop()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
