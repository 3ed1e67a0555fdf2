"""Settings of the teleoperation devices, given as ``--teleop-arg key=value``."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dzrobot.configuration import FrozenConfig

Axes = tuple[str, str, str, str, str, str]
Signs = tuple[
    Literal[-1, 1], Literal[-1, 1], Literal[-1, 1], Literal[-1, 1], Literal[-1, 1], Literal[-1, 1],
    Literal[-1, 1],
]  # fmt: skip
Ids = tuple[int, int, int, int, int, int, int]
Angles = tuple[float, float, float, float, float, float, float]
Gain = Annotated[float, Field(gt=0, le=1)]
Button = Annotated[int, Field(ge=0, le=63)]
ServoId = Annotated[int, Field(ge=0, le=252)]

NONE = "none"
"""Axis of a motion that nothing commands."""


class DeviceConfig(FrozenConfig):
    """What every device has."""

    silent_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """A device that says nothing for this long is lost: the robot holds still and recording ends.
    """


class MotionConfig(DeviceConfig):
    """What devices have that show a motion."""

    dead_zone: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of an axis's travel that counts as rest; the remainder covers the whole range."""

    translation_gain: Gain = 0.5
    """Translation of a whole deflection, as a share of the largest step that the robot takes."""

    rotation_gain: Gain = 0.5
    """The same of rotation."""


