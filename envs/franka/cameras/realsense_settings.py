"""Exposure, gain and white balance of a RealSense color stream: chosen by itself, kept, or fixed.

Values that are set are read back and compared: a camera may round, or ignore, what it is told.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dzrobot.envs.franka.cameras.camera_config import CameraConfig
from dzrobot.errors import RobotError

_DEPTH_UNITS_PER_MS = 1000.0
"""A color stream from the depth sensor, as the D405 has it, counts its exposure in us."""

_COLOR_UNITS_PER_MS = 10.0
"""A color sensor counts in 100 us, as all USB video cameras do."""

_ROUNDING = 1e-3
"""Of a step: values are 32-bit floats."""


@dataclass(frozen=True)
class _Control:
    """One value of the sensor."""

    name: str
    """Field of :class:`~dzrobot.envs.franka.cameras.camera_config.CameraConfig`."""

    option: Any
    """The library's."""

    automatic: Any
    """The library's option by which the sensor chooses it by itself."""

    unit: str
    per_unit: float
    """Numbers of the sensor for 1 of the field."""


class ColorSettings:
    """What the sensor of a color stream offers and is told.

    Args:
        device: The library's.
        name: Of the camera, for errors.

    Raises:
        RobotError: it has no color stream.
    """

    def __init__(self, device: Any, name: str) -> None:
        self._name = name
        self._sensor = _color_sensor(device, name)
        self._controls = tuple(_controls(self._sensor))

    def offered(self) -> str:
        """Return the ranges of what may be fixed, with their units; empty: nothing."""
        return ", ".join(
            f"{control.name} {self._range(control)}"
            for control in self._controls
            if self._sensor.supports(control.option)
        )

    def check(self, camera: CameraConfig) -> None:
        """Refuse fixed values that the camera does not offer.

        Raises:
            RobotError: names them, and what it offers.
        """
        faults = []
        for control, value in self._fixed(camera):
            if not self._sensor.supports(control.option):
                faults.append(f"{control.name} at all: leave it out")
                continue
            offered = self._sensor.get_option_range(control.option)
            number = value * control.per_unit
            steps = (number - offered.min) / (offered.step or 1.0)
            near = abs(steps - round(steps)) <= _ROUNDING
            if not (offered.min <= number <= offered.max and near):
                faults.append(
                    f"{control.name}={value:g}; it offers {self._range(control)}: change it in "
                    "`cameras` of the workcell"
                )
        if faults:
            raise RobotError(f"{self._name} does not offer {'; nor '.join(faults)}")

    def leave(self) -> None:
        """Let the camera choose everything by itself."""
        for option in self._automatic():
            self._sensor.set_option(option, 1.0)

    def keep(self) -> None:
        """Keep what the camera has chosen."""
        for option in self._automatic():
            self._sensor.set_option(option, 0.0)

    def fix(self, camera: CameraConfig) -> None:
        """Set the fixed values, and leave the others to the camera.

        Raises:
            RobotError: the camera says something else than it was told.
        """
        fixed = list(self._fixed(camera))
        ours = {control.automatic for control, _ in fixed}
        for option in self._automatic():
            self._tell("automatic choice", option, 0.0 if option in ours else 1.0)
        for control, value in fixed:
            self._tell(control.name, control.option, value * control.per_unit)

    def _tell(self, what: str, option: Any, number: float) -> None:
        self._sensor.set_option(option, number)
        said = self._sensor.get_option(option)
        if abs(said - number) > 0.5 * (self._sensor.get_option_range(option).step or _ROUNDING):
            raise RobotError(
                f"{self._name} was told {number:g} for its {what}, in its own numbers, and says "
                f"{said:g}: update its firmware, or leave the value out"
            )

    def _fixed(self, camera: CameraConfig) -> Iterator[tuple[_Control, float]]:
        for control in self._controls:
            if control.name in camera.fixed:
                yield control, camera.fixed[control.name]

    def _automatic(self) -> list[Any]:
        found = dict.fromkeys(control.automatic for control in self._controls)
        return [option for option in found if self._sensor.supports(option)]

    def _range(self, control: _Control) -> str:
        offered = self._sensor.get_option_range(control.option)
        low, high, step = (
            number / control.per_unit for number in (offered.min, offered.max, offered.step)
        )
        return f"{low:g} to {high:g}{control.unit} in steps of {step:g}"


def _color_sensor(device: Any, name: str) -> Any:
    import pyrealsense2 as rs

    for sensor in device.query_sensors():
        profiles = sensor.get_stream_profiles()
        if any(profile.stream_type() == rs.stream.color for profile in profiles):
            return sensor
    raise RobotError(f"{name} has no color stream: use another camera")


def _controls(sensor: Any) -> Iterator[_Control]:
    import pyrealsense2 as rs

    of, per_ms = rs.option, _COLOR_UNITS_PER_MS
    if sensor.is_depth_sensor():
        per_ms = _DEPTH_UNITS_PER_MS
    yield _Control("exposure_ms", of.exposure, of.enable_auto_exposure, " ms", per_ms)
    yield _Control("gain", of.gain, of.enable_auto_exposure, "", 1.0)
    yield _Control("white_balance_k", of.white_balance, of.enable_auto_white_balance, " K", 1.0)
