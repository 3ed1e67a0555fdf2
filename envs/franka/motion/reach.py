"""Inverse kinematics within joint limits: where the hand can be brought, and what stays beyond."""

from dataclasses import dataclass

import numpy as np

from dzrobot.envs.franka.arm_model import pose_and_jacobian
from dzrobot.envs.panda.poses import Array, damped_inverse, pose_difference

SOLVED_M = 1e-4
"""How near a solution is (m and rad)."""

_FEW, _MANY = 8, 60
"""Iterations for a pose that is near, and for one anywhere."""

_PROGRESS, _IDLE = 0.98, 12
"""An error that has not shrunk to this share of the smallest for so many iterations will not."""

_STRIDE = 0.2
"""Largest change of a joint in one iteration (rad)."""

_DRAW = 0.1
"""Share of the elbow's way back to its posture in one iteration."""


@dataclass(frozen=True)
class JointBox:
    """Joint angles that a solution keeps to."""

    low: Array
    high: Array
    """(7,), rad."""

    posture: Array
    """Joint angles (7,) that the elbow is drawn to, as the controller draws it."""


def solve_joints(joints: Array, pose: Array, flange_to_ee: Array) -> Array | None:
    """Solve inverse kinematics for a near ``pose``, from ``joints`` (7,); None: no solution.

    Joint limits are not looked at.
    """
    for _ in range(_FEW):
        at, jacobian = pose_and_jacobian(joints, flange_to_ee)
        away = pose_difference(pose, at)
        if float(np.linalg.norm(away)) <= SOLVED_M:
            return joints
        joints = joints + damped_inverse(jacobian, away)
    return None


def solve_within(joints: Array, pose: Array, flange_to_ee: Array, box: JointBox) -> Array | None:
    """Solve inverse kinematics for ``pose`` within ``box``, from ``joints`` (7,); None: none."""
    joints = np.clip(joints, box.low, box.high)
    best, idle = np.inf, 0
    for _ in range(_MANY):
        at, jacobian = pose_and_jacobian(joints, flange_to_ee)
        away = pose_difference(pose, at)
        error = float(np.linalg.norm(away))
        if error <= SOLVED_M:
            return joints
        idle = 0 if error < _PROGRESS * best else idle + 1
        best = min(best, error)
        if idle > _IDLE:
            return None
        joints = np.clip(joints + _change(joints, jacobian, away, box), box.low, box.high)
    return None


def _change(joints: Array, jacobian: Array, away: Array, box: JointBox) -> Array:
    """Return a change (7,) of the joints towards a solution; joints at their limits stay there."""
    free = np.ones(7)
    change = np.zeros(7)
    while free.any():
        movable = jacobian * free
        draw = free * _DRAW * (box.posture - joints)
        change = damped_inverse(movable, away - movable @ draw) + draw
        change /= max(1.0, float(np.abs(change).max()) / _STRIDE)
        stopped = ((joints <= box.low) & (change < 0)) | ((joints >= box.high) & (change > 0))
        if not (stopped & (free > 0)).any():
            break
        free[stopped] = 0.0
    return change
