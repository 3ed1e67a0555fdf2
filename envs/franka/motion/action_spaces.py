"""The spaces that targets are commanded in: Cartesian poses of the hand, or joint angles.

Each space limits an action to a target, finds the arm's position in it, and holds the arm there.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dzrobot.envs.franka.arm_model import forward, pose_and_jacobian
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.motion.reach import solve_joints
from dzrobot.envs.franka.safeguards.limits import (
    Abort,
    LimitedTarget,
    RefusalError,
    Workspace,
    check_first_target,
    check_near,
)
from dzrobot.envs.franka.safeguards.self_collision import SelfCollision, collision_of
from dzrobot.envs.franka.workcells import Space
from dzrobot.envs.panda.joint_targets import JointProfile
from dzrobot.envs.panda.poses import (
    Array,
    angle_between,
    between,
    distance_between,
    pose_of,
    rotation_of_quaternion,
    towards,
)
from dzrobot.envs.panda.state import ArmState, desired_pose
from dzrobot.errors import ConfigError

_HOLD_M, _HOLD_RAD = 0.01, 0.05
"""A target this near is held by keeping it: an arm that sags must not be followed down."""

_ROUNDING_RAD = 1e-5
_ROUNDING = 1e-5
"""Rounding of a number of an action."""

_SHARES = (1.0, 0.5, 0.2)
"""Shares of a requested motion that are tried in turn before the joints brake."""

SHORTFALLS = ("workspace", "self_collision", "obstacle")
"""What targets of joints keep besides their own limits: the hand's box, and distances of links."""

_LONGEST_ARM_M = 1.25
"""The grasp point is never farther from the base."""

_UNIT = 0.1
"""How far the length of a quaternion may be from 1: a network's is not exact."""


@dataclass(frozen=True)
class Held:
    """Where an arm is to be held."""

    target: Array
    over_s: float = 0.0
    """The reference comes to rest there within this time; 0: at once."""


class TargetSpace(Protocol):
    """What targets are."""

    space: Space
    collision: SelfCollision | None
    """Measures distances that must be kept; None if there are none, and before :meth:`prepare`."""

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

        Args:
            last: Target before, of this space or of the one before. None: there is none.
            state: Where the arm is.

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

    def check(self, action: Array) -> None:
        """Check the motion of an action before anything of it is carried out.

        Raises:
            RefusalError: it is far outside of what an action can be.
        """
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


class CartesianSpace:
    """Poses of the hand, (4, 4), that actions move on from the one before.

    Where there are obstacles, the joints that lead to a target are solved for, from those measured.

    Args:
        config: Limits and scales.
    """

    space = Space.CARTESIAN

    def __init__(self, config: FrankaConfig) -> None:
        self._config = config
        self._workspace = Workspace(config)
        self.collision: SelfCollision | None = None
        self._flange_to_ee = np.eye(4)

    def prepare(self) -> None:
        """Load the shapes of the links, where there are obstacles."""
        if self.collision is None:
            self.collision = collision_of(self._config.limits, links=False)

    def begin(self, state: ArmState) -> None:
        """Learn from the arm where its hand is on its flange."""
        self._flange_to_ee = state.flange_to_ee

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

    def check(self, action: Array) -> None:
        """Refuse a step far beyond the largest."""
        check_near(action, -1.0, 1.0, "a step of the hand")

    def limit(self, action: Array, state: ArmState, last: Array, pace: float) -> LimitedTarget:
        """Return what the limits leave of a step."""
        self.check(action)
        anchor = last if self._config.action.anchor == "target" else state.pose
        within = np.clip(action, -1.0, 1.0)
        cut = ("action",) if np.abs(within - action).max() > _ROUNDING else ()
        desired = desired_pose(anchor, pace * within, self._config.action)
        limited = self._clear(self._workspace.limit(desired, state.pose, last), state, last)
        return replace(limited, by=(*cut, *limited.by), motion=pace * within)

    def _clear(self, limited: LimitedTarget, state: ArmState, last: Array) -> LimitedTarget:
        """Return the target, or as much of the motion to it as keeps links clear of obstacles."""
        if self.collision is None:
            return limited
        _, allowed = self.collision.deficits_m(state.joints)
        for share in (*_SHARES, 0.0):
            target = limited.target
            cut: tuple[str, ...] = ()
            if share < 1.0:
                target = self._workspace.clip(between(last, target, share))
                cut = ("path",) if share else ("obstacle",)
            joints = solve_joints(state.joints, target, self._flange_to_ee)
            if joints is not None and self.collision.deficits_m(joints)[1] <= allowed + 1e-9:
                return LimitedTarget(target, (*limited.by, *cut))
        # Where the arm is, nothing is nearer than it is.
        return LimitedTarget(self._workspace.clip(state.pose), (*limited.by, "obstacle"))

    def _kept(self, last: Array | None, pose: Array) -> Array:
        """Return the last target where the arm is about there already, else where it is."""
        if last is None or last.ndim != 2 or self._config.action.anchor == "measured":
            return pose
        near = distance_between(last, pose) <= _HOLD_M and angle_between(last, pose) <= _HOLD_RAD
        return last if near else pose


