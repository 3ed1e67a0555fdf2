"""Grippers whose driver runs in a process of its own; the control loop never waits for one."""

import contextlib
import logging
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

from dzrobot.envs.driver_process import DisconnectedError, DriverProcess, Latest
from dzrobot.envs.franka.franka_config import GripperConfig
from dzrobot.envs.panda.state import GripperState
from dzrobot.errors import DzrobotError, RobotError, as_sentence

_log = logging.getLogger(__name__)

POLL_S = 0.05

MOVED_M = 0.002
"""Fingers that have moved no farther than this have not moved."""

_LOOKS = 3
"""How many states in a row must show fingers where they were, as one may be late."""


@dataclass(frozen=True)
class GripperReport:
    """What a gripper's driver publishes."""

    at_s: float
    """When (this machine's clock)."""

    carried_out: int
    """Number of the newest request that was carried out."""

    width_m: float
    is_grasped: bool
    """What the hand says; some call closed fingers with nothing between them a grasp too."""

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


class GripperDriver(ABC):
    """One gripper: carries requests out one after another, and publishes what it does.

    Args:
        place: Where the gripper is: an address or a device.
        config: Speeds, forces and widths.
        latest: Where the state is published.
    """

    WIDEST_M: ClassVar[float]
    """Distance between the fingers of an open hand of this kind."""

    MISSING_HINT: ClassVar[str]
    """What to look at when the gripper does not answer."""

    LOST_HINT: ClassVar[str]
    """What to look at when one that answered does so no longer."""

    def __init__(self, place: str, config: GripperConfig, latest: Latest) -> None:
        self._place = place
        self._config = config
        self._latest = latest
        self._is_connected = False
        self._wanted: tuple[int, bool] | None = None
        self._doing: tuple[int, bool] | None = None
        self._attempts = 0
        self._carried_out = 0
        self._fault = ""
        self._unanswered = 0
        self._width_m = 0.0
        self._grasped = False
        self._began_m = 0.0
        self._ended = False
        self._looks = 0

    def open(self) -> tuple[bool, bool]:
        """Connect; return whether the hand is open, and whether it was homed."""
        self._connect()
        self._is_connected = True
        return self._measure()

    def home(self) -> bool:
        """Home the gripper; return whether it is open."""
        self._home()
        opened, homed = self._measure()
        if not homed:
            raise RobotError("the gripper was homed and does not know how far it opens")
        return opened

    def request(self, number: int, opened: bool) -> None:
        """Open or close next; of several requests only the newest is carried out."""
        self._wanted = (number, opened)

    def tick(self) -> float:
        """Carry a request on, and publish."""
        if not self._is_connected or self._fault:
            return POLL_S
        try:
            self._proceed()
            self._publish()
            self._unanswered = 0
        except self._refusals() as error:
            self._failed(error)
        except self.errors as error:
            # One answer may be lost in transit; two in a row mean that the gripper is gone.
            self._unanswered += 1
            if self._unanswered > 1:
                self._fault = f"the gripper went away: {as_sentence(error)} {self.LOST_HINT}"
                self._publish()
        return POLL_S / 5

    @property
    @abstractmethod
    def errors(self) -> tuple[type[Exception], ...]:
        """What the library may raise: ValueError for an argument that it does not take."""

    @abstractmethod
    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""

    @abstractmethod
    def close(self) -> None:
        """Leave the hand as it is."""

    @abstractmethod
    def _connect(self) -> None:
        """Open the connection."""

    @abstractmethod
    def _home(self) -> None:
        """Move the fingers all the way, once; RobotError where they do not get there."""

    @abstractmethod
    def _is_homed(self) -> bool:
        """Return whether the hand knows how far it opens."""

    @property
    @abstractmethod
    def _open_m(self) -> float:
        """Distance between the fingers of this hand where it is open."""

    def _cause(self, error: Exception) -> str:
        """Return why a command failed, in words that say what to do."""
        return str(error)

    @abstractmethod
    def _begin(self, opened: bool) -> None:
        """Begin to open or close."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """Return whether what was begun is over; wait for that :data:`POLL_S` at most."""

    @abstractmethod
    def _read(self) -> tuple[float, bool]:
        """Return the width (m), and whether the hand says that it holds something."""

    @abstractmethod
    def _refusals(self) -> tuple[type[Exception], ...]:
        """Return what the library raises when the gripper refuses or fails a command."""

    def _measure(self) -> tuple[bool, bool]:
        homed = self._is_homed()
        is_wide = self._publish() > min(self._config.open_width_m, self.WIDEST_M) / 2
        # One that holds something wide is closed, and opens when it is asked to.
        return is_wide and not self._grasped, homed

    def _proceed(self) -> None:
        if self._doing is None:
            if self._wanted is None:
                return
            self._doing, self._wanted, self._attempts = self._wanted, None, 0
            self._try()
        elif self._ended or self._has_ended():
            self._ended = True
            if self._has_moved(opened=self._doing[1]):
                self._carried_out, self._doing = self._doing[0], None
            elif self._looks >= _LOOKS:
                self._grasped, self._fault = False, (
                    f"the hand did not move: it answered that it had closed, and its fingers are "
                    f"still {1000 * self._width_m:.0f} mm apart, as when it was open. Home it in "
                    "Desk (End Effector), and look whether something keeps the fingers open or is "
                    "as wide as the hand"
                )  # fmt: skip
                self._publish()

    def _has_moved(self, *, opened: bool) -> bool:
        """Return whether fingers that were open are no longer, once they were asked to close."""
        if opened or abs(self._began_m - self._open_m) > MOVED_M:
            return True
        self._looks += 1
        return abs(self._read()[0] - self._open_m) > MOVED_M

    def _try(self) -> None:
        assert self._doing is not None, "set by _proceed"
        self._attempts += 1
        self._began_m, self._ended, self._looks = self._width_m, False, 0
        self._begin(self._doing[1])

    def _failed(self, error: Exception) -> None:
        """Try once more: a hand sometimes fails once for no reason; twice is a fault."""
        _log.warning("gripper command failed (attempt %d): %s", self._attempts, str(error))
        if self._attempts >= 2 or self._doing is None:
            self._fault = f"the gripper failed: {self._cause(error)}"
            self._publish()
            return
        try:
            self._try()
        except self.errors as again:
            self._fault = f"the gripper failed: {self._cause(again)}"
            self._publish()

    def _publish(self) -> float:
        """Say what is known; return the width."""
        if not self._fault:
            self._width_m, self._grasped = self._read()
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


class DrivenGripper:
    """A gripper; its driver runs in a process of its own.

    Reading the width takes a hand up to a tenth of a second and a command up to seconds, so
    everyone sees what was last read. A command is never interrupted: the Franka Hand's own stop can
    hang for seconds.

    Args:
        make: The kind of driver.
        place: Returns where the gripper is, once the arm is connected.
        config: Speeds, forces and limits.
        patience: See :class:`~dzrobot.envs.driver_process.DriverProcess`.
    """

    def __init__(
        self,
        make: type[GripperDriver],
        place: Callable[[], str],
        config: GripperConfig,
        patience: float = 1.0,
    ) -> None:
        self._make = make
        self._place = place
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
        place = self._place()
        driver = DriverProcess(
            "gripper", self._make, place, self._config, memory=_MEMORY, patience=self._patience
        )
        try:
            with driver.killed_on_error():
                self._opened, self._homed = driver.call("open", timeout_s=_CONNECT_S)
        except DisconnectedError as error:
            raise RobotError(
                f"the gripper at {place} does not answer ({error}): {self._make.MISSING_HINT}. An "
                "arm without one has gripper: {kind: none}"
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
        return GripperState(
            report.width_m, self._opened, busy, waiting, fault, held, self._homed,
            self._make.WIDEST_M,
        )  # fmt: skip

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
