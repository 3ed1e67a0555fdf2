"""A scripted expert with privileged knowledge of the simulator.

It reads object poses from the physics instead of looking at pictures: hover, descend, grasp, lift,
and start over when the object is lost. It acts through the same seven numbers as a learned policy
and has a policy's methods, so that evaluation and collection take it like any other.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import SimulatorError

Array = NDArray[np.float64]
Action = NDArray[np.float32]

OPEN, CLOSE = -1.0, 1.0
HOVER_M = 0.08
"""Height of the hand above an object before it descends."""

NEAR_M = 0.012
"""Horizontal distance within which the hand descends, and vertical within which it grasps."""

FULL_SPEED_M = 0.03
"""Distance at which the hand moves at full speed; closer, it slows down in proportion."""

CLOSING_STEPS = 8
"""Steps the fingers take to close on an object."""

LIFT_M = 0.15
"""How far an object is lifted above where it lay."""


class Arm(Protocol):
    """What the expert needs to know of the scene, in metres and world axes."""

    def hand(self) -> Array:
        """Return the position of the grasp point, (3,)."""

    def target(self) -> Array:
        """Return the position of the object to take, (3,)."""

    def yaw_error(self) -> float:
        """Return the turn about the vertical that lines the fingers up, in (-pi/4, pi/4]."""


@dataclass
class LiftScene:
    """Robosuite's Lift, read from its physics."""

    env: Any

    def hand(self) -> Array:
        """Return the position of the grasp point, (3,) m."""
        position: Array = np.array(self.env.sim.data.site_xpos[self.env.robots[0].eef_site_id])
        return position

    def target(self) -> Array:
        """Return the position of the cube, (3,) m."""
        position: Array = np.array(self.env.sim.data.body_xpos[self.env.cube_body_id])
        return position

    def yaw_error(self) -> float:
        """Return the turn (rad) from the fingers to the nearest pair of the cube's faces."""
        grip = self.env.sim.data.site_xmat[self.env.robots[0].eef_site_id].reshape(3, 3)
        cube = self.env.sim.data.body_xmat[self.env.cube_body_id].reshape(3, 3)
        difference = _yaw(cube) - _yaw(grip)
        quarter = np.pi / 2
        return float((difference + quarter / 2) % quarter - quarter / 2)


class Expert:
    """Takes an object and lifts it; a policy with the simulator's own knowledge.

    Args:
        env: A Gymnasium environment of this package that is Lift underneath.

    Raises:
        SimulatorError: the environment has no simulator to look into.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        if not hasattr(env.unwrapped, "simulation"):
            raise SimulatorError(
                f"the expert reads the simulator's physics, and {env.unwrapped} has none; "
                "use it with dzrobot/lift-v0 or a LIBERO environment"
            )
        self._env = env.unwrapped
        self._closing = 0
        self._goal_m: Array | None = None

    def reset(self, session: str | None = None) -> None:
        """Forget the last episode."""
        self._closing = 0
        self._goal_m = None

    def act(self, obs: Any, *, session: str = "default") -> Action:
        """Return the next action (7,); the observation is not looked at."""
        scene = LiftScene(self._env.simulation.env)  # type: ignore[attr-defined]
        hand, target = scene.hand(), scene.target()
        if self._goal_m is not None:
            return self._lift(hand, target)
        aside = float(np.linalg.norm((target - hand)[:2]))
        turn = scene.yaw_error()
        if self._closing == 0 and aside > NEAR_M:
            above = _above(target, HOVER_M if aside > 3 * NEAR_M else HOVER_M / 2)
            return _action(above - hand, turn, OPEN)
        if self._closing == 0 and abs(hand[2] - target[2]) > NEAR_M:
            return _action(target - hand, turn, OPEN)
        self._closing += 1
        if self._closing > CLOSING_STEPS:
            self._goal_m = _above(target, LIFT_M)
        return _action(target - hand, 0.0, CLOSE)

    def _lift(self, hand: Array, target: Array) -> Action:
        assert self._goal_m is not None
        if float(np.linalg.norm(target - hand)) > 3 * NEAR_M:
            # The object slipped out: begin again with open fingers.
            self.reset()
            return _action(np.array([0.0, 0.0, HOVER_M]), 0.0, OPEN)
        return _action(self._goal_m - hand, 0.0, CLOSE)


def _action(move_m: Array, turn: float, gripper: float) -> Action:
    translation = np.clip(move_m / FULL_SPEED_M, -1.0, 1.0)
    rotation = (0.0, 0.0, float(np.clip(turn / 0.3, -1.0, 1.0)))
    return np.array([*translation, *rotation, gripper], np.float32)


def _above(position_m: Array, height_m: float) -> Array:
    return position_m + np.array([0.0, 0.0, height_m])


def _yaw(rotation: Array) -> float:
    return float(np.arctan2(rotation[1, 0], rotation[0, 0]))
