"""A light environment with the keys of LIBERO, for trying out policies and rollouts."""

from typing import Any

import gymnasium as gym
import numpy as np

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.episodes import (
    NEAR_SHARE,
    FailureClass,
    InitialStates,
    action_space,
    episode_info,
    named_arguments,
    observation_space,
    plain_action,
)
from dzrobot.errors import ModalityError, SimulatorError

Observation = dict[str, Any]

COLORS = {"red": (200, 40, 40), "green": (40, 160, 40), "yellow": (220, 200, 40)}
"""One task per color of the mark."""

STARTS = 50
"""Initial states per task, as in LIBERO."""

_POINT = (40, 40, 200)
_STEP = 0.1
_NEAR = 0.1


class PointEnv(gym.Env[Observation, np.ndarray]):
    """Move a point in the square [-1, 1] x [-1, 1] onto a colored mark.

    Observation and action have the keys and dimensions of ``libero_sim``; nothing is simulated, so
    thousands of steps take a second. ``video.image`` shows the square from above,
    ``video.wrist_image`` the surroundings of the point. ``state.state`` is point (x, y, 0), mark
    (x, y, 0), gripper opening (g, -g). Action: the first two numbers move the point by up to 0.1,
    the last closes the gripper above 0.

    Args:
        task_id: Which color the mark has; in [0, 3).
        resolution: Height and width of both images in pixels.
        render_mode: ``"rgb_array"`` or None.
        crash_at: Step of each episode, from 1, that raises :class:`SimulatorError`. None: never.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (Gymnasium's own)
    action_space: gym.spaces.Box
    """What an action may be."""

    @named_arguments
    def __init__(
        self,
        *,
        task_id: int = 0,
        resolution: int = 64,
        render_mode: str | None = None,
        crash_at: int | None = None,
    ) -> None:
        if task_id not in range(len(COLORS)):
            raise ModalityError(
                f"task_id={task_id} does not exist; there are 0 to {len(COLORS) - 1}."
            )
        self.observation_space = observation_space(
            load_embodiment("libero_sim"),
            {"state.state": (-1.0, 1.0)},
            resolution=(resolution, resolution),
        )
        self.embodiment = load_embodiment("libero_sim").at_resolution(resolution, resolution)
        """Robot that it stands for: ``libero_sim``, with cameras of ``resolution``."""

        self.control_hz = self.embodiment.timing.control_hz
        """Steps per second that a real one would take."""

        self.init_states = STARTS
        """Numbered initial states of a task."""

        self.action_space = action_space(self.embodiment)
        self.render_mode = render_mode
        self.task_id = task_id
        """Which color the mark has."""

        self.task = f"move the point to the {list(COLORS)[task_id]} mark"
        """The instruction."""

        self._resolution = resolution
        self._crash_at = crash_at
        self._starts = InitialStates(STARTS)
        self._start = -1
        self._steps = 0
        self._point = np.zeros(2, np.float32)
        self._mark = np.zeros(2, np.float32)
        self._path = 0.0
        self._closed = False
        self._omitting = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin at what ``seed`` and ``options`` say; see :class:`InitialStates`."""
        super().reset(seed=seed)
        self._start = self._starts.choose(seed, options)
        generator = np.random.default_rng([self.task_id, self._start])
        self._point = generator.uniform(-0.9, -0.3, 2).astype(np.float32)
        self._mark = generator.uniform(0.2, 0.9, 2).astype(np.float32)
        self._path = float(np.abs(self._mark - self._point).max())
        self._closed = self._omitting = False
        self._steps = 0
        return self._observe(drawn=True), self._info()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move the point by the first two numbers of ``action`` (7,), each in [-1, 1].

        Raises:
            ModalityError: another shape, or numbers that are not finite.
            SimulatorError: at the step ``crash_at``.
        """
        action = plain_action(action, self.action_space)
        self._steps += 1
        if self._steps == self._crash_at:
            raise SimulatorError(f"the point env was set to fail at step {self._crash_at}.")
        move = np.clip(action[:2], -1.0, 1.0).astype(np.float32)
        self._point = np.clip(self._point + np.float32(_STEP) * move, -1.0, 1.0)
        self._closed = bool(action[6] > 0)
        reached = self._reached()
        drawn, self._omitting = not self._omitting, False
        return self._observe(drawn=drawn), float(reached), reached, False, self._info()

    def omit_frames(self) -> None:
        """Leave the images out of the observation of the next step, and of no other."""
        self._omitting = True

    def render(self) -> np.ndarray:  # type: ignore[override]
        """Return the square from above, ``(H, W, 3)`` uint8."""
        return self._image(np.zeros(2, np.float32), 1.0)

    def _reached(self) -> bool:
        return bool(np.abs(self._mark - self._point).max() < _NEAR)

    def _observe(self, *, drawn: bool) -> Observation:
        opening = 0.0 if self._closed else 0.04
        return {
            **(self._images() if drawn else {}),
            "state.state": np.array(
                [*self._point, 0, *self._mark, 0, opening, -opening], np.float32
            ),
            "annotation.task": self.task,
        }

    def _images(self) -> Observation:
        return {
            "video.image": self._image(np.zeros(2, np.float32), 1.0),
            "video.wrist_image": self._image(self._point, 0.5),
        }

    def _info(self) -> dict[str, Any]:
        reached = self._reached()
        return episode_info(self.task, self._start, self._failure(), success=reached, ends=True)

    def _failure(self) -> FailureClass | None:
        """Return how the episode failed if it ended now: nothing is grasped here."""
        if self._reached():
            return None
        left = float(np.abs(self._mark - self._point).max())
        return (
            FailureClass.NEAR_GOAL if left < NEAR_SHARE * self._path else FailureClass.NEVER_REACHED
        )

    def _image(self, center: np.ndarray, reach: float) -> np.ndarray:
        """Return the part of the square within ``reach`` of ``center``."""
        image = np.full((self._resolution, self._resolution, 3), 230, np.uint8)
        grid = np.linspace(-reach, reach, self._resolution, dtype=np.float32)
        for place, color in (
            (self._mark, list(COLORS.values())[self.task_id]),
            (self._point, _POINT),
        ):
            columns = np.abs(grid + center[0] - place[0]) < _NEAR
            rows = np.abs(grid + center[1] - place[1]) < _NEAR
            image[np.ix_(rows, columns)] = color
        return image
