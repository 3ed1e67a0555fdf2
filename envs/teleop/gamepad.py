"""Gamepads, through pygame's SDL."""

import os
from typing import Any, get_args

from dzrobot.envs.teleop.device import TeleopReading, listed, the_only
from dzrobot.envs.teleop.settings import GamepadButton, GamepadConfig, shaped
from dzrobot.errors import RobotError

PACKAGES = ("pygame",)

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
