"""Teleoperation devices by name, and custom ones by ``module:factory``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from dzrobot.configuration import load_config
from dzrobot.envs.teleop import handheld, leader
from dzrobot.envs.teleop.device import DrivenDevice, Gives, TeleopDevice, TeleopReading
from dzrobot.envs.teleop.settings import (
    NONE,
    DeviceConfig,
    GamepadConfig,
    HandConfig,
    LeaderConfig,
    SpaceMouseConfig,
)
from dzrobot.errors import ConfigError, find
from dzrobot.importing import is_reference, load_reference


class Guarded:
    """A device that is active while the deadman of another one is held, which ends episodes too.

    Args:
        device: What steers.
        guard: Whose deadman it is.
    """

    has_deadman = True

    def __init__(self, device: TeleopDevice, guard: TeleopDevice) -> None:
        self.gives: Gives = device.gives
        self._device = device
        self._guard = guard

    def check(self) -> None:
        """Check that the libraries of both are installed."""
        self._device.check()
        self._guard.check()

    def open(self) -> None:
        """Find both."""
        self._guard.open()
        self._device.open()

    def read(self) -> TeleopReading:
        """Return what the device says, active as the guard is."""
        guard = self._guard.read()
        return replace(self._device.read(), active=guard.active, ends=guard.ends)

    def close(self) -> None:
        """Let both go."""
        self._device.close()
        self._guard.close()


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device."""

    settings: type[DeviceConfig]
    make: Callable[[Any], TeleopDevice]
    """Makes the device from its settings; opens nothing."""


def _spacemouse(config: SpaceMouseConfig) -> TeleopDevice:
    return DrivenDevice(
        "SpaceMouse", handheld.SpaceMouseSource, config,
        gives="motion", has_deadman=config.deadman is not None,
        packages=handheld.SPACEMOUSE_PACKAGES,
    )  # fmt: skip


def _gamepad(config: GamepadConfig, gives: Gives = "motion") -> TeleopDevice:
    return DrivenDevice(
        "gamepad", handheld.GamepadSource, config,
        gives=gives, has_deadman=config.deadman is not None, packages=handheld.GAMEPAD_PACKAGES,
    )  # fmt: skip


def _leader(config: LeaderConfig) -> TeleopDevice:
    arm = DrivenDevice(
        "leader arm", leader.LeaderSource, config,
        gives="joints", has_deadman=config.deadman_id is not None, packages=leader.PACKAGES,
    )  # fmt: skip
    held = config.deadman_button
    if held is None:
        return arm
    guard = GamepadConfig(
        silent_s=config.silent_s,
        deadman=held,
        gripper="b" if held == "a" else "a",
        end=None if held == "start" else "start",
    )
    return Guarded(arm, _gamepad(guard))


def _hand(config: HandConfig) -> TeleopDevice:
    # The arm shows the motion.
    return _gamepad(GamepadConfig(axes=(NONE,) * 6, **config.model_dump()), "guidance")


DEVICES: Mapping[str, DeviceKind] = {
    "spacemouse": DeviceKind(SpaceMouseConfig, _spacemouse),
    "gamepad": DeviceKind(GamepadConfig, _gamepad),
    "leader": DeviceKind(LeaderConfig, _leader),
    "hand": DeviceKind(HandConfig, _hand),
}
"""Name on the command line -> kind."""


def load_device(name: str, settings: Sequence[str] = (), env: Any = None) -> TeleopDevice:
    """Return the device ``name``, not yet open; its libraries are there.

    Args:
        name: Key of :data:`DEVICES`, or ``module:factory`` of a function that returns a device.
        settings: ``key=value`` each, of the kind's settings; an own factory has none.
        env: What is steered; given to an own factory that takes an argument.

    Raises:
        UnknownNameError: there is no such device or factory.
        ConfigError: settings are unknown, wrong, or missing.
        MissingDependencyError: a library is not installed.
    """
    if is_reference(name):
        if settings:
            raise ConfigError(
                f"{name} makes its device itself: settings {', '.join(settings)} are its own"
            )
        factory = load_reference(name, "device", Callable)
        takes_env = bool(signature(factory).parameters)
        if takes_env and env is None:
            raise ConfigError(
                f"{name} takes the environment that it steers, and there is none here"
            )
        device: TeleopDevice = factory(env) if takes_env else factory()
    else:
        kind = find(DEVICES, "device", name)
        device = kind.make(load_config(kind.settings, None, settings))
    device.check()
    return device
