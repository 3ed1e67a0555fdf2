"""Environments: LIBERO and Lift, the real Franka, an emulated Franka, and a light one for tests."""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if __name__ != "dzrobot.envs":
    raise ImportError(f"this package is dzrobot.envs, not {__name__}: write `import dzrobot.envs`")

if TYPE_CHECKING:
    from dzrobot.envs.adapted import ActionConversion, AdaptedEnv, ImageConversion, PlainKeys
    from dzrobot.envs.episodes import action_space, observation_space
    from dzrobot.envs.fakes import PointEnv
    from dzrobot.envs.franka.franka_config import FrankaConfig

__all__ = [
    "ActionConversion",
    "AdaptedEnv",
    "FrankaConfig",
    "ImageConversion",
    "PlainKeys",
    "PointEnv",
    "action_space",
    "observation_space",
]

__getattr__, __dir__ = lazy_exports(__name__)
