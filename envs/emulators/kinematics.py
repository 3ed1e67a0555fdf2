"""Forward kinematics, Jacobian and inverse steps of a 7-joint Franka arm, in NumPy.

Constants are the published kinematic parameters of the arm with the Franka Hand. Lengths in metres,
angles in radians; poses are 4x4 homogeneous matrices of the end effector in the base frame.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

READY = np.array([0.0, -np.pi / 4, 0.0, -3 * np.pi / 4, 0.0, np.pi / 2, np.pi / 4])
"""The usual ready posture (rad)."""

JOINT_LOW = np.array([-2.9007, -1.8361, -2.9007, -3.0770, -2.8763, 0.4398, -3.0508])
JOINT_HIGH = np.array([2.9007, 1.8361, 2.9007, -0.1169, 2.8763, 4.6216, 3.0508])
JOINT_VELOCITY = np.array([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26])
JOINT_TORQUE = np.array([87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0])
VELOCITY_OFFSET = np.array([0.652, 0.25, 0.2005, 0.3542, 0.5738, 0.4885, 0.4592])
DECELERATION = np.array([6.0, 2.585, 3.5, 4.0, 17.0, 5.5, 17.0])
LINK_MASS = np.array([2.93, 2.94, 2.25, 2.50, 2.37, 1.43, 0.73])

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

FLANGE_Z = 0.107
HAND_YAW = -np.pi / 4
HAND_Z = 0.1034


def flange_to_hand() -> Array:
    """Return the pose of the hand's grasp point in the flange frame, (4, 4)."""
    return _rotation_z(HAND_YAW) + _translation_only(0.0, 0.0, HAND_Z)


def joint_frames(q: Array) -> Array:
    """Return the frames of joints 1..7 and of the flange in the base frame, (8, 4, 4)."""
    frames = np.empty((8, 4, 4))
    pose = np.eye(4)
    for index, ((x, y, z), roll) in enumerate(ORIGINS):
        pose = pose @ _origin(x, y, z, roll) @ _rotation_z(float(q[index]))
        frames[index] = pose
    frames[7] = pose @ _origin(0.0, 0.0, FLANGE_Z, 0.0)
    return frames


def forward(q: Array, flange_to_ee: Array) -> Array:
    """Return the end-effector pose for joint angles ``q`` (7,), (4, 4)."""
    pose: Array = joint_frames(q)[7] @ flange_to_ee
    return pose


def jacobian(q: Array, flange_to_ee: Array) -> Array:
    """Return the geometric Jacobian at the end effector in base axes, (6, 7): m, then rad."""
    frames = joint_frames(q)
    tip = (frames[7] @ flange_to_ee)[:3, 3]
    axes = frames[:7, :3, 2]
    linear = np.cross(axes, tip - frames[:7, :3, 3])
    return np.vstack([linear.T, axes.T])


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


def damped_inverse(matrix: Array, twist: Array, damping: float = 1e-3) -> Array:
    """Return the joint change (7,) for a twist (6,), damped near singularities."""
    square = matrix @ matrix.T + damping**2 * np.eye(6)
    change: Array = matrix.T @ np.linalg.solve(square, twist)
    return change


def _origin(x: float, y: float, z: float, roll: float) -> Array:
    cosine, sine = np.cos(roll), np.sin(roll)
    return np.array(
        [[1, 0, 0, x], [0, cosine, -sine, y], [0, sine, cosine, z], [0, 0, 0, 1.0]],
        dtype=np.float64,
    )


def _rotation_z(angle: float) -> Array:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0, 0], [sine, cosine, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])


def _translation_only(x: float, y: float, z: float) -> Array:
    matrix = np.zeros((4, 4))
    matrix[:3, 3] = (x, y, z)
    return matrix
