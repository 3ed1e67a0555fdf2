"""What moves the emulated arm: inertia, friction, load, table, noise, and what its fingers meet.

:class:`Dynamics` is what an arm's joints and fingers are moved by. Here is the one without a scene,
:class:`PlainDynamics`; :mod:`dzrobot.envs.emulators.physics` has one with objects.

Masses are those of the URDF that the client gets, so both sides compute the same dynamics; gravity
of the arm and of the declared load is compensated, as the real arm does.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dzrobot.envs.emulators.faults import GRIPPER_WIDTH_M, Faults
from dzrobot.envs.panda import kinematics
from dzrobot.envs.panda.kinematics import Array, Posture

DT = 1e-3
GRAVITY = 9.81
ROTOR_INERTIA = np.array([0.6, 0.6, 0.5, 0.5, 0.2, 0.2, 0.1])
"""Of the motors, seen through their gears (kg m^2)."""

VISCOUS = np.array([1.5, 1.5, 1.2, 1.2, 0.5, 0.4, 0.3])
"""Nm per rad/s."""

COULOMB = np.array([0.3, 0.3, 0.25, 0.25, 0.12, 0.1, 0.08])
"""Dry friction that is left after the arm's own compensation (Nm)."""

TABLE_STIFFNESS = 2e4
TABLE_DAMPING = 200.0

NOISE = {
    "q": [2e-6] * 7,
    "dq": [2e-4] * 7,
    "torque": [0.03] * 7,
    "wrench": [0.12] * 3 + [0.012] * 3,
}
"""Standard deviations by purpose: rad, rad/s, Nm, N then Nm."""

_ROWS = 1 << 13
_INERTIA_PERIOD_MS = 20
_LATER = np.triu_indices(7, 1)
_SPHERES = np.cumsum((0.4 * kinematics.LINK_SPHERE_M**2 * kinematics.LINK_MASS)[::-1])[::-1][
    np.maximum.outer(np.arange(7), np.arange(7))
]
"""Inertia of the links beyond both of two joints, as spheres (kg m^2), (7, 7)."""


@dataclass(frozen=True)
class Surroundings:
    """What acts on an arm during a millisecond, besides its commands."""

    posture: Posture
    """Where it is."""

    torque: Array
    """Joint torque (7,) of what people and faults exert on the hand (Nm)."""

    payload_kg: float
    """Mass at the hand."""

    friction: float
    """Dry friction, as a share of the usual."""


class Fingers(Protocol):
    """The two fingers of the hand."""

    @property
    def width_m(self) -> float:
        """Distance between them."""
        ...

    def move(self, goal_m: float, speed_m_s: float, force_n: float) -> None:
        """Begin to move to a width, with a largest force; then hold it, or what is in between."""
        ...

    def rest(self) -> None:
        """Stay where they are."""
        ...

    def advance(self, seconds: float) -> bool:
        """Return whether they have arrived, or are held up, after so much more time."""
        ...


class Dynamics(Protocol):
    """What an arm's joints and fingers are moved by, a millisecond at a time."""

    q: Array
    """Joint angles (7,), rad."""

    dq: Array
    """Joint speeds (7,), rad/s."""

    touch: Array
    """Joint torque (7,) of what the scene exerts, as the arm estimates it (Nm)."""

    @property
    def fingers(self) -> Fingers:
        """The hand's fingers."""
        ...

    @property
    def goal_holds(self) -> bool:
        """Whether the scene's task is done."""
        ...

    def follow(self, joints: Array, speeds: Array, around: Surroundings) -> None:
        """Let the arm's own controller follow a reference: joint angles (7,) and speeds (7,)."""
        ...

    def drive(self, torque: Array, around: Surroundings) -> None:
        """Let the joints be moved by torques (7,); gravity is compensated."""
        ...

    def put(self, joints: Array) -> None:
        """Let the joints (7,) be elsewhere, at rest."""
        ...

    def prepare(self, start: int) -> None:
        """Put the scene's objects where an initial state has them."""
        ...

    def visible(self, posture: Posture) -> Array:
        """Return what cameras need to know, at most `timebase.LARGEST_SCENE` numbers."""
        ...


