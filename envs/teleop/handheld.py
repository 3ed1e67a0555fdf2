"""Devices in a person's hand: gamepads by SDL, through pygame, and SpaceMice by pyspacemouse."""

import contextlib
import io
import os
from typing import Any, get_args

from dzrobot.envs.teleop.device import TeleopReading, listed, the_only
from dzrobot.envs.teleop.settings import (
    SPACEMOUSE_AXES,
    GamepadButton,
    GamepadConfig,
    SpaceMouseConfig,
    shaped,
)
from dzrobot.errors import MissingDependencyError, RobotError

GAMEPAD_PACKAGES = ("pygame",)
SPACEMOUSE_PACKAGES = ("pyspacemouse",)

_WHOLE = 32767.0
"""What SDL says of an axis that is deflected all the way."""


class GamepadSource:
    """Reads a gamepad.

    Args:
        config: Which one, and what its axes and buttons mean.
    """

    def __init__(self, config: GamepadConfig) -> None:
        self._config = config
        self._pad: Any = None
        self._presses = 0

    def open(self) -> None:
        """Open the only one, or that of the settings.

        Raises:
            RobotError: it is not there.
        """
        # Events of gamepads come without a window, and while another program has the keyboard.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ["SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS"] = "1"
        os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
        import pygame
        from pygame._sdl2 import controller

        pygame.display.init()
        controller.init()
        found = {
            str(number): str(controller.Controller(number).name)
            for number in range(controller.get_count())
            if controller.is_controller(number)
        }
        wanted = self._config.number
        key = the_only(found, "gamepad", "number") if wanted is None else str(wanted)
        if key not in found:
            raise RobotError(f"there is no gamepad {key}; connected: {listed(found)}")
        self._pad = controller.Controller(int(key))
        pygame.event.clear()

    def poll(self) -> TeleopReading:
        """Read axes and buttons, and the presses since the last time.

        Raises:
            RobotError: the gamepad is gone.
        """
        import pygame

        config = self._config
        for event in pygame.event.get():
            if event.type == pygame.CONTROLLERBUTTONDOWN and event.instance_id == self._pad.id:
                self._presses += event.button == _number("BUTTON", config.gripper)
        if not self._pad.attached():
            raise RobotError("it is no longer connected")
        axes = self._axes()
        return TeleopReading(
            active=config.deadman is None or self._is_down(config.deadman),
            motion=shaped(axes, config.axes, config),
            presses=self._presses,
            ends=config.end is not None and self._is_down(config.end),
            shown=axes | {name: float(self._is_down(name)) for name in get_args(GamepadButton)},
        )

    def close(self) -> None:
        """Let it go."""
        pad, self._pad = self._pad, None
        if pad is not None:
            pad.quit()

    def _axes(self) -> dict[str, float]:
        """Return the values of :data:`~dzrobot.envs.teleop.settings.GAMEPAD_AXES`."""
        sticks = {
            name: self._pad.get_axis(_number("AXIS", name.replace("_", ""))) / _WHOLE
            for name in ("left_x", "left_y", "right_x", "right_y")
        }
        left, right = (
            self._pad.get_axis(_number("AXIS", f"trigger{side}")) / _WHOLE
            for side in ("left", "right")
        )
        return {
            **sticks,
            "triggers": right - left,
            "dpad_x": float(self._is_down("dpad_right")) - float(self._is_down("dpad_left")),
            "dpad_y": float(self._is_down("dpad_down")) - float(self._is_down("dpad_up")),
        }

    def _is_down(self, button: str) -> bool:
        return bool(self._pad.get_button(_number("BUTTON", button)))


def _number(kind: str, name: str) -> int:
    """Return SDL's number of an axis or button."""
    import pygame

    return int(getattr(pygame, f"CONTROLLER_{kind}_{name.upper()}"))


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
