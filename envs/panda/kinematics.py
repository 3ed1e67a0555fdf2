"""Forward kinematics, Jacobian and inverse kinematics of the 7-joint Franka arm, in NumPy.

Constants are the published kinematic parameters of the arm with the Franka Hand. Lengths in meters,
angles in radians; poses are 4x4 homogeneous matrices of the end effector in the base frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import DzrobotError

Array = NDArray[np.float64]

READY = np.array([0.0, -np.pi / 4, 0.0, -3 * np.pi / 4, 0.0, np.pi / 2, np.pi / 4])
"""The usual ready posture (rad)."""

JOINT_LOW = np.array([-2.9007, -1.8361, -2.9007, -3.0770, -2.8763, 0.4398, -3.0508])
JOINT_HIGH = np.array([2.9007, 1.8361, 2.9007, -0.1169, 2.8763, 4.6216, 3.0508])
JOINT_VELOCITY = np.array([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26])
JOINT_TORQUE = np.array([87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0])
VELOCITY_OFFSET = np.array([0.652, 0.25, 0.2005, 0.3542, 0.5738, 0.4885, 0.4592])
DECELERATION = np.array([6.0, 2.585, 3.5, 4.0, 17.0, 5.5, 17.0])
JOINT_ACCELERATION = np.full(7, 10.0)
JOINT_JERK = np.full(7, 5000.0)
TORQUE_RATE = 1000.0
"""Largest change of a commanded joint torque (Nm/s)."""

CARTESIAN_VELOCITY = np.array([3.0, 2.5])
CARTESIAN_ACCELERATION = np.array([9.0, 17.0])
"""Of the end effector: meters, then radians."""

LINK_MASS = np.array([2.93, 2.94, 2.25, 2.50, 2.37, 1.43, 0.73])
LINK_SPHERE_M = 0.08
"""A solid sphere of this radius is close enough for the inertia of each link."""

ORIGINS = (
    ((0.0, 0.0, 0.333), 0.0),
    ((0.0, 0.0, 0.0), -np.pi / 2),
    ((0.0, -0.316, 0.0), np.pi / 2),
    ((0.0825, 0.0, 0.0), np.pi / 2),
    ((-0.0825, 0.384, 0.0), -np.pi / 2),
    ((0.0, 0.0, 0.0), np.pi / 2),
    ((0.088, 0.0, 0.0), np.pi / 2),
)
"""Per joint: origin (m) in the previous link's frame, and roll about its x axis (rad)."""

_OFFSETS = tuple(offset for offset, _ in ORIGINS)
_QUARTERS = tuple(round(roll / (np.pi / 2)) for _, roll in ORIGINS)

FLANGE_Z = 0.107
HAND_YAW = -np.pi / 4
HAND_Z = 0.1034


def flange_to_hand() -> Array:
    """Return the pose of the hand's grasp point in the flange frame, (4, 4)."""
    return _rotation_z(HAND_YAW) + _translation_only(0.0, 0.0, HAND_Z)


_REACHING_STEPS, _REACHING_RAD, _REACHED = 400, 0.1, 1e-4
"""Steps of an inverse, the largest change of a joint in one, and what is near enough (m, rad)."""


@dataclass(frozen=True)
class Posture:
    """Where the joints and the end effector are, for one set of joint angles."""

    axes: Array
    """Joint axes in the base frame, (7, 3)."""

    origins: Array
    """A point on each axis, (7, 3), m."""

    pose: Array
    """Pose of the end effector in the base frame, (4, 4)."""

    jacobian: Array
    """Geometric Jacobian at the end effector in base axes, (6, 7): m, then rad."""


