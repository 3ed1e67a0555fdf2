"""The driver of a Robotiq 2F-85 on a serial port, on the pyrobotiqgripper library."""

import time
from typing import Any, ClassVar

from dzrobot.envs.driver_process import DisconnectedError, Latest
from dzrobot.envs.franka.drivers.gripper import POLL_S, GripperDriver
from dzrobot.envs.franka.franka_config import GripperConfig
from dzrobot.errors import DzrobotError, MissingDependencyError, RobotError
from dzrobot.importing import install

MISSING = f"a Robotiq gripper needs `{install('robotiq')}`"

_SPEEDS_M_S = (0.02, 0.15)
_FORCES_N = (20.0, 235.0)
"""What 0 and 255 stand for, by Robotiq's manual of the 2F-85."""

_OPEN_AT, _CLOSED_AT = 3, 230
"""What the gripper reports as its position at its ends."""

_OPEN, _CLOSED = 0, 255
_MOVING, _STOPPED_CLOSING = 0, 2
"""Values of ``gOBJ``: fingers on their way, and stopped by a contact while they closed."""

_MAJOR_FAULTS = range(10, 16)
"""Values of ``gFLT``: they last until the gripper is activated anew."""

_LATENCY_S = 0.1
"""By then the gripper's status is of the command that was sent last."""


class RobotiqDriver(GripperDriver):
    """The gripper at a serial port; see :class:`GripperDriver`. Its homing is its activation."""

    WIDEST_M: ClassVar[float] = 0.085
    MISSING_HINT: ClassVar[str] = (
        "has it 24 V, is its USB adapter plugged in, and may you open the port (group dialout)?"
    )
    LOST_HINT: ClassVar[str] = "Look at its 24 V and its USB adapter"

    def __init__(self, place: str, config: GripperConfig, latest: Latest) -> None:
        super().__init__(place, config, latest)
        self._gripper: Any = None
        self._began_s = 0.0
        self._activated = False

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the libraries raise."""
        from pymodbus.exceptions import ModbusException

        return _library().RobotiqGripperError, ModbusException, OSError, ValueError

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        shown = str(error) or type(error).__name__
        if isinstance(error, self._refusals()):
            return RobotError(f"the gripper failed: {shown}")
        if isinstance(error, self.errors):
            return DisconnectedError(shown)
        return RobotError(f"{type(error).__name__}: {shown}")

    def close(self) -> None:
        """Leave the hand as it is."""
        if self._gripper is not None:
            self._gripper.disconnect()

    def _connect(self) -> None:
        self._gripper = _library().RobotiqGripper(com_port=self._place)

    def _home(self) -> None:
        self._gripper.activate()

    def _is_homed(self) -> bool:
        self._gripper.readStatus(raiseOnFault=False)
        status = self._gripper.status(refreshStatus=False)
        activated = bool(self._gripper.isActivated(refreshStatus=False))
        self._activated = activated and int(status["gFLT"]) not in _MAJOR_FAULTS
        return self._activated

    @property
    def _open_m(self) -> float:
        return min(self._config.open_width_m, self.WIDEST_M)

    def _begin(self, opened: bool) -> None:
        low, high = _SPEEDS_M_S
        speed = _share(self._config.speed_m_s, low, high)
        force = _share(self._config.force_n, *_FORCES_N)
        place = _CLOSED
        if opened:
            place = _OPEN + _share(self.WIDEST_M - self._config.open_width_m, 0.0, self.WIDEST_M)
        self._gripper.move(place, speed, force, wait=False, readStatus=False, start=True)
        self._began_s = time.monotonic()

    def _has_ended(self) -> bool:
        if time.monotonic() - self._began_s < _LATENCY_S:
            time.sleep(POLL_S)
            return False
        return int(self._gripper.status(refreshStatus=False)["gOBJ"]) != _MOVING

    def _read(self) -> tuple[float, bool]:
        # A fault that was there before is cleared by the activation, so it may not prevent that.
        self._gripper.readStatus(raiseOnFault=self._activated)
        status = self._gripper.status(refreshStatus=False)
        closed = (float(status["gPO"]) - _OPEN_AT) / (_CLOSED_AT - _OPEN_AT)
        width = self.WIDEST_M * (1.0 - min(max(closed, 0.0), 1.0))
        return width, int(status["gOBJ"]) == _STOPPED_CLOSING

    def _refusals(self) -> tuple[type[Exception], ...]:
        library = _library()
        return library.GripperFaultError, library.GripperNotActivatedError


def _library() -> Any:
    """Return the library.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import pyrobotiqgripper
    except ImportError as error:
        raise MissingDependencyError(f"{MISSING} ({error})") from error
    return pyrobotiqgripper


def _share(value: float, low: float, high: float) -> int:
    """Return where ``value`` lies from ``low`` (0) to ``high`` (255)."""
    return round(255 * min(max((value - low) / (high - low), 0.0), 1.0))
