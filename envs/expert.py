"""A scripted expert with privileged knowledge of the simulator.

It reads poses and shapes from the physics instead of looking at images: hover, descend, grasp,
lift, carry, lower, release, and start over when the object is lost. It acts through the same seven
numbers as a learned policy and has a policy's methods, so that evaluation and collection take it
like any other. It knows Lift, libero_object and libero_spatial.
"""

from enum import Enum, auto
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND, forward
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.pick_expert import DrivenPickArm, PickArm, PickExpert
from dzrobot.envs.franka.workcells import SceneObject
from dzrobot.envs.libero.lift import DroidLiftEnv
from dzrobot.envs.libero.sim import Simulation
from dzrobot.envs.libero.simulated import SimulatedArmEnv
from dzrobot.envs.libero.task_scene import Destination, Grasp, TaskScene, choose_grasp, half_turn
from dzrobot.envs.panda.state import ActionConfig
from dzrobot.errors import SimulatorError

Array = NDArray[np.float64]
Action = NDArray[np.float32]

OPEN, CLOSE = -1.0, 1.0

HOVER_M = 0.08
"""Height of the hand above a grasp before it descends."""

LIFT_M = 0.15
"""How far an object is lifted where lifting it is all."""

NEAR_M = 0.01
"""Distance at which a place counts as reached."""

ALIGNED_M = 0.006
"""The same, sideways, before the fingers close."""

FULL_SPEED_M = 0.03
"""Distance from which on the hand moves at full speed; nearer, in proportion."""

FULL_SPEED_RAD = 0.25
PUSH = 0.05
"""Share of what is missing that is added to the push, per step."""

CLOSING_STEPS = 11
OPENING_STEPS = 6
PATIENCE_STEPS = 50
"""Steps after which a phase has failed."""

_UP = np.array([0.0, 0.0, 1.0])


class GraspPhase(Enum):
    """What the expert is doing."""

    HOVER = auto()
    DESCEND = auto()
    GRASP = auto()
    LIFT = auto()
    CARRY = auto()
    LOWER = auto()
    RELEASE = auto()
    RETREAT = auto()


