"""``env.type=dzrobot``: any environment of dzrobot for ``lerobot-eval``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE, OBS_STR
from numpy.typing import NDArray

import dzrobot  # noqa: F401 - registers the environments
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.policies.dreamzero.lerobot_folder import columns_of, input_features

_STATE = "agent_pos"
"""What LeRobot calls ``observation.state`` in what an environment returns."""


@EnvConfig.register_subclass("dzrobot")
@dataclass
class DzrobotEnvConfig(EnvConfig):
    """An environment of dzrobot, with the names that the robot declares for dataset columns."""

    task: str | None = "dzrobot/lift-v0"
    """Gymnasium id."""

    embodiment: str = "libero_mini"
    """The robot, with the images' size, as in ``libero_sim@128x128``."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``gym.make``, such as ``resolution``."""

    def __post_init__(self) -> None:
        """Fill in rate and features.

        Raises:
            ConfigError: The robot's columns have names that LeRobot's environments cannot have.
        """
        robot = load_embodiment(self.embodiment)
        self.fps = round(robot.timing.control_hz)
        features = input_features(robot, columns_of(robot))
        self.features = {ACTION: PolicyFeature(FeatureType.ACTION, (robot.action_dim,))}
        self.features_map = {ACTION: ACTION}
        for name, feature in features.items():
            shape = tuple(feature["shape"])
            is_image = feature["type"] == "VISUAL"
            if not name.startswith(f"{OBS_IMAGES}." if is_image else f"{OBS_STR}."):
                raise ConfigError(
                    f"{robot.tag} has the column {name!r}; LeRobot's environments give "
                    f"{OBS_IMAGES}.* and {OBS_STR}.*: choose another robot"
                )
            own = name if is_image else _returned(name)
            self.features[own] = PolicyFeature(
                FeatureType[feature["type"]], (*shape[1:], shape[0]) if is_image else shape
            )
            self.features_map[own] = name

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of ``gym.make``."""
        return self.arguments

    def create_envs(
        self, n_envs: int, use_async_envs: bool = False
    ) -> dict[str, dict[int, gym.vector.VectorEnv[Any, Any, Any]]]:
        """Return ``n_envs`` environments, one after another in this process.

        Args:
            n_envs: How many.
            use_async_envs: Not read: LeRobot's processes share memory, which texts do not pass.
        """
        robot = load_embodiment(self.embodiment)

        def make() -> gym.Env[Any, Any]:
            return LeRobotEnv(gym.make(str(self.task), **self.arguments), robot)

        made = SyncVectorEnv([make] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        return {self.type: {0: made}}


class LeRobotEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Returns what LeRobot's environments return: ``pixels`` by camera, states, no text."""

    def __init__(self, env: gym.Env[Any, Any], robot: Embodiment) -> None:
        """Wrap ``env``, whose observations hold the keys of ``robot``."""
        super().__init__(env)
        self.task = "" if env.spec is None else env.spec.id
        """Gymnasium id."""

        self.task_description = ""
        """The instruction; known once the environment was reset."""

        self._columns, self._language = columns_of(robot), robot.language
        self._images = {
            name.removeprefix(f"{OBS_IMAGES}."): keys[0] for name, keys in self._columns.items()
            if keys[0] in robot.video_keys
        }  # fmt: skip
        self._states = {
            _returned(name): keys for name, keys in self._columns.items()
            if keys[0] not in robot.video_keys
        }  # fmt: skip
        widths = {part.key: part.dim for part in robot.state}
        pixels: dict[str, spaces.Space[Any]] = {
            name: spaces.Box(0, 255, (*robot.view(key).resolution, 3), np.uint8)
            for name, key in self._images.items()
        }
        states = {
            name: spaces.Box(-np.inf, np.inf, (sum(widths[key] for key in keys),), np.float32)
            for name, keys in self._states.items()
        }
        self.observation_space = spaces.Dict({"pixels": spaces.Dict(pixels), **states})
        self._shown: NDArray[np.uint8] | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; LeRobot's own options are not the environment's."""
        observation, info = self.env.reset(seed=seed)
        return self._converted(observation), info

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Do one step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._converted(observation), float(reward), terminated, truncated, info

    def render(self) -> NDArray[np.uint8]:
        """Return the newest image of the first camera."""
        assert self._shown is not None, "rendered after a reset"
        return self._shown

    def _converted(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self.task_description = str(observation[self._language])
        pixels = {name: observation[key] for name, key in self._images.items()}
        self._shown = next(iter(pixels.values()))
        states = {
            name: np.concatenate([observation[key] for key in keys])
            for name, keys in self._states.items()
        }
        return {"pixels": pixels, **states}


def _returned(name: str) -> str:
    """Return what LeRobot's environments call the column ``name``."""
    return _STATE if name == OBS_STATE else name.removeprefix(f"{OBS_STR}.")
