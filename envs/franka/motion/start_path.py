"""Whether the way to a start keeps clear of obstacles; looked at before anything moves."""

from collections.abc import Callable, Iterator

import numpy as np

from dzrobot.envs.franka.config import GripperConfig
from dzrobot.envs.franka.motion.action_spaces import hand_on_flange, solved_joints
from dzrobot.envs.franka.operator.operator import ArmPhase, Attendance
from dzrobot.envs.franka.safeguards.limits import Abort, RefusalError
from dzrobot.envs.franka.safeguards.self_collision import SelfCollision
from dzrobot.envs.franka.workcells import Clock, GripperDevice
from dzrobot.envs.panda.kinematics import forward
from dzrobot.envs.panda.poses import Array, between, distance_between
from dzrobot.envs.panda.state import ArmState, GripperState
from dzrobot.errors import RobotError

_STEP_M = 0.01
_STEP_RAD = 0.03
_TURN_STEPS = 10
"""Places that are looked at on a way of the hand, however short."""

_SAME_M = 1e-6


def check_start_way(
    collision: SelfCollision, state: ArmState, lifted: Array, home: Array | None, goal: Array
) -> None:
    """Check the way of a reset: the hand up, the joints home, the hand to its start.

    Where a link is nearer to an obstacle than is allowed already, it may not come nearer still.

    Args:
        collision: Looks at distances.
        state: Where the arm is.
        lifted: Pose (4, 4) that the hand rises to.
        home: Joint angles (7,), rad, on the way; None: the way leads over none.
        goal: Pose (4, 4) of the start.

    Raises:
        RobotError: a link would come too near to an obstacle, or nobody knows how the joints go.
    """
    _, allowed = collision.deficits_m(state.joints)
    for part, joints in _places(state, lifted, home, goal):
        if joints is None:
            raise RobotError(
                f"nothing has moved: the way to the start ({part}) cannot be followed in joint "
                "angles, so nobody knows whether it leads through limits.obstacles. Bring the arm "
                "by hand to another place"
            )
        _, deficit = collision.deficits_m(joints)
        if deficit > allowed + _SAME_M:
            raise RobotError(
                f"nothing has moved: on the way to the start ({part}) a link would come "
                f"{deficit:.3f} m nearer to one of limits.obstacles than limits.obstacle_m allows. "
                "Bring the arm by hand to where the way is free, or change reset.joints, "
                "reset.lift_m or reset.position"
            )


def _places(
    state: ArmState, lifted: Array, home: Array | None, goal: Array
) -> Iterator[tuple[str, Array | None]]:
    """Yield part of the way and joint angles (7,) there; None: not found, and the last."""
    hand = hand_on_flange(state)
    joints = state.joints
    for found in _along(joints, _hand_way(state.pose, lifted), hand):
        yield "up", found
        if found is None:
            return
        joints = found
    pose = lifted
    if home is not None:
        steps = max(1, int(np.ceil(np.abs(home - joints).max() / _STEP_RAD)))
        for share in np.linspace(0.0, 1.0, steps + 1)[1:]:
            yield "to reset.joints", joints + share * (home - joints)
        joints, pose = home, forward(home, hand)
    for found in _along(joints, _hand_way(pose, goal), hand):
        yield "to reset.position", found


def _along(joints: Array, poses: Iterator[Array], hand: Array) -> Iterator[Array | None]:
    """Yield the joints (7,) of each pose, near those before; None: not found, and the last."""
    for pose in poses:
        found = solved_joints(joints, pose, hand)
        yield found
        if found is None:
            return
        joints = found


def _hand_way(start: Array, end: Array) -> Iterator[Array]:
    steps = max(_TURN_STEPS, int(np.ceil(distance_between(start, end) / _STEP_M)))
    for share in np.linspace(0.0, 1.0, steps + 1)[1:]:
        yield between(start, end, float(share))


POLL_S = 0.02
"""How often fingers that move are looked at."""


def home_hand(hand: GripperDevice, people: Attendance, config: GripperConfig) -> None:
    """Let a hand that was never homed move its fingers all the way, if a person agrees.

    Raises:
        RobotError: nobody can be asked, and the workcell does not allow it.
        StoppedError: the person stopped instead.
    """
    if hand.state().is_homed:
        return
    if people.asks:
        people.ask(
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
    people.show(ArmPhase.MOVING, "homing the hand")
    hand.home()


def open_hand(
    hand: GripperDevice, config: GripperConfig, clock: Clock, check_latch: Callable[[], None]
) -> None:
    """Open the hand before the arm moves: what it holds falls where it is, not on the way.

    Args:
        hand: What is opened.
        config: Its patience.
        clock: What that is measured by.
        check_latch: Raises where an operator has stopped the arm.

    Raises:
        RefusalError: it does not answer, or an operator has stopped the arm.
    """
    hand.request(opened=True)
    deadline = clock.now() + config.timeout_s
    while (state := hand.state()).is_busy and clock.now() < deadline:
        check_latch()
        check_hand(state, config)
        clock.sleep_until(clock.now() + POLL_S)
    check_hand(state, config)


def check_hand(state: GripperState, config: GripperConfig) -> None:
    """Raise :class:`RefusalError` where the hand has a fault, or answers nothing for too long."""
    timeout = config.timeout_s
    if state.fault or state.waiting_s > timeout:
        fault = state.fault or f"the gripper has not answered for {timeout} s"
        raise RefusalError(Abort.GRIPPER, fault)
