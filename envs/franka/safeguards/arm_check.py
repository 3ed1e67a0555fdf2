"""Whether a connected arm is the one of the workcell, and is where it is computed to be."""

import logging
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dzrobot.envs.franka.arm_model import forward
from dzrobot.envs.franka.franka_config import FrankaConfig, LimitsConfig
from dzrobot.envs.franka.safeguards.limits import Abort, RefusalError
from dzrobot.envs.panda.poses import Array, angle_between, distance_between
from dzrobot.envs.panda.state import ArmState
from dzrobot.errors import RobotError
from dzrobot.untrusted import parsing

POSE_M, POSE_RAD = 1e-3, float(np.deg2rad(0.2))
"""How far the pose that an arm reports may be from the one that its joint angles lead to."""

_ROUNDING_RAD = 1e-6

_GRAVITY = 9.81
_MOSTLY = 0.8
"""Share of a force that points down where it is a weight."""

_log = logging.getLogger(__name__)


class ArmMismatchError(RobotError):
    """The arm is another than the workcell or the safety layer takes it for."""


@dataclass(frozen=True)
class ArmReport:
    """What an arm says of itself."""

    kind: str
    """Name in its model, such as ``fr3``; empty: it has none."""

    joint_limits: tuple[Array, Array] | None
    """Lowest and highest joint angles (7,), rad. None: it cannot say them."""

    nominal_to_ee: Array
    """Pose (4, 4) of the end effector, from the one that Desk knows."""

    hand_kg: float
    load_kg: float


def kind_in(urdf: str) -> str:
    """Return the name of the robot in its URDF.

    Raises:
        RobotError: it is none.
    """
    return _parsed(urdf).get("name", "")


def joint_limits_in(urdf: str) -> tuple[Array, Array]:
    """Return lowest and highest angles (7,) of an arm's joints in its URDF, rad.

    Raises:
        RobotError: it has not seven joints with limits.
    """
    found = [
        (_number(limit, "lower"), _number(limit, "upper"))
        for joint in _parsed(urdf).iter("joint")
        if joint.get("type") == "revolute" and (limit := joint.find("limit")) is not None
    ]
    low, high = np.array(found, np.float64).reshape(-1, 2).T
    if len(found) != 7 or not (low < high).all():
        raise RobotError(
            f"the model that the arm reports has {len(found)} revolute joints with limits "
            f"({low.tolist()} to {high.tolist()}); needed are seven"
        )
    return low, high


def _number(limit: ElementTree.Element, name: str) -> float:
    try:
        return float(limit.get(name, "nan"))
    except ValueError:
        return float("nan")


def _parsed(urdf: str) -> ElementTree.Element:
    with parsing("the model that the arm reports", RobotError, lambda e: f"is not a URDF: {e}"):
        return ElementTree.fromstring(urdf)


def check_arm(report: ArmReport, state: ArmState, config: FrankaConfig) -> None:
    """Check an arm just connected.

    Raises:
        ArmMismatchError: the workcell claims more than the joints have, it does not say which arm
            it is and the arm cannot say it, the end effector was not taken, or the pose that the
            arm reports is not where its joint angles lead.
    """
    _check_limits(report, config)
    if config.end_effector is not None:
        _check_pose("its end effector is", report.nominal_to_ee, config.end_effector.pose)
    _check_pose(
        f"at joint angles {np.round(state.joints, 4).tolist()} its hand is", state.pose,
        forward(state.joints, state.flange_to_ee),
    )  # fmt: skip


def load_at_rest(state: ArmState, limits: LimitsConfig) -> str:
    """Return what the wrench of an arm at rest is more than usual by; empty: it is not."""
    force, torque = _norms(state)
    if force <= limits.resting_force_n and torque <= limits.resting_torque_nm:
        return ""
    shown = f"{wrench_text(state)} at rest"
    down_n = _down_n(state)
    if down_n < _MOSTLY * force:
        return (
            f"{shown}, not straight down: the hand touches something, or the arm's torque sensors "
            "have drifted; look, and move it clear by hand"
        )
    return (
        f"{shown}: a load of about {down_n / _GRAVITY:.2g} kg that the arm does not know; enter it "
        "in Desk (end effector) or in `load` of the workcell, or take it off"
    )


def is_small_load(state: ArmState, limits: LimitsConfig) -> bool:
    """Return whether an arm with such a wrench at rest may move."""
    force, torque = _norms(state)
    return force <= limits.load_force_n and torque <= limits.load_torque_nm


def wrench_text(state: ArmState) -> str:
    """Return force and torque at the hand in words."""
    force, torque = _norms(state)
    return f"{force:.1f} N and {torque:.2f} Nm at the hand"


def _norms(state: ArmState) -> tuple[float, float]:
    """Return force (N) and torque (Nm) at the hand."""
    return float(np.linalg.norm(state.force_n)), float(np.linalg.norm(state.torque_nm))


def _down_n(state: ArmState) -> float:
    return -float((state.pose[:3, :3] @ state.force_n)[2])


