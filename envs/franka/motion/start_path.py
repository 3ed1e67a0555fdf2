"""Before an episode: the gripper opens, and the path to the start keeps clear of obstacles."""

from collections.abc import Callable, Iterator

import numpy as np

from dzrobot.envs.franka.franka_config import GripperConfig
from dzrobot.envs.franka.motion.action_spaces import flange_to_ee_of, solve_joints
from dzrobot.envs.franka.operator.operator import ArmPhase, Consent
from dzrobot.envs.franka.safeguards.limits import Abort, RefusalError
from dzrobot.envs.franka.safeguards.self_collision import SelfCollision
from dzrobot.envs.franka.workcells import Clock, GripperDevice
from dzrobot.envs.panda.kinematics import forward
from dzrobot.envs.panda.poses import Array, between, distance_between
from dzrobot.envs.panda.state import ArmState, GripperState
from dzrobot.errors import RobotError

_STEP_M = 0.01
_STEP_RAD = 0.03
_FEWEST_STEPS = 10
"""Waypoints that are checked on a Cartesian path, however short."""

_SAME_M = 1e-6

POLL_S = 0.02
"""How often moving fingers are checked."""


def check_start_path(
    collision: SelfCollision, state: ArmState, lifted: Array, home: Array | None, goal: Array
) -> None:
    """Check the path of a reset: the hand up, the joints home, the hand to its start.

    A link that is already closer to an obstacle than allowed may not come closer still.

    Args:
        collision: Measures distances.
        state: Where the arm is.
        lifted: Pose (4, 4) that the hand rises to.
        home: Joint angles (7,), rad, to pass through. None: the path is Cartesian throughout.
        goal: Pose (4, 4) of the start.

    Raises:
        RobotError: a link would come too close to an obstacle, or a waypoint has no solution.
    """
    _, allowed = collision.deficits_m(state.joints)
    for part, joints in _waypoints(state, lifted, home, goal):
        if joints is None:
            raise RobotError(
                f"nothing has moved: the way to the start ({part}) cannot be followed in joint "
                "angles, so it cannot be checked against limits.obstacles. Bring the arm by hand "
                "to another place"
            )
        _, deficit = collision.deficits_m(joints)
        if deficit > allowed + _SAME_M:
            raise RobotError(
                f"nothing has moved: on the way to the start ({part}) a link would come "
                f"{deficit:.3f} m nearer to one of limits.obstacles than limits.obstacle_m allows. "
                "Bring the arm by hand to where the way is free, or change reset.joints, "
                "reset.lift_m or reset.position"
            )


def _waypoints(
    state: ArmState, lifted: Array, home: Array | None, goal: Array
) -> Iterator[tuple[str, Array | None]]:
    """Yield part of the path and joint angles (7,); None, and no more, where there are none."""
    flange_to_ee = flange_to_ee_of(state)
    joints, pose = state.joints, lifted
    for found in _solved(joints, _cartesian_path(state.pose, lifted), flange_to_ee):
        yield "up", found
        if found is None:
            return
        joints = found
    if home is not None:
        steps = max(1, int(np.ceil(np.abs(home - joints).max() / _STEP_RAD)))
        for share in np.linspace(0.0, 1.0, steps + 1)[1:]:
            yield "to reset.joints", joints + share * (home - joints)
        joints, pose = home, forward(home, flange_to_ee)
    for found in _solved(joints, _cartesian_path(pose, goal), flange_to_ee):
        yield "to reset.position", found


def _solved(joints: Array, poses: Iterator[Array], flange_to_ee: Array) -> Iterator[Array | None]:
    """Yield the joints (7,) of each pose, near the previous ones; None, and no more, if none."""
    for pose in poses:
        found = solve_joints(joints, pose, flange_to_ee)
        yield found
        if found is None:
            return
        joints = found


def _cartesian_path(start: Array, end: Array) -> Iterator[Array]:
    steps = max(_FEWEST_STEPS, int(np.ceil(distance_between(start, end) / _STEP_M)))
    for share in np.linspace(0.0, 1.0, steps + 1)[1:]:
        yield between(start, end, float(share))


def home_gripper(gripper: GripperDevice, consent: Consent, config: GripperConfig) -> None:
    """Home a gripper that was never homed, if the operator or the workcell allows it.

    Raises:
        RobotError: nobody can be asked, and the workcell does not allow it.
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
            "the gripper has not been homed, and nobody can be asked: clear the fingers and "
            "set gripper: {homing: true}, which lets reset() move them all the way once, or "
            "home it in Desk"
        )
    consent.show(ArmPhase.MOVING, "homing the hand")
    gripper.home()


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
