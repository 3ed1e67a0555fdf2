"""The two-way gripper: never waited for."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dzrobot.envs.franka.config import GripperConfig
from dzrobot.errors import RobotError

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_CONNECT_S = 5.0


@dataclass(frozen=True)
class GripperState:
    """What is known about the hand without asking it."""

    width_m: float
    """Distance between the fingers."""

    is_open: bool
    """What was last asked for."""

    is_busy: bool
    """Whether what was last asked for has not been carried out yet."""

    waiting_s: float
    """For how long a command has not been answered."""

    fault: str
    """Why the last command failed; empty when it did not."""


class Gripper(Protocol):
    """One gripper, real or not; no call but ``connect`` may take longer than a moment."""

    def connect(self) -> None:
        """Open the hand, or open it anew after a fault.

        Raises:
            RobotError: it cannot be reached.
        """
        ...

    def state(self) -> GripperState:
        """Return the last known state."""
        ...

    def request(self, *, opened: bool) -> None:
        """Ask for an open or closed hand; of several requests only the newest is carried out."""
        ...

    def close(self) -> None:
        """Let go of the hand."""
        ...


def wants_change(value: float, *, is_open: bool, threshold: float) -> bool:
    """Return whether the action number ``value`` (+1 opens) changes the hand.

    Between minus and plus ``threshold`` the hand keeps what it does, so a wavering policy does not
    make it chatter.
    """
    return value <= -threshold if is_open else value >= threshold


class FrankyGripper:
    """The Franka Hand, on a thread of its own.

    Reading the width takes the hand a tenth of a second and a command up to seconds, so the thread
    reads and commands, and everyone else sees what it last read. A command is never interrupted:
    the hand's own stop can hang for seconds.

    Args:
        address: Returns host name or IP address, once the arm is connected.
        config: Speeds, forces and limits.
    """

    def __init__(self, address: Callable[[], str], config: GripperConfig) -> None:
        self._address = address
        self._config = config
        self._thread: _Hand | None = None

    def connect(self) -> None:
        """Connect, unless connected and well."""
        if self._thread is not None and self._thread.is_well:
            return
        self.close()
        self._thread = _Hand(self._address(), self._config)
        self._thread.start()
        self._thread.await_ready()

    def state(self) -> GripperState:
        """Return the last known state."""
        return self._hand.state()

    def request(self, *, opened: bool) -> None:
        """Ask for an open or closed hand."""
        self._hand.request(opened=opened)

    def close(self) -> None:
        """Leave the hand as it is."""
        if self._thread is not None:
            self._thread.end()
        self._thread = None

    @property
    def _hand(self) -> "_Hand":
        if self._thread is None:
            raise RobotError("the gripper is not connected; the environment's reset() connects it")
        return self._thread


class _Hand(threading.Thread):
    """One connection to the hand."""

    def __init__(self, address: str, config: GripperConfig) -> None:
        super().__init__(name="franka-gripper", daemon=True)
        self._address = address
        self._config = config
        self._ready = threading.Event()
        self._changed = threading.Event()
        self._stopping = False
        self._refused: Exception | None = None
        self._width_m = 0.0
        self._wanted_open = True
        self._done_open: bool | None = None
        self._since_s: float | None = None
        self._fault = ""

    @property
    def is_well(self) -> bool:
        waiting = self.state().waiting_s
        return self.is_alive() and not self._fault and waiting < self._config.timeout_s

    def await_ready(self) -> None:
        if not self._ready.wait(_CONNECT_S) or self._refused is not None:
            raise RobotError(
                f"the gripper at {self._address} does not answer ({self._refused}): is the hand "
                "mounted and enabled in Desk?"
            ) from self._refused

    def state(self) -> GripperState:
        since = self._since_s
        waiting = 0.0 if since is None else time.monotonic() - since
        wanted = self._wanted_open
        busy = wanted != self._done_open and not self._fault
        return GripperState(self._width_m, wanted, busy, waiting, self._fault)

    def request(self, *, opened: bool) -> None:
        self._wanted_open = opened
        self._changed.set()

    def end(self) -> None:
        self._stopping = True
        self._changed.set()
        self.join(1.0)

    def run(self) -> None:
        import franky

        try:
            gripper = franky.Gripper(self._address)
            self._width_m = float(gripper.width)
        except (franky.Exception, RuntimeError) as error:
            self._refused = error
            self._ready.set()
            return
        self._wanted_open = self._width_m > self._config.open_width_m / 2
        self._done_open = self._wanted_open
        self._ready.set()
        try:
            while not self._stopping:
                self._turn(gripper, franky)
        except (franky.Exception, RuntimeError) as error:
            self._fault = f"the gripper went away: {error}"

    def _turn(self, gripper: Any, franky: Any) -> None:
        if self._wanted_open == self._done_open:
            self._width_m = float(gripper.width)
            self._changed.wait(_POLL_S)
            self._changed.clear()
            return
        opened = self._wanted_open
        self._since_s = time.monotonic()
        # The hand sometimes fails once for no reason; twice is a fault.
        for attempt in (1, 2):
            try:
                self._carry_out(gripper, opened=opened)
                break
            except franky.CommandException as error:
                _log.warning("gripper command failed (attempt %d): %s", attempt, str(error))
                if attempt == 2:
                    self._fault = f"the gripper failed: {error}"
        self._since_s = None
        self._done_open = opened

    def _carry_out(self, gripper: Any, *, opened: bool) -> None:
        config = self._config
        if opened:
            pending = gripper.move_async(config.open_width_m, config.speed_m_s)
        else:
            # Epsilons as wide as the hand: whatever is between the fingers is held.
            width = config.open_width_m
            pending = gripper.grasp_async(
                config.grasp_width_m, config.speed_m_s, config.force_n, width, width
            )
        while not pending.wait(_POLL_S) and not self._stopping:
            self._width_m = float(gripper.width)
        if not self._stopping:
            # False means that nothing was between the fingers, which is no fault.
            pending.get()
