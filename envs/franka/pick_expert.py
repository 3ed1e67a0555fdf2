"""A scripted expert for arms with a known scene, driven or simulated: it lifts the object.

It acts through the numbers of a policy, in the arm's frame, and uses no images.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.arm_model import pose_and_jacobian
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.workcells import SceneObject
from dzrobot.envs.panda.poses import Array, damped_inverse
from dzrobot.envs.panda.quantities import ArmLayout
from dzrobot.envs.panda.state import ActionConfig, in_action_axes
from dzrobot.errors import RobotError

OPEN, CLOSE = 1.0, -1.0

HOVER_M = 0.08
"""Height of the hand above a grasp before it descends."""

LIFT_M = 0.12
"""How far an object is lifted."""

BELOW_M = 0.004
"""How far below an object's center the fingers' tips take it."""

REACH_M = 0.035
"""How far below an object's top they reach at most: the palm comes after them."""

FITS_M = 0.074
"""Largest width that open fingers go around with room to spare."""

NEAR_M = 0.006
"""Distance at which a place counts as reached."""

NEAR_RAD = 0.06
GENTLE = 0.15
"""Share of the largest translation near the object; above it, `BRISK`."""

BRISK = 0.4
CLOSING_STEPS = 4
_UP = np.array([0.0, 0.0, 1.0])
LEAD_STEPS = 3
"""How many such steps ahead joints are asked to be: they can brake before where they are asked."""

PATIENCE_STEPS = 60
"""Steps after which a phase has failed, and everything begins anew."""


class PickPhase(Enum):
    """What the expert is doing."""

    HOVER = auto()
    DESCEND = auto()
    GRASP = auto()
    LIFT = auto()


@dataclass(frozen=True, eq=False, kw_only=True)
class PickMove:
    """What is to be done in one step."""

    goal: Array | None
    """Place (3,) of the hand in the base frame, m; None: where it is."""

    turn: float
    """About the vertical, rad."""

    pace: float
    """Largest share of a step."""

    gripper: float
    """`OPEN` or `CLOSE`."""


class PickArm(ABC):
    """An arm that the expert moves, and what it knows of it.

    Args:
        layout: What its actions are made of.
        scales: What an action number means.

    Raises:
        RobotError: actions name poses.
    """

    def __init__(self, layout: ArmLayout, scales: ActionConfig) -> None:
        if layout.motion not in ("hand_step", "joint_position"):
            raise RobotError(
                f"the expert moves by hand_step or joint_position, and {layout.robot.tag!r} "
                f"takes {layout.motion}"
            )
        self.layout = layout
        self.scales = scales

    @abstractmethod
    def object(self) -> SceneObject:
        """Return where the object is now."""

    @abstractmethod
    def hand(self) -> Array:
        """Return the measured pose (4, 4) of the hand in the base frame."""

    @abstractmethod
    def target(self) -> Array:
        """Return the pose (4, 4) or joint angles (7,) that were commanded last.

        Raises:
            RobotError: the arm is not under control.
        """

    @abstractmethod
    def flange_to_ee(self) -> Array:
        """Return the pose (4, 4) of the hand's grasp point in the flange frame."""


class DrivenPickArm(PickArm):
    """An arm behind its drivers, on a workcell with a scene, such as ``workcell="emulated"``.

    Args:
        env: The arm.

    Raises:
        RobotError: the workcell knows no objects, or actions name poses.
    """

    def __init__(self, env: FrankaEnv) -> None:
        super().__init__(env.layout, env.config.action)
        if env.scene is None:
            raise RobotError(
                "the expert has to know where the object is, and this workcell does not; it "
                "knows workcell='emulated'"
            )
        self._env = env
        self._scene = env.scene

    def object(self) -> SceneObject:
        """Return where the scene has it."""
        return self._scene.object()

    def hand(self) -> Array:
        """Return what the arm reports."""
        return self._env.arm.state().pose

    def target(self) -> Array:
        """Return the controller's."""
        last = self._env.last_target
        if last is None:
            raise RobotError("the arm is not under control: reset() comes first")
        return last

    def flange_to_ee(self) -> Array:
        """Return what the arm reports."""
        return self._env.arm.state().flange_to_ee


