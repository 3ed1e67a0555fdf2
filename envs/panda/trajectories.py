"""Trajectory interpolation between targets, timed by the arm's clock."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dzrobot.envs.panda.poses import Array, between, rotation_vector

_BLEND = 0.5
"""Share of a segment over which the reference's twist blends to a new one."""


class ArmTrajectory(Protocol):
    """Moves the reference from one target to the next."""

    def at(self, now_s: float) -> tuple[Array, Array]:
        """Return the reference and its rate at a time of the arm's clock."""
        ...

    def is_over(self, now_s: float) -> bool:
        """Return whether the reference rests."""
        ...


@dataclass(frozen=True)
class PoseTrajectory:
    """Linear interpolation of the hand's pose, with a blended twist."""

    start: Array
    goal: Array
    began_s: float
    """Arm's clock."""

    lasts_s: float

    before: Array
    """Twist (6,) of the reference until then."""

    def at(self, now_s: float) -> tuple[Array, Array]:
        """Return reference pose (4, 4) and twist (6,).

        The twist blends to its new value over the first part, and to zero after the end: an
        instant reversal would need more torque than the wrist has.
        """
        share = (now_s - self.began_s) / self.lasts_s
        if share >= 1.0:
            return self.goal, max(0.0, 1.0 - (share - 1.0) / _BLEND) * self._twist
        new = min(1.0, share / _BLEND)
        twist = self.before + new * (self._twist - self.before)
        return between(self.start, self.goal, share), twist

    def is_over(self, now_s: float) -> bool:
        """Return whether the reference rests at the goal."""
        return now_s - self.began_s >= (1.0 + _BLEND) * self.lasts_s

    @property
    def _twist(self) -> Array:
        turn = rotation_vector(self.goal[:3, :3] @ self.start[:3, :3].T)
        move = self.goal[:3, 3] - self.start[:3, 3]
        return np.concatenate([move, turn]) / self.lasts_s


@dataclass(frozen=True)
class JointTrajectory:
    """Cubic interpolation of joint angles: position and speed are continuous.

    The cubic meets both ends and their speeds; for speeds of a trapezoidal profile its acceleration
    is constant. After its end the joints brake, unless the next trajectory has begun.
    """

    start: Array
    goal: Array
    began_s: float
    """Arm's clock."""

    lasts_s: float

    before: Array
    """Speeds (7,) of the reference until then, rad/s."""

    after: Array
    """Speeds (7,) at the goal, rad/s."""

    braking: float
    """How fast they brake there, rad/s^2."""

    def at(self, now_s: float) -> tuple[Array, Array]:
        """Return joint angles (7,) and speeds (7,)."""
        over_s = now_s - self.began_s - self.lasts_s
        if over_s >= 0.0:
            lasts = np.minimum(over_s, np.abs(self.after) / self.braking)
            slowing = np.sign(self.after) * self.braking
            return self.goal + (self.after - slowing * lasts / 2) * lasts, (
                self.after - slowing * lasts
            )
        share, span = (now_s - self.began_s) / self.lasts_s, self.lasts_s
        travel, twice, thrice = self.goal - self.start, share**2, share**3
        place = self.start + (
            (3 * twice - 2 * thrice) * travel
            + span * ((share - 2 * twice + thrice) * self.before + (thrice - twice) * self.after)
        )
        speed = (6 * share - 6 * twice) * travel / span + (
            (1 - 4 * share + 3 * twice) * self.before + (3 * twice - 2 * share) * self.after
        )
        return place, speed

    def is_over(self, now_s: float) -> bool:
        """Return whether the joints rest."""
        stopped_s = float(np.abs(self.after).max()) / self.braking
        return now_s - self.began_s >= self.lasts_s + stopped_s