class PlainDynamics:
    """An arm and fingers without a scene: references are followed exactly, at no cost.

    Args:
        faults: Width of an object between the fingers.
    """

    goal_holds = False

    def __init__(self, faults: Faults) -> None:
        self.q = kinematics.READY.copy()
        self.dq = np.zeros(7)
        self.touch = np.zeros(7)
        self.fingers = PlainFingers(faults)
        self._inverse_inertia: Array | None = None
        self._age_ms = 0

    def follow(self, joints: Array, speeds: Array, around: Surroundings) -> None:
        """Be where the reference is."""
        self.q, self.dq = joints.copy(), speeds.copy()
        self._inverse_inertia = None

    def drive(self, torque: Array, around: Surroundings) -> None:
        """Move coupled inertias against viscous and dry friction."""
        if self._inverse_inertia is None or self._age_ms >= _INERTIA_PERIOD_MS:
            self._inverse_inertia = inverse_inertia(around.posture, around.payload_kg)
            self._age_ms = 0
        self._age_ms += 1
        driven = torque + around.torque - VISCOUS * self.dq
        free = self.dq + DT * (self._inverse_inertia @ driven)
        slip = DT * around.friction * self._inverse_inertia.diagonal() * COULOMB
        self.dq = after_friction(free, slip)
        self.q = self.q + self.dq * DT

    def put(self, joints: Array) -> None:
        """Be elsewhere."""
        self.q, self.dq = joints.copy(), np.zeros(7)

    def prepare(self, start: int) -> None:
        """Do nothing: there are no objects."""

    def visible(self, posture: Posture) -> Array:
        """Return position (m), yaw (rad) and width (m) of the hand, (5,)."""
        pose = posture.pose
        yaw = math.atan2(pose[1, 0], pose[0, 0])
        return np.array([*pose[:3, 3], yaw, self.fingers.width_m])


class PlainFingers:
    """Fingers that an object of some width may keep apart.

    Args:
        faults: Width of that object.
    """

    def __init__(self, faults: Faults) -> None:
        self.width_m = GRIPPER_WIDTH_M
        self._faults = faults
        self._goal_m = self.width_m
        self._speed_m_s = 0.0

    def move(self, goal_m: float, speed_m_s: float, force_n: float) -> None:
        """Begin to move."""
        self._goal_m, self._speed_m_s = goal_m, speed_m_s

    def rest(self) -> None:
        """Stay."""
        self._goal_m = self.width_m

    def advance(self, seconds: float) -> bool:
        """Move on."""
        object_m, goal = self._faults.object_width_m, self._goal_m
        if object_m is not None and goal < object_m <= self.width_m + 1e-9:
            goal = object_m
        step = self._speed_m_s * seconds
        if abs(self.width_m - goal) > step:
            self.width_m += step if goal > self.width_m else -step
            return False
        self.width_m = goal
        return True


class SensorNoise:
    """Sensor noise that a seed and the arm's clock decide.

    Args:
        seed: Of this arm.
    """

    def __init__(self, seed: int) -> None:
        self._tables = {
            name: np.array(sizes)
            * np.random.default_rng([seed, number]).standard_normal((_ROWS, len(sizes)))
            for number, (name, sizes) in enumerate(NOISE.items())
        }

    def at(self, purpose: str, clock_ms: int) -> Array:
        """Return what is added to a measurement at a time."""
        row: Array = self._tables[purpose][clock_ms % _ROWS]
        return row


def inverse_inertia(now: Posture, payload_kg: float) -> Array:
    """Return the inverse of the joint-space inertia, (7, 7), with ``payload_kg`` at the hand."""
    mass = kinematics.LINK_MASS
    lever = now.origins[:, None, :] - now.origins[None, :, :]
    moves = np.cross(now.axes[None], lever)
    moves[_LATER] = 0.0
    weighted = mass[:, None, None] * moves
    inertia = np.einsum("ija,ika->jk", weighted, moves)
    inertia += _SPHERES * (now.axes @ now.axes.T)
    tip = now.jacobian[:3]
    inertia += payload_kg * (tip.T @ tip)
    inverse: Array = np.linalg.inv(inertia + np.diag(ROTOR_INERTIA))
    return inverse


def after_friction(free: Array, slip: Array) -> Array:
    """Return joint speeds (7,) once dry friction has taken up to ``slip`` of each; it may stick."""
    slowed: Array = np.sign(free) * np.maximum(np.abs(free) - slip, 0.0)
    return slowed


def table_force(height_m: float, table_m: float | None, sinking_m_s: float) -> float:
    """Return the upward force (N) of a table on a hand whose grasp point is at ``height_m``."""
    if table_m is None or height_m >= table_m:
        return 0.0
    return max(0.0, TABLE_STIFFNESS * (table_m - height_m) + TABLE_DAMPING * sinking_m_s)