class PoseSpace(CartesianSpace):
    """Poses of the hand, (4, 4), that actions name: position, and angles or a quaternion.

    The target goes there no faster than the limits of speed allow.

    Args:
        config: Limits.
    """

    def __init__(self, config: FrankaConfig) -> None:
        # There is nothing that an action would be measured from; targets follow each other.
        action = config.action.model_copy(update={"anchor": "target"})
        super().__init__(config.model_copy(update={"action": action}))

    def check(self, action: Array) -> None:
        """Refuse a pose that no hand can have."""
        _requested_pose(action)

    def limit(self, action: Array, state: ArmState, last: Array, pace: float) -> LimitedTarget:
        """Return the next target towards a pose."""
        requested = _requested_pose(action)
        limits, period = self._config.limits, self._config.period_s
        near = towards(
            last, requested, meters=pace * limits.speed_m_s * period,
            radians=pace * limits.turn_rad_s * period,
        )  # fmt: skip
        limited = self._workspace.limit(near, state.pose, last)
        if not np.array_equal(near, requested):
            limited = LimitedTarget(limited.target, ("speed", *limited.by))
        return self._clear(limited, state, last)


class JointSpace:
    """Joint angles, (7,), rad.

    Targets are points of a trapezoid of speed for each joint, from which the joints can always
    brake: within their box, and with the hand in the workspace and no link too near another on the
    path. So a policy that asks for something else, or falls silent, leaves the arm where it may be.

    Args:
        config: Limits.
    """

    space = Space.JOINTS

    def __init__(self, config: FrankaConfig) -> None:
        limits = config.limits
        self._limits = limits
        self._low, self._high = joint_box(config)
        self._profile = JointProfile(
            period_s=config.period_s,
            speed=np.array(limits.joint_speed_rad_s),
            acceleration=limits.joint_acceleration_rad_s2,
            hand_speed_m_s=limits.speed_m_s,
            hand_turn_rad_s=limits.turn_rad_s,
        )
        self._workspace = Workspace(config)
        self.collision: SelfCollision | None = None
        self._flange_to_ee = np.eye(4)
        self._speeds = np.zeros(7)

    def prepare(self) -> None:
        """Load the shapes of the links."""
        if self.collision is None:
            self.collision = collision_of(self._limits, links=True)

    def begin(self, state: ArmState) -> None:
        """Begin at rest, and learn from the arm where its hand is on its flange."""
        self._speeds = np.zeros(7)
        self._flange_to_ee = state.flange_to_ee

    def place(self, state: ArmState) -> Array:
        """Return the joint angles."""
        return state.joints

    def first(self, last: Array | None, state: ArmState) -> Array:
        """Return the joints that are kept, in their box."""
        self._workspace.check_inside(state.pose)
        if last is not None and last.ndim == 2:
            # The joints that lead to the pose before: a loaded arm hangs a little below both.
            near = distance_between(last, state.pose) <= self._limits.first_m
            last = solve_joints(state.joints, last, self._flange_to_ee) if near else None
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
        stops = [target for target, _ in self._profile.braking(last, self._speeds)]
        self._speeds = np.zeros(7)
        return Held(stops[-1], len(stops) * self._profile.period_s)

    def limit(self, action: Array, state: ArmState, last: Array, pace: float) -> LimitedTarget:
        """Return the next target towards joint angles."""
        limits, by = self._limits, []
        self.check(action)
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
                cut = (*by, *cut, *(() if share == 1.0 else ("path",)))
                return replace(self._taken(target, speeds, cut), motion=boxed)
        target, speeds = next(self._profile.braking(last, self._speeds), (last, np.zeros(7)))
        first = SHORTFALLS[int(np.argmax(short > allowed + 1e-9))]
        return replace(self._taken(target, speeds, (*by, first)), motion=boxed)

    def _taken(self, target: Array, speeds: Array, by: tuple[str, ...]) -> LimitedTarget:
        self._speeds = speeds
        return LimitedTarget(target, by, speeds)

    def _kept(self, last: Array | None, joints: Array) -> Array:
        if last is None or float(np.abs(last - joints).max()) > _HOLD_RAD:
            return joints
        return last

    def check(self, action: Array) -> None:
        """Refuse an angle that the arm does not have."""
        low, high = np.array(self._limits.joints_low), np.array(self._limits.joints_high)
        beyond = np.maximum(low - action, action - high)
        worst = int(np.argmax(beyond))
        if not beyond[worst] <= _ROUNDING_RAD:
            raise RefusalError(
                Abort.INVALID_ACTION,
                f"joint {worst + 1} is asked for {action[worst]:.3f} rad, which the arm "
                f"does not have; allowed are {low[worst]} to {high[worst]} rad, from zero and not "
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
        """Return target, speeds (7,) and what cut them: one period on, towards ``goal``."""
        jacobian = pose_and_jacobian(at, self._flange_to_ee)[1]
        target, speeds, is_cut = self._profile.towards(at, goal, self._speeds, jacobian, pace)
        return target, speeds, ("speed",) if is_cut else ()

    def _worst(self, target: Array, speeds: Array) -> Array:
        """Return the largest shortfalls (3,) at a target and while braking from it."""
        places = [target, *(at for at, _ in self._profile.braking(target, speeds))]
        return np.max([self._shortfalls(at) for at in places], axis=0)  # type: ignore[no-any-return]

    def _shortfalls(self, joints: Array) -> Array:
        """Return by how much each of :data:`SHORTFALLS` is not kept (m or rad), (3,)."""
        outside = self._workspace.excess(forward(joints, self._flange_to_ee))
        near = (0.0, 0.0) if self.collision is None else self.collision.deficits_m(joints)
        return np.array([outside, *near])


def _requested_pose(action: Array) -> Array:
    """Return the pose (4, 4) that an action names: (6,) with angles, (7,) with a quaternion."""
    position, turn = action[:3], action[3:]
    away = float(np.linalg.norm(position))
    if not away <= _LONGEST_ARM_M:
        raise RefusalError(
            Abort.INVALID_ACTION,
            f"the hand is asked to be {away:.2f} m from the base, which the arm does not reach; "
            f"allowed are {_LONGEST_ARM_M} m: positions are in meters, from the base and not from "
            "where the hand is",
        )
    if len(turn) == 3:
        check_near(turn, -np.pi, np.pi, "roll, pitch and yaw")
        return pose_of(position, turn)
    length = float(np.linalg.norm(turn))
    if not abs(length - 1.0) <= _UNIT:
        raise RefusalError(
            Abort.INVALID_ACTION,
            f"a quaternion (x, y, z, w) of length {length:.2f} is asked for; allowed is 1, give or "
            f"take {_UNIT}",
        )
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation_of_quaternion(turn), position
    return pose


def joint_box(config: FrankaConfig) -> tuple[Array, Array]:
    """Return lowest and highest joint angles (7,) of a target, rad."""
    limits, room = config.limits, config.limits.joint_room_rad
    return np.array(limits.joints_low) + room, np.array(limits.joints_high) - room


def target_space(motion: str, config: FrankaConfig) -> TargetSpace:
    """Return the space of a motion of :data:`dzrobot.envs.panda.quantities.MOTIONS`.

    Raises:
        ConfigError: the workcell's controller cannot follow it.
    """
    if motion == "hand_step":
        return CartesianSpace(config)
    if motion != "joint_position":
        return PoseSpace(config)
    if config.controller.kind != "impedance":
        raise ConfigError(
            f"{config.embodiment!r} commands joint angles, which controller.kind="
            f"{config.controller.kind!r} does not follow: set it to impedance"
        )
    return JointSpace(config)
