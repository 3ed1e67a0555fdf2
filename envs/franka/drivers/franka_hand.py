"""The driver of the Franka Hand, on the franky library."""

from typing import Any, ClassVar

from dzrobot.envs.driver_process import Latest
from dzrobot.envs.franka.drivers.franky_library import FrankyErrors, library
from dzrobot.envs.franka.drivers.gripper import POLL_S, GripperDriver
from dzrobot.envs.franka.franka_config import GripperConfig
from dzrobot.envs.panda.state import OPEN_M
from dzrobot.errors import RobotError

_HOMED_M = 0.03
"""A hand that says it opens less than this has not been homed."""


class FrankaHandDriver(FrankyErrors, GripperDriver):
    """The hand at an arm's controller; see :class:`GripperDriver`."""

    WIDEST_M: ClassVar[float] = OPEN_M
    MISSING_HINT: ClassVar[str] = "is the hand mounted and enabled in Desk?"

    def __init__(self, place: str, config: GripperConfig, latest: Latest) -> None:
        super().__init__(place, config, latest)
        self._gripper: Any = None
        self._pending: Any = None
        self._widest_m = config.open_width_m

    def close(self) -> None:
        """Leave the hand as it is."""

    def _connect(self) -> None:
        self._gripper = library().Gripper(self._place)

    def _home(self) -> None:
        if not self._gripper.homing():
            raise RobotError("the gripper's homing failed: is something between the fingers?")

    def _is_homed(self) -> bool:
        widest = float(self._gripper.max_width)
        self._widest_m = min(self._config.open_width_m, widest)
        return widest >= _HOMED_M

    def _begin(self, opened: bool) -> None:
        config = self._config
        if opened:
            self._pending = self._gripper.move_async(self._widest_m, config.speed_m_s)
        else:
            # Epsilons as wide as the hand: whatever is between the fingers is held.
            self._pending = self._gripper.grasp_async(
                min(config.grasp_width_m, self._widest_m), config.speed_m_s, config.force_n,
                config.open_width_m, config.open_width_m,
            )  # fmt: skip

    def _has_ended(self) -> bool:
        if not self._pending.wait(POLL_S):
            return False
        # False means that nothing was between the fingers, which is not a fault.
        self._pending.get()
        self._pending = None
        return True

    def _read(self) -> tuple[float, bool]:
        state = self._gripper.state
        return float(state.width), bool(state.is_grasped)

    def _refusals(self) -> tuple[type[Exception], ...]:
        return (library().CommandException,)
