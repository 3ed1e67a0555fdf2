"""What a person steers a robot with, whatever it is: one reading at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dzrobot.errors import RobotError

Gives = Literal["motion", "joints", "guidance"]
"""What a device shows: how the hand is to move, where the joints are to be, or whether a person
guides the arm itself."""


class DeviceLostError(RobotError):
    """A device that was there says nothing any more, or something that is none of its values."""


@dataclass(frozen=True, kw_only=True)
class TeleopReading:
    """What a device says at one moment."""

    active: bool
    """Whether the person steers: their hand is on the deadman button. Else nothing is to move."""

    motion: tuple[float, ...] | None = None
    """(6,) in [-1, 1]: translation forward, left and up, then rotation about these axes, which are
    those of the robot's base; 1 is the largest step that the robot takes.
    None: it does not show that."""

    joints: tuple[float, ...] | None = None
    """(7,) rad: where the arm's joints are to be. None: it does not show that."""

    closed: bool | None = None
    """Whether the gripper is to be closed. None: ``presses`` say it."""

    presses: int = 0
    """How often the button was pressed, since the device was opened, that closes an open gripper
    and opens a closed one."""

    ends: bool = False
    """Whether the button is pressed that ends the episode."""

    shown: Mapping[str, float] = field(default_factory=dict)
    """What the device says by its own names, for people who set it up."""


class TeleopDevice(Protocol):
    """One device. Nothing is opened before ``open``."""

    @property
    def gives(self) -> Gives:
        """What its readings hold."""
        ...

    @property
    def has_deadman(self) -> bool:
        """Whether it is active only while a person holds a button."""
        ...

    def check(self) -> None:
        """Check that the libraries it needs are installed; nothing is opened.

        Raises:
            MissingDependencyError: one is not.
        """
        ...

    def open(self) -> None:
        """Find the device and begin to listen to it; twice is harmless.

        Raises:
            RobotError: it is not there, or is not what its settings say.
        """
        ...

    def read(self) -> TeleopReading:
        """Return the newest reading, at once.

        Raises:
            DeviceLostError: it says nothing any more.
        """
        ...

    def close(self) -> None:
        """Let the device go; twice is harmless."""
        ...


def the_only(found: Mapping[str, str], kind: str, setting: str) -> str:
    """Return the key of the only device of ``found``, key -> name.

    Args:
        found: What is connected.
        kind: What it is, for messages.
        setting: That chooses one.

    Raises:
        RobotError: there is none, or there are several.
    """
    if not found:
        raise RobotError(f"no {kind} is connected: plug it in, or look at its receiver")
    if len(found) > 1:
        raise RobotError(
            f"several devices are a {kind}: {listed(found)}; choose one by --teleop-arg "
            f"{setting}={next(iter(found))}"
        )
    return next(iter(found))


def listed(found: Mapping[str, str]) -> str:
    """Return what is connected, for a message."""
    return ", ".join(f"{key} ({name})" for key, name in found.items()) or "none"
