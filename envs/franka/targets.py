"""The numbers in which an arm's targets are commanded: poses of the hand, or joint angles.

Each space says what the limits leave of an action, where the arm is in it, and how it is held.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dzrobot.envs.emulators.kinematics import forward, posture
from dzrobot.envs.franka.arm import ArmState, Space
from dzrobot.envs.franka.axes import desired_pose
from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.envs.franka.poses import Array, angle_between, distance_between
from dzrobot.envs.franka.safety import (
    Abort,
    LimitedTarget,
    RefusalError,
    Workspace,
    check_first_target,
)
from dzrobot.envs.franka.self_collision import SelfCollision
from dzrobot.errors import ConfigError

_HOLD_M, _HOLD_RAD = 0.01, 0.05
"""A target this near is held by keeping it: an arm that sags must not be followed down."""

_ROUNDING_RAD = 1e-5
_SHARES = (1.0, 0.5, 0.2)
"""Of what is asked, tried one after another, before the joints brake."""


@dataclass(frozen=True)
class Held:
    """Where an arm is to be held."""

    target: Array
    over_s: float = 0.0
    """The reference comes to rest there within this time; 0: at once."""


class TargetSpace(Protocol):
    """What targets are."""

    space: Space

    def prepare(self) -> None:
        """Load what takes seconds, before anything moves; twice is harmless.

        Raises:
            MissingDependencyError: it is not installed.
            SimulatorError: it has the wrong version.
        """
        ...

    def begin(self, state: ArmState) -> None:
        """Control begins where the arm is."""
        ...

    def place(self, state: ArmState) -> Array:
        """Return where the arm is."""
        ...

    def first(self, last: Array | None, state: ArmState) -> Array:
        """Return the first target of a controller.

        Raises:
            RefusalError: the arm is outside of what is allowed.
        """
        ...

    def held(self, last: Array | None, state: ArmState) -> Held:
        """Return where the arm is held."""
        ...

    def rested(self, last: Array) -> Held | None:
        """Return where a reference comes to rest that no target follows; None: it rests."""
        ...

    def limit(self, action: Array, state: ArmState, last: Array, pace: float) -> LimitedTarget:
        """Return the target that is commanded for the motion of an action.

        Args:
            action: Finite numbers.
            state: Where the arm is.
            last: Target before.
            pace: Share of the speed.

        Raises:
            RefusalError: nothing may be commanded.
        """
        ...


class HandSpace:
    """Poses of the hand, (4, 4).

    Args:
        config: Limits and scales.
    """

    space = Space.HAND

    def __init__(self, config: FrankaConfig) -> None:
        self._config = config
        self._workspace = Workspace(config)

    def prepare(self) -> None:
        """Do nothing."""

    def begin(self, state: ArmState) -> None:
        """Do nothing."""

    def place(self, state: ArmState) -> Array:
        """Return the hand's pose."""
        return state.pose

    def first(self, last: Array | None, state: ArmState) -> Array:
        """Return the pose that is kept, in the box."""
        target = self._workspace.clip(self._kept(last, state.pose))
        check_first_target(target, state.pose, self._config.limits)
        return target

    def held(self, last: Array | None, state: ArmState) -> Held:
        """Return the last pose where the hand is about there already, else where it is."""
        target = self._workspace.clip(self._kept(last, state.pose))
        if distance_between(target, state.pose) > self._config.limits.margin_m:
            target = state.pose
        return Held(target)

    def rested(self, last: Array) -> Held | None:
        """Return None: every target is a place to rest."""
        return None

    def limit(self, action: Array, state: ArmState, last: Array, pace: float) -> LimitedTarget:
        """Return what the limits leave of a step."""
        anchor = last if self._config.action.anchor == "target" else state.pose
        step = pace * np.clip(action, -1.0, 1.0)
        desired = desired_pose(anchor, step, self._config.action)
        return self._workspace.limit(desired, state.pose, last)

    def _kept(self, last: Array | None, pose: Array) -> Array:
        """Return the last target where the arm is about there already, else where it is."""
        if last is None or self._config.action.anchor == "measured":
            return pose
        near = distance_between(last, pose) <= _HOLD_M and angle_between(last, pose) <= _HOLD_RAD
        return last if near else pose


