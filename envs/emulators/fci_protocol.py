"""The Franka Control Interface on the wire: robot server version 10, gripper server version 3.

Every structure is little-endian and packed; matrices are column-major. The layout is written from a
measured description of the protocol; only what a client needs is named.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np

from dzrobot.errors import DzrobotError

ROBOT_PORT = 1337
GRIPPER_PORT = 1338
ROBOT_VERSION = 10
GRIPPER_VERSION = 3

ROBOT_HEADER = struct.Struct("<III")
"""command, command id, size with the header."""
GRIPPER_HEADER = struct.Struct("<HII")

LARGEST_REQUEST = 4096
"""No request of either protocol is larger (bytes); the largest has 428."""


class MalformedError(DzrobotError):
    """A message is not a request of the protocol; its connection cannot be used any more."""


def unpack(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    """Return the fields of ``body``; raise MalformedError where it has another size."""
    if len(body) != layout.size:
        raise MalformedError(f"a body of {len(body)} bytes, needed are {layout.size}")
    return layout.unpack(body)


class RequestBuffer:
    """Cuts a byte stream into requests.

    Args:
        header: Command, identity and size with the header.
    """

    def __init__(self, header: struct.Struct) -> None:
        self._header = header
        self._bytes = b""

    def add(self, chunk: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield the requests that ``chunk`` completes.

        Raises:
            MalformedError: a size is impossible.
        """
        self._bytes += chunk
        begin = self._header.size
        while len(self._bytes) >= begin:
            command, identity, size = self._header.unpack_from(self._bytes)
            if not begin <= size <= LARGEST_REQUEST:
                raise MalformedError(f"a request of {size} bytes")
            if len(self._bytes) < size:
                return
            body, self._bytes = self._bytes[begin:size], self._bytes[size:]
            yield command, identity, body

    def clear(self) -> None:
        """Forget an unfinished request."""
        self._bytes = b""


ERRORS = (
    "joint_position_limits_violation",
    "cartesian_position_limits_violation",
    "self_collision_avoidance_violation",
    "joint_velocity_violation",
    "cartesian_velocity_violation",
    "force_control_safety_violation",
    "joint_reflex",
    "cartesian_reflex",
    "max_goal_pose_deviation_violation",
    "max_path_pose_deviation_violation",
    "cartesian_velocity_profile_safety_violation",
    "joint_position_motion_generator_start_pose_invalid",
    "joint_motion_generator_position_limits_violation",
    "joint_motion_generator_velocity_limits_violation",
    "joint_motion_generator_velocity_discontinuity",
    "joint_motion_generator_acceleration_discontinuity",
    "cartesian_position_motion_generator_start_pose_invalid",
    "cartesian_motion_generator_elbow_limit_violation",
    "cartesian_motion_generator_velocity_limits_violation",
    "cartesian_motion_generator_velocity_discontinuity",
    "cartesian_motion_generator_acceleration_discontinuity",
    "cartesian_motion_generator_elbow_sign_inconsistent",
    "cartesian_motion_generator_start_elbow_invalid",
    "force_controller_desired_force_tolerance_violation",
    "start_elbow_sign_inconsistent",
    "communication_constraints_violation",
    "power_limit_violation",
    "cartesian_motion_generator_joint_position_limits_violation",
    "cartesian_motion_generator_joint_velocity_limits_violation",
    "cartesian_motion_generator_joint_velocity_discontinuity",
    "cartesian_motion_generator_joint_acceleration_discontinuity",
    "cartesian_position_motion_generator_invalid_frame",
    "controller_torque_discontinuity",
    "joint_p2p_insufficient_torque_for_planning",
    "tau_j_range_violation",
    "instability_detected",
    "joint_move_in_wrong_direction",
    "cartesian_spline_motion_generator_violation",
    "joint_via_motion_generator_planning_joint_limit_violation",
    "base_acceleration_initialization_timeout",
    "base_acceleration_invalid_reading",
)
"""The 41 error bits in the order of the state message."""


class Command(IntEnum):
    """Requests to the robot server."""

    CONNECT = 0
    MOVE = 1
    STOP_MOVE = 2
    SET_COLLISION_BEHAVIOR = 3
    SET_JOINT_IMPEDANCE = 4
    SET_CARTESIAN_IMPEDANCE = 5
    SET_GUIDING_MODE = 6
    SET_EE_TO_K = 7
    SET_NE_TO_EE = 8
    SET_LOAD = 9
    RECOVER = 10
    GET_ROBOT_MODEL = 11


