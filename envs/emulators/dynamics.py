"""What moves the emulated arm besides its commands: inertia, friction, payload, table, noise.

Masses are those of the URDF that the client gets, so both sides compute the same dynamics; gravity
of the arm and of the declared load is compensated, as the real arm does.
"""

import numpy as np

from dzrobot.envs.emulators import kinematics
from dzrobot.envs.emulators.kinematics import Array, Posture

GRAVITY = 9.81
ROTOR_INERTIA = np.array([0.6, 0.6, 0.5, 0.5, 0.2, 0.2, 0.1])
"""Of the motors, seen through their gears (kg m^2)."""

VISCOUS = np.array([1.5, 1.5, 1.2, 1.2, 0.5, 0.4, 0.3])
"""Nm per rad/s."""

COULOMB = np.array([0.3, 0.3, 0.25, 0.25, 0.12, 0.1, 0.08])
"""Dry friction that is left after the arm's own compensation (Nm)."""

LINK_SPHERE_M = 0.08
"""A solid sphere of this radius is close enough for the inertia of each link."""

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
_LATER = np.triu_indices(7, 1)
_SPHERES = np.cumsum((0.4 * LINK_SPHERE_M**2 * kinematics.LINK_MASS)[::-1])[::-1][
    np.maximum.outer(np.arange(7), np.arange(7))
]
"""Inertia of the links beyond both of two joints, as spheres (kg m^2), (7, 7)."""


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
