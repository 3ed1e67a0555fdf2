"""The real Franka, through the franky library (``pip install -e '.[franka]'``)."""

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dzrobot.envs.driver_process import DisconnectedError, DriverProcess, require
from dzrobot.envs.franka.drivers.franky_driver import HAND_OVER_S, RECOVER_S, FrankyDriver
from dzrobot.envs.franka.drivers.franky_library import MISSING, FrankaHandDriver
from dzrobot.envs.franka.drivers.gripper import DrivenGripper
from dzrobot.envs.franka.drivers.robotiq import MISSING as MISSING_ROBOTIQ
from dzrobot.envs.franka.drivers.robotiq import RobotiqDriver
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.safeguards.arm_check import ArmMismatchError, ArmReport, check_arm
from dzrobot.envs.franka.workcells import (
    Clock,
    GripperDevice,
    NoGripper,
    Space,
    SystemClock,
    Workcell,
)
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.state import ArmState
from dzrobot.errors import RobotError, as_sentence

_CONNECT_S = HAND_OVER_S + 12.0
_ALIVE_S = 0.5
_CALL_S = 1.5
_STOP_S = 3.0
"""The controller ramps its torques down within 2.5 s. With what else must close after it, a program
that is asked to end has 5 s."""

_CLOSE_S = 2.0


class FrankyArm:
    """A Franka arm; its driver runs in a process of its own, which keeps the last target.

    Args:
        workcell: Where the arm is.
        config: The workcell.
        clock: What the age of a state is measured by. None: this machine's.
    """

    def __init__(
        self, workcell: Workcell, config: FrankaConfig, clock: Clock | None = None
    ) -> None:
        self._workcell = workcell
        self._config = config
        self._clock: Clock = clock or SystemClock()
        self._gripper = _gripper_of(workcell, config)
        self._driver: DriverProcess | None = None
        self._seen: ArmState | None = None
        self._stop: Path | None = None

    @property
    def gripper(self) -> GripperDevice:
        """The hand."""
        return self._gripper

    @property
    def driver(self) -> DriverProcess:
        """The arm's process.

        Raises:
            DisconnectedError: there is none.
        """
        if self._driver is None:
            raise DisconnectedError(
                "the arm is not connected, or no longer; the environment's next reset() connects it"
            )
        return self._driver

    def watch_stop(self, path: Path) -> None:
        """Let the driver hold the arm by itself while there is a file at ``path``."""
        self._stop = path

    def keep_alive(self) -> None:
        """Say that this program runs."""
        if self._driver is not None:
            # Whoever needs an answer next says that there is none.
            with contextlib.suppress(DisconnectedError):
                self._driver.notify("keep_alive")

    def connect(self) -> None:
        """Connect, or connect again where the arm or its driver stopped answering."""
        if self._driver is not None:
            with contextlib.suppress(DisconnectedError):
                if self._is_alive():
                    return
            # Hand and arm share a controller: what cut one off has cut the other off too.
            self._gripper.close()
        self._abandon()
        require("franky", MISSING)
        if self._config.gripper.kind == "robotiq":
            require("pyrobotiqgripper", MISSING_ROBOTIQ)
        self._workcell.open()
        patience = self._workcell.patience
        driver = DriverProcess(
            "arm", FrankyDriver, self._workcell.address, self._config, self._stop, patience,
            patience=patience,
        )  # fmt: skip
        try:
            with driver.killed_on_error():
                driver.call("open", timeout_s=_CONNECT_S)
                self._seen = self._dated(driver.call("state", timeout_s=_CALL_S))
                check_arm(driver.call("about", timeout_s=_CALL_S), self._seen, self._config)
        except ArmMismatchError:
            raise
        except DisconnectedError as error:
            raise RobotError(
                f"no connection to the arm at {self._workcell.address}: {as_sentence(error)} Is "
                "another program connected to it?"
            ) from error
        except RobotError as error:
            # Its cause is known.
            raise RobotError(
                f"no connection to the arm at {self._workcell.address}: {error}"
            ) from error
        self._driver = driver

    def state(self) -> ArmState:
        """Return the newest state; while an answer is due, the last one, whose age shows it."""
        state = self._try_call("state")
        if state is not None:
            self._seen = self._dated(state)
        if self._seen is None:
            raise DisconnectedError("the arm has sent no state")
        return self._seen

    def about(self) -> ArmReport:
        """Return what the arm says of itself."""
        found: ArmReport = self._call("about", timeout_s=_CALL_S)
        return found

    def recover(self) -> None:
        """Clear errors and see them cleared."""
        self._call("recover", timeout_s=RECOVER_S + _CALL_S)

    def start(self, space: Space = Space.CARTESIAN) -> None:
        """Start the controller where the arm is."""
        self._call("start", space, timeout_s=_CALL_S)

    def home(self, joints: Array, dynamics: float) -> None:
        """Begin to move the joints home."""
        self._call("home", joints, dynamics, timeout_s=_STOP_S + _CALL_S)

    def command(self, target: Array, over_s: float = 0.0, speeds: Array | None = None) -> None:
        """Send one target, and see that it was taken."""
        self._try_call("command", target, over_s, speeds)

    def make_compliant(self, joints: Array) -> None:
        """Yield to a person's hand, and see that it was taken."""
        self._try_call("make_compliant", joints)

    def stop(self) -> None:
        """Come to rest; an arm that is gone has come to rest by itself."""
        if self._driver is not None:
            with contextlib.suppress(DisconnectedError):
                self._call("stop", timeout_s=_STOP_S)

    def close(self) -> None:
        """Stop, disconnect, and let the workcell go."""
        self.stop()
        self._gripper.close()
        if self._driver is not None:
            self._driver.end(_CLOSE_S)
        self._abandon()
        self._workcell.close()

    def _is_alive(self) -> bool:
        """Return whether the arm's clock advances: a lost connection shows its last state on."""
        first = self.state().robot_time_s
        deadline = time.monotonic() + _ALIVE_S
        while time.monotonic() < deadline:
            if self.state().robot_time_s != first:
                return True
            time.sleep(0.01)
        return False

    def _dated(self, state: ArmState) -> ArmState:
        """Return ``state`` with its time by the environment's clock."""
        return replace(state, fresh_at_s=self._clock.now() - (time.monotonic() - state.fresh_at_s))

    def _call(self, method: str, *arguments: object, timeout_s: float) -> Any:
        try:
            return self.driver.call(method, *arguments, timeout_s=timeout_s)
        except DisconnectedError:
            self._abandon()
            raise

    def _try_call(self, method: str, *arguments: object) -> Any:
        try:
            return self.driver.try_call(method, *arguments)
        except DisconnectedError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Kill what there is: the arm stops by itself when its connection closes."""
        if self._driver is not None:
            self._driver.kill()
        self._driver = self._seen = None


def _gripper_of(workcell: Workcell, config: FrankaConfig) -> GripperDevice:
    gripper = config.gripper
    match gripper.kind:
        case "none":
            return NoGripper()
        case "robotiq":
            # It hangs on a port of this machine: no arm's clock is paused for it.
            return DrivenGripper(RobotiqDriver, lambda: gripper.device, gripper)
        case "franka":
            return DrivenGripper(
                FrankaHandDriver, lambda: workcell.address, gripper, workcell.patience
            )
