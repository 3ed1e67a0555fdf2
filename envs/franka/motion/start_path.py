"""Before an episode: the gripper opens, and the path to the start is solved before it is taken."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dzrobot.envs.franka.arm_model import forward
from dzrobot.envs.franka.franka_config import (
    FrankaConfig,
    GripperConfig,
    LimitsConfig,
    ResetConfig,
)
from dzrobot.envs.franka.motion.reach import JointBox, solve_within
from dzrobot.envs.franka.operator.operator import ArmPhase, Consent
from dzrobot.envs.franka.safeguards.limits import Abort, RefusalError
from dzrobot.envs.franka.safeguards.self_collision import SelfCollision
from dzrobot.envs.franka.workcells import Clock, GripperDevice
from dzrobot.envs.panda.poses import (
    Array,
    angle_between,
    between,
    distance_between,
    is_within,
    pose_difference,
)
from dzrobot.envs.panda.state import ArmState, GripperState, Mode
from dzrobot.errors import RobotError

_SETTLED_M_S, _SETTLED_RAD_S = 0.01, 0.02
_STEP_M = 0.01
_STEP_RAD = 0.03
_FEWEST_STEPS = 10
"""Waypoints that are solved on a Cartesian path, however short."""

_SAME_M = 1e-6
_SAME_RAD = 1e-9
_NEAR_M, _LOWER_M = 0.1, 0.005
"""Less than the first above the floor of its workspace, a hand that goes home by the joints alone
may come lower than where it is by the second."""

_WHERE_IT_IS = 2e-3
"""How far (m and rad) an arm's pose may be from its joint angles, to be taken at its word."""

POLL_S = 0.02
"""How often moving fingers are checked."""


@dataclass(frozen=True)
class StartPath:
    """The path of a reset: the hand up, the joints home, the hand to its start."""

    clear: Array | None
    """Joint angles (7,) to bring the joints to first, away from their limits. None: they are."""

    lifted: Array
    """Pose (4, 4) that the hand rises to then; where it is, if it cannot rise."""

    waypoints: tuple[tuple[str, Array], ...]
    """Part of the path and joint angles (7,), in order."""

    def check_rising(self, state: ArmState, pressed: str) -> None:
        """Let a hand that is pressed onto something leave it before anything else moves.

        Args:
            state: Where the arm is.
            pressed: What :func:`check_resting` says of it; empty: it is not pressed.

        Raises:
            RobotError: it would move in another way first.
        """
        if pressed and not (self.clear is None and self.lifted[2, 3] > state.pose[2, 3]):
            raise RobotError(pressed)

    def is_clear(self, collision: SelfCollision | None, state: ArmState, *, last: bool) -> bool:
        """Return whether links keep their distances from each other and from obstacles.

        Links that are already closer than allowed may not come closer still.

        Args:
            collision: Measures distances. None: they are not looked at.
            state: Where the arm is.
            last: Whether there is no other path, so that it is an error instead.

        Raises:
            RobotError: two of them would come too close.
        """
        if collision is None:
            return True
        allowed = collision.deficits_m(state.joints)
        for part, place in self.waypoints:
            found = zip(collision.deficits_m(place), allowed, _KEPT, strict=True)
            for deficit, already, kept in found:
                if deficit <= already + _SAME_M:
                    continue
                if not last:
                    return False
                raise RobotError(
                    f"nothing has moved: on the way to the start ({part}) "
                    f"{collision.nearest(place)} would come {deficit:.3f} m nearer to each "
                    f"other than {kept} allows. Bring the arm by hand to where the way is "
                    "free, or change reset.joints, reset.lift_m or reset.position"
                )
        return True


_KEPT = ("limits.self_collision_m", "limits.obstacle_m of limits.obstacles")
"""What is to be kept, in the order of :meth:`SelfCollision.deficits_m`."""


def check_reach(state: ArmState, goal: Array, reset: ResetConfig) -> None:
    """Check that the arm can be moved now, and is near enough to its start (4, 4).

    Raises:
        RobotError: it cannot, or is farther than ``reset.reach_m``.
    """
    if state.mode in (Mode.GUIDING, Mode.OTHER):
        raise RobotError(f"the arm cannot be moved now; it says {state.description}")
    distance = distance_between(state.pose, goal)
    if not distance <= reset.reach_m:
        raise RobotError(
            f"the arm is {distance:.2f} m from its start pose, allowed are {reset.reach_m} m: "
            "bring it closer by hand"
        )