class PickExpert:
    """Takes the scene's object and lifts it.

    Args:
        arm: What is moved.
    """

    def __init__(self, arm: PickArm) -> None:
        self._arm = arm
        self.reset()

    def reset(self, session: str = "default", *, episode: int | None = None) -> None:
        """Begin anew; nothing here is drawn, so ``episode`` keys no noise."""
        self._enter(PickPhase.HOVER)
        self._top_m = 0.0

    def act(self, obs: Any, *, session: str = "default") -> NDArray[np.float32]:
        """Return the next action (A,); the observation is not used."""
        return self._towards(self.move())

    @property
    def begins(self) -> bool:
        """Whether it begins anew, and has made no move yet."""
        return self._phase is PickPhase.HOVER and self._steps == 0

    def move(self) -> PickMove:
        """Return what is to be done in this step, of which there is one a call."""
        found, hand = self._arm.object(), self._arm.hand()
        self._steps += 1
        if self._steps > PATIENCE_STEPS:
            self._enter(PickPhase.HOVER)
        grasp = found.pose[:3, 3] + max(-BELOW_M, found.half[2] - REACH_M) * _UP
        turn = _turn(found, hand)
        match self._phase:
            case PickPhase.HOVER:
                goal = grasp + HOVER_M * _UP
                if _is_near(hand, goal) and abs(turn) < NEAR_RAD:
                    self._enter(PickPhase.DESCEND)
                return PickMove(goal=goal, turn=turn, pace=BRISK, gripper=OPEN)
            case PickPhase.DESCEND:
                if _is_near(hand, grasp):
                    self._enter(PickPhase.GRASP)
                return PickMove(goal=grasp, turn=turn, pace=GENTLE, gripper=OPEN)
            case PickPhase.GRASP:
                self._top_m = float(hand[2, 3]) + LIFT_M
                if self._steps >= CLOSING_STEPS:
                    self._enter(PickPhase.LIFT)
                return PickMove(goal=None, turn=0.0, pace=GENTLE, gripper=CLOSE)
            case PickPhase.LIFT:
                return self._lift(found, hand)

    def _lift(self, found: SceneObject, hand: Array) -> PickMove:
        if np.linalg.norm(found.pose[:3, 3] - hand[:3, 3]) > HOVER_M / 2:
            self._enter(PickPhase.HOVER)
        elif hand[2, 3] > self._top_m - LIFT_M / 4:
            # It goes on holding for as long as the episode lasts.
            self._enter(PickPhase.LIFT)
        goal = np.array([*hand[:2, 3], self._top_m])
        return PickMove(goal=goal, turn=0.0, pace=BRISK, gripper=CLOSE)

    def _enter(self, phase: PickPhase) -> None:
        self._phase, self._steps = phase, 0

    def _towards(self, move: PickMove) -> NDArray[np.float32]:
        """Return the action of a move."""
        scales, last = self._arm.scales, self._arm.target()
        if self._arm.layout.motion == "joint_position":
            return self._joints_towards(move, last)
        anchor = last if scales.anchor == "target" else self._arm.hand()
        twist = in_action_axes(anchor, motion_of(move, anchor, scales), scales)
        action: NDArray[np.float32] = np.clip([*twist, move.gripper], -1.0, 1.0).astype(np.float32)
        return action

    def _joints_towards(self, move: PickMove, last: Array) -> NDArray[np.float32]:
        """Return the same for an arm that takes joint angles: where they are to be soon."""
        scales, layout = self._arm.scales, self._arm.layout
        at, jacobian = pose_and_jacobian(last, self._arm.flange_to_ee())
        twist = np.zeros(6)
        if move.goal is not None:
            lead = LEAD_STEPS * move.pace * scales.translation_m
            twist[:3] = np.clip(move.goal - at[:3, 3], -lead, lead)
        lead = LEAD_STEPS * move.pace * scales.rotation_rad
        twist[5] = np.clip(move.turn, -lead, lead)
        joints = last + damped_inverse(jacobian, twist)
        action = np.zeros(layout.robot.action_dim, np.float32)
        action[layout.motion_at] = joints
        action[layout.gripper_at] = move.gripper == CLOSE
        return action


def motion_of(move: PickMove, hand: Array, config: ActionConfig) -> Array:
    """Return the motion (6,) of a move in the base frame, in shares of the largest step.

    Args:
        move: What is to be done.
        hand: (4, 4), where the hand is, or is asked to be.
        config: How long steps are.
    """
    away = np.zeros(3)
    if move.goal is not None:
        away = (move.goal - hand[:3, 3]) / config.translation_m
    turn = move.turn / config.rotation_rad
    motion: Array = np.array([*away, 0.0, 0.0, turn]).clip(-move.pace, move.pace)
    return motion


def _is_near(hand: Array, goal: Array) -> bool:
    return bool(np.abs(hand[:3, 3] - goal).max() < NEAR_M)


def _turn(found: SceneObject, hand: Array) -> float:
    """Return the smallest turn (rad) about the vertical that lets the fingers meet two sides."""
    away = _yaw(found.pose) - _yaw(hand)
    along_x, along_y = 2.0 * found.half[:2] < FITS_M
    # Fingers close along the hand's y axis; which of the two sides is behind does not matter.
    if along_x and not along_y:
        away += np.pi / 2
    between = np.pi / 2 if along_x == along_y else np.pi
    return float((away + between / 2) % between - between / 2)


def _yaw(pose: Array) -> float:
    return float(np.arctan2(pose[1, 0], pose[0, 0]))
