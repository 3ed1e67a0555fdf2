"""Rotations and poses in NumPy: (4, 4) homogeneous matrices, meters and radians.

Euler angles are roll, pitch, yaw about fixed axes, in that order:
``R = Rz(yaw) Ry(pitch) Rx(roll)``.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def pose_of(position: ArrayLike, euler: ArrayLike) -> Array:
    """Return the pose (4, 4) at ``position`` (3,) with the angles ``euler`` (3,)."""
    pose = np.eye(4)
    pose[:3, :3] = rotation_of(euler)
    pose[:3, 3] = position
    return pose


def rotation_of(euler: ArrayLike) -> Array:
    """Return the rotation (3, 3) of roll, pitch and yaw."""
    (sr, sp, sy), (cr, cp, cy) = np.sin(euler), np.cos(euler)
    return np.array(
        [
            [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
            [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
            [-sp, cp * sr, cp * cr],
        ]
    )


def euler_of(rotation: Array) -> Array:
    """Return roll, pitch and yaw (3,) of a rotation; roll and yaw lie in [-pi, pi]."""
    level = np.hypot(rotation[0, 0], rotation[1, 0])
    if level < 1e-9:
        # Looking straight up or down only roll minus yaw is defined: all of it counts as roll.
        return np.array(
            [np.arctan2(-rotation[1, 2], rotation[1, 1]), np.arctan2(-rotation[2, 0], level), 0.0]
        )
    return np.array(
        [
            np.arctan2(rotation[2, 1], rotation[2, 2]),
            np.arctan2(-rotation[2, 0], level),
            np.arctan2(rotation[1, 0], rotation[0, 0]),
        ]
    )


def rotation_about(vector: ArrayLike) -> Array:
    """Return the rotation (3, 3) about ``vector`` (3,) by its length in radians."""
    axis = np.asarray(vector, np.float64)
    angle = float(np.linalg.norm(axis))
    if angle < 1e-12:
        return np.eye(3)
    cross = skew(axis / angle)
    turned: Array = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    return turned


def rotation_vector(rotation: Array) -> Array:
    """Return axis times angle (3,) of a rotation; the angle lies in [0, pi]."""
    quaternion = quaternion_of(rotation)
    sine = float(np.linalg.norm(quaternion[:3]))
    if sine < 1e-12:
        return np.zeros(3)
    angle = 2 * np.arctan2(sine, quaternion[3])
    vector: Array = quaternion[:3] * (angle / sine)
    return vector


def angle_between(first: Array, second: Array) -> float:
    """Return the angle (rad) between the rotations of two poses."""
    return float(np.linalg.norm(rotation_vector(second[:3, :3] @ first[:3, :3].T)))


def distance_between(first: Array, second: Array) -> float:
    """Return the distance (m) between the positions of two poses."""
    return float(np.linalg.norm(second[:3, 3] - first[:3, 3]))


def is_within(first: Array, second: Array, reach: tuple[float, float]) -> bool:
    """Return whether two poses are at most ``reach`` (m and rad) apart."""
    meters, radians = reach
    return distance_between(first, second) <= meters and angle_between(first, second) <= radians


def skew(vector: ArrayLike) -> Array:
    """Return the matrix (3, 3) whose product with a vector is the cross product."""
    x, y, z = np.asarray(vector, np.float64)
    return np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])


def towards(start: Array, goal: Array, *, meters: float, radians: float) -> Array:
    """Return the pose between ``start`` and ``goal`` that both limits allow.

    Position and rotation advance by the same share, so they arrive together.
    """
    turn = rotation_vector(goal[:3, :3] @ start[:3, :3].T)
    offset = goal[:3, 3] - start[:3, 3]
    need = max(np.linalg.norm(offset) / meters, np.linalg.norm(turn) / radians)
    return goal.copy() if need <= 1.0 else between(start, goal, 1.0 / float(need))


def between(start: Array, goal: Array, share: float) -> Array:
    """Interpolate between poses: ``share`` 0 is ``start``, 1 is ``goal``."""
    turn = rotation_vector(goal[:3, :3] @ start[:3, :3].T)
    pose = np.eye(4)
    pose[:3, :3] = rotation_about(share * turn) @ start[:3, :3]
    pose[:3, 3] = start[:3, 3] + share * (goal[:3, 3] - start[:3, 3])
    return pose


def rotation_of_quaternion(quaternion: ArrayLike) -> Array:
    """Return the rotation (3, 3) of x, y, z, w (4,) of any length but 0."""
    x, y, z, w = np.asarray(quaternion, np.float64) / np.linalg.norm(quaternion)
    matrix: Array = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
    return matrix


def quaternion_of(rotation: Array) -> Array:
    """Return x, y, z, w (4,) with w >= 0, computed from the largest of the four for accuracy."""
    m = rotation
    squares = np.array(
        [
            1 + m[0, 0] - m[1, 1] - m[2, 2],
            1 - m[0, 0] + m[1, 1] - m[2, 2],
            1 - m[0, 0] - m[1, 1] + m[2, 2],
            1 + m[0, 0] + m[1, 1] + m[2, 2],
        ]
    )
    columns = np.array(
        [
            [squares[0], m[0, 1] + m[1, 0], m[0, 2] + m[2, 0], m[2, 1] - m[1, 2]],
            [m[0, 1] + m[1, 0], squares[1], m[1, 2] + m[2, 1], m[0, 2] - m[2, 0]],
            [m[0, 2] + m[2, 0], m[1, 2] + m[2, 1], squares[2], m[1, 0] - m[0, 1]],
            [m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1], squares[3]],
        ]
    )
    quaternion = columns[int(np.argmax(squares))]
    quaternion = quaternion / np.linalg.norm(quaternion)
    signed: Array = -quaternion if quaternion[3] < 0 else quaternion
    return signed


def pose_difference(target: Array, current: Array) -> Array:
    """Return the twist (6,) that carries ``current`` to ``target`` in unit time: m, then rad."""
    turn = rotation_vector(target[:3, :3] @ current[:3, :3].T)
    return np.concatenate([target[:3, 3] - current[:3, 3], turn])


def damped_inverse(matrix: Array, result: Array, damping: float = 1e-3) -> Array:
    """Return the smallest cause of ``result``, damped near singularities.

    With a Jacobian (6, 7), the joint change (7,) of a twist (6,); with its transpose, the wrench
    (6,) at the hand of joint torques (7,).
    """
    square = matrix @ matrix.T + damping**2 * np.eye(len(matrix))
    cause: Array = matrix.T @ np.linalg.solve(square, result)
    return cause
