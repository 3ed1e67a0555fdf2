"""What other libraries need of our environments' observations."""

from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from dzrobot.errors import ConfigError


class PlainKeys(gym.ObservationWrapper[dict[str, Any], Any, dict[str, Any]], RecordConstructorArgs):
    """Observations without dots in their keys and without texts, for Stable-Baselines3.

    ``video.image`` becomes ``video_image``, and the instruction is left out: Stable-Baselines3
    names torch modules after the keys and has no policy for texts. Its ``MultiInputPolicy`` takes
    what is left. ``info["task"]`` still holds the instruction.

    Args:
        env: An environment whose observations are a :class:`gymnasium.spaces.Dict`.

    Raises:
        ConfigError: the observations are no such dict, or two keys become the same one.
    """

    def __init__(self, env: gym.Env[dict[str, Any], Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ConfigError(
                f"PlainKeys takes observations in a Dict, this environment has {space}"
            )
        kept = [key for key, part in space.items() if not isinstance(part, spaces.Text)]
        self._names = {key: key.replace(".", "_") for key in kept}
        """New name of every key that is kept."""
        if len(set(self._names.values())) < len(kept):
            raise ConfigError(f"two of the keys {', '.join(kept)} are the same without dots")
        self.observation_space = spaces.Dict({self._names[key]: space[key] for key in kept})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return what is kept of ``observation``, under the new names."""
        return {name: observation[key] for key, name in self._names.items()}
