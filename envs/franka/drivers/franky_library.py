"""The franky library: found when it is used, its errors as ours, and the Franka Hand on it."""

import re
from typing import Any, ClassVar

from dzrobot.envs.driver_process import DisconnectedError, Latest
from dzrobot.envs.franka.drivers.gripper import POLL_S, GripperDriver
from dzrobot.envs.franka.franka_config import GripperConfig
from dzrobot.envs.franka.workcells import ControllerEndedError
from dzrobot.envs.panda.state import OPEN_M
from dzrobot.errors import DzrobotError, MissingDependencyError, RobotError, as_sentence
from dzrobot.importing import install

SERVERS_WITH_WHEELS = (3, 10)
"""Lowest and highest version of a robot server that wheels are published for."""

WHEEL_INDEX = "https://timschneider42.github.io/franky/whl/by-robot-server-version"


def library() -> Any:
    """Return the franky library.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import franky
    except ImportError as error:
        raise MissingDependencyError(MISSING) from error
    return franky


MISSING = (
    f"the real Franka needs `{install('franka')}` on x86_64 Linux (the package is "
    "franky-control; plain `franky` is something else)"
)


def library_errors() -> tuple[type[Exception], ...]:
    """Return what the library may raise.

    Its exceptions have no base in common; after a network error it raises a plain RuntimeError.
    """
    kinds = [kind for name, kind in vars(library()).items() if name.endswith("Exception")]
    return (*kinds, RuntimeError)


def translated(error: Exception) -> DzrobotError:
    """Return an error of the library as one of this package: what is gone, ended or refused."""
    franky = library()
    shown = str(error).strip() or type(error).__name__
    match error:
        case franky.IncompatibleVersionException():
            return RobotError(version_hint(shown))
        case franky.RealtimeException():
            return RobotError(
                f"{shown}; install a PREEMPT_RT kernel, or set controller.realtime: ignore"
            )
        case franky.NetworkException() | franky.ProtocolException():
            return DisconnectedError(f"the arm does not answer: {shown}")
        case franky.CommandException():
            return RobotError(
                f"the arm refused a command: {as_sentence(shown)} Look at its lamp and at Desk"
            )
        case RuntimeError():
            return DisconnectedError(f"the connection to the arm is broken: {shown}")
        case _ if isinstance(error, library_errors()):
            return ControllerEndedError(f"the arm's controller: {shown}")
    return RobotError(f"{type(error).__name__}: {shown}")


class FrankyErrors:
    """What drivers on this library have in common: how its errors are read."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the library raises: ValueError for an argument that it does not take."""
        return (*library_errors(), ValueError)

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        return translated(error)


def error_names(errors: Any) -> tuple[str, ...]:
    """Return the names of the errors that are set."""
    return tuple(
        name for name in dir(errors) if not name.startswith("_") and getattr(errors, name) is True
    )


def version_hint(message: str) -> str:
    """Return what to install for a robot server of another version."""
    numbers = [int(word) for word in re.findall(r"\d+", message)]
    first, last = SERVERS_WITH_WHEELS
    if numbers and not first <= numbers[0] <= last:
        return (
            f"the arm speaks another protocol version ({message}). franky-control has wheels for "
            f"server versions {first} to {last} only: update the arm's system image in Desk if it "
            "is older, or dzrobot and franky-control if it is newer"
        )
    server = numbers[0] if numbers else "<N>"
    return (
        f"the arm speaks another protocol version ({message}). Install the library built for it: "
        f"pip install franky-control --extra-index-url {WHEEL_INDEX}/{server}/ --force-reinstall "
        "--no-deps"
    )


_PREEMPTED = "aborted"
"""The library's word for a command of the hand that another one has ended."""

_HOMED_M = 0.03
"""A hand that says it opens less than this has not been homed."""


class FrankaHandDriver(FrankyErrors, GripperDriver):
    """The hand at an arm's controller; see :class:`GripperDriver`."""

    WIDEST_M: ClassVar[float] = OPEN_M
    MISSING_HINT: ClassVar[str] = "is the hand mounted and enabled in Desk?"
    LOST_HINT: ClassVar[str] = (
        "Has another program taken the hand? End it; else look at the hand's cable, and whether "
        "Desk shows it (End Effector)"
    )

    def __init__(self, place: str, config: GripperConfig, latest: Latest) -> None:
        super().__init__(place, config, latest)
        self._gripper: Any = None
        self._pending: Any = None
        self._widest_m = config.open_width_m

    def close(self) -> None:
        """Leave the hand as it is."""

    def _connect(self) -> None:
        self._gripper = library().Gripper(self._place)

    def _home(self) -> None:
        if not self._gripper.homing():
            raise RobotError("the gripper's homing failed: is something between the fingers?")

    def _is_homed(self) -> bool:
        widest = float(self._gripper.max_width)
        self._widest_m = min(self._config.open_width_m, widest)
        return widest >= _HOMED_M

    @property
    def _open_m(self) -> float:
        return self._widest_m

    def _cause(self, error: Exception) -> str:
        shown = as_sentence(error)
        if _PREEMPTED in shown:
            return (
                f"{shown} Another program commands the hand, or stops it: end that program; in "
                "Desk leave the page of the end effector"
            )
        if not self._is_homed():
            return (
                f"{shown} The hand has lost its homing, so it neither opens nor grasps: home it in "
                "Desk (End Effector), or let the next reset() do it once somebody agrees"
            )
        return f"{shown} Look at the hand, and at Desk (End Effector): is a finger blocked?"

    def _begin(self, opened: bool) -> None:
        config = self._config
        if opened:
            self._pending = self._gripper.move_async(self._widest_m, config.speed_m_s)
        else:
            # Epsilons as wide as the hand: whatever is between the fingers is held.
            self._pending = self._gripper.grasp_async(
                min(config.grasp_width_m, self._widest_m), config.speed_m_s, config.force_n,
                config.open_width_m, config.open_width_m,
            )  # fmt: skip

    def _has_ended(self) -> bool:
        if not self._pending.wait(POLL_S):
            return False
        # False means that nothing was between the fingers, which is not a fault.
        self._pending.get()
        self._pending = None
        return True

    def _read(self) -> tuple[float, bool]:
        state = self._gripper.state
        return float(state.width), bool(state.is_grasped)

    def _refusals(self) -> tuple[type[Exception], ...]:
        return (library().CommandException,)
