"""The two-way gripper: never waited for."""

import contextlib
import time
from collections.abc import Callable

from dzrobot.envs.franka.config import GripperConfig
from dzrobot.envs.franka.drivers.gripper_driver import HandDriver, HandState
from dzrobot.envs.panda.state import GripperState
from dzrobot.envs.processes.driver_process import DisconnectedError, DriverProcess
from dzrobot.errors import RobotError

_CONNECT_S = 10.0
_HOMING_S = 15.0
_CLOSE_S = 1.0
_MEMORY = 4096

SILENT_S = 3.0
"""A hand that publishes nothing for this long while nothing was asked of it is gone."""


class FrankyGripper:
    """The Franka Hand; its driver runs in a process of its own.

    Reading the width takes the hand a tenth of a second and a command up to seconds, so everyone
    sees what was last read. A command is never interrupted: the hand's own stop can hang for
    seconds.

    Args:
        address: Returns host name or IP address, once the arm is connected.
        config: Speeds, forces and limits.
        patience: See :class:`~dzrobot.envs.processes.driver_process.DriverProcess`.
    """

    def __init__(
        self, address: Callable[[], str], config: GripperConfig, patience: float = 1.0
    ) -> None:
        self._address = address
        self._config = config
        self._patience = patience
        self._driver: DriverProcess | None = None
        self._asked = 0
        self._opened = True
        self._homed = False
        self._asked_s = 0.0
        self._hand: HandState | None = None

    @property
    def driver(self) -> DriverProcess:
        """The hand's process.

        Raises:
            RobotError: there is none.
        """
        if self._driver is None:
            raise RobotError("the gripper is not connected; the environment's reset() connects it")
        return self._driver

    def connect(self) -> None:
        """Connect, unless connected and well.

        Raises:
            RobotError: it does not answer.
        """
        if self._driver is not None:
            state = self.state()
            well = not state.fault and state.waiting_s < self._config.timeout_s
            # One that was not homed may have been since, in Desk.
            if well and state.is_homed:
                return
        self.close()
        address = self._address()
        driver = DriverProcess(
            "gripper", HandDriver, address, self._config, memory=_MEMORY, patience=self._patience
        )
        try:
            self._opened, self._homed = driver.ask("open", timeout_s=_CONNECT_S)
        except DisconnectedError as error:
            driver.kill()
            raise RobotError(
                f"the gripper at {address} does not answer ({error}): is the hand mounted and "
                "enabled in Desk? An arm without one has gripper: {kind: none}"
            ) from error
        except BaseException:
            driver.kill()
            raise
        self._driver, self._asked = driver, 0

    def home(self) -> None:
        """Move the fingers all the way, unless they have been since the hand was started."""
        if not self._homed:
            self._opened = self.driver.ask("home", timeout_s=_HOMING_S)
            self._homed = True

    def state(self) -> GripperState:
        """Return the last known state."""
        value = None
        with contextlib.suppress(DisconnectedError):
            value = self.driver.latest.get()
        # What was killed shows what it published last.
        self._hand = self._hand if value is None else HandState.unpack(value)
        hand, now = self._hand, time.monotonic()
        assert hand is not None, "published by open()"
        busy = hand.carried_out < self._asked and not hand.fault
        waiting = now - self._asked_s if busy else 0.0
        fault = hand.fault
        if not fault and not self.driver.is_running():
            fault = "the gripper's driver has ended"
        silent_s = SILENT_S * self._patience
        if not fault and not busy and now - hand.at_s > silent_s:
            fault = f"the gripper's driver has been silent for {silent_s} s"
        held = hand.is_grasped and not self._opened and hand.width_m > self._config.empty_width_m
        return GripperState(hand.width_m, self._opened, busy, waiting, fault, held, self._homed)

    def request(self, *, opened: bool) -> None:
        """Ask for an open or closed hand."""
        if opened == self._opened:
            return
        if not self.state().is_busy:
            self._asked_s = time.monotonic()
        self._asked += 1
        self._opened = opened
        # A driver that has ended meanwhile is a fault of the next state.
        with contextlib.suppress(DisconnectedError):
            self.driver.tell("request", self._asked, opened)

    def close(self) -> None:
        """Leave the hand as it is."""
        if self._driver is not None:
            self._driver.end(_CLOSE_S)
        self._driver = self._hand = None