def check_unmoved(planned: ArmState, state: ArmState, limits: LimitsConfig) -> None:
    """Check that the arm is where its way to the start was planned from.

    Args:
        planned: What the way was planned from.
        state: Where the arm is when it begins to go that way.
        limits: Of a controller's first target.

    Raises:
        RobotError: it has moved since.
    """
    moved = distance_between(planned.pose, state.pose)
    turned = angle_between(planned.pose, state.pose)
    if not (moved <= limits.first_m and turned <= limits.first_rad):
        raise RobotError(
            f"the arm moved by {moved:.3f} m and {turned:.2f} rad while its way to the start was "
            f"planned; allowed are {limits.first_m} m and {limits.first_rad} rad: look at what "
            "moves it, and reset again"
        )


def kept_pose(last: Array | None, state: ArmState, config: FrankaConfig) -> Array:
    """Return the last target of the hand (4, 4) where it hangs near that, else where it is.

    A loaded hand hangs a little below its target, and is not followed down.
    """
    if last is None or last.ndim != 2:
        return state.pose
    first = config.limits.first_m, config.limits.first_rad
    return last if is_within(last, state.pose, first) else state.pose


def is_near(joints: Array, state: ArmState, reset: ResetConfig) -> bool:
    """Return whether the joints are at ``joints`` (7,), as near as a reset brings them."""
    return float(np.abs(state.joints - joints).max()) <= reset.joint_tolerance_rad


def rests(before: ArmState, state: ArmState) -> bool:
    """Return whether no joint moved between two states.

    The speeds that an arm reports are of one instant: a wrist that trembles by 1e-4 rad in every
    cycle of the controller has 0.1 rad/s in each of them, and rests.
    """
    passed = state.robot_time_s - before.robot_time_s
    moved = float(np.abs(state.joints - before.joints).max())
    return passed > 0 and moved < _SETTLED_RAD_S * passed


def hangs_still(before: ArmState, state: ArmState) -> bool:
    """Return whether the hand hangs still and no joint moved between two states."""
    return float(np.linalg.norm(state.twist[:3])) < _SETTLED_M_S / 2 and rests(before, state)


def arrived_within(reset: ResetConfig) -> tuple[float, float]:
    """Return how near the hand is brought to its start (m and rad)."""
    return reset.tolerance_m, reset.tolerance_rad


def risen_within(config: FrankaConfig) -> tuple[float, float]:
    """Return how near the hand is brought to where it rises to (m and rad).

    Beside a singularity friction holds it a little off, from where it goes on well.
    """
    limits, (meters, radians) = config.limits, arrived_within(config.reset)
    return max(limits.first_m, meters), max(limits.first_rad, radians)


def is_at(goal: Array, state: ArmState, within: tuple[float, float]) -> bool:
    """Return whether the hand rests at ``goal`` (4, 4), as near as ``within`` (m and rad)."""
    still = float(np.linalg.norm(state.twist[:3])) < _SETTLED_M_S
    return still and is_within(state.pose, goal, within)


def lifted_pose(pose: Array, goal: Array, config: FrankaConfig) -> Array:
    """Return where the hand rises to before it travels, (4, 4)."""
    lifted, lift_m = pose.copy(), config.reset.lift_m
    # Only as high as the workspace is, and not at all for short distances.
    if distance_between(pose, goal) > lift_m:
        top = max(config.limits.workspace_high[2], pose[2, 3])
        lifted[2, 3] = min(pose[2, 3] + lift_m, top)
    return lifted


