"""Whether the way to a start keeps clear of obstacles; looked at before anything moves."""

from collections.abc import Iterator

import numpy as np

from dzrobot.envs.franka.motion.action_spaces import hand_on_flange, solved_joints
from dzrobot.envs.franka.safeguards.self_collision import SelfCollision
from dzrobot.envs.panda.kinematics import forward
from dzrobot.envs.panda.poses import Array, between, distance_between
from dzrobot.envs.panda.state import ArmState
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
