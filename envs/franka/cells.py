"""Where a workcell's devices are: on the robot's network, or emulated in child processes."""

import itertools
from typing import Any, Protocol

from dzrobot.errors import RobotError

_benches = itertools.count(1)


class Cell(Protocol):
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

    def camera_settings(self) -> dict[str, Any]:
        """Return settings of the camera library's context; empty for cameras on USB."""
        ...

    def close(self) -> None:
        """Let the devices go; twice is harmless."""
        ...


class RealCell:
    """A workcell of hardware.

    Args:
        address: Host name or IP address of the arm's controller; None is an error at ``open``.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address

    def open(self) -> None:
        """Refuse a cell without an address."""
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

    def camera_settings(self) -> dict[str, Any]:
        """Return no settings: the cameras are on USB."""
        return {}

    def close(self) -> None:
        """Do nothing: hardware stays."""


class EmulatedCell:
    """Emulated arm, gripper and cameras, started as child processes when first opened.

    Args:
        rate: Robot seconds per wall second.
    """

    def __init__(self, rate: float = 1.0) -> None:
        self._rate = rate
        self._bench: Any = None

    @property
    def bench(self) -> Any:
        """The running emulators, for those who inject faults.

        Raises:
            RobotError: they have not been started.
        """
        if self._bench is None:
            raise RobotError("the emulators are started by the first reset()")
        return self._bench

    def open(self) -> None:
        """Start the emulators."""
        if self._bench is not None:
            return
        from dzrobot.envs.emulators.bench import SERIALS, Bench, BenchAddress

        self._bench = Bench(BenchAddress.for_process(next(_benches)), SERIALS, self._rate).start()

    @property
    def address(self) -> str:
        """The loopback address of the emulated arm."""
        host: str = self.bench.address.host
        return host

    def camera_settings(self) -> dict[str, Any]:
        """Return the settings that find the emulated cameras."""
        settings: dict[str, Any] = self.bench.camera_settings()
        return settings

    def close(self) -> None:
        """Stop the emulators."""
        if self._bench is not None:
            self._bench.close()
        self._bench = None
