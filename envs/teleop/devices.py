"""The devices that are known by name, and own ones by ``module:factory``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dzrobot.config import load_config
from dzrobot.envs.teleop import gamepad, leader, spacemouse
from dzrobot.envs.teleop.device import Gives, TeleopDevice
from dzrobot.envs.teleop.driven import DrivenDevice, Source
from dzrobot.envs.teleop.settings import (
    DeviceConfig,
    GamepadConfig,
    LeaderConfig,
    SpaceMouseConfig,
)
from dzrobot.errors import ConfigError, find
from dzrobot.importing import is_reference, load_reference


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device."""

    title: str
    """For messages."""

    settings: type[DeviceConfig]
    source: Callable[[Any], Source]
    """Makes what reads it, from its settings."""

    gives: Gives
    deadman: str
    """The setting that names its deadman button; None there: it has none."""

    packages: tuple[str, ...]
    """That it needs, by the names they are imported by."""

    def device(self, config: DeviceConfig) -> TeleopDevice:
        """Return the device, not yet open."""
        return DrivenDevice(
            self.title, self.source, config, gives=self.gives, packages=self.packages,
            has_deadman=getattr(config, self.deadman) is not None,
        )  # fmt: skip


DEVICES: Mapping[str, DeviceKind] = {
    "spacemouse": DeviceKind(
        title="SpaceMouse", settings=SpaceMouseConfig, source=spacemouse.SpaceMouseSource,
        gives="motion", deadman="deadman", packages=spacemouse.PACKAGES,
    ),
    "gamepad": DeviceKind(
        title="gamepad", settings=GamepadConfig, source=gamepad.GamepadSource,
        gives="motion", deadman="deadman", packages=gamepad.PACKAGES,
    ),
    "leader": DeviceKind(
        title="leader arm", settings=LeaderConfig, source=leader.LeaderSource,
        gives="joints", deadman="deadman_id", packages=leader.PACKAGES,
    ),
}  # fmt: skip
"""Name on the command line -> kind."""


def load_device(name: str, settings: Sequence[str] = ()) -> TeleopDevice:
    """Return the device ``name``, not yet open; its libraries are there.

    Args:
        name: Key of :data:`DEVICES`, or ``module:factory`` of a function that returns a device.
        settings: ``key=value`` each, of the kind's settings; an own factory has none.

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
        device: TeleopDevice = load_reference(name, "device", Callable)()
    else:
        kind = find(DEVICES, "device", name)
        device = kind.device(load_config(kind.settings, None, settings))
    device.check()
    return device
