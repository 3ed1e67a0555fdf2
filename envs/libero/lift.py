"""robosuite's Lift, in the keys and actions of LIBERO or of DROID; it needs no download."""

from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.episodes import DRAWN, named_arguments
from dzrobot.envs.libero.impedance import droid_arm
from dzrobot.envs.libero.sim import ArmSetup, Raw, Simulation
from dzrobot.envs.libero.simulated import (
    ArmEnv,
    Observation,
    SimulatedArmEnv,
    SimulatedRobot,
    arguments_of,
)
from dzrobot.envs.mujoco.simulator import check_versions, import_robosuite
from dzrobot.envs.panda.joint_targets import JOINT_LIMITS
from dzrobot.envs.panda.quantities import CLOSED_ABOVE, ArmLayout, gripper_position


class _Lift(SimulatedArmEnv):
    """The task, whatever the robot's keys and actions are."""

    task = "lift the red cube"

    def _open(self, seed: int) -> Simulation:
        lift = import_robosuite().environments.manipulation.lift.Lift
        lift, arguments = self._armed(lift)
        return Simulation(lift, arguments, self._image, seed, self._setup)

    def _armed(self, lift: type) -> tuple[type, dict[str, Any]]:
        """Return robosuite's environment with the arm of this one, and arguments for it."""
        return lift, {}

    def _begin(self, sim: Simulation, start: int) -> Raw:
        return sim.reset(start)


class LiftEnv(_Lift, ArmEnv):
    """Lift a red cube off the table; see :class:`ArmEnv` for observation and action.

    ``dzrobot/lift-v0`` makes it. An initial state fixes where the cube lies, how large it is and
    how the arm is bent; the goal holds while the cube is 4 cm above the table.

    Args:
        resolution: Height and width of the images in pixels.
        render_mode: ``"rgb_array"`` or None.
        settle_steps: Steps with an open, resting gripper before the episode begins.
        cameras: False leaves the images out of the observation, and the time they take.
        quality: ``"draft"`` draws faster and less well, for tests.
        stop_on_success: False never terminates; ``info["is_success"]`` still reports it.

    Raises:
        MissingDependencyError: the simulator is not installed.
        SimulatorError: the simulator has the wrong version.
    """

    @named_arguments
    def __init__(  # noqa: PLR0913 (Gymnasium passes plain keyword arguments)
        self,
        *,
        resolution: int = 256,
        render_mode: str | None = None,
        settle_steps: int = 10,
        cameras: bool = True,
        quality: Literal["full", "draft"] = "full",
        stop_on_success: bool = True,
    ) -> None:
        super().__init__(arguments_of(locals()), DRAWN)
        check_versions()


_SETUP = ArmSetup(
    controller="JOINT_POSITION",
    cameras=("agentview", "sideview", "robot0_eye_in_hand"),
    control_hz=15,
)
_VIEWS = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")


class DroidLiftEnv(_Lift):
    """Lift a red cube off the table, in the keys and conventions of ``oxe_droid``.

    ``dzrobot/droid-lift-v0`` makes it: a simulated twin of an arm of DROID, for policies that act
    in joint positions. Its initial states are those of ``dzrobot/lift-v0``.

    Observation:
        ``video.exterior_image_1_left``, ``video.exterior_image_2_left``,
            ``video.wrist_image_left``: ``(180, 320, 3)`` uint8, upright.
        ``state.joint_position``: ``(7,)`` float32, rad.
        ``state.gripper_position``: ``(1,)`` float32, 0 open to 1 closed.
        ``annotation.task``: the instruction.

    Action, ``(8,)``: seven joint positions (rad) to move to, measured from zero and not from where
    the arm is, and the gripper: above 0.5 closes, else opens. The joints follow by the law, the
    gains and the limits of ``dzrobot/Franka-DROID-emulated-v0``, against the same inertia and
    friction, so they lag behind by about five steps; its workspace and the distances that it keeps
    are not checked. One step is 66 ms: 33 physics steps of 2 ms.

    See :class:`SimulatedArmEnv` for episodes.

    Args:
        render_mode: ``"rgb_array"`` or None.
        settle_steps: Steps with an open, resting gripper before the episode begins.
        cameras: False leaves the images out of the observation, and the time they take.
        quality: ``"draft"`` draws faster and less well, for tests.
        stop_on_success: False never terminates; ``info["is_success"]`` still reports it.

    Raises:
        MissingDependencyError: the simulator is not installed.
        SimulatorError: the simulator has the wrong version.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    layout = ArmLayout.of(load_embodiment("oxe_droid"))
    """What its actions and states are made of: those of a Franka."""

    @named_arguments
    def __init__(
        self,
        *,
        render_mode: str | None = None,
        settle_steps: int = 10,
        cameras: bool = True,
        quality: Literal["full", "draft"] = "full",
        stop_on_success: bool = True,
    ) -> None:
        arguments = arguments_of(locals())
        lowest, highest = JOINT_LIMITS["fr3"]
        low, high = np.array([(*lowest, 0.0), (*highest, 1.0)], np.float32)
        robot = SimulatedRobot(
            embodiment=self.layout.robot,
            # A joint may be pushed a little beyond its limit.
            state_limits={"state.joint_position": (-4.0, 4.0), "state.gripper_position": (0, 1)},
            action_space=spaces.Box(low, high, dtype=np.float32),
            setup=_SETUP,
        )
        super().__init__(arguments, robot, DRAWN)
        check_versions()

    @property
    def target(self) -> np.ndarray:
        """Joint angles (7,) that were commanded last, rad.

        Raises:
            ResetNeeded: there has been no reset yet.
        """
        target: np.ndarray = self.simulation.env.robots[0].controller.target
        return target

    def _armed(self, lift: type) -> tuple[type, dict[str, Any]]:
        # Drawn and not added: the cube lies where it does in Lift, and the arm is at home.
        return droid_arm(lift), {"initialization_noise": {"magnitude": 0.0, "type": "gaussian"}}

    def _rest(self, sim: Simulation) -> np.ndarray:
        return np.array([*self.target, 0.0])

    def _command(self, sim: Simulation, action: np.ndarray) -> np.ndarray:
        return np.array([*action[:7], 1.0 if action[7] > CLOSED_ABOVE else -1.0])

    def _images(self, raw: Raw) -> Observation:
        return {
            f"video.{name}": np.ascontiguousarray(raw[f"{camera}_image"][::-1])
            for name, camera in zip(_VIEWS, self._setup.cameras, strict=True)
        }

    def _state(self, raw: Raw) -> Observation:
        # robosuite samples what it reports some milliseconds before a step ends, and of joints it
        # reports only sines and cosines, while one goes beyond half a turn.
        sim = self.simulation
        return {
            "state.joint_position": sim.joints.astype(np.float32),
            "state.gripper_position": np.array([gripper_position(sim.fingers_m)], np.float32),
        }