def posture(q: Array, flange_to_ee: Array) -> Posture:
    """Return axes, origins, pose and Jacobian for joint angles ``q`` (7,).

    Once per emulated millisecond: plain numbers are several times faster here than small arrays.
    """
    xx, xy, xz, yx, yy, yz, zx, zy, zz = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0
    px = py = pz = 0.0
    axes, origins = [], []
    for (x, y, z), quarter, angle in zip(_OFFSETS, _QUARTERS, q.tolist(), strict=True):
        px += x * xx + y * yx + z * zx
        py += x * xy + y * yy + z * zy
        pz += x * xz + y * yz + z * zz
        if quarter:
            # A quarter turn about x takes y to z and z to -y, or back.
            yx, yy, yz, zx, zy, zz = (
                (zx, zy, zz, -yx, -yy, -yz) if quarter > 0 else (-zx, -zy, -zz, yx, yy, yz)
            )
        cosine, sine = math.cos(angle), math.sin(angle)
        xx, yx = cosine * xx + sine * yx, cosine * yx - sine * xx
        xy, yy = cosine * xy + sine * yy, cosine * yy - sine * xy
        xz, yz = cosine * xz + sine * yz, cosine * yz - sine * xz
        axes.append((zx, zy, zz))
        origins.append((px, py, pz))
    flange = np.array(
        (
            (xx, yx, zx, px + FLANGE_Z * zx),
            (xy, yy, zy, py + FLANGE_Z * zy),
            (xz, yz, zz, pz + FLANGE_Z * zz),
            (0.0, 0.0, 0.0, 1.0),
        )
    )
    pose = flange @ flange_to_ee
    tx, ty, tz = pose[:3, 3].tolist()
    columns = []
    for (ax, ay, az), (ox, oy, oz) in zip(axes, origins, strict=True):
        dx, dy, dz = tx - ox, ty - oy, tz - oz
        columns.append((ay * dz - az * dy, az * dx - ax * dz, ax * dy - ay * dx, ax, ay, az))
    return Posture(np.array(axes), np.array(origins), pose, np.array(columns).T)


def forward(q: Array, flange_to_ee: Array) -> Array:
    """Return the end-effector pose for joint angles ``q`` (7,), (4, 4)."""
    return posture(q, flange_to_ee).pose


def pose_difference(target: Array, current: Array) -> Array:
    """Return the twist (6,) that carries ``current`` to ``target`` in unit time: m, then rad."""
    rotation = target[:3, :3] @ current[:3, :3].T
    cosine = np.clip((np.trace(rotation) - 1) / 2, -1.0, 1.0)
    angle = float(np.arccos(cosine))
    skew = np.array(
        [
            rotation[2, 1] - rotation[1, 2],
            rotation[0, 2] - rotation[2, 0],
            rotation[1, 0] - rotation[0, 1],
        ]
    )
    scale = 0.5 if angle < 1e-6 else angle / (2 * np.sin(angle))
    return np.concatenate([target[:3, 3] - current[:3, 3], scale * skew])


def damped_inverse(matrix: Array, result: Array, damping: float = 1e-3) -> Array:
    """Return the smallest cause of ``result``, damped near singularities.

    With the Jacobian (6, 7), the joint change (7,) of a twist (6,); with its transpose, the wrench
    (6,) at the hand of joint torques (7,).
    """
    square = matrix @ matrix.T + damping**2 * np.eye(len(matrix))
    cause: Array = matrix.T @ np.linalg.solve(square, result)
    return cause


def reaching(q: Array, place: Sequence[float], flange_to_ee: Array) -> Array:
    """Return joint angles (7,) near ``q`` whose end effector is at ``place`` (3,), as upright.

    Raises:
        DzrobotError: the place is out of reach.
    """
    found, at = q.copy(), posture(q, flange_to_ee)
    goal = at.pose.copy()
    goal[:3, 3] = place
    for _ in range(_REACHING_STEPS):
        difference = pose_difference(goal, at.pose)
        if np.abs(difference).max() < _REACHED:
            return found
        change = damped_inverse(at.jacobian, difference)
        change = np.clip(change, -_REACHING_RAD, _REACHING_RAD)
        found = np.clip(found + change, JOINT_LOW, JOINT_HIGH)
        at = posture(found, flange_to_ee)
    raise DzrobotError(f"the hand cannot be brought to {tuple(place)} m: it is out of reach")


def _rotation_z(angle: float) -> Array:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0, 0], [sine, cosine, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])


def _translation_only(x: float, y: float, z: float) -> Array:
    matrix = np.zeros((4, 4))
    matrix[:3, 3] = (x, y, z)
    return matrix
