"""What LIBERO and Lift have in common: one arm, two cameras, seven numbers."""

from abc import abstractmethod
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from dzrobot.embodiments.hand import HandMotion
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.initial_states import InitialStates
from dzrobot.envs.libero.goal_progress import GoalProgress
from dzrobot.envs.libero.perturbations import AXES, perturb
from dzrobot.envs.libero.rendering import choose_backend
from dzrobot.envs.libero.sim import CONTROL_HZ, CameraOptions, Raw, Simulation
from dzrobot.envs.spaces import action_space, observation_space, plain_action
from dzrobot.errors import ConfigError

Observation = dict[str, Any]
Info = dict[str, Any]

STATE_LIMITS = (
    (-3.0, -3.0, -3.0, -6.2832, -6.2832, -6.2832, -0.1, -0.1),
    (3.0, 3.0, 3.0, 6.2832, 6.2832, 6.2832, 0.1, 0.1),
)
"""Lowest and highest state: meters, radians (a rotation vector of up to one turn), meters."""

SETTLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""What is done while the objects come to rest: stand still, gripper open."""


class ArmEnv(gym.Env[Observation, np.ndarray]):
    """A simulated Panda with an exterior and a wrist camera, in the keys of ``libero_sim``.

    Observation:
        ``video.image``, ``video.wrist_image``: ``(H, W, 3)`` uint8. Turned by 180 degrees from
            robosuite's bottom-up buffer, as the published datasets and policies have them: that is
            a mirror image. :meth:`render` is upright and not mirrored.
        ``state.state``: ``(8,)`` float32. Position of the hand (m), its rotation vector (rad),
            the two finger positions (m), as :func:`arm_state` writes them.
        ``annotation.task``: the instruction.

    Action, ``(7,)`` in [-1, 1]: translation along the world's axes (1 = 0.05 m), rotation vector
    about them (1 = 0.5 rad), both measured from the current pose, then the gripper, of which only
    the sign counts: above 0 closes, below 0 opens, 0 holds. One step is 50 ms.

    ``info["failure_class"]`` says at every step how the episode failed if it ended there, None
    while the goal holds; see :class:`~dzrobot.envs.failure_classes.FailureClass`.

    An episode terminates when the goal holds; a step after that continues with the physics, and
    reports the goal again. Time limits are Gymnasium's wrapper's. The simulator is opened by the
    first reset, in whichever process that happens, and a pickled copy opens its own.

    The same seed and actions give the same numbers and pixels to the bit, on one machine; another
    graphics driver may draw other pixels.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}  # noqa: RUF012

    hand = HandMotion(
        position=slice(0, 3),
        rotation=slice(3, 6),
        rotation_form="rotation vector",
        fingers=slice(6, 8),
        translation=slice(0, 3),
        turn=slice(3, 6),
        gripper=6,
        closes=1,
        translation_m=0.05,
        rotation_rad=0.5,
    )
    """Which numbers of state and action move the hand."""

    def __init__(  # noqa: PLR0913 (Gymnasium passes plain keyword arguments)
        self,
        *,
        starts: int,
        resolution: int,
        render_mode: str | None,
        settle_steps: int,
        cameras: bool,
        quality: Literal["full", "draft"],
        stop_on_success: bool,
    ) -> None:
        self._sim: Simulation | None = None
        self._progress: GoalProgress | None = None
        self._refuse_bad_options(render_mode, settle_steps, quality)
        self.render_mode = render_mode
        self._image = CameraOptions(
            resolution=resolution,
            cameras=cameras,
            on_demand=render_mode is not None,
            quality=quality,
        )
        self._settle_steps = settle_steps
        self._stop_on_success = stop_on_success
        self._starts = InitialStates(starts)
        self._perturbation: tuple[str, int, int] | None = None
        self._start = -1
        self._frame: np.ndarray | None = None
        self._omitting = False
        self.observation_space = observation_space(
            load_embodiment("libero_sim"),
            {"state.state": STATE_LIMITS},
            resolution=(resolution, resolution),
            cameras=cameras,
        )
        self.embodiment = load_embodiment("libero_sim").at_resolution(resolution, resolution)
        self.action_space = action_space(self.embodiment)
        self.control_hz = CONTROL_HZ
        self.init_states = starts

    @property
    @abstractmethod
    def task(self) -> str:
        """The instruction."""

    @abstractmethod
    def _open(self, seed: int) -> Simulation:
        """Build the simulator."""

    @abstractmethod
    def _begin(self, sim: Simulation, start: int) -> Raw:
        """Put the scene at its initial state, before anything settles."""

    @property
    def opengl(self) -> str:
        """Backend that draws the images."""
        return choose_backend()

    perturbations = tuple(AXES)
    """Respects in which the scene can be made harder."""

    def perturb(self, axis: str | None, level: int, seed: int) -> None:
        """Make the scene of the next resets harder; see `dzrobot.envs.libero.perturbations`.

        Args:
            axis: One of ``perturbations``. None: as it is.
            level: 1, hardly, to 5.
            seed: What is drawn follows from it alone.

        Raises:
            ConfigError: no such axis.
        """
        if axis is not None and axis not in AXES:
            raise ConfigError(f"axis {axis!r}: allowed are {', '.join(AXES)}, or None")
        self._perturbation = None if axis is None else (axis, level, seed)

    @property
    def simulation(self) -> Simulation:
        """The simulator behind this environment, for those with privileges.

        Raises:
            ResetNeeded: there has been no reset yet.
        """
        if self._sim is None:
            raise gym.error.ResetNeeded("the simulator is opened by the first reset().")
        return self._sim

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode: build the scene, restore its initial state, let it settle.

        ``seed`` fixes everything. :class:`~dzrobot.envs.initial_states.InitialStates` says which
        initial state is taken.

        Raises:
            ModalityError: an unknown option or initial state.
            SimulatorError: the simulator, its OpenGL or its assets are not ready.
        """
        super().reset(seed=seed)
        start = self._starts.choose(seed, options)
        self._omitting = False
        if self._sim is None:
            self._sim = self._open(0)
        sim, self._progress = self._sim, None
        sim.draw(wanted=self._settle_steps == 0)
        raw = self._begin(sim, start)
        if self._perturbation is not None:
            perturb(sim, *self._perturbation)
            # A step looks by itself; to look before it would move the times of all later looks.
            raw = raw if self._settle_steps else sim.refresh()
        for left in reversed(range(self._settle_steps)):
            sim.draw(wanted=left == 0)
            raw = sim.step(SETTLE)
        self._start = start
        success = sim.success
        self._progress = GoalProgress(sim.env)
        return self._observe(raw), self._info(self._progress, success=success)

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Apply ``action`` (7,) for 50 ms; reward 1.0 while the goal holds, else 0.0.

        Raises:
            ModalityError: the action has another shape or is not finite.
            SimulatorError: the physics diverged.
            ResetNeeded: there has been no reset yet.
        """
        sim = self.simulation
        action = plain_action(action, self.action_space.shape)
        drawn, self._omitting = not self._omitting, False
        sim.draw(wanted=drawn)
        observation = self._observe(sim.step(np.clip(action, -1.0, 1.0)), drawn=drawn)
        success = sim.success
        if self._progress is None:
            raise gym.error.ResetNeeded("the last reset() failed.")
        self._progress.step()
        terminated = success and self._stop_on_success
        info = self._info(self._progress, success=success)
        return observation, float(success), terminated, False, info

    def omit_frames(self) -> None:
        """Leave the images out of the observation of the next step, and of no other."""
        self._omitting = True

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """Return the exterior camera's image ``(H, W, 3)`` uint8, upright, for people."""
        if self.render_mode is None:
            gym.logger.warn("render() needs render_mode='rgb_array' in gym.make.")
            return None
        raw = self.simulation.photograph() if self._frame is None else self._frame
        return np.ascontiguousarray(raw[::-1])

    def close(self) -> None:
        """Free the simulator; closing twice, or before the first reset, is harmless."""
        if self._sim is not None:
            self._sim.close()
        self._sim = self._progress = None
        self._frame = None

    def _observe(self, raw: Raw, *, drawn: bool = True) -> Observation:
        observation: Observation = {}
        self._frame = None
        if self._image.cameras and drawn:
            self._frame = raw["agentview_image"]
            observation["video.image"] = turned(raw["agentview_image"])
            observation["video.wrist_image"] = turned(raw["robot0_eye_in_hand_image"])
        observation["state.state"] = arm_state(raw)
        observation["annotation.task"] = self.task
        return observation

    def _info(self, progress: GoalProgress, *, success: bool) -> Info:
        failure = progress.failure_class
        return {
            "is_success": success,
            "task": self.task,
            "init_state_id": self._start,
            "reset_reason": "success" if success and self._stop_on_success else "",
            "failure_class": None if failure is None else failure.value,
        }

    def _draw_seed(self) -> int:
        return int(self.np_random.integers(2**32))

    def _refuse_bad_options(self, render_mode: str | None, settle_steps: int, quality: str) -> None:
        faults = []
        if render_mode not in (None, *self.metadata["render_modes"]):
            faults.append(f"render_mode={render_mode!r} must be 'rgb_array' or None")
        if settle_steps < 0:
            faults.append(f"settle_steps={settle_steps} must be 0 or more")
        if quality not in ("full", "draft"):
            faults.append(f"quality={quality!r} must be 'full' or 'draft'")
        if faults:
            raise ConfigError(f"{type(self).__name__} cannot be made: {'; '.join(faults)}.")


def turned(raw: np.ndarray) -> np.ndarray:
    """Return a fresh copy of ``raw`` (H, W, 3), turned by 180 degrees."""
    return np.ascontiguousarray(raw[::-1, ::-1])


def arm_state(raw: Raw) -> np.ndarray:
    """Return ``(8,)`` float32: hand position, rotation vector, finger positions."""
    return np.concatenate(
        [
            raw["robot0_eef_pos"],
            rotation_vector(raw["robot0_eef_quat"]),
            raw["robot0_gripper_qpos"],
        ]
    ).astype(np.float32)


def rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """Return axis times angle (rad) of ``quaternion`` (x, y, z, w), which is left as it is.

    The angle lies in [0, 2 pi]: a quaternion with negative w keeps its sign and gives more than pi.
    The datasets are written so, and a downward hand sits right at that seam; folding it back would
    flip the sign of the whole vector there.
    """
    x, y, z, w = (float(number) for number in quaternion)
    w = min(max(w, -1.0), 1.0)
    sine = float(np.sqrt(1.0 - w * w))
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return np.array([x, y, z]) * (2.0 * float(np.arccos(w)) / sine)