def plan_start_path(
    state: ArmState,
    home: Array | None,
    goal: Array,
    config: FrankaConfig,
    collision: SelfCollision | None = None,
) -> StartPath:
    """Solve the path of a reset, within the joint limits and clear of the arm and of obstacles.

    Joints beside a limit leave it first. The hand then rises, or where that is not clear goes home
    by the joints alone.

    Args:
        state: Where the arm is.
        home: Joint angles (7,), rad, to pass through. None: the path is Cartesian throughout.
        goal: Pose (4, 4) of the start.
        config: Its joint limits.
        collision: Measures the distances that links keep. None: they are not looked at.

    Raises:
        RobotError: the start is out of reach, or the way to it is not clear; nothing has moved.
    """
    clear = _away_from_limits(state.joints, config)
    leaves = float(np.abs(clear - state.joints).max()) > _SAME_RAD
    began, leaving = state, []
    if leaves:
        began = replace(state, joints=clear, pose=forward(clear, state.flange_to_ee))
        leaving = _joint_path("away from a joint's limit", state.joints, clear)

    def solved(lifted: Array) -> StartPath:
        path = _solve_path(began, lifted, home, goal, config)
        return StartPath(clear if leaves else None, path.lifted, (*leaving, *path.waypoints))

    rising = solved(lifted_pose(began.pose, goal, config))
    direct = rising if home is None else solved(began.pose)
    ways = [rising] if home is None or _sinks(direct, state, config) else [rising, direct]
    if leaves:
        # The hand's own controller, which lifts it, may lead joints back to their limits.
        ways.reverse()
    return next(way for way in ways if way.is_clear(collision, state, last=way is ways[-1]))


def _away_from_limits(joints: Array, config: FrankaConfig) -> Array:
    """Return the nearest joint angles (7,) that keep ``limits.joint_room_rad``.

    A joint that the start itself brings nearer to its limit goes no farther from it than that.
    """
    limits, home = config.limits, config.reset.joints
    low = np.array(limits.joints_low) + limits.joint_room_rad
    high = np.array(limits.joints_high) - limits.joint_room_rad
    if home is not None:
        low, high = np.minimum(low, home), np.maximum(high, home)
    return np.clip(joints, low, high)


def _joint_path(part: str, start: Array, end: Array) -> list[tuple[str, Array]]:
    steps = max(1, int(np.ceil(np.abs(end - start).max() / _STEP_RAD)))
    return [(part, start + share * (end - start)) for share in np.linspace(0.0, 1.0, steps + 1)[1:]]


def _sinks(path: StartPath, state: ArmState, config: FrankaConfig) -> bool:
    """Return whether the hand would come lower than both its ends, near what it works on."""
    heights = [forward(place, state.flange_to_ee)[2, 3] for _, place in path.waypoints]
    lowest = min(heights)
    near = lowest < config.limits.workspace_low[2] + _NEAR_M
    return bool(near and lowest < min(state.pose[2, 3], heights[-1]) - _LOWER_M)


def _solve_path(
    state: ArmState, lifted: Array, home: Array | None, goal: Array, config: FrankaConfig
) -> StartPath:
    """Solve the path by inverse kinematics, within the joint limits.

    A joint that is nearer to a limit than ``limits.joint_room_rad`` may not come nearer still. The
    hand rises only as high as it can.

    Raises:
        RobotError: the start is out of reach.
    """
    solver = _PathSolver(state, config)
    start = solver.joints
    risen: list[tuple[str, Array]] = []
    waypoints: list[tuple[str, Array]] = []
    reached = state.pose
    for pose in _cartesian_path(state.pose, lifted):
        if not solver.go(pose):
            break
        risen.append(("up", solver.joints))
        # Beside a limit the controller pushes back, and the hand may not arrive.
        if solver.has_room:
            reached, waypoints = pose, list(risen)
    pose = reached
    solver.begin_at(waypoints[-1][1] if waypoints else start)
    if home is not None:
        waypoints += _joint_path("to reset.joints", solver.joints, home)
        solver.begin_at(home)
        pose = forward(home, state.flange_to_ee)
    for waypoint in _cartesian_path(pose, goal):
        if not solver.go(waypoint):
            raise out_of_reach("the way to reset.position cannot be followed", waypoint)
        waypoints.append(("to reset.position", solver.joints))
    return StartPath(None, reached, tuple(waypoints))


def out_of_reach(what: str, pose: Array) -> RobotError:
    """Return the error of a pose (4, 4) that no joint angles within the limits lead to."""
    place = ", ".join(f"{value:.3f}" for value in pose[:3, 3])
    return RobotError(
        f"out of reach: {what}; with this orientation no joint angles within limits.joints_low and "
        f"joints_high bring the hand to ({place}) m. Nothing has moved: bring the arm by hand to "
        "another place, or change reset.position, reset.euler or reset.joints"
    )


