"""Limits that every command must pass, as pure functions, and when a driver ends a motion itself.

Targets are limited in *box coordinates*: position (m) in the base frame, then roll, pitch and yaw
(rad) about the base axes, measured from the reset orientation. In them the workspace is a box, so
every point between two allowed targets is allowed. Angles near half a turn, as of
a hand that points down, do not wrap there.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dzrobot.envs.franka.franka_config import FrankaConfig, LimitsConfig
from dzrobot.envs.franka.safeguards.stop_file import stop_stands
from dzrobot.envs.panda.poses import Array, angle_between, euler_of, rotation_of
from dzrobot.errors import SafetyError, StoppedError

_BISECTIONS = 24


class Abort(StrEnum):
    """Why an episode was cut short; ``info["abort"]``."""

    NONE = ""
    INVALID_ACTION = "invalid_action"
    POLICY_ERROR = "policy_error"
    STALE_STATE = "stale_state"
    STALE_FRAME = "stale_frame"
    OUTSIDE = "outside_workspace"
    NOT_FOLLOWING = "not_following"
    FIRST_TARGET = "first_target"
    FORCE = "force"
    COLLISION = "collision"
    JOINT_LIMIT = "joint_limit"
    REFLEX = "reflex"
    USER_STOP = "user_stop"
    OPERATOR_STOP = "operator_stop"
    CONTROLLER = "controller"
    CONNECTION = "connection"
    GRIPPER = "gripper"
    PACKET_LOSS = "packet_loss"
    WATCHDOG = "watchdog"
    NOT_ARRIVED = "not_arrived"


SAFETY_STOPS = frozenset(
    {
        Abort.OUTSIDE,
        Abort.NOT_FOLLOWING,
        Abort.FIRST_TARGET,
        Abort.FORCE,
        Abort.COLLISION,
        Abort.JOINT_LIMIT,
        Abort.REFLEX,
        Abort.USER_STOP,
        Abort.OPERATOR_STOP,
        Abort.CONTROLLER,
        Abort.GRIPPER,
        Abort.NOT_ARRIVED,
    }
)
"""They end the run: a person looks before anything moves again, whoever may be there."""

HARDWARE_FAULTS = frozenset(
    {
        Abort.STALE_STATE,
        Abort.STALE_FRAME,
        Abort.CONNECTION,
        Abort.GRIPPER,
        Abort.PACKET_LOSS,
        Abort.WATCHDOG,
    }
)
"""What cameras, connection, hand or program did: no result of the policy."""

RECOVERS_ALONE = frozenset(
    {Abort.STALE_FRAME, Abort.WATCHDOG, Abort.INVALID_ACTION, Abort.POLICY_ERROR}
)
"""A lost frame, a slow policy, one that fails: what an unattended run may continue after."""

FAR = 1.5
"""Numbers of an action that lie this many times as far from the middle of their range as its ends
are refused; nearer ones are cut. Networks are trained on numbers within the range and overshoot it
a little: up to 1.22 times, measured on a trained policy. Wrong statistics give any number."""


class RefusalError(SafetyError):
    """A command that is not carried out, with the reason an episode ends by."""

    def __init__(self, abort: Abort, message: str) -> None:
        super().__init__(message)
        self.abort = abort


COLLISIONS = frozenset(
    {
        "joint_reflex",
        "cartesian_reflex",
        "force_control_safety_violation",
        "self_collision_avoidance_violation",
    }
)
"""Errors that mean contact: a person looks before anything moves again."""

RECOVERABLE = frozenset(
    {
        "communication_constraints_violation",
        "joint_velocity_violation",
        "cartesian_velocity_violation",
        "joint_motion_generator_velocity_limits_violation",
        "joint_motion_generator_velocity_discontinuity",
        "joint_motion_generator_acceleration_discontinuity",
        "cartesian_motion_generator_velocity_limits_violation",
        "cartesian_motion_generator_velocity_discontinuity",
        "cartesian_motion_generator_acceleration_discontinuity",
        "cartesian_motion_generator_joint_velocity_limits_violation",
        "cartesian_motion_generator_joint_velocity_discontinuity",
        "cartesian_motion_generator_joint_acceleration_discontinuity",
        "controller_torque_discontinuity",
    }
)
"""Errors of timing and smoothness: nothing was touched, so the episode may continue, slower."""


def classify(errors: Collection[str]) -> Abort:
    """Return how errors end an episode; ``Abort.NONE`` when all of them may be recovered from."""
    if set(errors) & COLLISIONS:
        return Abort.COLLISION
    if errors and set(errors) <= RECOVERABLE:
        return Abort.NONE
    return Abort.REFLEX


def check_shape(action: ArrayLike, dim: int, description: str) -> Array:
    """Return ``action`` as (dim,) float64.

    Args:
        action: Numbers.
        dim: How many there have to be.
        description: What an action is, for the error.

    Raises:
        SafetyError: it has another shape or is no number.
    """
    try:
        values = np.asarray(action, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, of a tensor with a gradient
        raise SafetyError(f"{description}; got {action!r}") from error
    if values.shape != (dim,):
        raise SafetyError(f"{description}; got shape {values.shape}")
    return values


def check_finite(values: Array) -> Array:
    """Return the action as it is.

    Raises:
        RefusalError: a number is NaN or infinite.
    """
    if not np.isfinite(values).all():
        raise RefusalError(Abort.INVALID_ACTION, f"an action holds a non-finite number: {values}")
    return values


def check_near(values: Array, low: ArrayLike, high: ArrayLike, what: str) -> None:
    """Check that numbers of an action lie in their range, or near it.

    Args:
        values: Finite numbers (n,).
        low: Lowest of each.
        high: Highest of each.
        what: What they are, for the message.

    Raises:
        RefusalError: one lies far outside; see :data:`FAR`.
    """
    middle, half = np.add(low, high) / 2, np.subtract(high, low) / 2
    beyond = np.abs(values - middle) / half
    worst = int(np.argmax(beyond))
    if not beyond[worst] <= FAR:
        edge = np.broadcast_to(middle + np.sign(values[worst] - middle) * half, values.shape)[worst]
        raise RefusalError(
            Abort.INVALID_ACTION,
            f"number {worst + 1} of {what} is {values[worst]:.4g}; its range ends at {edge:g}, and "
            f"allowed is at most {FAR:g} times as far: are the policy's statistics those of this "
            "robot?",
        )


def check_fresh(state_age_s: float, frame_ages_s: Collection[float], limits: LimitsConfig) -> None:
    """Raise :class:`RefusalError` when what the action was chosen from is too old (s)."""
    # Comparisons are written so that a NaN age counts as too old.
    if not state_age_s <= limits.state_age_s:
        raise RefusalError(
            Abort.STALE_STATE,
            f"the arm's state is {state_age_s:.2f} s old, allowed are {limits.state_age_s} s",
        )
    for age in frame_ages_s:
        if not age <= limits.frame_age_s:
            raise RefusalError(
                Abort.STALE_FRAME,
                f"a camera frame is {age:.2f} s old, allowed are {limits.frame_age_s} s",
            )


def check_contact(force_n: Array, torque_nm: Array, limits: LimitsConfig) -> None:
    """Raise :class:`RefusalError` when the external force (3,) or torque (3,) is too high."""
    force, torque = float(np.linalg.norm(force_n)), float(np.linalg.norm(torque_nm))
    if not (force <= limits.force_n and torque <= limits.torque_nm):
        raise RefusalError(
            Abort.FORCE,
            f"{force:.0f} N and {torque:.1f} Nm at the hand; allowed are {limits.force_n} N and "
            f"{limits.torque_nm} Nm",
        )


def check_joints(joints: Array, limits: LimitsConfig) -> None:
    """Raise :class:`RefusalError` when a joint (7,) has come too close to its limit."""
    room = np.minimum(joints - limits.joints_low, np.array(limits.joints_high) - joints)
    nearest = int(np.argmin(room))
    if not room[nearest] > limits.joint_margin_rad:
        raise RefusalError(
            Abort.JOINT_LIMIT,
            f"joint {nearest + 1} is {room[nearest]:.3f} rad from its limit; allowed are "
            f"{limits.joint_margin_rad} rad",
        )


def check_first_target(target: Array, measured: Array, limits: LimitsConfig) -> None:
    """Raise :class:`RefusalError` when a first target is far from the measured pose."""
    meters = float(np.linalg.norm(target[:3, 3] - measured[:3, 3]))
    radians = angle_between(measured, target)
    if not (meters <= limits.first_m and radians <= limits.first_rad):
        raise RefusalError(
            Abort.FIRST_TARGET,
            f"the first target lies {meters:.3f} m and {radians:.2f} rad from the arm; allowed are "
            f"{limits.first_m} m and {limits.first_rad} rad",
        )


class CommandTimeout(StrEnum):
    """What a lack of actions calls for."""

    NONE = "none"
    HOLD = "hold"
    STOP = "stop"


def on_silence(seconds: float, limits: LimitsConfig) -> CommandTimeout:
    """Return what ``seconds`` without an action call for."""
    if seconds >= limits.stop_after_s:
        return CommandTimeout.STOP
    return CommandTimeout.HOLD if seconds >= limits.hold_after_s else CommandTimeout.NONE


@dataclass(frozen=True)
class SlewLimits:
    """How far a target may be from the measured pose (step) and from the target before (call)."""

    step_m: float
    step_rad: float
    call_m: float
    call_rad: float
    lag_m: float
    lag_rad: float
    """How far the arm may be from its last target before it counts as not following."""

    @classmethod
    def of(cls, config: FrankaConfig) -> "SlewLimits":
        """Return the slew limits of one period; of distance and speed the smaller counts."""
        limits, period = config.limits, config.period_s
        step, call = (limits.step_m, limits.step_rad), (limits.call_m, limits.call_rad)
        paced = (limits.speed_m_s * period, limits.turn_rad_s * period)
        # Speed is how fast the target leaves what an action is measured from.
        if config.action.anchor == "target":
            call = (min(call[0], paced[0]), min(call[1], paced[1]))
        else:
            step = (min(step[0], paced[0]), min(step[1], paced[1]))
        return cls(*step, *call, limits.call_m, limits.call_rad)


@dataclass(frozen=True)
class LimitedTarget:
    """A target that may be commanded, and what it was limited by."""

    target: Array
    by: tuple[str, ...]
    speeds: Array | None = None
    """Speeds of the joints (7,) at the target, rad/s. None: the target is a pose."""

    compliant: bool = False
    """Whether the arm is compliant there, for hand guiding; see ``Space.GUIDED``."""

    motion: Array | None = None
    """What is carried out of the action's motion, in its numbers: cut to their range, at the pace.
    Other limits move the target. None: all of it."""

    executed_action: NDArray[np.float32] | None = None
    """The action (A,) that is carried out, or that leads to where a person has brought the arm;
    None: the one that was asked for."""

    def carrying_out(
        self, action: Array, motion_at: slice, gripper_at: int, gripper: float
    ) -> Self:
        """Return this with the action (A,) that is carried out, where ``action`` is not that.

        Args:
            action: As it was asked for.
            motion_at: Where its motion is.
            gripper_at: Where its number for the gripper is.
            gripper: What is carried out of that number.
        """
        executed = action.copy()
        executed[gripper_at] = gripper
        if self.motion is not None:
            executed[motion_at] = self.motion
        if np.array_equal(executed, action):
            return self
        return replace(self, executed_action=executed.astype(np.float32))


class Workspace:
    """The box that holds every target, and the slew limits within it."""

    def __init__(self, config: FrankaConfig) -> None:
        limits = config.limits
        tilt = np.array(limits.tilt)
        self._home = config.reset.pose[:3, :3]
        self._low = np.concatenate([limits.workspace_low, -tilt])
        self._high = np.concatenate([limits.workspace_high, tilt])
        self._margin_m = limits.margin_m
        self._reach = SlewLimits.of(config)

    def coordinates(self, pose: Array) -> Array:
        """Return the box coordinates (6,) of a pose."""
        return np.concatenate([pose[:3, 3], euler_of(pose[:3, :3] @ self._home.T)])

    def pose(self, coordinates: Array) -> Array:
        """Return the pose at box coordinates (6,)."""
        pose = np.eye(4)
        pose[:3, :3] = rotation_of(coordinates[3:]) @ self._home
        pose[:3, 3] = coordinates[:3]
        return pose

    def clip(self, pose: Array) -> Array:
        """Return the pose moved into the box."""
        return self.pose(self._clipped(pose))

    def contains(self, pose: Array, slack: float = 1e-9) -> bool:
        """Return whether a pose lies in the box, up to ``slack`` in meters and radians."""
        place = self.coordinates(pose)
        return bool(((place >= self._low - slack) & (place <= self._high + slack)).all())

    def limit(self, desired: Array, measured: Array, last: Array) -> LimitedTarget:
        """Return the target nearest to ``desired`` that every limit allows.

        Args:
            desired: Pose that the policy asks for.
            measured: Pose the arm is at.
            last: Target before; lies in the box.

        Raises:
            RefusalError: the arm is outside its workspace, or lags too far behind the last target.
        """
        self.check_inside(measured)
        self._check_lag(measured, last)
        reasons = []
        wanted = self.coordinates(desired)
        goal = self._clipped(desired)
        if not np.allclose(goal, wanted, atol=1e-9):
            reasons.append("workspace")
        before, here = self._clipped(last), self._clipped(measured)
        slewed = _between(before, goal, self._reach.call_m, self._reach.call_rad)
        if not np.array_equal(slewed, goal):
            reasons.append("call")
        stepped = _between(here, slewed, self._reach.step_m, self._reach.step_rad)
        if not np.array_equal(stepped, slewed):
            reasons.append("step")
        if not _within(before, stepped, self._reach.call_m, self._reach.call_rad):
            # Where both limits cannot be met at once, the target comes closer to the arm as fast as
            # it may.
            closer = _between(before, stepped, self._reach.call_m, self._reach.call_rad)
            return LimitedTarget(self.pose(closer), (*reasons, "hold"))
        return LimitedTarget(self.pose(stepped), tuple(reasons))

    def excess(self, pose: Array) -> float:
        """Return how far a pose lies outside the box (m or rad); 0: it lies in it."""
        place = self.coordinates(pose)
        return max(0.0, float((self._low - place).max()), float((place - self._high).max()))

    def check_inside(self, measured: Array) -> None:
        """Raise :class:`RefusalError` when the hand is outside the box, by more than its margin."""
        outside = float(np.linalg.norm(measured[:3, 3] - self._clipped(measured)[:3]))
        if not outside <= self._margin_m:
            raise RefusalError(
                Abort.OUTSIDE,
                f"the hand is {outside:.3f} m outside the workspace; allowed are "
                f"{self._margin_m} m",
            )

    def _check_lag(self, measured: Array, last: Array) -> None:
        lag_m = float(np.linalg.norm(measured[:3, 3] - last[:3, 3]))
        lag_rad = angle_between(last, measured)
        if not (lag_m <= self._reach.lag_m and lag_rad <= self._reach.lag_rad):
            raise RefusalError(
                Abort.NOT_FOLLOWING,
                f"the arm is {lag_m:.3f} m and {lag_rad:.2f} rad from its last target; allowed are "
                f"{self._reach.lag_m} m and {self._reach.lag_rad} rad",
            )

    def _clipped(self, pose: Array) -> Array:
        return np.clip(self.coordinates(pose), self._low, self._high)


def _between(start: Array, goal: Array, meters: float, radians: float) -> Array:
    """Return the point between ``start`` and ``goal`` that both limits allow."""
    place = goal.copy()
    offset = goal[:3] - start[:3]
    length = float(np.linalg.norm(offset))
    if length > meters:
        place[:3] = start[:3] + offset * (meters / length)
    if _angle(start, goal) > radians:
        allowed, refused = 0.0, 1.0
        for _ in range(_BISECTIONS):
            share = (allowed + refused) / 2
            place[3:] = start[3:] + share * (goal[3:] - start[3:])
            allowed, refused = (
                (share, refused) if _angle(start, place) <= radians else (allowed, share)
            )
        place[3:] = start[3:] + allowed * (goal[3:] - start[3:])
    return place


def _within(start: Array, goal: Array, meters: float, radians: float) -> bool:
    distance = float(np.linalg.norm(goal[:3] - start[:3]))
    return distance <= meters + 1e-9 and _angle(start, goal) <= radians + 1e-9


def _angle(first: Array, second: Array) -> float:
    return angle_between(rotation_of(first[3:]), rotation_of(second[3:]))


class MotionGuard:
    """Watches the stop, and how long the program has been silent; all times are the arm's.

    Args:
        limits: How long the program may be silent.
        stop: File of the arm's stop. None: there is none.
    """

    def __init__(self, limits: LimitsConfig, stop: Path | None) -> None:
        self._limits = limits
        self._stop = stop
        self.stopped = False
        """Whether a stop has stood since the motion began."""

        self._heard_s = 0.0
        self._done = CommandTimeout.NONE

    def begin(self, now_s: float) -> None:
        """Begin a motion.

        Raises:
            StoppedError: a stop stands.
        """
        self.stopped = False
        self.check()
        self.hear(now_s)

    def hear(self, now_s: float) -> None:
        """Note that the program has spoken."""
        self._heard_s = now_s
        if not self.stopped:
            self._done = CommandTimeout.NONE

    def check(self) -> None:
        """Raise :class:`StoppedError` if a stop stands, or stood since the motion began."""
        if self.stopped or self._stands():
            raise StoppedError("the arm was stopped; its driver holds it")

    def due(self, now_s: float) -> CommandTimeout:
        """Return what is to be done now; each thing is asked for once."""
        silent_s = now_s - self._heard_s
        if silent_s >= self._limits.stop_after_s:
            due = CommandTimeout.STOP
        elif self._stands():
            # It lasts until the next motion, though somebody else may acknowledge it before the
            # program has seen it.
            self.stopped, due = True, CommandTimeout.HOLD
        elif silent_s >= self._limits.deadman_s:
            due = CommandTimeout.HOLD
        else:
            due = CommandTimeout.NONE
        if due in (CommandTimeout.NONE, self._done):
            return CommandTimeout.NONE
        self._done = due
        return due

    def _stands(self) -> bool:
        return self._stop is not None and stop_stands(self._stop)
