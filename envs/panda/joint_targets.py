"""How an arm follows joint angles, real and simulated: its targets, and the law of its joints.

Units: rad, rad/s, Nm; meters and N at the hand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from dzrobot.envs.panda.poses import Array

Vector6 = tuple[float, float, float, float, float, float]
Vector7 = tuple[float, float, float, float, float, float, float]

ArmKind = Literal["fr3", "fer"]

JOINT_LIMITS: Mapping[ArmKind, tuple[Vector7, Vector7]] = {
    "fr3": (
        (-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159),
        (2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159),
    ),
    "fer": (
        (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
        (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
    ),
}
"""Lowest and highest joint angles by kind of arm: Franka Research 3, and Franka Emika Robot, which
was sold as Panda. From the manufacturer's franka_description."""


@dataclass(frozen=True, eq=False, kw_only=True)
class JointProfile:
    """Limits of targets that are points of a trapezoid of speed for each joint.

    From every such target the joints can brake.
    """

    period_s: float
    """From one target to the next."""

    speed: Array
    """Fastest that targets move, (7,), rad/s."""

    acceleration: float
    """How fast their speeds change, rad/s^2."""

    hand_speed_m_s: float
    hand_turn_rad_s: float
    """Fastest that the hand moves and turns with them."""

    @property
    def change(self) -> float:
        """Change of a joint's speed over one period, rad/s."""
        return self.acceleration * self.period_s

    def towards(
        self, at: Array, goal: Array, before: Array, jacobian: Array, pace: float
    ) -> tuple[Array, Array, bool]:
        """Return target (7,) and speeds (7,) one period on, and whether a limit of speed cut them.

        A joint goes as fast as it may that can still brake before its goal.

        Args:
            at: The target before, (7,).
            goal: Where the joints are to be, (7,).
            before: Speeds (7,) of the target before.
            jacobian: Of the hand at that target, (6, 7): meters, then radians.
            pace: Share of the speeds that is allowed, above 0, at most 1.
        """
        period, change = self.period_s, self.change
        away = (goal - at) / (change * period) - before / (2 * change)
        whole = np.floor((np.sqrt(1 + 8 * np.abs(away)) - 1) / 2)
        part = (np.abs(away) - whole * (whole + 1) / 2) / (whole + 1)
        wished = np.sign(away) * (whole + part) * change
        fastest = pace * self.speed
        low, high = before - change, before + change
        speeds = np.clip(np.clip(wished, -fastest, fastest), low, high)
        is_cut = bool((np.abs(wished) > fastest).any())
        twist = jacobian @ speeds
        share = max(
            float(np.linalg.norm(twist[:3])) / (pace * self.hand_speed_m_s),
            float(np.linalg.norm(twist[3:])) / (pace * self.hand_turn_rad_s),
        )
        if share > 1.0:
            speeds, is_cut = np.clip(speeds / share, low, high), True
        return at + (before + speeds) / 2 * period, speeds, is_cut

    def braking(self, at: Array, speeds: Array) -> Iterator[tuple[Array, Array]]:
        """Yield targets and speeds until the joints rest.

        Args:
            at: The last target, (7,).
            speeds: Its speeds, (7,).
        """
        while speeds.any():
            slower = np.sign(speeds) * np.maximum(np.abs(speeds) - self.change, 0.0)
            at, speeds = at + (speeds + slower) / 2 * self.period_s, slower
            yield at, speeds


@dataclass(frozen=True, kw_only=True)
class TargetLimits:
    """How fast and far targets of joints go, and how fast the torques that follow them change."""

    speed_rad_s: Vector7
    """Fastest that targets move."""

    acceleration_rad_s2: float
    """How fast their speeds change."""

    hand_speed_m_s: float
    hand_turn_rad_s: float
    """Fastest that the hand moves and turns with them."""

    step_rad: float
    """How far a target may run ahead of the measured joint."""

    room_rad: float
    """How far targets stay from the joints' limits."""

    max_delta_tau: float
    """Largest change of a joint torque per millisecond (Nm)."""

    def profile(self, period_s: float) -> JointProfile:
        """Return what targets keep that are ``period_s`` apart."""
        return JointProfile(
            period_s=period_s,
            speed=np.array(self.speed_rad_s),
            acceleration=self.acceleration_rad_s2,
            hand_speed_m_s=self.hand_speed_m_s,
            hand_turn_rad_s=self.hand_turn_rad_s,
        )


TARGETS = TargetLimits(
    speed_rad_s=(1.0,) * 7, acceleration_rad_s2=5.0, hand_speed_m_s=0.55, hand_turn_rad_s=1.8,
    step_rad=0.3, room_rad=0.1, max_delta_tau=1.0,
)  # fmt: skip
"""Those of a workcell that says nothing else, and of the simulated twin of DROID's arm."""


@dataclass(frozen=True, kw_only=True)
class HybridGains:
    """Stiffness and damping of the joints, and of the hand as its Jacobian maps them to joints."""

    joint_stiffness: Vector7
    """Nm/rad."""

    joint_damping: Vector7
    """Nm s/rad."""

    hand_stiffness: Vector6
    """N/m and Nm/rad, along the base axes."""

    hand_damping: Vector6
    """N s/m and Nm s/rad, along the base axes."""

    def torque(self, jacobian: ArrayLike, away: ArrayLike, speeds: ArrayLike) -> Array:
        """Return the torque (7,), Nm, without the compensation of gravity.

        Args:
            jacobian: Of the hand, (6, 7): meters, then radians.
            away: Reference minus measured joint angles, (7,), rad.
            speeds: Measured joint speeds, (7,), rad/s; joints are damped against standstill.
        """
        hand, away, speeds = np.asarray(jacobian), np.asarray(away), np.asarray(speeds)
        pull = np.array(self.hand_stiffness) * (hand @ away)
        pull -= np.array(self.hand_damping) * (hand @ speeds)
        joints = np.array(self.joint_stiffness) * away - np.array(self.joint_damping) * speeds
        torque: Array = joints + hand.T @ pull
        return torque


DROID_GAINS = HybridGains(
    joint_stiffness=(40.0, 30.0, 50.0, 25.0, 35.0, 25.0, 10.0),
    joint_damping=(4.0, 6.0, 5.0, 5.0, 3.0, 2.0, 1.0),
    hand_stiffness=(400.0, 400.0, 400.0, 15.0, 15.0, 15.0),
    hand_damping=(37.0, 37.0, 37.0, 2.0, 2.0, 2.0),
)
"""Those of DROID's arms."""