class _PathSolver:
    """Joint angles along a path of the hand, each from those before."""

    def __init__(self, state: ArmState, config: FrankaConfig) -> None:
        room = config.limits.joint_room_rad
        self._low = np.array(config.limits.joints_low) + room
        self._high = np.array(config.limits.joints_high) - room
        self._hand = state.flange_to_ee
        self._box = JointBox(
            np.minimum(self._low, state.joints), np.maximum(self._high, state.joints), state.joints
        )
        self.joints = state.joints
        away = pose_difference(state.pose, forward(state.joints, self._hand))
        if float(np.abs(away).max()) > _WHERE_IT_IS and not self.go(state.pose):
            raise out_of_reach("the arm is not where its joint angles say", state.pose)

    @property
    def has_room(self) -> bool:
        """Whether no joint is nearer to a limit than ``limits.joint_room_rad``."""
        slack = 1e-9
        return bool(
            ((self.joints >= self._low - slack) & (self.joints <= self._high + slack)).all()
        )

    def begin_at(self, joints: Array) -> None:
        """Go on from joint angles (7,), and keep the elbow as it is there."""
        self.joints, self._box = joints, replace(self._box, posture=joints)

    def go(self, pose: Array) -> bool:
        """Go on to a pose (4, 4); False where there is no solution."""
        found = solve_within(self.joints, pose, self._hand, self._box)
        if found is not None:
            self.joints = found
        return found is not None


def _cartesian_path(start: Array, end: Array) -> Iterator[Array]:
    steps = max(_FEWEST_STEPS, int(np.ceil(distance_between(start, end) / _STEP_M)))
    for share in np.linspace(0.0, 1.0, steps + 1)[1:]:
        yield between(start, end, float(share))


def home_gripper(gripper: GripperDevice, consent: Consent, config: GripperConfig) -> None:
    """Home a gripper that was never homed, if the operator or the workcell allows it.

    Raises:
        RobotError: no person can be asked, and the workcell does not allow it.
        StoppedError: the operator stopped the arm instead.
    """
    if gripper.state().is_homed:
        return
    if consent.is_asked:
        consent.confirm(
            ArmPhase.STAND_CLEAR,
            "The hand was never homed: its fingers will close and open all the way, once. Take "
            "everything from between them, press Enter.",
        )
    elif not config.homing:
        raise RobotError(
            "the gripper has not been homed, and no person can be asked: clear the fingers and "
            "set gripper: {homing: true}, which lets reset() move them all the way once, or "
            "home it in Desk"
        )
    consent.show(ArmPhase.MOVING, "homing the hand")
    gripper.home()


def rises_first(state: ArmState, hand: GripperState, config: FrankaConfig) -> bool:
    """Return whether an empty hand is so low that it rises before its fingers open."""
    above_m = float(state.pose[2, 3]) - config.limits.workspace_low[2]
    return above_m < config.reset.open_above_m and not hand.is_grasped


def open_gripper(
    gripper: GripperDevice, config: GripperConfig, clock: Clock, check_latch: Callable[[], None]
) -> None:
    """Open the gripper before the arm moves, so that what it holds is not carried along.

    Args:
        gripper: What is opened.
        config: Its timeout.
        clock: What the timeout is measured by.
        check_latch: Raises if an operator has stopped the arm.

    Raises:
        RefusalError: the gripper does not answer, or an operator has stopped the arm.
    """
    check_latch()
    gripper.request(opened=True)
    deadline = clock.now() + config.timeout_s
    while (state := gripper.state()).is_busy and clock.now() < deadline:
        check_latch()
        check_gripper(state, config)
        clock.sleep_until(clock.now() + POLL_S)
    check_gripper(state, config)


def check_gripper(state: GripperState, config: GripperConfig) -> None:
    """Raise :class:`RefusalError` if the gripper has a fault, or has not answered in time."""
    timeout = config.timeout_s
    if state.fault or state.waiting_s > timeout:
        fault = state.fault or f"the gripper has not answered for {timeout} s"
        raise RefusalError(Abort.GRIPPER, fault)