class JointSpace:
    """Joint angles, (7,), rad.

    Targets are points of a trapezoid of speed for each joint, from which the joints can always
    brake: within their box, and with the hand in the workspace and no link too near another on the
    way. So a policy that asks for something else, or falls silent, leaves the arm where it may be.

    Args:
        config: Limits.
    """

    space = Space.JOINTS

    def __init__(self, config: FrankaConfig) -> None:
        limits = config.limits
        self._limits = limits
        self._low, self._high = joint_box(config)
        self._period_s = config.period_s
        self._speed = np.array(limits.joint_speed_rad_s)
        self._change = limits.joint_acceleration_rad_s2 * config.period_s
        self._workspace = Workspace(config)
        self._collision: SelfCollision | None = None
        self._hand = np.eye(4)
        self._speeds = np.zeros(7)

    def prepare(self) -> None:
        """Load the shapes of the links."""
        if self._limits.self_collision_m > 0 and self._collision is None:
            self._collision = SelfCollision(self._limits.self_collision_m)

    def begin(self, state: ArmState) -> None:
        """Begin at rest, and learn from the arm where its hand is on its flange."""
        self._speeds = np.zeros(7)
        self._hand = np.linalg.inv(forward(state.joints, np.eye(4))) @ state.pose

    def place(self, state: ArmState) -> Array:
        """Return the joint angles."""
        return state.joints

    def first(self, last: Array | None, state: ArmState) -> Array:
        """Return the joints that are kept, in their box."""
        self._workspace.check_inside(state.pose)
        target = np.clip(self._kept(last, state.joints), self._low, self._high)
        away = float(np.abs(target - state.joints).max())
        if not away <= self._limits.first_rad:
            raise RefusalError(
                Abort.FIRST_TARGET,
                f"the first target lies {away:.2f} rad from the joints; allowed are "
                f"{self._limits.first_rad} rad",
            )
        return target

    def held(self, last: Array | None, state: ArmState) -> Held:
        """Return where the joints can brake to, where they follow; else where they are."""
        if last is None or float(np.abs(last - state.joints).max()) > self._limits.joint_step_rad:
            self._speeds = np.zeros(7)
            return Held(state.joints.copy())
        return self.rested(last) or Held(last)

    def rested(self, last: Array) -> Held | None:
        """Return where the joints come to rest."""
        if not self._speeds.any():
            return None
        way = [target for target, _ in self._braking(last, self._speeds)]
        self._speeds = np.zeros(7)
        return Held(way[-1], len(way) * self._period_s)

    def limit(self, action: Array, state: ArmState, last: Array, pace: float) -> LimitedTarget:
        """Return the next target on the way to joint angles."""
        limits, by = self._limits, []
        self._check_asked(action)
        self._check_measured(state, last)
        boxed = np.clip(action, self._low, self._high)
        if np.abs(boxed - action).max() > _ROUNDING_RAD:
            by.append("joints")
        # A target that runs ahead of an arm that is blocked would build up force.
        reach = limits.joint_step_rad
        goal = np.clip(boxed, state.joints - reach, state.joints + reach)
        if not np.array_equal(goal, boxed):
            by.append("step")
        allowed = self._shortfalls(last)
        for share in _SHARES:
            target, speeds, cut = self._next(last, last + share * (goal - last), pace)
            short = self._worst(target, speeds)
            if (short <= allowed + 1e-9).all():
                return self._taken(target, speeds, (*by, *cut, *(() if share == 1.0 else ("way",))))
        target, speeds = next(self._braking(last, self._speeds), (last, np.zeros(7)))
        first = "workspace" if short[0] > allowed[0] + 1e-9 else "self_collision"
        return self._taken(target, speeds, (*by, first))

    def _taken(self, target: Array, speeds: Array, by: tuple[str, ...]) -> LimitedTarget:
        self._speeds = speeds
        return LimitedTarget(target, by, speeds)

    def _kept(self, last: Array | None, joints: Array) -> Array:
        if last is None or float(np.abs(last - joints).max()) > _HOLD_RAD:
            return joints
        return last

    def _check_asked(self, asked: Array) -> None:
        low, high = np.array(self._limits.joints_low), np.array(self._limits.joints_high)
        beyond = np.maximum(low - asked, asked - high)
        worst = int(np.argmax(beyond))
        if not beyond[worst] <= _ROUNDING_RAD:
            raise RefusalError(
                Abort.INVALID_ACTION,
                f"joint {worst + 1} is asked for {asked[worst]:.3f} rad, which the arm does not "
                f"have; allowed are {low[worst]} to {high[worst]} rad, measured from zero and not "
                "from where the arm is",
            )

    def _check_measured(self, state: ArmState, last: Array) -> None:
        self._workspace.check_inside(state.pose)
        away = np.abs(state.joints - last)
        if not away.max() <= self._limits.joint_lag_rad:
            raise RefusalError(
                Abort.NOT_FOLLOWING,
                f"joint {int(np.argmax(away)) + 1} is {away.max():.2f} rad from its last target; "
                f"allowed are {self._limits.joint_lag_rad} rad",
            )

    def _next(self, at: Array, goal: Array, pace: float) -> tuple[Array, Array, tuple[str, ...]]:
        """Return target, speeds (7,) and what cut them: one period on, towards ``goal``.

        A joint goes as fast as it may that can still brake before its goal.
        """
        period, change, before = self._period_s, self._change, self._speeds
        away = (goal - at) / (change * period) - before / (2 * change)
        whole = np.floor((np.sqrt(1 + 8 * np.abs(away)) - 1) / 2)
        part = (np.abs(away) - whole * (whole + 1) / 2) / (whole + 1)
        wished = np.sign(away) * (whole + part) * change
        fastest = pace * self._speed
        low, high = before - change, before + change
        speeds = np.clip(np.clip(wished, -fastest, fastest), low, high)
        cut = ("speed",) if (np.abs(wished) > fastest).any() else ()
        hand = posture(at, self._hand).jacobian @ speeds
        limits = self._limits
        share = max(
            float(np.linalg.norm(hand[:3])) / (pace * limits.speed_m_s),
            float(np.linalg.norm(hand[3:])) / (pace * limits.turn_rad_s),
        )
        if share > 1.0:
            speeds, cut = np.clip(speeds / share, low, high), ("speed",)
        return at + (before + speeds) / 2 * period, speeds, cut

    def _braking(self, at: Array, speeds: Array) -> Iterator[tuple[Array, Array]]:
        """Yield targets and speeds until the joints rest."""
        while speeds.any():
            slower = np.sign(speeds) * np.maximum(np.abs(speeds) - self._change, 0.0)
            at, speeds = at + (speeds + slower) / 2 * self._period_s, slower
            yield at, speeds

    def _worst(self, target: Array, speeds: Array) -> Array:
        """Return the largest shortfalls (2,) at a target and while braking from it."""
        places = [target, *(at for at, _ in self._braking(target, speeds))]
        return np.max([self._shortfalls(at) for at in places], axis=0)  # type: ignore[no-any-return]

    def _shortfalls(self, joints: Array) -> Array:
        """Return how far the hand is outside its box (m or rad), and links too near (m), (2,)."""
        outside = self._workspace.excess(forward(joints, self._hand))
        near = 0.0 if self._collision is None else self._collision.deficit_m(joints)
        return np.array([outside, near])


def joint_box(config: FrankaConfig) -> tuple[Array, Array]:
    """Return lowest and highest joint angles (7,) of a target, rad."""
    limits, room = config.limits, config.limits.joint_room_rad
    return np.array(limits.joints_low) + room, np.array(limits.joints_high) - room


def target_space(motion: str, config: FrankaConfig) -> TargetSpace:
    """Return the space of a motion of :data:`dzrobot.envs.franka.quantities.MOTIONS`.

    Raises:
        ConfigError: the workcell's controller cannot follow it.
    """
    if motion != "joint_position":
        return HandSpace(config)
    if config.controller.kind != "impedance":
        raise ConfigError(
            f"{config.embodiment!r} commands joint angles, which controller.kind="
            f"{config.controller.kind!r} does not follow: set it to impedance"
        )
    return JointSpace(config)
