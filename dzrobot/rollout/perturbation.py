"""Episodes changed on purpose: made harder in one respect, or with images that say nothing.

The axes of perturbations are those of LIBERO-Plus; how far each level goes is ours
(`docs/scores.md`). What changes the scene is up to the environment, by :class:`PerturbableScene`;
what changes the instruction or the images is done here, for any environment. An ablation replaces
the images: a policy that scores the same with them does not use them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, get_args

import cv2
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import ConfigError
from dzrobot.rng import keyed_number, keyed_seed
from dzrobot.rollout.protocol import EpisodeSpec

Axis = Literal["camera", "light", "texture", "robot_init", "language", "noise", "layout", "goal"]

SHOWN_AXES: tuple[Axis, ...] = ("language", "noise")
"""Axes that change what a policy is shown, in any environment."""

LEVELS = range(1, 6)
DEFAULT_LEVEL = 3

PERTURBATION = "perturbation"
"""Field of a card that says it; absent where nothing was perturbed."""

DEFINITION = 1
"""Raised when an axis or level comes to mean something else; part of the card."""

GOAL: Axis = "goal"
"""Another object of the scene is asked for, and judged."""

OWN_GOAL = "own_goal"
"""Whether the goal that was not asked for held at any step, in ``info["robot"]``."""

_WRITTEN = re.compile(r"([a-z_]+)(?::([0-9]))?\Z")

Image = NDArray[np.uint8]


class PerturbableScene(Protocol):
    """An environment whose scene can be made harder."""

    perturbations: tuple[str, ...]
    """Axes that it knows."""

    def perturb(self, axis: str | None, level: int, seed: int) -> None:
        """Say how the scene of the next resets differs.

        Args:
            axis: One of ``perturbations``. None: it does not differ.
            level: 1, hardly, to 5; of the axis ``goal``, which other object.
            seed: What is drawn follows from it alone.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """What differs from the episodes of the protocol."""

    axis: Axis
    level: int = DEFAULT_LEVEL

    def __post_init__(self) -> None:
        if self.axis not in get_args(Axis) or self.level not in LEVELS:
            raise ConfigError(
                f"perturbation {self.axis!r} of level {self.level!r}: axes are "
                f"{', '.join(get_args(Axis))}, levels {LEVELS[0]} to {LEVELS[-1]}"
            )

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what ``axis`` or ``axis:level`` says.

        Raises:
            ConfigError: it says nothing known.
        """
        match = _WRITTEN.match(text)
        if match is None:
            raise ConfigError(
                f"--perturb {text!r}: write AXIS or AXIS:LEVEL, such as camera:3; axes are "
                f"{', '.join(get_args(Axis))}, levels {LEVELS[0]} to {LEVELS[-1]}"
            )
        level = DEFAULT_LEVEL if match[2] is None else int(match[2])
        return cls(axis=match[1], level=level)  # type: ignore[arg-type]  # checked right above

    @property
    def text(self) -> str:
        """Return it as it is written."""
        return f"{self.axis}:{self.level}"

    def card(self) -> dict[str, Any]:
        """Return what a score depends on."""
        return {"axis": self.axis, "level": self.level, "definition": DEFINITION}

    def check(self, name: str, known: tuple[str, ...]) -> None:
        """Check that an environment can be perturbed so.

        Args:
            name: Of the environment.
            known: Axes that it says it knows.

        Raises:
            ConfigError: it cannot.
        """
        allowed = (*SHOWN_AXES, *known)
        if self.axis not in allowed:
            raise ConfigError(
                f"{name} cannot be perturbed along {self.axis!r}; it can along {', '.join(allowed)}"
            )


class PerturbedEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Perturbs the episode of one case, by draws that the case keys.

    The same draws at every level: a higher level goes further the same way.
    """

    takes_missing_frames = True
    """Images are spoiled one by one, where there are any."""

    def __init__(
        self, env: gym.Env[Any, Any], perturbation: Perturbation, case: EpisodeSpec
    ) -> None:
        super().__init__(env)
        self._what = perturbation
        self._key = ("perturb", perturbation.axis, case.seed, case.suite, case.task_id,
                     case.episode)  # fmt: skip
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the perturbed episode."""
        self._steps = 0
        if self._what.axis in SHOWN_AXES:
            observation, info = self.env.reset(seed=seed, options=options)
            return self._shown(observation), info
        scene: PerturbableScene = self.unwrapped  # type: ignore[assignment]  # checked beforehand
        scene.perturb(self._what.axis, self._what.level, keyed_seed(*self._key))
        try:
            return self.env.reset(seed=seed, options=options)
        finally:
            scene.perturb(None, 0, 0)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out ``action``."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        return self._shown(observation), reward, terminated, truncated, info

    def _shown(self, observation: Any) -> Any:
        level = self._what.level
        draws = np.random.default_rng(keyed_number(*self._key))
        if self._what.axis == "language":
            return {
                key: reworded(value, level, draws) if isinstance(value, str) else value
                for key, value in observation.items()
            }
        if self._what.axis == "noise":
            kind = KINDS[int(draws.integers(len(KINDS)))]
            each = np.random.default_rng(keyed_number(*self._key, self._steps))
            return {
                key: noisy(value, kind, level, each) if key.startswith("video.") else value
                for key, value in observation.items()
            }
        return observation


_SYNONYMS = (
    ("pick up", ("grab", "take", "fetch")),
    ("put", ("place", "set", "lay")),
    ("place", ("put", "set", "lay")),
    ("lift", ("raise", "hoist", "take up")),
    ("open", ("pull open", "unclose")),
    ("close", ("shut", "push closed")),
    ("turn on", ("switch on", "start")),
    ("push", ("shove", "slide")),
    ("move", ("bring", "shift")),
)
_POLITE = ("please {}", "could you {}", "would you {}")
_CHATTER = (
    "it has been a long day in the kitchen and the guests arrive at eight. {}",
    "never mind the radio, and leave everything else where it is. {}",
    "I will water the plants meanwhile. {}",
)


def reworded(task: str, level: int, draws: np.random.Generator) -> str:
    """Return ``task`` in other words that ask for the same.

    1: politely. 2: with another verb. 3: both. 4: after a sentence that has nothing to do with it.
    5: all of it.
    """
    polite, chatter = draws.integers(len(_POLITE)), draws.integers(len(_CHATTER))
    choice = float(draws.random())
    words = task
    if level in (2, 3, 5):
        for verb, others in _SYNONYMS:
            if re.search(rf"\b{verb}\b", words):
                other = others[int(choice * len(others))]
                words = re.sub(rf"\b{verb}\b", other, words, count=1)
                break
    if level in (1, 3, 5):
        words = _POLITE[polite].format(words)
    if level in (4, 5):
        words = _CHATTER[chatter].format(words)
    return words


KINDS = ("gaussian noise", "gaussian blur", "motion blur", "fog")
"""What a camera may do to an image; one kind an episode."""


def noisy(image: Image, kind: str, level: int, draws: np.random.Generator) -> Image:
    """Return ``image`` (H, W, 3) as a bad camera would have it.

    Args:
        image: What was seen.
        kind: One of `KINDS`.
        level: 1 to 5. Noise: standard deviation of 8 of 255 a level. Blurs: width of 0.6 % of the
            image a level. Fog: 12 % of white a level.
        draws: Of this image.
    """
    width = 0.006 * level * image.shape[1]
    values = image.astype(np.float32)
    if kind == "gaussian noise":
        values += draws.normal(0.0, 8.0 * level, image.shape).astype(np.float32)
    elif kind == "gaussian blur":
        values = np.asarray(cv2.GaussianBlur(values, (0, 0), max(width, 0.1)), np.float32)
    elif kind == "motion blur":
        length = max(2, round(2 * width) + 1)
        line = np.full((1, length), 1 / length, np.float32)
        values = np.asarray(cv2.filter2D(values, -1, line), np.float32)
    else:
        values += (255.0 - values) * np.float32(0.12 * level)
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


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


def _images(observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {key: value for key, value in observation.items() if key.startswith("video.")}
