"""Description and kinematics of an emulated 7-joint Franka arm, from a file per kind of arm.

The files lie in ``arms/``; only emulators read them. Lengths in meters, angles in radians; poses
are 4x4 homogeneous matrices of the end effector in the base frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dzrobot.configuration import FrozenConfig, read_config
from dzrobot.envs.panda.poses import damped_inverse, pose_difference, pose_of
from dzrobot.errors import DzrobotError, find

Array = NDArray[np.float64]

READY = np.array([0.0, -np.pi / 4, 0.0, -3 * np.pi / 4, 0.0, np.pi / 2, np.pi / 4])
"""The usual ready posture (rad)."""

TORQUE_RATE = 1000.0
"""Largest change of a commanded joint torque (Nm/s)."""

ARMS = {path.stem: path for path in sorted((Path(__file__).parent / "arms").glob("*.yaml"))}
"""Kind of arm -> its description."""

_Seven = Annotated[tuple[float, ...], Field(min_length=7, max_length=7)]
_Two = Annotated[tuple[float, ...], Field(min_length=2, max_length=2)]
_Origin = Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]


class ArmFile(FrozenConfig):
    """The description of an arm, as its file has it."""

    name: str
    joint_low: _Seven
    joint_high: _Seven
    joint_velocity: _Seven
    joint_acceleration: _Seven
    joint_jerk: _Seven
    joint_torque: _Seven
    velocity_offset: _Seven
    deceleration: _Seven
    cartesian_velocity: _Two
    cartesian_acceleration: _Two
    """Limits of the end effector: meters, then radians."""

    link_mass: _Seven
    origins: Annotated[tuple[_Origin, ...], Field(min_length=7, max_length=7)]
    """Per joint: origin in the frame of the link before it."""

    quarter_turns: Annotated[tuple[int, ...], Field(min_length=7, max_length=7)]
    """Per joint: quarter turns about the x axis there: -1, 0 or 1."""

    flange_z: float
    hand_z: float
    hand_yaw: float


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


class ArmDescription:
    """Limits, masses and transforms of one kind of arm.

    Args:
        file: Its values.
    """

    def __init__(self, file: ArmFile) -> None:
        self.name = file.name
        self.joint_low = np.array(file.joint_low)
        self.joint_high = np.array(file.joint_high)
        self.joint_velocity = np.array(file.joint_velocity)
        self.joint_acceleration = np.array(file.joint_acceleration)
        self.joint_jerk = np.array(file.joint_jerk)
        self.joint_torque = np.array(file.joint_torque)
        self.cartesian_velocity = np.array(file.cartesian_velocity)
        self.cartesian_acceleration = np.array(file.cartesian_acceleration)
        self.link_mass = np.array(file.link_mass)
        self.flange_to_hand = pose_of((0.0, 0.0, file.hand_z), (0.0, 0.0, file.hand_yaw))
        """Pose (4, 4) of the hand's grasp point in the flange frame."""

        self.file = file

    def posture(self, q: Array, flange_to_ee: Array) -> Posture:
        """Return axes, origins, pose and Jacobian for joint angles ``q`` (7,).

        Once per emulated millisecond: plain numbers are several times faster than small arrays.
        """
        xx, xy, xz, yx, yy, yz, zx, zy, zz = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0
        px = py = pz = 0.0
        axes, origins, flange_z = [], [], self.file.flange_z
        for (x, y, z), quarter, angle in zip(
            self.file.origins, self.file.quarter_turns, q.tolist(), strict=True
        ):
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
                (xx, yx, zx, px + flange_z * zx),
                (xy, yy, zy, py + flange_z * zy),
                (xz, yz, zz, pz + flange_z * zz),
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

    def forward(self, q: Array, flange_to_ee: Array) -> Array:
        """Return the end-effector pose for joint angles ``q`` (7,), (4, 4)."""
        return self.posture(q, flange_to_ee).pose

    def reaching(self, q: Array, place: Sequence[float], flange_to_ee: Array) -> Array:
        """Return joint angles (7,) near ``q`` whose end effector is at ``place`` (3,), as upright.

        Raises:
            DzrobotError: the place is out of reach.
        """
        found, at = q.copy(), self.posture(q, flange_to_ee)
        goal = at.pose.copy()
        goal[:3, 3] = place
        for _ in range(_REACHING_STEPS):
            difference = pose_difference(goal, at.pose)
            if np.abs(difference).max() < _REACHED:
                return found
            change = damped_inverse(at.jacobian, difference)
            change = np.clip(change, -_REACHING_RAD, _REACHING_RAD)
            found = np.clip(found + change, self.joint_low, self.joint_high)
            at = self.posture(found, flange_to_ee)
        raise DzrobotError(f"the hand cannot be brought to {tuple(place)} m: it is out of reach")


def describe(arm: str) -> ArmDescription:
    """Return the description of a kind of arm, or in a YAML file.

    Raises:
        UnknownNameError: there is no such kind.
        ConfigError: the file lacks a value, or has a wrong one.
    """
    path = Path(arm) if arm.endswith(".yaml") else find(ARMS, "arm", arm)
    return ArmDescription(read_config(path).build(ArmFile))


FR3 = describe("fr3")
