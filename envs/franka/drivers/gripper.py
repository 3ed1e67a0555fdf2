"""The Franka Hand, through the franky library; the control loop never waits for it."""

import contextlib
import logging
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from dzrobot.envs.driver_process import DisconnectedError, DriverProcess, Latest
from dzrobot.envs.franka.drivers.franky_driver import library, library_errors, translated
from dzrobot.envs.franka.franka_config import GripperConfig
from dzrobot.envs.panda.state import GripperState
from dzrobot.errors import DzrobotError, RobotError

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_HOMED_M = 0.03
"""A hand that says it opens less than this has not been homed."""


@dataclass(frozen=True)
class GripperReport:
    """What the hand's driver publishes."""

    at_s: float
    """When (this machine's clock)."""

    carried_out: int
    """Number of the newest request that was carried out."""

    width_m: float
    is_grasped: bool
    """What the hand says, which calls closed fingers with nothing between them a grasp too."""

    fault: str

    _FORMAT: ClassVar[struct.Struct] = struct.Struct("<dQd?")

    def pack(self) -> bytes:
        """Return the state as bytes."""
        head: bytes = self._FORMAT.pack(self.at_s, self.carried_out, self.width_m, self.is_grasped)
        return head + self.fault.encode()[:1024]

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the state that :meth:`pack` wrote."""
        at_s, carried_out, width_m, is_grasped = cls._FORMAT.unpack_from(data)
        fault = data[cls._FORMAT.size :].decode(errors="replace")
        return cls(at_s, carried_out, width_m, is_grasped, fault)


class FrankyGripperDriver:
    """One gripper.

    Args:
        address: Of the arm's controller.
        config: Speeds, forces and widths.
        latest: Where the state is published.
    """

    def __init__(self, address: str, config: GripperConfig, latest: Latest) -> None:
        self._address = address
        self._config = config
        self._latest = latest
        self._gripper: Any = None
        self._pending: Any = None
        self._wanted: tuple[int, bool] | None = None
        self._doing: tuple[int, bool] | None = None
        self._attempts = 0
        self._carried_out = 0
        self._fault = ""
        self._unanswered = 0
        self._widest_m = config.open_width_m
        self._width_m = 0.0
        self._grasped = False

    def open(self) -> tuple[bool, bool]:
        """Connect; return whether the hand is open, and whether it was homed."""
        self._gripper = library().Gripper(self._address)
        return self._measure()

    def home(self) -> bool:
        """Home the gripper; return whether it is open."""
        if not self._gripper.homing():
            raise RobotError("the gripper's homing failed: is something between the fingers?")
        opened, homed = self._measure()
        if not homed:
            raise RobotError("the gripper was homed and does not know how far it opens: see Desk")
        return opened

    def request(self, number: int, opened: bool) -> None:
        """Open or close next; of several requests only the newest is carried out."""
        self._wanted = (number, opened)

    def tick(self) -> float:
        """Carry a request on, and publish."""
        if self._gripper is None or self._fault:
            return _POLL_S
        try:
            self._proceed()
            self._publish()
            self._unanswered = 0
        except library().CommandException as error:
            self._failed(error)
        except library_errors() as error:
            # One answer may be lost in transit; two in a row mean that the gripper is gone.
            self._unanswered += 1
            if self._unanswered > 1:
                self._fault = f"the gripper went away: {error}"
                self._publish()
        return _POLL_S / 5

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the library raises: ValueError for an argument that it does not take."""
        return (*library_errors(), ValueError)

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        return translated(error)

    def close(self) -> None:
        """Leave the hand as it is."""

    def _measure(self) -> tuple[bool, bool]:
        widest, width = float(self._gripper.max_width), self._publish()
        self._widest_m = min(self._config.open_width_m, widest)
        return width > self._config.open_width_m / 2, widest >= _HOMED_M

    def _proceed(self) -> None:
        if self._doing is None:
            if self._wanted is None:
                return
            self._doing, self._wanted, self._attempts = self._wanted, None, 0
            self._begin()
        elif self._pending.wait(_POLL_S):
            # False means that nothing was between the fingers, which is no fault.
            self._pending.get()
            self._carried_out, self._doing, self._pending = self._doing[0], None, None

    def _begin(self) -> None:
        assert self._doing is not None, "set by _proceed"
        config = self._config
        self._attempts += 1
        if self._doing[1]:
            self._pending = self._gripper.move_async(self._widest_m, config.speed_m_s)
        else:
            # Epsilons as wide as the hand: whatever is between the fingers is held.
            self._pending = self._gripper.grasp_async(
                min(config.grasp_width_m, self._widest_m), config.speed_m_s, config.force_n,
                config.open_width_m, config.open_width_m,
            )  # fmt: skip

    def _failed(self, error: Exception) -> None:
        """Try once more: the hand sometimes fails once for no reason; twice is a fault."""
        _log.warning("gripper command failed (attempt %d): %s", self._attempts, str(error))
        if self._attempts >= 2 or self._doing is None:
            self._fault = f"the gripper failed: {error}"
            self._publish()
            return
        try:
            self._begin()
        except library_errors() as again:
            self._fault = f"the gripper failed: {again}"
            self._publish()

    def _publish(self) -> float:
        """Say what is known; return the width."""
        if not self._fault:
            state = self._gripper.state
            self._width_m, self._grasped = float(state.width), bool(state.is_grasped)
        self._latest.put(
            GripperReport(
                time.monotonic(), self._carried_out, self._width_m, self._grasped, self._fault
            ).pack()
        )
        return self._width_m


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
        patience: See :class:`~dzrobot.envs.driver_process.DriverProcess`.
    """

    def __init__(
        self, address: Callable[[], str], config: GripperConfig, patience: float = 1.0
    ) -> None:
        self._address = address
        self._config = config
        self._patience = patience
        self._driver: DriverProcess | None = None
        self._requested = 0
        self._opened = True
        self._homed = False
        self._requested_at_s = 0.0
        self._report: GripperReport | None = None

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
            "gripper",
            FrankyGripperDriver,
            address,
            self._config,
            memory=_MEMORY,
            patience=self._patience,
        )
        try:
            with driver.killed_on_error():
                self._opened, self._homed = driver.call("open", timeout_s=_CONNECT_S)
        except DisconnectedError as error:
            raise RobotError(
                f"the gripper at {address} does not answer ({error}): is the hand mounted and "
                "enabled in Desk? An arm without one has gripper: {kind: none}"
            ) from error
        self._driver, self._requested = driver, 0

    def home(self) -> None:
        """Home the gripper, unless it has been homed since it was started."""
        if not self._homed:
            self._opened = self.driver.call("home", timeout_s=_HOMING_S)
            self._homed = True

    def state(self) -> GripperState:
        """Return the last known state."""
        value = None
        with contextlib.suppress(DisconnectedError):
            value = self.driver.latest.get()
        # What was killed shows what it published last.
        self._report = self._report if value is None else GripperReport.unpack(value)
        report, now = self._report, time.monotonic()
        assert report is not None, "published by open()"
        busy = report.carried_out < self._requested and not report.fault
        waiting = now - self._requested_at_s if busy else 0.0
        fault = report.fault
        if not fault and not self.driver.is_running():
            fault = "the gripper's driver has ended"
        silent_s = SILENT_S * self._patience
        if not fault and not busy and now - report.at_s > silent_s:
            fault = f"the gripper's driver has been silent for {silent_s} s"
        held = (
            report.is_grasped and not self._opened and report.width_m > self._config.empty_width_m
        )
        return GripperState(report.width_m, self._opened, busy, waiting, fault, held, self._homed)

    def request(self, *, opened: bool) -> None:
        """Request an open or closed gripper."""
        if opened == self._opened:
            return
        if not self.state().is_busy:
            self._requested_at_s = time.monotonic()
        self._requested += 1
        self._opened = opened
        # A driver that has ended meanwhile is a fault of the next state.
        with contextlib.suppress(DisconnectedError):
            self.driver.notify("request", self._requested, opened)

    def close(self) -> None:
        """Leave the hand as it is."""
        if self._driver is not None:
            self._driver.end(_CLOSE_S)
        self._driver = self._report = None
