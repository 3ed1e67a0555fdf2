"""Limits of the real arm, and the errors that it stops with where they are exceeded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dzrobot.envs.emulators.wire import Generator
from dzrobot.envs.panda import kinematics
from dzrobot.envs.panda.kinematics import Array

if TYPE_CHECKING:
    from dzrobot.envs.emulators.arm import EmulatedArm

_TOLERANCE = 1.01
"""Rounding that the arm forgives, as a share of each limit."""

_DT = 1e-3
_COLUMN_RADIUS_M, _COLUMN_HEIGHT_M = 0.12, 0.45
"""The arm's own base and shoulder, which the hand must not enter."""


def torque_steps(before: Array, commanded: Array) -> tuple[str, ...]:
    """Return the errors of a commanded torque (7,), given the one before."""
    found = []
    if (np.abs(commanded - before) > kinematics.TORQUE_RATE * _DT * _TOLERANCE).any():
        found.append("controller_torque_discontinuity")
    if (np.abs(commanded) > kinematics.JOINT_TORQUE).any():
        found.append("tau_j_range_violation")
    return tuple(found)


@dataclass(frozen=True)
class _Smoothness:
    """Largest rate, its largest change, and that one's, of a kind of commanded motion."""

    velocity: Array
    acceleration: Array
    jerk: Array


_JOINTS = _Smoothness(
    kinematics.JOINT_VELOCITY, kinematics.JOINT_ACCELERATION, kinematics.JOINT_JERK
)
# Jerk of the end effector is blurred by our own way from poses to joints, so it has no limit here.
_CARTESIAN = _Smoothness(
    kinematics.CARTESIAN_VELOCITY, kinematics.CARTESIAN_ACCELERATION, np.full(2, np.inf)
)


def discontinuities(generator: Generator, rates: tuple[Array, Array, Array]) -> tuple[str, ...]:
    """Return the errors of a commanded motion: too fast, or not smooth.

    Args:
        generator: What is commanded.
        rates: Velocity, acceleration and jerk in its own units: of joints (7,), or of the end
            effector, (2,), meters then radians.
    """
    cartesian = generator in (Generator.POSE, Generator.TWIST)
    limits = _CARTESIAN if cartesian else _JOINTS
    kind = "cartesian_motion_generator_" if cartesian else "joint_motion_generator_"
    velocity, acceleration, jerk = rates
    if (np.abs(velocity) > limits.velocity * _TOLERANCE).any():
        return (f"{kind}velocity_limits_violation",)
    if (np.abs(acceleration) > limits.acceleration * _TOLERANCE).any():
        return (f"{kind}velocity_discontinuity",)
    if (np.abs(jerk) > limits.jerk * _TOLERANCE).any():
        return (f"{kind}acceleration_discontinuity",)
    return ()


def outside(generator: Generator, arm: "EmulatedArm") -> tuple[str, ...]:
    """Return the error of joints beyond their range."""
    if not ((arm.q < kinematics.JOINT_LOW) | (arm.q > kinematics.JOINT_HIGH)).any():
        return ()
    match generator:
        case Generator.NONE:
            return ("joint_position_limits_violation",)
        case Generator.POSE | Generator.TWIST:
            return ("cartesian_motion_generator_joint_position_limits_violation",)
    return ("joint_motion_generator_position_limits_violation",)


def contacts(arm: "EmulatedArm") -> tuple[str, ...]:
    """Return the errors of a moving arm: contact above its thresholds, speed, walls, itself."""
    settings, found = arm.settings, []
    if (np.abs(arm.measured_torque) > settings.collision_torque).any():
        found.append("joint_reflex")
    if (np.abs(arm.measured_wrench) > settings.collision_force).any():
        found.append("cartesian_reflex")
    if not arm.faults.limits:
        return tuple(found)
    if (np.abs(arm.dq) > kinematics.JOINT_VELOCITY * _TOLERANCE).any():
        found.append("joint_velocity_violation")
    twist = arm.posture.jacobian @ arm.dq
    speeds = np.hypot.reduce(twist.reshape(2, 3), axis=1)
    if (speeds > kinematics.CARTESIAN_VELOCITY).any():
        found.append("cartesian_velocity_violation")
    x, y, z = arm.posture.pose[:3, 3].tolist()
    walls = arm.faults.walls_m
    if walls is not None and not all(
        low <= value <= high
        for low, value, high in zip(walls[:3], (x, y, z), walls[3:], strict=True)
    ):
        found.append("cartesian_position_limits_violation")
    if x * x + y * y < _COLUMN_RADIUS_M**2 and z < _COLUMN_HEIGHT_M:
        found.append("self_collision_avoidance_violation")
    return tuple(found)
