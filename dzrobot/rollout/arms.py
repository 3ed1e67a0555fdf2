"""What a run needs to know of a robot arm before anything is opened."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.envs.franka.make import is_real, load_workcell
from dzrobot.errors import ConfigError
from dzrobot.rollout.environment import accepted

ALL_STEPS = 1_000_000
"""More steps than an episode has."""

LIBRARIES = ("franky-control", "pyrealsense2")
"""Drivers whose version belongs to a result on an arm."""


def moves_an_arm(env: str) -> bool:
    """Return whether ``env`` drives a robot arm, real or emulated.

    Raises:
        UnknownNameError: no such environment.
    """
    accepted(env)
    entry = gym.spec(env).entry_point
    return isinstance(entry, str) and entry.startswith("dzrobot.envs.franka")


def on_a_real_arm(env: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether ``env``, made with ``arguments``, reaches hardware.

    Raises:
        ConfigError: the workcell is wrong.
    """
    name, config = _workcell(env, arguments)
    return is_real(name, config)


def slowed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` for a first trial: every step at the workcell's ``slow_pace``."""
    return {**arguments, "slow_first_steps": ALL_STEPS}


def workcell_card(env: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a result depends on of a workcell: all of it but where the devices are."""
    _, config = _workcell(env, arguments)
    values = config.model_dump(mode="json", exclude={"address", "lock_folder"})
    for camera in values["cameras"]:
        del camera["serial"]
    return values


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


def _workcell(env: str, arguments: Mapping[str, Any]) -> tuple[str | None, FrankaConfig]:
    given = {**gym.spec(env).kwargs, **arguments}
    name = given.pop("workcell", None)
    return name, load_workcell(name, given)
