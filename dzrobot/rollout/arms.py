"""What a run needs to know of a robot arm before anything is opened."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError

ALL_STEPS = 1_000_000
"""More steps than an episode has."""


@runtime_checkable
class AttendedArm(Protocol):
    """An environment that drives an arm, real or emulated, which people stand beside."""

    is_real: bool
    """Whether metal moves."""

    address: str | None
    """Where the arm is reached; None for one that is made here. An address is taken at its word."""

    judged_by_operator: bool
    """Whether a person says if an episode succeeded."""

    def attend(self, operator: Any, *, unattended: bool = False) -> None:
        """Say who looks after the arm, before the first reset."""
        ...

    def rest(self) -> None:
        """Stop the arm at once, from any thread."""
        ...

    def operator_stop(self) -> Exception:
        """Stop the arm for a person, from any thread; nothing moves until one has looked.

        Returns:
            What says so, and what ends it.
        """
        ...

    def images(self) -> Mapping[str, NDArray[np.uint8]]:
        """Return the newest image (H, W, 3) of every camera."""
        ...

    def reported(self, info: dict[str, Any], outcome: Any) -> dict[str, Any]:
        """Return ``info`` with a person's verdict."""
        ...


def slowed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` for a first trial: every step at the workcell's ``slow_pace``."""
    return {**arguments, "slow_first_steps": ALL_STEPS}


def check_conventions(env: gym.Env[Any, Any], robot: Embodiment) -> None:
    """Check that ``env`` reads actions as ``robot`` writes them: axes and rate.

    Raises:
        ConfigError: it does not.
    """
    stated = getattr(env.unwrapped, "embodiment", None)
    if stated is None:
        return
    frame = stated.action_frame
    if frame is not None and robot.action_frame is not None and frame != robot.action_frame:
        raise ConfigError(
            f"the environment reads actions in the frame {frame!r}, the policy was made for "
            f"{robot.action_frame!r}: set action.frame of the workcell to {robot.action_frame!r}, "
            f"or describe the policy's robot with action_frame={frame!r}"
        )
    rate, wanted = stated.timing.control_hz, robot.timing.control_hz
    if rate != wanted:
        raise ConfigError(
            f"the environment takes {rate:g} actions per second, the policy was made for "
            f"{wanted:g}: set control_hz of the workcell to {wanted:g}, or describe the policy's "
            "robot with that rate"
        )
