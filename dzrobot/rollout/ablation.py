"""Spoiling what a policy sees, to find out whether it looks.

A policy that scores the same with corrupted images does not use them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from dzrobot.rng import keyed_seed
from dzrobot.rollout.protocol import EpisodeSpec

Ablation = Literal["none", "shuffle", "other-start"]

TILE = 8
"""Height and width in pixels of the tiles that are shuffled."""


class AblatedImages(gym.ObservationWrapper[dict[str, Any], np.ndarray, dict[str, Any]]):
    """Gives the policy other images than the environment's; the rest stays.

    ``shuffle``: the image cut into tiles of 8 x 8 pixels, which change places. The order is drawn
    once per episode and view, from a generator keyed by the case, so colors and their amounts
    stay and places do not. ``other-start``: throughout the episode, the images at the beginning
    of another initial state of the same task: genuine ones that say nothing about this episode.
    Images that are left out stay out.
    """

    takes_missing_frames = True

    def __init__(
        self, env: gym.Env[dict[str, Any], np.ndarray], kind: Ablation, case: EpisodeSpec
    ) -> None:
        super().__init__(env)
        self._kind = kind
        self._key = keyed_seed("ablation", kind, case.suite, case.task_id, case.episode)
        self._shown: dict[str, np.ndarray] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; the other initial state is visited first."""
        if self._kind == "other-start":
            self._shown = _images(self._other(seed, options))
        return super().reset(seed=seed, options=options)

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return ``observation`` with its images replaced."""
        ablated: Callable[[str, np.ndarray], np.ndarray] = (
            self._shuffled if self._kind == "shuffle" else lambda key, _: self._shown[key].copy()
        )
        images = _images(observation)
        return {**observation, **{key: ablated(key, image) for key, image in images.items()}}

    def _other(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        step = 1 + self._key % 24
        if options and "init_state_id" in options:
            count = self.unwrapped.init_states  # type: ignore[attr-defined]
            start = (options["init_state_id"] + step) % count
            return self.env.reset(seed=seed, options={**options, "init_state_id": start})[0]
        return self.env.reset(seed=(seed or 0) + step)[0]

    def _shuffled(self, key: str, image: np.ndarray) -> np.ndarray:
        height, width, channels = image.shape
        rows, columns = height // TILE, width // TILE
        whole = image[: rows * TILE, : columns * TILE]
        tiles = whole.reshape(rows, TILE, columns, TILE, channels).swapaxes(1, 2)
        order = np.random.default_rng([self._key, len(key)]).permutation(rows * columns)
        mixed = tiles.reshape(rows * columns, TILE, TILE, channels)[order]
        corrupted = image.copy()
        corrupted[: rows * TILE, : columns * TILE] = (
            mixed.reshape(rows, columns, TILE, TILE, channels).swapaxes(1, 2).reshape(whole.shape)
        )
        return corrupted


def ablated(env: Any, kind: Ablation, case: EpisodeSpec) -> Any:
    """Return ``env`` as the policy of ``case`` is to see it."""
    return env if kind == "none" else AblatedImages(env, kind, case)


def _images(observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {key: value for key, value in observation.items() if key.startswith("video.")}
