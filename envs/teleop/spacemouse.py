"""A SpaceMouse, through pyspacemouse."""

import contextlib
import io
from typing import Any

from dzrobot.envs.teleop.device import TeleopReading, listed, the_only
from dzrobot.envs.teleop.settings import SPACEMOUSE_AXES, SpaceMouseConfig, shaped
from dzrobot.errors import MissingDependencyError, RobotError

PACKAGES = ("pyspacemouse",)

_MOST_REPORTS = 64
"""That are read at a time; a cap that is moved sends about one per millisecond."""


class SpaceMouseSource:
    """Reads a SpaceMouse.

    Args:
        config: Which one, and what its axes and buttons mean.
    """

    def __init__(self, config: SpaceMouseConfig) -> None:
        self._config = config
        self._device: Any = None
        self._reports = 0
        self._presses = 0
        self._is_down = False

    def open(self) -> None:
        """Open the only one, or that of the settings.

        Raises:
            RobotError: it is not there, or lacks a button.
            MissingDependencyError: the system's library is not installed.
        """
        import pyspacemouse

        try:
            found = pyspacemouse.get_connected_devices_by_path()
        except RuntimeError as error:
            raise MissingDependencyError(
                "the SpaceMouse needs the system's hidapi: sudo apt install libhidapi-hidraw0"
            ) from error
        path = self._config.path or the_only(found, "SpaceMouse", "path")
        if path not in found:
            raise RobotError(f"there is no SpaceMouse at {path}; connected: {listed(found)}")
        # The library prints what it has found.
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                self._device = pyspacemouse.open_by_path(
                    path, callback=self._note, axis_convention=pyspacemouse.AxisConvention.ROS
                )
            except RuntimeError as error:
                raise RobotError(
                    f"the SpaceMouse at {path} cannot be opened ({error}): a udev rule lets you "
                    "read it; see the guide of the arm"
                ) from error
        self._check_buttons()

    def poll(self) -> TeleopReading:
        """Read every report that has come.

        Raises:
            RobotError: it is gone.
        """
        from easyhid.easyhid import HIDException

        for _ in range(_MOST_REPORTS):
            before = self._reports
            try:
                state = self._device.read()
            except HIDException as error:
                raise RobotError(f"it is no longer connected ({error})") from error
            if self._reports == before:
                break
        config, pressed = self._config, state.buttons
        axes = {name: state[name] for name in SPACEMOUSE_AXES}
        return TeleopReading(
            active=config.deadman is None or bool(pressed[config.deadman]),
            motion=shaped(axes, config.axes, config),
            presses=self._presses,
            ends=config.end is not None and bool(pressed[config.end]),
            shown=axes | {f"button {number}": float(down) for number, down in enumerate(pressed)},
        )

    def close(self) -> None:
        """Let it go."""
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def _note(self, state: Any) -> None:
        """Take note of one report: a button may be pressed and let go between two polls."""
        self._reports += 1
        is_down = bool(state.buttons[self._config.gripper])
        self._presses += is_down and not self._is_down
        self._is_down = is_down

    def _check_buttons(self) -> None:
        info, config = self._device.info, self._config
        names = ", ".join(f"{number} ({name})" for number, name in enumerate(info.button_names))
        for button in (config.deadman, config.gripper, config.end):
            if button is not None and button >= len(info.button_names):
                self.close()
                raise RobotError(
                    f"the {info.name} has no button {button}; it has {names or 'none'}"
                )