class Expert:
    """Takes an object and brings it where the task wants it; a policy with the simulator's eyes.

    Args:
        env: A LIBERO or Lift environment of this package, wrapped or not.

    Raises:
        SimulatorError: the environment has no simulator to look into.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        if not isinstance(env.unwrapped, SimulatedArmEnv):
            raise SimulatorError(
                f"the expert reads the simulator's physics, and {env.unwrapped} has none; "
                "use it with dzrobot/lift-v0 or a LIBERO environment"
            )
        self._env = env.unwrapped
        self.reset()

    def reset(self, session: str = "default", *, episode: int | None = None) -> None:
        """Forget the last episode; nothing here is drawn, so ``episode`` keys no noise."""
        self._failed: list[Grasp] = []
        self._begin()

    def act(self, obs: Any, *, session: str = "default") -> Action:
        """Return the next action (7,); the observation is not used.

        Raises:
            SimulatorError: the task is none that the expert knows.
        """
        scene = TaskScene(self._simulation.env)
        if self._grasp is None:
            self._plan(scene)
        self._steps += 1
        if self._steps > PATIENCE_STEPS or self._lost(scene):
            self._give_up()
            return self._move(scene, scene.hand + _UP * HOVER_M, None, OPEN)
        return self._phases[self._phase](scene)

    @property
    def _simulation(self) -> Simulation:
        return self._env.simulation

    def _begin(self) -> None:
        self._grasp: Grasp | None = None
        self._planned_at = np.zeros(3)
        self._held_offset = np.zeros(3)
        self._travel_m = 0.0
        self._lifted_m = 0.0
        self._phases = {
            GraspPhase.HOVER: self._hover,
            GraspPhase.DESCEND: self._descend,
            GraspPhase.GRASP: self._close,
            GraspPhase.LIFT: self._lift,
            GraspPhase.CARRY: self._carry,
            GraspPhase.LOWER: self._lower,
            GraspPhase.RELEASE: self._release,
            GraspPhase.RETREAT: self._retreat,
        }
        self._enter(GraspPhase.HOVER)

    def _enter(self, phase: GraspPhase) -> None:
        self._phase = phase
        self._steps = 0
        self._push_m = np.zeros(3)

    def _give_up(self) -> None:
        if self._grasp is not None:
            self._failed.append(self._grasp)
        self._begin()

    def _plan(self, scene: TaskScene) -> None:
        obstacles = scene.obstacles
        yaw = float(np.arctan2(scene.hand_axes[1, 0], scene.hand_axes[0, 0]))
        grasp = choose_grasp(scene.object, scene.position, obstacles, yaw, self._failed)
        if grasp is None:
            raise SimulatorError("the expert finds no way to hold the object of this task.")
        self._grasp = grasp
        self._planned_at = scene.position
        target = scene.position + grasp.offset
        over = obstacles.top_between(scene.hand, target, margin=0.06)
        self._travel_m = max(float(target[2]) + HOVER_M, over + 0.06)

    def _lost(self, scene: TaskScene) -> bool:
        match self._phase:
            case GraspPhase.HOVER | GraspPhase.DESCEND:
                return bool(np.linalg.norm(scene.position - self._planned_at) > 0.015)
            case GraspPhase.LIFT | GraspPhase.CARRY | GraspPhase.LOWER:
                slipped = scene.position - scene.hand - self._held_offset
                return bool(np.linalg.norm(slipped) > 0.05)
            case GraspPhase.RETREAT:
                # The object rolled away. Counted from the last step at which the goal held.
                return self._steps > 2 * OPENING_STEPS
            case _:
                return False

    def _target(self, scene: TaskScene) -> Array:
        assert self._grasp is not None, "planned before any phase"
        target: Array = scene.position + self._grasp.offset
        return target

    def _yaw(self) -> float:
        assert self._grasp is not None, "planned before any phase"
        return self._grasp.yaw

    def _hover(self, scene: TaskScene) -> Action:
        target = self._target(scene)
        aside = float(np.linalg.norm((target - scene.hand)[:2]))
        goal = np.array([*target[:2], self._travel_m if aside > 0.05 else target[2] + HOVER_M])
        late = self._steps > PATIENCE_STEPS // 2
        near = aside < (2 * NEAR_M if late else ALIGNED_M)
        if near and abs(_turn(scene, self._yaw())[2]) < 0.1:
            self._enter(GraspPhase.DESCEND)
        return self._move(scene, goal, self._yaw(), OPEN)

    def _descend(self, scene: TaskScene) -> Action:
        target = self._target(scene)
        deep = scene.hand[2] - target[2] < NEAR_M / 2
        aligned = np.linalg.norm((target - scene.hand)[:2]) < ALIGNED_M
        if (deep and aligned) or self._steps > PATIENCE_STEPS // 2:
            self._enter(GraspPhase.GRASP)
        return self._move(scene, target, self._yaw(), OPEN)

    def _close(self, scene: TaskScene) -> Action:
        if self._steps >= CLOSING_STEPS:
            self._held_offset = scene.position - scene.hand
            self._lifted_m = self._carrying_height(scene)
            self._enter(GraspPhase.LIFT)
        return self._move(scene, scene.hand, self._yaw(), CLOSE)

    def _carrying_height(self, scene: TaskScene) -> float:
        """Return the height of the hand at which what it holds clears everything below its path."""
        place = scene.destination
        if place is None:
            return float(scene.hand[2]) + LIFT_M
        hanging = float(scene.hand[2] - scene.object.corners[:, 2].min())
        over = scene.obstacles.top_between(scene.hand, place.center, margin=0.05)
        return max(over + hanging + 0.03, float(scene.hand[2]) + 0.05)

    def _lift(self, scene: TaskScene) -> Action:
        place = scene.destination
        if scene.hand[2] > self._lifted_m - 0.02:
            # Where lifting is all, this continues for as long as the episode does.
            self._enter(GraspPhase.LIFT if place is None else GraspPhase.CARRY)
        return self._move(scene, np.array([*scene.hand[:2], self._lifted_m]), self._yaw(), CLOSE)

    def _carry(self, scene: TaskScene) -> Action:
        over = self._over(scene, scene.destination)
        if np.linalg.norm(over - scene.hand[:2]) < NEAR_M:
            self._enter(GraspPhase.LOWER)
        return self._move(scene, np.array([*over, self._lifted_m]), self._yaw(), CLOSE)

    def _lower(self, scene: TaskScene) -> Action:
        place = scene.destination
        assert place is not None, "there is a place to lower it to"
        hanging = float(scene.hand[2] - scene.object.corners[:, 2].min())
        height = max(float(place.center[2]) + hanging + 0.012, place.rim + 0.01)
        if scene.hand[2] - height < NEAR_M or self._steps > PATIENCE_STEPS // 2:
            self._enter(GraspPhase.RELEASE)
        return self._move(scene, np.array([*self._over(scene, place), height]), self._yaw(), CLOSE)

    def _release(self, scene: TaskScene) -> Action:
        if self._steps > OPENING_STEPS:
            self._travel_m = float(scene.hand[2]) + HOVER_M
            self._enter(GraspPhase.RETREAT)
        return self._move(scene, scene.hand, self._yaw(), OPEN)

    def _retreat(self, scene: TaskScene) -> Action:
        if self._simulation.success:
            self._enter(GraspPhase.RETREAT)
        return self._move(scene, np.array([*scene.hand[:2], self._travel_m]), self._yaw(), OPEN)

    def _move(self, scene: TaskScene, goal: Array, yaw: float | None, gripper: float) -> Action:
        away = goal - scene.hand
        if np.linalg.norm(away) < FULL_SPEED_M:
            # With the arm stretched out, the last centimeter needs a lasting push.
            self._push_m = np.clip(self._push_m + PUSH * away, -FULL_SPEED_M, FULL_SPEED_M)
        move = np.clip((away + self._push_m) / FULL_SPEED_M, -1.0, 1.0)
        turn = np.zeros(3) if yaw is None else _turn(scene, yaw) / FULL_SPEED_RAD
        return np.array([*move, *np.clip(turn, -1.0, 1.0), gripper], np.float32)

    def _over(self, scene: TaskScene, place: Destination | None) -> Array:
        """Return where the hand has to be, (2,), for the object to be over its place."""
        assert place is not None, "there is a place to carry it to"
        over: Array = place.center[:2] - (scene.position - scene.hand)[:2]
        return over


class SimulatedPickArm(PickArm):
    """The simulated twin of an arm of DROID: ``dzrobot/droid-lift-v0``.

    Args:
        env: The twin.
    """

    def __init__(self, env: DroidLiftEnv) -> None:
        super().__init__(env.layout, ActionConfig())
        self._env = env

    def object(self) -> SceneObject:
        """Return where the physics have the cube."""
        sim = self._env.simulation.env
        pose, body = np.eye(4), sim.cube_body_id
        pose[:3, :3] = sim.sim.data.body_xmat[body].reshape(3, 3)
        pose[:3, 3] = sim.sim.data.body_xpos[body] - sim.robots[0].base_pos
        return SceneObject(pose, np.array(sim.cube.size))

    def hand(self) -> Array:
        """Return where the joints have it, by the kinematics of the drivers."""
        return forward(self._env.simulation.joints, FLANGE_TO_HAND)

    def target(self) -> Array:
        """Return the joint angles (7,) that were commanded last."""
        return self._env.target

    def flange_to_ee(self) -> Array:
        """Return that of the Franka Hand."""
        return FLANGE_TO_HAND


def _turn(scene: TaskScene, yaw: float) -> Array:
    """Return the rotation vector (rad) that makes the hand point down and close at ``yaw``."""
    axes = scene.hand_axes
    level = half_turn(yaw - float(np.arctan2(axes[1, 0], axes[0, 0])))
    # Small angles: upright the hand by its tilt, and turn it about the vertical.
    tilt = np.cross(axes[:, 2], (0.0, 0.0, -1.0))
    turn: Array = np.array([tilt[0], tilt[1], level])
    return turn


def expert_for(env: gym.Env[Any, Any]) -> Expert | PickExpert:
    """Return the expert that looks into ``env``: a simulator, or an arm whose scene is known.

    Raises:
        SimulatorError: the environment has nothing to look into.
        RobotError: the arm's workcell knows no objects.
    """
    inner = env.unwrapped
    if isinstance(inner, FrankaEnv):
        return PickExpert(DrivenPickArm(inner))
    if isinstance(inner, DroidLiftEnv):
        return PickExpert(SimulatedPickArm(inner))
    return Expert(env)