def check_axes(axes: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise ValueError for an axis that the device has not."""
    for name in axes:
        if name != NONE and name.removeprefix("-") not in known:
            raise ValueError(
                f"axes names {name!r}; allowed: {', '.join(known)}, each with or without - in "
                f"front, and {NONE}"
            )


SPACEMOUSE_AXES = ("x", "y", "z", "roll", "pitch", "yaw")
"""Axes of the cap, as ROS has them: x away from the person, y left, z up, and turns about these."""


class SpaceMouseConfig(MotionConfig):
    """A SpaceMouse, on USB or its receiver."""

    path: str | None = None
    """Such as ``/dev/hidraw3``, where several are connected. None: the only one."""

    axes: Axes = ("x", "y", "z", "roll", "pitch", "yaw")
    """What moves the hand forward, left and up and turns it about these: axes of the cap (x
    forward, y left, z up, and roll, pitch, yaw about them), ``-`` in front turns one round,
    ``none`` leaves a motion out. The default is right for someone who looks as the robot does."""

    deadman: Button | None = 0
    """Number of the button that is held while the robot may move. None: always active; an arm
    refuses that."""

    gripper: Button = 1
    """Number of the button that closes and opens the gripper."""

    end: Button | None = None
    """Number of the button that ends the episode. None: no button does."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_axes(self.axes, SPACEMOUSE_AXES)
        check_buttons(self.deadman, self.gripper, self.end)
        return self


GAMEPAD_AXES = ("left_x", "left_y", "right_x", "right_y", "triggers", "dpad_x", "dpad_y")
"""Sticks to the right and down, the right trigger less the left one, the pad right and down."""

GamepadButton = Literal[
    "a", "b", "x", "y", "back", "start", "leftshoulder", "rightshoulder", "leftstick", "rightstick"
]
"""As SDL names them on every known gamepad: ``a`` is the lowest of the four on the right."""


class GamepadConfig(MotionConfig):
    """A gamepad that SDL knows."""

    number: Annotated[int, Field(ge=0, le=63)] | None = None
    """As SDL counts them from 0, where several are connected. None: the only one."""

    axes: Axes = ("-left_y", "-left_x", "triggers", "dpad_x", "-right_y", "-right_x")
    """What moves the hand forward, left and up and turns it about these: ``left_x``, ``left_y``,
    ``right_x``, ``right_y`` (sticks, right and down), ``triggers`` (the right one less the left
    one), ``dpad_x``, ``dpad_y``; ``-`` in front turns one round, ``none`` leaves a motion out."""

    deadman: GamepadButton | None = "leftshoulder"
    """Held while the robot may move. None: always active; an arm refuses that."""

    gripper: GamepadButton = "a"
    """Closes and opens the gripper."""

    end: GamepadButton | None = "start"
    """Ends the episode. None: no button does."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_axes(self.axes, GAMEPAD_AXES)
        check_buttons(self.deadman, self.gripper, self.end)
        return self


class HandConfig(DeviceConfig):
    """The arm itself, guided by one hand, with a gamepad in the other."""

    number: Annotated[int, Field(ge=0, le=63)] | None = None
    """Number of the gamepad, as SDL counts them from 0, where several are connected. None: the
    only one."""

    deadman: GamepadButton = "leftshoulder"
    """Held while the arm yields to the hand."""

    gripper: GamepadButton = "a"
    """Closes and opens the gripper."""

    end: GamepadButton | None = "start"
    """Ends the episode. None: no button does."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_buttons(self.deadman, self.gripper, self.end)
        return self


def check_buttons(*buttons: int | str | None) -> None:
    """Raise ValueError where one button means two things."""
    named = [button for button in buttons if button is not None]
    if len(set(named)) < len(named):
        raise ValueError(
            f"deadman, gripper and end are {', '.join(map(str, named))}: give each its own button"
        )


class LeaderConfig(DeviceConfig):
    """A leader arm of Dynamixel servos, such as GELLO, that stands like the robot's arm."""

    port: str
    """Serial port, such as ``/dev/serial/by-id/usb-FTDI_...``."""

    baud_rate: Annotated[int, Field(gt=0)] = 57600
    """As the servos are set."""

    ids: Ids = (1, 2, 3, 4, 5, 6, 7)
    """Ids of the servos of joints 1 to 7."""

    signs: Signs
    """Whether a servo turns as its joint does: 1, or -1 where it turns the other way."""

    offsets_rad: Angles
    """What a servo shows where its joint is at zero: joint = sign x (servo - offset)."""

    gripper_id: ServoId = 8
    """Id of the trigger's servo."""

    gripper_open_rad: float
    """What the trigger's servo shows at rest."""

    gripper_closed_rad: float
    """What it shows when the trigger is fully pulled; half of the travel closes the gripper."""

    deadman_button: GamepadButton | None = None
    """Button of a gamepad in the other hand, held while the robot may move; its ``start`` then
    ends the episode. None, and no ``deadman_id``: always active; an arm refuses that."""

    deadman_id: ServoId | None = None
    """Id of the servo of a lever that is held instead of that button."""

    deadman_rest_rad: float = 0.0
    """What the lever's servo shows at rest."""

    deadman_held_rad: float = 0.0
    """What it shows when the lever is held; beyond half of its travel it counts as held."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        ids = [*self.ids, self.gripper_id, self.deadman_id]
        if len(set(ids)) < len(ids):
            raise ValueError(f"ids, gripper_id and deadman_id are {ids}: give each its own servo")
        if self.deadman_id is not None and self.deadman_button is not None:
            raise ValueError(
                f"deadman_id is {self.deadman_id} and deadman_button {self.deadman_button}; "
                "choose one of them"
            )
        if self.gripper_open_rad == self.gripper_closed_rad:
            raise ValueError(
                f"gripper_open_rad and gripper_closed_rad are both {self.gripper_open_rad}; they "
                "differ by the travel of the trigger"
            )
        if self.deadman_id is not None and self.deadman_rest_rad == self.deadman_held_rad:
            raise ValueError(
                f"deadman_rest_rad and deadman_held_rad are both {self.deadman_rest_rad}; they "
                "differ by the travel of the lever"
            )
        return self


def shaped(
    values: dict[str, float], axes: tuple[str, ...], config: MotionConfig
) -> tuple[float, ...]:
    """Return the motion (6,) of axis values in [-1, 1]: mapped, without dead zone, with gains.

    Args:
        values: By the device's own names.
        axes: Which of them is which motion.
        config: Dead zone and gains.
    """
    motion = []
    for number, name in enumerate(axes):
        value = 0.0 if name == NONE else max(-1.0, min(1.0, values[name.removeprefix("-")]))
        beyond = max(0.0, abs(value) - config.dead_zone) / (1.0 - config.dead_zone)
        gain = config.translation_gain if number < 3 else config.rotation_gain
        sign = (-1.0 if value < 0 else 1.0) * (-1.0 if name.startswith("-") else 1.0)
        motion.append(sign * beyond * gain)
    return tuple(motion)
