"""Kinematics of Franka arms, for whatever keeps the real one safe.

Emulators have kinematics of their own, so that a mistake here or there shows as a disagreement;
:mod:`dzrobot.envs.franka.safeguards.arm_check` compares these with what a connected arm reports.

Lengths in meters, angles in radians.
"""

import numpy as np

from dzrobot.envs.panda.poses import Array, pose_of

_QUARTER = np.pi / 2
_LINKS = np.array(
    [
        pose_of((0.0, 0.0, 0.333), (0.0, 0.0, 0.0)),
        pose_of((0.0, 0.0, 0.0), (-_QUARTER, 0.0, 0.0)),
        pose_of((0.0, -0.316, 0.0), (_QUARTER, 0.0, 0.0)),
        pose_of((0.0825, 0.0, 0.0), (_QUARTER, 0.0, 0.0)),
        pose_of((-0.0825, 0.384, 0.0), (-_QUARTER, 0.0, 0.0)),
        pose_of((0.0, 0.0, 0.0), (_QUARTER, 0.0, 0.0)),
        pose_of((0.088, 0.0, 0.0), (_QUARTER, 0.0, 0.0)),
    ]
)
"""Pose (4, 4) of each joint in the frame of the link before it; both kinds of arm have the same."""

_FLANGE = pose_of((0.0, 0.0, 0.107), (0.0, 0.0, 0.0))
"""Pose of the flange, in the frame of the last link."""

FLANGE_TO_HAND = pose_of((0.0, 0.0, 0.1034), (0.0, 0.0, -np.pi / 4))
"""Pose (4, 4) of the Franka Hand's grasp point in the flange frame."""


def forward(joints: Array, flange_to_ee: Array) -> Array:
    """Return the pose (4, 4) of the end effector in the base frame, for joint angles (7,)."""
    pose: Array = _frames(joints)[6] @ (_FLANGE @ flange_to_ee)
    return pose


def pose_and_jacobian(joints: Array, flange_to_ee: Array) -> tuple[Array, Array]:
    """Return the pose (4, 4) and the Jacobian (6, 7) of the end effector, for joint angles (7,).

    The Jacobian is geometric, along the axes of the base: meters, then radians.
    """
    frames = _frames(joints)
    pose = frames[6] @ (_FLANGE @ flange_to_ee)
    axes = frames[:, :3, 2]
    levers = pose[:3, 3] - frames[:, :3, 3]
    # np.cross takes several times as long.
    moves = axes[:, _NEXT] * levers[:, _AFTER] - axes[:, _AFTER] * levers[:, _NEXT]
    return pose, np.concatenate([moves, axes], axis=1).T


_NEXT, _AFTER = [1, 2, 0], [2, 0, 1]


def _frames(joints: Array) -> Array:
    """Return the pose (7, 4, 4) of each link in the base frame."""
    cosine, sine = np.cos(joints), np.sin(joints)
    turns = np.zeros((7, 4, 4))
    turns[:, 0, 0] = turns[:, 1, 1] = cosine
    turns[:, 0, 1], turns[:, 1, 0] = -sine, sine
    turns[:, 2, 2] = turns[:, 3, 3] = 1.0
    frames: Array = _LINKS @ turns
    for number in range(1, 7):
        frames[number] = frames[number - 1] @ frames[number]
    return frames
