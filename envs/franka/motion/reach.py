"""Inverse kinematics within joint limits: where the hand can be brought, and what stays beyond."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from dzrobot.envs.franka.arm_model import pose_and_jacobian
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.panda.poses import Array, between, damped_inverse, pose_difference

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
    """Joint angles (7,) that the elbow is drawn to, as far as the hand allows."""


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


_PLACES = 5
"""Places along each side of a workspace that are tried."""

_ON_THE_WAY_M = 0.05


@dataclass(frozen=True)
class UnreachablePart:
    """What the hand cannot reach of a workspace, oriented as at the start of an episode."""

    share: float
    """Share of the places that were tried."""

    low: Array
    high: Array
    """Corners (3,) of the box around these places, m."""

    def __str__(self) -> str:
        """Return it in words."""
        low, high = (", ".join(f"{value:.2f}" for value in at) for at in (self.low, self.high))
        return (
            f"{100 * self.share:.0f} % of the workspace is out of reach with the hand as at "
            f"reset.euler, within ({low}) to ({high}) m"
        )


def unreachable_part(config: FrankaConfig, flange_to_ee: Array) -> UnreachablePart | None:
    """Return what the hand cannot reach of ``limits.workspace_low`` to ``workspace_high``.

    A grid of places is tried, each along a straight line from the start of an episode, as a policy
    gets there; None where the hand gets to all of them.
    """
    limits, start = config.limits, config.reset.pose
    room = limits.joint_margin_rad
    low, high = np.array(limits.joints_low) + room, np.array(limits.joints_high) - room
    posture = config.reset.joints
    home = (low + high) / 2 if posture is None else np.array(posture)
    box = JointBox(low, high, home)
    begin = solve_within(home, start, flange_to_ee, box)
    sides = zip(limits.workspace_low, limits.workspace_high, strict=True)
    grid = [np.array(at) for at in product(*(np.linspace(*side, _PLACES) for side in sides))]
    beyond = [
        place for place in grid
        if begin is None or not _is_led_to(begin, _line(start, place), flange_to_ee, box)
    ]  # fmt: skip
    if not beyond:
        return None
    return UnreachablePart(len(beyond) / len(grid), np.min(beyond, axis=0), np.max(beyond, axis=0))


def _line(start: Array, place: Array) -> Iterator[Array]:
    end = start.copy()
    end[:3, 3] = place
    steps = max(1, int(np.ceil(np.linalg.norm(place - start[:3, 3]) / _ON_THE_WAY_M)))
    for share in np.linspace(0.0, 1.0, steps + 1)[1:]:
        yield between(start, end, float(share))


def _is_led_to(joints: Array, path: Iterator[Array], flange_to_ee: Array, box: JointBox) -> bool:
    for pose in path:
        found = solve_within(joints, pose, flange_to_ee, box)
        if found is None:
            return False
        joints = found
    return True
