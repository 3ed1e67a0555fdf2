"""The base of all simulated arms: initial states, settling, success, images on demand."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import EzPickle

from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.episodes import (
    InitialStates,
    Limits,
    action_space,
    episode_info,
    observation_space,
    plain_action,
)
from dzrobot.envs.libero.goal_progress import GoalProgress
from dzrobot.envs.libero.perturbations import AXES, perturb
from dzrobot.envs.libero.sim import ArmSetup, CameraOptions, Raw, Simulation
from dzrobot.envs.mujoco.simulator import choose_backend
from dzrobot.errors import ConfigError

Observation = dict[str, Any]
Info = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SimulatedRobot:
    """Which robot an environment is of, and how it is simulated."""

    embodiment: Embodiment
    """With the size that its images have."""

    state_limits: Mapping[str, Limits]
    """Lowest and highest value of every state part."""

    action_space: gym.spaces.Box
    """What an action may be; numbers beyond are clipped."""

    setup: ArmSetup
    """Controller, cameras and rate."""


class SimulatedArmEnv(gym.Env[Observation, np.ndarray], EzPickle):
    """A robosuite arm in the modality keys of an embodiment.

    ``info["failure_class"]`` says at every step how the episode failed if it ended there, None
    while the goal holds; see :class:`~dzrobot.envs.episodes.FailureClass`.

    An episode terminates when the goal holds; a step after that continues with the physics, and
    reports the goal again. Time limits are Gymnasium's wrapper's. The simulator is opened by the
    first reset, in whichever process that happens, and a pickled copy opens its own.

    The same seed and actions give the same numbers and pixels to the bit, on one machine; another
    graphics driver may draw other pixels.

    Args:
        arguments: What its own constructor was called with, among it render_mode, settle_steps,
            cameras, quality and stop_on_success. A pickle is made with them again.
        robot: Which robot it is.
        starts: Number of its initial states.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    action_space: gym.spaces.Box

    def __init__(self, arguments: Mapping[str, Any], robot: SimulatedRobot, starts: int) -> None:
        EzPickle.__init__(self, **arguments)
        render_mode, settle_steps = arguments["render_mode"], arguments["settle_steps"]
        cameras, quality = arguments["cameras"], arguments["quality"]
        self._sim: Simulation | None = None
        self._progress: GoalProgress | None = None
        self._refuse_bad_options(render_mode, settle_steps, quality)
        self.render_mode = render_mode
        self._setup = robot.setup
        size = robot.embodiment.views[0].resolution
        self._image = CameraOptions(
            size=size,
            cameras=cameras,
            on_demand=render_mode is not None,
            quality=quality,
        )
        self._settle_steps = settle_steps
        self._stop_on_success = arguments["stop_on_success"]
        self._starts = InitialStates(starts)
        self._perturbation: tuple[str, int, int] | None = None
        self._start = -1
        self._frame: np.ndarray | None = None
        self._omitting = False
        self.embodiment = robot.embodiment
        self.observation_space = observation_space(
            robot.embodiment, robot.state_limits, resolution=size, cameras=cameras
        )
        self.action_space = robot.action_space
        self.control_hz = robot.setup.control_hz
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

    @abstractmethod
    def _rest(self, sim: Simulation) -> np.ndarray:
        """Return the action of an arm at rest with an open gripper."""

    @abstractmethod
    def _command(self, sim: Simulation, action: np.ndarray) -> np.ndarray:
        """Return robosuite's own numbers for ``action``, which lies in the action space."""

    @abstractmethod
    def _images(self, raw: Raw) -> Observation:
        """Return every view (H, W, 3) by its key."""

    @abstractmethod
    def _state(self, raw: Raw) -> Observation:
        """Return every state part by its key."""

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
            raise gym.error.ResetNeeded("call reset() first: it opens the simulator")
        return self._sim

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode: build the scene, restore its initial state, let it settle.

        ``seed`` fixes everything. :class:`~dzrobot.envs.episodes.InitialStates` says which
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
            raw = sim.step(self._command(sim, self._rest(sim)))
        self._start = start
        success = sim.success
        self._progress = GoalProgress(sim.env)
        return self._observe(raw), self._info(self._progress, success=success)

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Apply ``action`` (A,) for one control period; reward 1.0 while the goal holds, else 0.0.

        Raises:
            ModalityError: the action has another shape or is not finite.
            SimulatorError: the physics diverged.
            ResetNeeded: there has been no reset yet.
        """
        sim = self.simulation
        action = plain_action(action, self.action_space)
        drawn, self._omitting = not self._omitting, False
        sim.draw(wanted=drawn)
        bounded = np.clip(action, self.action_space.low, self.action_space.high)
        observation = self._observe(sim.step(self._command(sim, bounded)), drawn=drawn)
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
            self._frame = raw[f"{self._setup.cameras[0]}_image"]
            observation |= self._images(raw)
        observation |= self._state(raw)
        observation[self.embodiment.language] = self.task
        return observation

    def _info(self, progress: GoalProgress, *, success: bool) -> Info:
        failure, ends = progress.failure_class, self._stop_on_success
        return episode_info(self.task, self._start, failure, success=success, ends=ends)

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


STATE_LIMITS = (
    (-3.0, -3.0, -3.0, -6.2832, -6.2832, -6.2832, -0.1, -0.1),
    (3.0, 3.0, 3.0, 6.2832, 6.2832, 6.2832, 0.1, 0.1),
)
"""Lowest and highest state: meters, radians (a rotation vector of up to one turn), meters."""

SETTLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""Action while the objects settle: no motion, gripper open."""


class ArmEnv(SimulatedArmEnv):
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

    See :class:`SimulatedArmEnv` for episodes.

    Args:
        arguments: As of :class:`SimulatedArmEnv`, and the images' ``resolution``.
        starts: Number of initial states.
    """

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

    def __init__(self, arguments: Mapping[str, Any], starts: int) -> None:
        size = arguments["resolution"]
        embodiment = load_embodiment("libero_sim").at_resolution(size, size)
        robot = SimulatedRobot(
            embodiment=embodiment,
            state_limits={"state.state": STATE_LIMITS},
            action_space=action_space(embodiment),
            setup=ArmSetup(),
        )
        super().__init__(arguments, robot, starts)

    def _rest(self, sim: Simulation) -> np.ndarray:
        return SETTLE

    def _command(self, sim: Simulation, action: np.ndarray) -> np.ndarray:
        return action

    def _images(self, raw: Raw) -> Observation:
        return {
            "video.image": turned(raw["agentview_image"]),
            "video.wrist_image": turned(raw["robot0_eye_in_hand_image"]),
        }

    def _state(self, raw: Raw) -> Observation:
        return {"state.state": arm_state(raw)}


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a constructor was called with, from its ``locals()``."""
    return {name: value for name, value in values.items() if name not in ("self", "__class__")}


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