class RobotMode(IntEnum):
    """Modes in the state message."""

    OTHER = 0
    IDLE = 1
    MOVE = 2
    GUIDING = 3
    REFLEX = 4
    USER_STOPPED = 5
    RECOVERY = 6


class Generator(IntEnum):
    """Motion generators of a Move request."""

    JOINT_POSITION = 0
    JOINT_VELOCITY = 1
    POSE = 2
    TWIST = 3
    NONE = 4


class MoveStatus(IntEnum):
    """Answers to a Move request; STARTED comes first, another one ends the motion."""

    SUCCESS = 0
    STARTED = 1
    PREEMPTED = 2
    REJECTED = 5
    INVALID = 7
    REFLEX_ABORTED = 8
    EMERGENCY_ABORTED = 9
    ABORTED = 11


class SetterStatus(IntEnum):
    """Answers to a setter."""

    SUCCESS = 0
    NOT_POSSIBLE = 1
    INVALID = 2
    SAFETY_FUNCTION = 3


class RecoverStatus(IntEnum):
    """Answers to an error-recovery request."""

    SUCCESS = 0
    NOT_POSSIBLE = 1
    MANUAL_RECOVERY_REQUIRED = 3
    EMERGENCY = 5


class GripperCommand(IntEnum):
    """Requests to the gripper server."""

    CONNECT = 0
    HOMING = 1
    GRASP = 2
    MOVE = 3
    STOP = 4


class GripperStatus(IntEnum):
    """Answers of the gripper server: a client raises on FAIL and ABORTED."""

    SUCCESS = 0
    FAIL = 1
    UNSUCCESSFUL = 2
    ABORTED = 3


def _floats(*fields: tuple[str, int]) -> list[tuple[str, str, tuple[int]]]:
    return [(name, "<f4", (count,)) for name, count in fields]


ROBOT_STATE = np.dtype(
    [
        ("message_id", "<u8"),
        *_floats(
            *(
                (name, 16)
                for name in ("O_T_EE", "O_T_EE_d", "F_T_EE", "EE_T_K", "F_T_NE", "NE_T_EE")
            ),
            *(("m_ee", 1), ("I_ee", 9), ("F_x_Cee", 3), ("m_load", 1), ("I_load", 9)),
            *(("F_x_Cload", 3), ("elbow", 2), ("elbow_d", 2)),
            *(
                (name, 7)
                for name in ("tau_J", "tau_J_d", "dtau_J", "q", "q_d", "dq", "dq_d", "ddq_d")
            ),
            *(("joint_contact", 7), ("cartesian_contact", 6)),
            *(("joint_collision", 7), ("cartesian_collision", 6)),
            *(("tau_ext", 7), ("O_F_ext", 6), ("K_F_ext", 6), ("O_dP_EE_d", 6), ("O_ddP_O", 3)),
            *(("elbow_c", 2), ("delbow_c", 2), ("ddelbow_c", 2)),
            *(("O_T_EE_c", 16), ("O_dP_EE_c", 6), ("O_ddP_EE_c", 6)),
            *(("theta", 7), ("dtheta", 7), ("accelerometer_top", 18), ("accelerometer_bottom", 18)),
        ),
        ("generator_mode", "u1"),
        ("controller_mode", "u1"),
        ("errors", "u1", (41,)),
        ("reflex_reason", "u1", (41,)),
        ("robot_mode", "u1"),
        ("success_rate", "<f4"),
    ]
)
"""State datagram, 1377 bytes, sent every millisecond; ``message_id`` is the robot's clock in ms."""

COMMAND = struct.Struct("<Q7d7d16d6d2d2B7dB")
"""Command datagram, 371 bytes: the state it answers, joint positions and speeds, pose by columns,
twist, elbow, whether that is valid, motion finished, torques, torque finished."""

MOVE_REQUEST = struct.Struct("<II3d3dB7d")
CONNECT_REQUEST = struct.Struct("<HH")
GRIPPER_MOVE = struct.Struct("<2d")
GRIPPER_GRASP = struct.Struct("<5d")
"""width, inner and outer tolerance, speed, force."""
GRIPPER_STATE = struct.Struct("<IddBH")
"""message id, width (m), widest opening (m), grasped, temperature."""

assert ROBOT_STATE.itemsize == 1377
assert COMMAND.size == 371
