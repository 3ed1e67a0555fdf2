"""Where a workcell's devices are."""

from collections.abc import Sequence
from typing import Any, Protocol

from dzrobot.envs.franka.arm import Arm
from dzrobot.envs.franka.cameras.camera import Camera
from dzrobot.envs.franka.clock import Clock, SystemClock
from dzrobot.envs.franka.reward import Scene
from dzrobot.errors import RobotError


class Workcell(Protocol):
    """Where arm, gripper and cameras are reached."""

    def open(self) -> None:
        """Make the devices reachable; twice is harmless.

        Raises:
            RobotError: it is not known where they are.
        """
        ...

    @property
    def address(self) -> str:
        """Host name or IP address of the arm's controller."""
        ...

    @property
    def patience(self) -> float:
        """How many times longer than beside hardware a driver's answer is waited for."""
        ...

    def camera_settings(self) -> dict[str, Any]:
        """Return settings of the camera library's context; empty for cameras on USB."""
        ...

    def keep_time(self, arm: Arm, cameras: Sequence[Camera]) -> "Timed":
        """Return the drivers as they are to be used, and the clock that they keep."""
        ...

    @property
    def scene(self) -> Scene | None:
        """What stands around the arm, where a program knows it."""
        ...

    def close(self) -> None:
        """Let the devices go; twice is harmless."""
        ...


Timed = tuple[Arm, Sequence[Camera], Clock]
"""Arm, cameras, and the clock that an environment on them measures its periods by."""


class RealWorkcell:
    """A workcell of hardware.

    Args:
        address: Host name or IP address of the arm's controller; None is an error at ``open``.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address

    def open(self) -> None:
        """Refuse a workcell without an address."""
        if self._address is None:
            raise RobotError(
                "no robot address is known. Give one of: address='172.16.0.2' and cameras=[...]; "
                "workcell='cell.yaml' with both; workcell='emulated' for an emulated robot and "
                "cameras; workcell='fake' for neither library."
            )

    @property
    def address(self) -> str:
        """The configured address."""
        assert self._address is not None, "checked by open()"
        return self._address

    @property
    def patience(self) -> float:
        """No longer than is safe."""
        return 1.0

    def camera_settings(self) -> dict[str, Any]:
        """Return no settings: the cameras are on USB."""
        return {}

    def keep_time(self, arm: Arm, cameras: Sequence[Camera]) -> Timed:
        """Return the drivers, and this machine's clock."""
        return arm, cameras, SystemClock()

    @property
    def scene(self) -> Scene | None:
        """None: what stands around hardware, people know."""
        return None

    def close(self) -> None:
        """Do nothing: hardware stays."""