def check_resting(states: Iterable[ArmState], limits: LimitsConfig) -> str:
    """Compare the wrench of an arm at rest with the limits, before it moves.

    Args:
        states: One after another, until one is within the limits: a load does not pass.
        limits: What is usual, and what is allowed.

    Returns:
        Why it may move upward alone: the hand is pressed onto what lies below it. Empty: it may
        move.

    Raises:
        RobotError: it carries more that it does not know of than a small load, or is leaned on.
    """
    found, pressed = "", False
    for state in states:
        found = load_at_rest(state, limits)
        if is_small_load(state, limits):
            if found:
                _log.warning("%s", found)
            return ""
        force, _ = _norms(state)
        pressed = force > 0 and _down_n(state) <= -_MOSTLY * force
    refused = (
        f"nothing has moved: {found}. Allowed are limits.load_force_n={limits.load_force_n} N and "
        f"load_torque_nm={limits.load_torque_nm} Nm"
    )
    if not pressed:
        raise RobotError(refused)
    return refused


def check_sag(target: Array, state: ArmState, limits: LimitsConfig) -> None:
    """Check how far a hand at rest hangs below its target, before a person is let near it.

    Args:
        target: What was commanded last, a pose (4, 4) or joint angles (7,).
        state: Where the arm is.
        limits: How far is allowed.

    Raises:
        RobotError: too far, so that it may sink when control is given up.
    """
    pose = target if target.ndim == 2 else forward(target, state.flange_to_ee)
    sag_m = float(pose[2, 3] - state.pose[2, 3])
    if not sag_m <= limits.sag_m:
        raise RobotError(
            f"the hand hangs {1000 * sag_m:.1f} mm below its target, allowed are "
            f"{1000 * limits.sag_m:.1f} mm (limits.sag_m), so control is not given up and no "
            f"person may reach in: {load_at_rest(state, limits) or 'put down what it holds'}"
        )


def check_start(state: ArmState, start: Array, config: FrankaConfig) -> float:
    """Return how far the hand is from its start (4, 4), m, once the arm is under control there.

    Raises:
        RefusalError: farther than a start may be.
    """
    reset = config.reset
    meters, radians = distance_between(state.pose, start), angle_between(state.pose, start)
    if not (meters <= reset.tolerance_m and radians <= reset.tolerance_rad):
        raise RefusalError(
            Abort.NOT_ARRIVED,
            f"under control the hand is {1000 * meters:.0f} mm and {radians:.2f} rad from its "
            f"start; reset.tolerance_m allows {1000 * reset.tolerance_m:.0f} mm and tolerance_rad "
            f"{reset.tolerance_rad}: {unfinished(state, config.limits, 'look at what moved it')}",
        )
    return meters


def unfinished(
    state: ArmState, limits: LimitsConfig, otherwise: str = "is something in its way?"
) -> str:
    """Return why an arm may not have arrived, by what it reports.

    Args:
        state: Where the arm is.
        limits: Of joints, and what is usual at rest.
        otherwise: What is said where nothing that it reports explains it.
    """
    low, high = np.array(limits.joints_low), np.array(limits.joints_high)
    room = np.minimum(state.joints - low, high - state.joints)
    nearest = int(np.argmin(room))
    if room[nearest] < limits.joint_room_rad:
        return (
            f"joint {nearest + 1} is {room[nearest]:.3f} rad from its limit, where the controller "
            "pushes back: bring the arm by hand to the middle of its joints"
        )
    return load_at_rest(state, limits) or otherwise


def _check_limits(report: ArmReport, config: FrankaConfig) -> None:
    if report.joint_limits is None:
        if "arm" not in config.model_fields_set:
            raise ArmMismatchError(
                "the arm does not report its joint limits, as a Panda does not: say which it is, "
                "`arm: fer` (Franka Emika Robot, Panda) or `arm: fr3`, in the workcell"
            )
        return
    low, high = report.joint_limits
    limits = config.limits
    beyond = (np.array(limits.joints_low) < low - _ROUNDING_RAD) | (
        np.array(limits.joints_high) > high + _ROUNDING_RAD
    )
    if beyond.any():
        raise ArmMismatchError(
            "the workcell claims more than the arm's joints have: "
            f"{compared(report, limits, np.flatnonzero(beyond).tolist())}. Set limits.joints_low "
            "and joints_high within that, or `arm: fer` for a Panda, or leave them out for an FR3's"
        )


def compared(report: ArmReport, limits: LimitsConfig, joints: Iterable[int] = range(7)) -> str:
    """Return the limits of joints (0 to 6), as the workcell and as the arm have them."""
    if report.joint_limits is None:
        return f"workcell {limits.joints_low} to {limits.joints_high} rad; the arm does not say"
    low, high = report.joint_limits
    arm = f"the arm ({report.kind})" if report.kind else "the arm"
    rows = (
        f"joint {joint + 1} workcell {limits.joints_low[joint]:g} to "
        f"{limits.joints_high[joint]:g}, {arm} {low[joint]:g} to {high[joint]:g} rad"
        for joint in joints
    )
    return "; ".join(rows)


def _check_pose(what: str, reported: Array, expected: Array) -> None:
    meters, radians = distance_between(expected, reported), angle_between(expected, reported)
    if not (meters <= POSE_M and radians <= POSE_RAD):
        raise ArmMismatchError(
            f"{what} {1000 * meters:.1f} mm and {np.rad2deg(radians):.2f} degrees from where it is "
            f"computed to be; allowed are {1000 * POSE_M:g} mm and {np.rad2deg(POSE_RAD):.1f} "
            "degrees. The safety limits would be wrong for this arm, so it is not moved"
        )
